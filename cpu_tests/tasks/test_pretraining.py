"""The task's own rules, and that ranks compute what one process does."""

import pytest
import torch

from cpu_tests.layouts.layouts import COPIES, TENSOR, Layout, agree
from cpu_tests.layouts.training import make_trainer, train
from cpu_tests.masked_data import make_masked_data
from cpu_tests.world import run_world
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_model import ARCH_REGISTRY
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task

CPU = torch.device("cpu")
COMMON = [
    "--task", "pretraining", "--tokens-per-sample", "32", "--mask-prob", "0.3", "--batch-size", "2",
    "--lr", "0.01", "--clip-norm", "1", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "2",
    "--cpu", "--log-format", "none", "--log-interval", "1", "--no-epoch-checkpoints", "--seed", "3",
    "--arch", "mlm_tiny", "--encoder-layers", "2", "--encoder-embed-dim", "16",
    "--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "4", "--deepnorm",
]  # fmt: skip
KINDS = {
    "dense": ["--criterion", "masked_lm", "--dropout", "0.1"],
    "moe": [
        "--criterion", "masked_lm_moe_cross_entropy", "--moe-freq", "2", "--moe-expert-count", "4",
        "--use-xmoe", "--pad-to-max-length", "--dropout", "0",
    ],
}  # fmt: skip
LAYOUTS = {
    "copies 2": Layout(2, 2, COPIES),
    "shard 2": Layout(2, 2),
    "tensor 2": Layout(2, 1, TENSOR),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_masked_data(tmp_path_factory.mktemp("masked") / "data")


@pytest.fixture
def make_task(tmp_path, data):
    def make(**settings):
        cfg = TASK_REGISTRY.config_for("pretraining").replace(
            **{"data": str(data), "tokens_per_sample": 32, **settings}
        )
        cfg.validate()
        return setup_task(cfg, seed=1, cache_dir=tmp_path / "c", quarantine=tmp_path / "bad.jsonl")

    return make


def run_at(layout, data, home):
    """This rank's short runs, by kind."""
    runs = {}
    for kind, words in KINDS.items():
        trainer = make_trainer(
            data, home / kind, [*words, *layout.flags, "--no-save"], updates=4,
            data_size=layout.data_size, common=COMMON,
        )  # fmt: skip
        runs[kind] = train(trainer)
    return runs


def run_everywhere(rank, data, home):
    return {name: run_at(layout, data, home / name) for name, layout in LAYOUTS.items()}


def test_a_layout_changes_no_number(data, tmp_path):
    expected = run_at(Layout(1, 1), data, tmp_path / "one")
    found = run_world(2, run_everywhere, data, tmp_path)[0]
    for name, runs in found.items():
        for kind, run in runs.items():
            agree(expected[kind], run, kind, f"at {name}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_prob": 0.0}, "--mask-prob is 0; give a share between"),
        ({"mask_prob": 1.0}, "--mask-prob is 1;"),
        ({"span_length": 0.5}, "--span-length is 0.5; give 1 or more"),
        ({"leave_unmasked_prob": 0.6, "random_token_prob": 0.5}, "sum is at most 1"),
        ({"random_token_prob": -0.1}, "--random-token-prob -0.1"),
        ({"tokens_per_sample": 2}, "--tokens-per-sample is 2; give 3"),
        ({"data": ""}, "the data folder is missing"),
    ],
)
def test_impossible_settings_are_refused(make_task, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**settings)


def test_a_missing_file_of_the_vocabulary_is_named(make_task, tmp_path, data):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty/sentencepiece\.bpe\.model does not exist; put"):
        make_task(data=str(tmp_path / "empty"))
    model = str(data / "sentencepiece.bpe.model")
    with pytest.raises(UserError, match=r"empty/dict\.txt does not exist; .* another with --dict"):
        make_task(data=str(tmp_path / "empty"), spm_model=model)
    with pytest.raises(UserError, match=r"no\.txt does not exist; .* correct --dict-file"):
        make_task(dict_file="no.txt")


def test_the_model_must_predict_hidden_tokens_and_have_room(make_task):
    task = make_task()
    with pytest.raises(ConfigError, match="--arch lm_tiny does not predict hidden tokens"):
        task.build_model(ARCH_REGISTRY.config_for("lm_tiny"), seed=1, device=CPU)
    small = ARCH_REGISTRY.config_for("mlm_base").replace(
        encoder_layers=1, max_source_positions=16, encoder_embed_dim=24
    )
    with pytest.raises(ConfigError, match="the model's 16 positions; .* --max-source-positions"):
        task.build_model(small, seed=1, device=CPU)


def test_sets_are_those_that_have_an_index(make_task):
    assert make_task().valid_subsets(["valid"]) == ["valid"]
    with pytest.raises(UserError, match="sets there: train, valid"):
        make_task().valid_subsets(["test"])


def test_cost_counts_the_layers_for_each_token_and_the_head_for_each_target(make_task):
    task = make_task(mask_prob=0.25)
    cfg = ARCH_REGISTRY.config_for("mlm_tiny").replace(encoder_layers=1)
    model = task.build_model(cfg, seed=1, device=CPU)
    dim, vocab = 128, len(task.dictionary)
    layers = 6 * (4 * dim * dim + 2 * dim * 512) + 12 * dim * 32
    assert task.flops_per_target(model) == 4 * layers + 6 * (dim * dim + dim * vocab)
