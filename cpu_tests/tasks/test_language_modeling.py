import itertools
import json

import pytest
import torch

from cpu_tests.binarised import VERSE, WORDS, verse_folder, write_dictionary, write_folder
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models import ARCH_REGISTRY
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return verse_folder(tmp_path / "data-bin")


@pytest.fixture
def make_task(tmp_path, folder):
    def make(**settings):
        settings = {"data": str(folder), "tokens_per_sample": 16, **settings}
        cfg = TASK_REGISTRY.config_for("language_modeling").replace(**settings)
        cfg.validate()
        return setup_task(cfg, seed=1, cache_dir=tmp_path / "cache", quarantine=tmp_path / "bad")

    return make


def tokens_of(dataset):
    return sum(len(block.tokens) - 1 for block in dataset.shard(1, 0))


def test_training_joins_numbered_files_and_validation_does_not(make_task):
    task = make_task()
    train = task.load_dataset("train")
    assert train.seed == 1
    assert train.counts().documents == 3 * len(VERSE)
    assert task.load_dataset("valid").seed is None
    assert task.valid_subsets(["valid"]) == ["valid", "valid1"]
    parts = [task.load_dataset(name, training=False) for name in ("train", "train1")]
    assert sum(tokens_of(part) for part in parts) == tokens_of(train) == train.counts().tokens
    events = {event["subset"]: event for event in task.data_report()}
    assert events["train"]["tokens"] in (train.counts().tokens, tokens_of(parts[0]))
    assert task.data_report() == []


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos", "eos_pad_8"])
def test_every_way_to_cut_reaches_the_batches(make_task, mode):
    dataset = make_task(sample_break_mode=mode).load_dataset("train")
    block = dataset.shard(1, 0)[0]
    batch = dataset.collate([block], [0])
    assert batch.tokens.shape == (1, 8 if mode == "eos_pad_8" else 16)
    assert batch.targets[0, : batch.num_targets].tolist() == block.tokens[1:].tolist()


def test_the_model_has_the_dictionarys_size_and_must_be_a_decoder(make_task):
    task = make_task()
    small = ARCH_REGISTRY.config_for("lm_tiny").replace(decoder_layers=1)
    model = task.build_model(small, seed=1, device=CPU)
    logits = model(torch.tensor([[2, 4]])).logits
    assert logits.shape == (1, 2, len(task.dictionary)) == (1, 2, 16)
    with pytest.raises(ConfigError, match="--arch mlm_base does not predict the next token"):
        task.build_model(
            ARCH_REGISTRY.config_for("mlm_base").replace(encoder_layers=1), seed=1, device=CPU
        )


def test_the_assets_of_a_checkpoint_hold_the_vocabulary(make_task, tmp_path):
    task = make_task()
    assert task.assets() == {"dict.txt": tmp_path / "data-bin/dict.txt"}
    write_dictionary(tmp_path / "assets")
    cfg = type(task).with_assets(task.cfg, tmp_path / "assets").replace(data="gone")
    again = setup_task(cfg, seed=1, cache_dir=tmp_path, quarantine=tmp_path)
    again.load_state_dict(task.state_dict())
    assert again.tokenizer.decode(again.tokenizer.encode("the cat")) == "the cat"


def test_other_words_are_refused(make_task, folder, tmp_path):
    state = make_task().state_dict()
    write_dictionary(tmp_path / "other", WORDS[::-1])
    other = make_task(vocabulary=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"another vocabulary .*; dict\.txt now gives"):
        other.load_state_dict(state)
    with pytest.raises(UserError, match=r"data-bin/dict\.txt is not the dictionary in .*other"):
        other.load_dataset("train")
    (folder / "dict.txt").unlink()
    with pytest.raises(UserError, match=r"data-bin has no dict\.txt"):
        make_task()
    assert tokens_of(make_task(vocabulary=str(tmp_path / "other")).load_dataset("valid"))


def test_bits_per_byte_are_known_where_the_bytes_are(make_task, folder):
    assert make_task().load_dataset("train").counts().bytes_per_token is None
    sets = {"train": {"bytes": 1000}, "train1": {"bytes": 500}, "valid": {"bytes": 0}}
    (folder / "preprocess.json").write_text(json.dumps({"sets": sets}))
    counts = make_task().load_dataset("train").counts()
    assert counts.bytes_per_token == 1500 / counts.tokens
    assert make_task().load_dataset("valid").counts().bytes_per_token is None


def test_a_data_folder_is_needed(make_task, tmp_path):
    with pytest.raises(ConfigError, match="the data folder is missing"):
        make_task(data="")
    with pytest.raises(UserError, match="does not exist"):
        make_task(data=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="--tokens-per-sample is 0"):
        make_task(tokens_per_sample=0)


GPT = [
    "--num-workers", "2", "--activation-fn", "gelu", "--share-decoder-input-output-embed",
    "--validate-interval-updates", "1000", "--save-interval-updates", "1000",
    "--no-epoch-checkpoints", "--memory-efficient-fp16", "--fp16-init-scale", "4",
    "--arch", "lm_base",
    "--task", "language_modeling", "--sample-break-mode", "none", "--tokens-per-sample", "128",
    "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-08",
    "--clip-norm", "0.0", "--lr", "5e-4", "--lr-scheduler", "polynomial_decay",
    "--warmup-updates", "750", "--dropout", "0.1", "--attention-dropout", "0.1",
    "--weight-decay", "0.01", "--batch-size", "4", "--update-freq", "1",
    "--required-batch-size-multiple", "1", "--ddp-backend=c10d",
    "--total-num-update", "50000", "--max-update", "50000", "--seed", "1",
]  # fmt: skip
"""The published command for a dense GPT."""
MOE = [
    "--moe-expert-count", "2", "--moe-freq", "2", "--moe-gating-use-fp32",
    "--moe-second-expert-policy", "random", "--moe-normalize-gate-prob-before-dropping",
    "--moe-eval-capacity-token-fraction", "-1.0", "--criterion", "moe_cross_entropy",
    "--moe-gate-loss-wt", "0.01", "--moe-gate-loss-combine-method", "sum", "--use-xmoe",
]  # fmt: skip
LONGNET = [
    "--flash-attention", "--segment-length", "[2048,4096]", "--dilated-ratio", "[1,2]",
    "--segment-length", "[]", "--segment-length", "[16,32]",
]  # fmt: skip
"""The published flags, and smaller segments in place of theirs."""
SMALL = [
    "--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64",
    "--decoder-attention-heads", "2", "--tokens-per-sample", "32", "--lr", "0.01",
    "--warmup-updates", "4", "--total-num-update", "400", "--max-update", "30",
    "--validate-interval-updates", "10", "--log-interval", "1", "--num-workers", "0", "--cpu",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "ranks"),
    list(itertools.product(([], MOE, LONGNET), (1, 2))),
    ids=["gpt", "gpt-2", "moe", "moe-2", "longnet", "longnet-2"],
)
def test_the_published_commands_learn_and_their_checkpoints_can_be_used(
    run, records, folder, tmp_path, words, ranks
):
    spread = ["--distributed-world-size", "2"] if ranks > 1 else []
    trained = run("train", folder, *GPT, *words, *SMALL, *spread, "--save-dir", "run")
    assert trained.code == 0, trained.stderr
    losses = [r["loss"] for r in records(tmp_path / "run", "train")]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    valid = [r["loss"] for r in records(tmp_path / "run", "valid", subset="valid")]
    assert valid[-1] < valid[0]
    assert valid[-1] < 4  # a guess among 16 symbols
    if ranks > 1:
        return
    scored = run("validate", folder, "--path", "run", "--cpu", "--json", "valid.json")
    assert scored.code == 0, scored.stderr
    numbers = json.loads((tmp_path / "valid.json").read_text())
    assert numbers["valid"]["loss"] == pytest.approx(valid[-1], rel=1e-5)
    assert numbers["valid"]["bits_per_byte"] is None
    assert numbers["valid1"]["tokens"] == 6 * 22
    (tmp_path / "data-bin").rename(tmp_path / "moved")
    told = run("interactive_cli", "--path", "run", "--cpu", "--temperature", "0", stdin="the cat\n")
    assert told.code == 0, told.stderr
    assert told.stdout.startswith("the cat ")
    assert set(told.stdout.split()) <= {*WORDS, "<unk>"}


@pytest.mark.long
def test_a_run_that_is_stopped_goes_on_with_the_same_losses(run, records, folder, tmp_path):
    command = ["train", folder, *GPT, *SMALL, "--validate-interval-updates", "100"]
    for save_dir, updates in (("whole", 12), ("parts", 5), ("parts", 12)):
        done = run(*command, "--max-update", updates, "--save-dir", save_dir)
        assert done.code == 0, done.stderr
    series = [
        {r["num_updates"]: r["loss"] for r in records(tmp_path / name, "train")}
        for name in ("whole", "parts")
    ]
    assert series[0] == series[1]


def test_damage_ends_the_command_in_one_sentence(run, folder, tmp_path):
    (folder / "train1.idx").unlink()
    failed = run("train", folder, *GPT, *SMALL, "--save-dir", "run")
    assert failed.code == 1
    assert "train1.idx is not there" in failed.error
    assert "Traceback" not in failed.stderr
    write_folder(folder, {"train": VERSE}, WORDS)
    write_dictionary(folder, WORDS[:-1])
    (folder / "train1.bin").unlink()
    failed = run("train", folder, *GPT, *SMALL, "--save-dir", "run", "--disable-validation")
    assert failed.code == 1
    assert "train.bin has the token 15, but dict.txt has 15 symbols" in failed.error
