"""Examples from the folder to the loss, as real runs."""

import json

import pytest
import torch

from scalerun.cli.inference import load_for_inference
from scalerun.criterions.base_criterion import build_criterion
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.precision import choose_precision
from scalerun.evaluation import evaluate
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task

NAME = "streaming_finetune_language_modeling"
PAIRS = [
    (f"repeat {word} {i}:", f"{word} {word}") for i, word in enumerate("cat dog owl".split() * 9)
]


def write_pairs(path, pairs):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"src": source, "tgt": target}) + "\n" for source, target in pairs]
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture
def pairs(tmp_path):
    """A folder with two training shards and a validation set of examples."""
    write_pairs(tmp_path / "pairs/train/00/web.jsonl", PAIRS[:14])
    write_pairs(tmp_path / "pairs/train/01/web.jsonl", PAIRS[14:])
    write_pairs(tmp_path / "pairs/valid/00/web.jsonl", PAIRS[:5])
    return tmp_path / "pairs"


@pytest.fixture
def words(tiny):
    """Flags of a tiny run on examples."""
    return [word.replace("streaming_language_modeling", NAME) for word in tiny]


@pytest.fixture
def make_task(tmp_path, pairs):
    def make(**settings):
        settings = {"data": str(pairs), "tokenizer": "bytes", "tokens_per_sample": 48, **settings}
        cfg = TASK_REGISTRY.config_for(NAME).replace(**settings)
        cfg.validate()
        return setup_task(cfg, seed=1, cache_dir=tmp_path / "c", quarantine=tmp_path / "q")

    return make


def num_targets(pairs):
    return sum(len(f" {target}".encode()) + 1 for _, target in pairs)


def test_examples_share_a_sequence_only_where_they_do_not_see_each_other(make_task):
    with pytest.raises(ConfigError, match="--sample-break-mode complete .* add --document-masking"):
        make_task(sample_break_mode="complete")
    task = make_task(sample_break_mode="complete", document_masking=True)
    dataset = task.load_dataset("valid")
    batch = dataset.collate(dataset.shard(1, 0)[:], range(len(dataset.shard(1, 0))))
    assert batch.num_samples < 5
    assert batch.num_targets == num_targets(PAIRS[:5]) == int((batch.targets >= 0).sum())
    assert batch.document_ids is not None


def test_a_sequence_has_room_for_a_source_and_a_target(make_task):
    with pytest.raises(ConfigError, match="--tokens-per-sample is 1, .*; give 2 or more"):
        make_task(tokens_per_sample=1)
    make_task(tokens_per_sample=2)


def test_the_fingerprint_tells_examples_from_texts(make_task, tmp_path, pairs):
    for file in pairs.rglob("*.jsonl"):
        rows = [json.loads(row) for row in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**row, "text": "t"}) + "\n" for row in rows))
    task = make_task(sample_break_mode="eos")
    cfg = TASK_REGISTRY.config_for("streaming_language_modeling").replace(
        **{name: getattr(task.cfg, name) for name in ("data", "tokenizer", "tokens_per_sample")},
        sample_break_mode="eos",
    )
    texts = setup_task(cfg, seed=1, cache_dir=tmp_path / "c", quarantine=tmp_path / "q")
    fingerprints = [each.load_dataset("train").fingerprint for each in (task, texts)]
    assert fingerprints[0] != fingerprints[1]


def test_a_run_is_normalised_by_its_targets_and_resumes(run, pairs, words, records, tmp_path):
    words += ["--lr-scheduler", "constant"]
    for save_dir, updates in (("whole", "6"), ("cut", "3"), ("cut", "6")):
        command = run("train", pairs, *words, "--max-update", updates, "--save-dir", save_dir)
        assert command.code == 0, command.stderr
    whole = records(tmp_path / "whole", "train")
    cut = records(tmp_path / "cut", "train")
    keys = ("num_updates", "loss", "gnorm", "tokens_seen")
    assert [[r[k] for k in keys] for r in cut] == [[r[k] for k in keys] for r in whole]
    [data] = records(tmp_path / "whole", "event", event="data", subset="valid")
    assert data["tokens"] == num_targets(PAIRS[:5])
    valid = records(tmp_path / "whole", "valid")[-1]
    assert valid["tokens"] == num_targets(PAIRS[:5])
    num_bytes = num_targets(PAIRS[:5]) - 5
    bits = valid["loss"] * valid["tokens"] / num_bytes
    assert valid["bits_per_byte"] == pytest.approx(bits)


def test_the_loss_is_that_of_the_targets_alone(run, pairs, words, records, tmp_path):
    """The reference reads one example at a time, in float64, and knows nothing of sequences."""
    command = run("train", pairs, *words, "--max-update", "2", "--save-dir", "run")
    assert command.code == 0, command.stderr
    loaded = load_for_inference(str(tmp_path / "run"), device=torch.device("cpu"))
    model, tokenizer = loaded.model.double(), loaded.task.tokenizer
    end = tokenizer.dictionary.eos
    nats, count = 0.0, 0
    for source, target in PAIRS[:5]:
        given, wanted = tokenizer.encode(source), [*tokenizer.encode(f" {target}"), end]
        with torch.no_grad():
            tokens = torch.tensor([[end, *given, *wanted[:-1]]])
            logits = model(tokens).logits[0, len(given) :]
        logprobs = logits.log_softmax(-1)
        nats -= sum(logprobs[i, token].item() for i, token in enumerate(wanted))
        count += len(wanted)
    reported = records(tmp_path / "run", "valid")[-1]
    assert reported["tokens"] == count
    assert reported["loss"] == pytest.approx(nats / count / torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("window", [0, 7])
def test_an_example_costs_the_same_alone_as_in_a_packed_sequence(
    run, pairs, words, tmp_path, make_task, window
):
    command = run("train", pairs, *words, "--max-update", "2", "--save-dir", "run")
    assert command.code == 0, command.stderr
    loaded = load_for_inference(str(tmp_path / "run"), device=torch.device("cpu"))
    results = []
    for settings in (
        {"sample_break_mode": "eos"},
        {"sample_break_mode": "eos_pad_8"},
        {"sample_break_mode": "complete", "document_masking": True, "tokens_per_sample": 96},
    ):
        if loaded.model.reads_positions:
            settings["reset_positions"] = True
        task = make_task(**settings)
        task.use_context_window(window)
        results.append(
            evaluate(
                task,
                loaded.model.double(),
                build_criterion(loaded.cfg.criterion),
                "valid",
                batch_size=2,
                precision=choose_precision(fp16=False, bf16=False, device=torch.device("cpu")),
            )
        )
    for result in results:
        assert result.tokens == num_targets(PAIRS[:5])
        assert result.loss == pytest.approx(results[0].loss, rel=1e-9)
