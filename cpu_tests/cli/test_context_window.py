"""Sliding-window scores are those of reading each token's own window, one at a time."""

import json
import math

import pytest
import torch

from scalerun.cli.inference import load_for_inference
from scalerun.criterions.base_criterion import build_criterion
from scalerun.distributed.precision import choose_precision
from scalerun.evaluation import evaluate

LENGTH = 32


@pytest.fixture
def trained(run, corpus, tiny, tmp_path):
    words = ["--max-update", "3", "--sinusoidal-pos", "--save-dir", "run"]
    command = run("train", corpus, *tiny, *words)
    assert command.code == 0, command.stderr
    return tmp_path / "run"


def token_by_token(model, stream, end, window):
    """Bits per token: each target alone, behind the tokens of its window, in float64."""
    nats = 0.0
    for place, token in enumerate(stream):
        windows_before = max(0, math.ceil((place + 1 - LENGTH) / (LENGTH - window)))
        first = windows_before * (LENGTH - window)
        read = [stream[first - 1] if first else end, *stream[first:place]]
        assert len(read) > min(place, window)
        with torch.no_grad():
            logits = model(torch.tensor([read])).logits[0, -1]
        nats -= logits.log_softmax(-1)[token].item()
    return nats / len(stream) / math.log(2)


@pytest.mark.parametrize("window", [0, 20])
def test_a_score_is_that_of_each_token_alone_behind_its_window(trained, corpus, window):
    loaded = load_for_inference(str(trained), device=torch.device("cpu"))
    model = loaded.model.double()
    loaded.task.use_context_window(window)
    lines = (corpus / "valid/first/00/verse.jsonl").read_text().splitlines()
    end = loaded.task.dictionary.eos
    stream = [t for line in lines for t in [*json.loads(line)["text"].encode(), end]]
    result = evaluate(
        loaded.task,
        model,
        build_criterion(loaded.cfg.criterion),
        "valid/first",
        batch_size=3,
        precision=choose_precision(fp16=False, bf16=False, device=torch.device("cpu")),
    )
    assert result.tokens == len(stream)
    assert result.loss == pytest.approx(token_by_token(model, stream, end, window), rel=1e-12)


@pytest.mark.long
def test_the_command_scores_every_token_once_and_refuses_a_window_without_targets(
    run, trained, tmp_path
):
    scores = []
    for window in ("0", "16"):
        words = ["--path", trained, "--cpu", "--json", "v.json", "--context-window", window]
        command = run("validate", *words)
        assert command.code == 0, command.stderr
        scores.append(json.loads((tmp_path / "v.json").read_text())["valid/first"])
    assert scores[0]["tokens"] == scores[1]["tokens"]
    assert scores[0]["loss"] != scores[1]["loss"]
    command = run("validate", "--path", trained, "--cpu", "--context-window", LENGTH)
    assert command.code == 2
    assert "--context-window 32 leaves a sequence" in command.error
