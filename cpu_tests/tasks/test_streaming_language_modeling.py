import json
from functools import partial

import pytest
import torch

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput
from scalerun.data.loader import BatchLoader
from scalerun.data.tokenizers.tokenizer_training import train_byte_level_bpe
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models import ARCH_REGISTRY
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task
from scalerun.tasks.streaming_language_modeling import StreamingLanguageModelingConfig


@pytest.fixture
def make_task(tmp_path, corpus):
    def make(**settings):
        settings = {"data": str(corpus), "tokenizer": "bytes", "tokens_per_sample": 32, **settings}
        cfg = TASK_REGISTRY.config_for("streaming_language_modeling").replace(**settings)
        cfg.validate()
        return setup_task(
            cfg, seed=1, cache_dir=tmp_path / "run/cache", quarantine=tmp_path / "run/bad.jsonl"
        )

    return make


def test_training_data_is_shuffled_and_validation_data_is_not(make_task):
    task = make_task()
    assert task.load_dataset("train").recipe.seed == 1
    assert task.load_dataset("valid/first").recipe.seed is None
    assert task.load_dataset("train", training=False).recipe.seed is None
    assert task.load_dataset("valid/first", training=True).recipe.seed == 1
    assert task.load_dataset("train") is task.load_dataset("train")


def test_weights_never_apply_to_validation(make_task):
    task = make_task(corpus_weights={"verse": 2.0})
    assert task.load_dataset("valid/first").recipe.mixture.is_plain
    assert not task.load_dataset("train").recipe.mixture.is_plain


def test_valid_stands_for_all_sets_and_is_optional(make_task, tmp_path, write_jsonl):
    assert make_task().valid_subsets(["valid"]) == ["valid/first", "valid/second"]
    with pytest.raises(UserError, match="did you mean valid/first"):
        make_task().valid_subsets(["valid/frist"])
    write_jsonl(tmp_path / "plain/a.jsonl", ["text"])
    assert make_task(data=str(tmp_path / "plain")).valid_subsets(["valid"]) == []


@pytest.fixture
def plain(tmp_path, write_jsonl):
    """A folder of text without any structure."""
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"plain/{name}.jsonl", [f"{name}, text {i}" for i in range(40)])
    return str(tmp_path / "plain")


def tokens_of(dataset):
    return sum(len(block.tokens) - 1 for block in dataset.shard(1, 0))


def test_a_part_that_is_held_out_is_never_trained_on(make_task, plain):
    whole = make_task(data=plain).load_dataset("train")
    task = make_task(data=plain, valid_fraction=0.2)
    assert task.valid_subsets(["valid"]) == ["valid"]
    kept, held_out = task.load_dataset("train"), task.load_dataset("valid")
    assert held_out.recipe.seed is None
    assert held_out.name == "valid"
    assert kept.counts().documents + held_out.counts().documents == 80
    assert 0 < tokens_of(held_out) < tokens_of(kept)
    assert tokens_of(kept) + tokens_of(held_out) == tokens_of(whole)
    assert tokens_of(kept) == kept.counts().tokens
    assert tokens_of(task.load_dataset("train", training=False)) == tokens_of(kept)
    for event in task.data_report():
        assert event["lines"] == 80 == event["lines_other_part"] + event["lines_documents"]


def test_the_part_belongs_to_the_fingerprint(make_task, plain):
    prints = {
        make_task(data=plain, valid_fraction=share).load_dataset("train").fingerprint
        for share in (0.0, 0.2, 0.3)
    }
    assert len(prints) == 3
    assert len({each.split("-")[0] for each in prints}) == 1


@pytest.mark.parametrize(
    ("share", "split", "message"),
    [
        (1e-9, "valid", r"valid \(.*\) has no documents: all 80 are on"),
        (1 - 1e-9, "train", r"train \(.*\) has no"),
    ],
)
def test_a_share_that_leaves_a_side_empty_is_refused(make_task, plain, share, split, message):
    with pytest.raises(UserError, match=message):
        make_task(data=plain, valid_fraction=share).load_dataset(split)


def test_a_folder_valid_and_a_part_that_is_held_out_exclude_each_other(make_task, corpus):
    task = make_task(valid_fraction=0.5)
    with pytest.raises(ConfigError, match=r"--valid-fraction 0\.5 .* has a folder valid"):
        task.load_dataset("train")
    # Scoring another folder with a run's settings: its own sets are meant.
    assert task.valid_subsets(["valid"]) == ["valid/first", "valid/second"]
    assert task.load_dataset("train", training=False).counts().documents > 0


def test_a_part_can_be_held_out_from_train_only(make_task, tmp_path, write_jsonl):
    write_jsonl(tmp_path / "two/train/a.jsonl", ["text"])
    write_jsonl(tmp_path / "two/more/a.jsonl", ["text"])
    with pytest.raises(ConfigError, match="of --train-subset train, not more"):
        make_task(data=str(tmp_path / "two"), valid_fraction=0.5).load_dataset(
            "more", training=True
        )


def test_tokenised_text_is_kept_in_the_run_folder_or_where_asked(make_task, tmp_path):
    make_task().load_dataset("train")
    assert list((tmp_path / "run/cache").glob("*.tokens"))
    make_task(cache_dir=str(tmp_path / "shared")).load_dataset("train")
    assert list((tmp_path / "shared").glob("*.tokens"))


def test_masking_and_positions_reach_the_batches(make_task):
    dataset = make_task(document_masking=True, reset_positions=True).load_dataset("train")
    loader = BatchLoader(
        dataset, batch_size=2, update_freq=lambda epoch: 1, num_workers=0, buffer_size=1
    )
    (batch,) = next(loader.updates())
    assert batch.document_ids is not None
    assert batch.positions is not None
    assert batch.tokens.shape == (2, 32)


def test_documents_are_masked_only_where_attention_can(make_task):
    config = ARCH_REGISTRY.config_for("lm_tiny").replace(decoder_layers=1)
    build = partial(
        make_task(document_masking=True).build_model, seed=1, device=torch.device("cpu")
    )
    assert build(config).masks_documents
    dilated = config.replace(segment_length=[4], dilated_ratio=[1])
    with pytest.raises(ConfigError, match="--document-masking needs attention") as caught:
        build(dilated)
    assert "\n" not in str(caught.value)
    make_task().build_model(dilated, seed=1, device=torch.device("cpu"))


@pytest.mark.parametrize("arch", ["lm_tiny", "retnet_tiny"])
def test_positions_are_reset_only_where_the_model_has_absolute_ones(make_task, arch):
    """Rotation and decay see distances alone, which are the same inside a document."""
    task = make_task(reset_positions=True)
    build = partial(task.build_model, seed=1, device=torch.device("cpu"))
    config = ARCH_REGISTRY.config_for(arch).replace(decoder_layers=1)
    with pytest.raises(ConfigError, match=f"--reset-positions has no effect .* --arch {arch} has"):
        build(config)
    assert build(ARCH_REGISTRY.config_for("lm_base").replace(decoder_layers=1)).reads_positions
    if arch == "lm_tiny":
        assert build(config.replace(sinusoidal_pos=True)).reads_positions


def test_the_report_tells_what_was_read_and_left_out_once(make_task, corpus, tmp_path):
    file = corpus / "train/00/verse.jsonl"
    file.write_text(file.read_text(encoding="utf-8") + "\n{\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"verse\.jsonl:16: not JSON"):
        make_task().load_dataset("train")
    task = make_task(bad_records="skip")
    task.load_dataset("train")
    bad, data = task.data_report()
    assert data["event"] == "data"
    assert (data["lines"], data["lines_documents"]) == (16, 14)
    assert (data["lines_blank"], data["lines_quarantined"]) == (1, 1)
    assert bad["event"] == "bad_record"
    assert bad["line"] == 16
    assert json.loads((tmp_path / "run/bad.jsonl").read_text())["record"] == "{"
    assert json.dumps([data, bad])
    assert task.data_report() == []


def test_assets_rebuild_the_tokenizer_elsewhere(make_task, tmp_path, write_jsonl):
    model = tmp_path / "t.json"
    model.write_bytes(train_byte_level_bpe(["the cat sat on the mat"], vocab_size=262))
    task = make_task(tokenizer=str(model))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, source in task.assets().items():
        (folder / name).write_bytes(source.read_bytes())
    model.unlink()
    moved = type(task).with_assets(task.cfg, folder)
    again = setup_task(moved, seed=1, cache_dir=tmp_path, quarantine=tmp_path / "q")
    assert again.tokenizer.digest == task.tokenizer.digest
    assert make_task().assets() == {}
    assert type(task).with_assets(make_task().cfg, folder).tokenizer == "bytes"


def test_assets_of_vocabulary_and_merges(make_task, tmp_path):
    cfg = StreamingLanguageModelingConfig(vocab_filename="v/a.json", merges_filename="v/b.txt")
    moved = type(make_task()).with_assets(cfg, tmp_path)
    assert moved.vocab_filename == str(tmp_path / "vocab.json")
    assert moved.merges_filename == str(tmp_path / "merges.txt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ""}, "the data folder is missing"),
        ({"tokens_per_sample": 0}, "--tokens-per-sample is 0"),
        ({"corpus_weights": {"a": -1.0}}, "--corpus-weights"),
        ({"tokenizer": None}, "--tokenizer is required"),
    ],
)
def test_wrong_settings_are_refused(make_task, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**settings)


def test_a_missing_folder_is_refused_when_data_is_read_not_before(make_task):
    task = make_task(data="/nowhere")  # generating needs no data
    with pytest.raises(UserError, match="/nowhere does not exist"):
        task.load_dataset("train")


class CountTargets(BaseCriterion):
    def forward(self, model, batch):
        loss = model(batch.tokens.float()).sum()
        return CriterionOutput(loss, batch.num_targets)


def test_steps_hand_the_batch_to_the_criterion(make_task):
    task = make_task()
    loader = BatchLoader(
        task.load_dataset("train"), batch_size=2, update_freq=lambda epoch: 1, num_workers=0,
        buffer_size=1,
    )  # fmt: skip
    (batch,) = next(loader.updates())
    model, criterion = torch.nn.Linear(32, 1), CountTargets(task.cfg)
    assert task.train_step(batch, model, criterion).loss_sum.requires_grad
    output = task.valid_step(batch, model, criterion)
    assert not output.loss_sum.requires_grad
    assert output.num_targets == batch.num_targets == 64
