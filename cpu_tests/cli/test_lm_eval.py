"""The harness's own command on a tiny run, with tasks of local files."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from scalerun.cli import lm_eval as command
from scalerun.cli.inference import load_for_inference
from scalerun.dataclass.errors import ConfigError, UserError

needs_harness = pytest.mark.skipif(
    command.harness_command is None, reason=f"needs lm_eval: {command.INSTALL}"
)
CONTEXT = 32


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "harness_command", None)
    with pytest.raises(ConfigError, match="needs the package lm_eval: pip install lm_eval"):
        command.main()


@pytest.fixture
def trained(run, corpus, tiny, tmp_path):
    words = ["--max-update", "3", "--sample-break-mode", "eos", "--save-dir", "run"]
    result = run("train", corpus, *tiny, *words)
    assert result.code == 0, result.stderr
    return tmp_path / "run"


@pytest.fixture
def model(trained):
    return command.HarnessModel(str(trained), device="cpu", batch_size=3, max_length=CONTEXT)


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def reference(path):
    """Log-probability of text and end behind the end symbol, read token by token in float64."""
    loaded = load_for_inference(str(path), device=torch.device("cpu"))
    model, end = loaded.model.double(), loaded.task.dictionary.eos

    def logprob(context, continuation):
        total, greedy = 0.0, True
        read = [end, *context.encode()]
        for token in continuation.encode():
            with torch.no_grad():
                logits = model(torch.tensor([read[-CONTEXT:]])).logits[0, -1]
            total += logits.log_softmax(-1)[token].item()
            greedy &= int(logits.argmax()) == token
            read.append(token)
        return total, greedy

    return logprob


@needs_harness
def test_likelihoods_are_those_of_the_tokens_read_one_by_one(model, trained):
    logprob = reference(trained)
    pairs = [("The cat", " sleeps"), ("", "Line"), ("A fox ", "x"), ("a" * 90, "b")]
    found = model.loglikelihood(requests(*pairs))
    pairs[2] = ("A fox", " x")  # the harness's rule for a space at the end of a context
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        expected, is_greedy = logprob(context, continuation)
        assert total == pytest.approx(expected, abs=1e-4)
        assert greedy == is_greedy
    [text] = model.loglikelihood_rolling(requests(("A whole text.",)))
    assert text == pytest.approx(logprob("", "A whole text.")[0], abs=1e-4)
    with pytest.raises(UserError, match="a continuation of 40 tokens does not fit"):
        model.loglikelihood(requests(("a", "b" * 40)))


@needs_harness
def test_likelihoods_of_texts_add_up_to_what_validate_reports(
    model, run, trained, corpus, tmp_path
):
    """Each text and its end, where a text fits into a sequence."""
    texts = ["The owl sleeps.", "Another voice.", "A third one"]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (corpus / "valid/second/00/verse.jsonl").write_text("".join(lines))
    words = ["--valid-subset", "valid/second", "--cpu", "--json", "v.json"]
    assert run("validate", corpus, "--path", trained, *words).code == 0
    reported = json.loads((tmp_path / "v.json").read_text())["valid/second"]
    rolling = sum(model.loglikelihood_rolling(requests(*((text,) for text in texts))))
    end = model.eot_token_id
    pairs = [([end, *text.encode()], [end]) for text in texts]
    ends = sum(sum(score.logprobs) for score in model.scorer.score(pairs))
    assert reported["tokens"] == sum(len(text) + 1 for text in texts)
    assert -(rolling + ends) / math.log(2) == pytest.approx(reported["loss"] * reported["tokens"])


@needs_harness
def test_generation_obeys_the_tasks_settings(model):
    settings = {"until": ["\n"], "max_gen_toks": 5}
    asked = requests(("The", settings), ("c" * 90, settings), ("", settings))
    answers = model.generate_until(asked)
    assert len(answers) == 3
    assert all(len(answer.encode()) <= 15 and "\n" not in answer for answer in answers)
    assert answers == model.generate_until(asked)
    with pytest.raises(ConfigError, match="max_gen_toks 256 leaves a prompt no room"):
        model.generate_until(requests(("The", {"until": ["."]})))
    with pytest.raises(ConfigError, match="generation_kwargs have num_beams"):
        model.generate_until(requests(("The", {"num_beams": 4, "max_gen_toks": 5})))


TASKS = {
    "choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\n"
        "doc_to_target: a\nmetric_list:\n  - metric: acc\n"
    ),
    "whole": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n"
    ),
    "answer": (
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{c[0]}}'\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 4\nmetric_list:\n"
        "  - metric: exact_match\n"
    ),
}


@needs_harness
def test_the_harness_runs_tasks_of_all_three_kinds(trained, tmp_path, monkeypatch, capsys):
    rows = [{"q": f"The {name} is", "c": [" a cat", " a dog"], "a": 0} for name in ("owl", "fox")]
    (tmp_path / "test.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        (tmp_path / f"tasks/{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs:\n"
            f"  data_files:\n    test: {tmp_path}/test.json\n{text}"
        )
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    words = ["lm_eval", "--model", "scalerun", "--model_args", f"path={trained},max_length=32"]
    words += ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path / "tasks")]
    words += ["--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", words)
    assert command.main() == 0
    [file] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert 0 <= results["choice"]["acc,none"] <= 1
    assert results["answer"]["exact_match,none"] == 0
    logprob = reference(trained)
    bits = -sum(logprob("", row["q"])[0] for row in rows) / math.log(2)
    num_bytes = sum(len(row["q"]) for row in rows)
    assert results["whole"]["bits_per_byte,none"] == pytest.approx(bits / num_bytes, rel=1e-4)
