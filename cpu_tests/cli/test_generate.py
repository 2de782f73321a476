"""Translating with a run, from the set or file to the scores."""

import json
import random
import sys

import pytest
import sacrebleu

from scalerun.cli.generate import GenerateConfig, main
from scalerun.dataclass.errors import ConfigError

WORDS = [
    "--task", "translation", "-s", "en", "-t", "fr", "--tokenizer", "bytes", "--arch", "mt_tiny",
    *(
        word
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", 1), ("embed-dim", 64), ("ffn-embed-dim", 64), ("attention-heads", 2),
        )
        for word in (f"--{side}-{name}", str(value))
    ),
    "--dropout", "0", "--batch-size", "12", "--lr", "5e-3", "--lr-scheduler", "constant",
    "--validate-interval", "0", "--no-epoch-checkpoints", "--cpu", "--eval-bleu",
]  # fmt: skip


def reversed_words(number, seed):
    """Lines of letters, and the same lines from right to left."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices("abcdefgh", k=draw.randint(4, 7))) for _ in range(number)]
    return lines, [line[::-1] for line in lines]


def write(folder, name, pair):
    for ending, lines in zip(("en", "fr"), pair, strict=True):
        (folder / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def home(launch, tmp_path_factory):
    """A run that has learned twelve sentences, and sets of those and of others."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    known = reversed_words(12, seed=3)
    for name in ("train", "valid", "test"):
        write(home / "data", name, known)
    write(home / "data", "other", reversed_words(9, seed=4))
    command = launch(home, "train", "data", *WORDS, "--max-update", "220", "--save-dir", "run")
    assert command.wait() == 0, command.stderr
    return home


@pytest.fixture
def generate(launch, home):
    def generate(*words, code=0, stdin=""):
        command = launch(home, "generate", "--path", "run", "--cpu", *words, stdin=stdin)
        assert command.wait() == code, command.stderr
        return command

    return generate


def lines_of(path):
    return path.read_text().splitlines()


def test_a_model_that_has_learned_to_reverse_reverses(generate, home):
    words = ["--output", "out.txt", "--scores", "scores.json", "--json", "all.json"]
    command = generate(*words)
    references = lines_of(home / "data/test.fr")
    assert lines_of(home / "out.txt") == references
    scores = json.loads((home / "scores.json").read_text())
    assert scores["bleu"] == pytest.approx(100)
    assert scores["sentences"] == 12
    assert scores["bleu_signature"] in command.stdout
    assert scores["chrf_signature"] in command.stdout
    assert "BLEU = 100.00" in command.stdout
    records = [json.loads(line) for line in lines_of(home / "all.json")]
    assert [record["line"] for record in records] == list(range(1, 13))
    assert [record["hypothesis"] for record in records] == references
    assert [record["reference"] for record in records] == references
    assert [record["source"] for record in records] == lines_of(home / "data/test.en")
    for record in records:
        assert bytes(record["tokens"]).decode() == record["hypothesis"]
        assert len(record["token_logprobs"]) == len(record["tokens"])
        length = len(record["tokens"]) + 1
        assert sum(record["token_logprobs"]) / length == pytest.approx(record["score"], abs=0.1)
        assert record["score"] < sum(record["token_logprobs"]) / length


def test_training_measured_the_same(generate, home, records):
    generate("--scores", "valid.json", "--gen-subset", "valid")
    scores = json.loads((home / "valid.json").read_text())
    [record] = records(home / "run", "valid")
    assert record["bleu"] == pytest.approx(scores["bleu"], abs=1e-9)
    assert record["chrf"] == pytest.approx(scores["chrf"], abs=1e-9)


def test_the_scores_are_sacrebleus_of_the_written_lines(generate, home):
    words = ["--output", "other.txt", "--scores", "other.json"]
    generate("--gen-subset", "other", *words, "--bleu-tokenize", "char")
    hypotheses, references = lines_of(home / "other.txt"), lines_of(home / "data/other.fr")
    assert hypotheses != references
    found = json.loads((home / "other.json").read_text())
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char")
    assert found["bleu"] == pytest.approx(expected.score)
    assert 0 < found["bleu"] < 100
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)


@pytest.mark.parametrize("beam", ["1", "3"])
def test_how_sources_share_batches_changes_nothing(generate, beam):
    words = ["--gen-subset", "other", "--beam", beam]
    together = generate(*words).stdout
    for limits in (["--batch-size", "1"], ["--max-tokens", "40"]):
        assert generate(*words, *limits).stdout == together


def test_lines_of_standard_input_keep_their_places_and_blank_ones_stay_blank(generate, home):
    known = lines_of(home / "data/test.en")
    text = f"{known[0]}\n\n  \n{known[5]}\r\n{known[2]}"
    command = generate("--input", "-", stdin=text)
    wanted = lines_of(home / "data/test.fr")
    assert command.stdout == f"{wanted[0]}\n\n\n{wanted[5]}\n{wanted[2]}\n"
    assert "BLEU" not in command.stderr


def test_a_file_may_bring_its_references(generate):
    words = ["--input", "data/test.en", "--reference", "data/test.fr"]
    assert "BLEU = 100.00" in generate(*words).stderr


def test_a_set_without_references_is_translated_and_not_scored(generate, home):
    (home / "data/alone.en").write_text((home / "data/test.en").read_text())
    command = generate("--gen-subset", "alone")
    assert command.stdout.splitlines() == lines_of(home / "data/test.fr")
    assert "alone.fr to compare with, so nothing will be scored" in command.stderr
    assert "BLEU" not in command.stderr
    refused = generate("--gen-subset", "alone", "--scores", "none.json", code=1)
    assert "--scores needs references, and" in refused.error


def test_nbest_hypotheses_differ_and_the_best_comes_first(generate, home):
    generate("--gen-subset", "other", "--nbest", "3", "--beam", "4", "--json", "nbest.json")
    records = [json.loads(line) for line in lines_of(home / "nbest.json")]
    assert [record["line"] for record in records] == [n for n in range(1, 10) for _ in range(3)]
    for first in range(0, len(records), 3):
        mine = records[first : first + 3]
        scores = [record["score"] for record in mine]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(record["tokens"]) for record in mine}) == 3


@pytest.mark.long
def test_hypotheses_begin_with_what_is_given_of_the_reference(generate, home):
    generate("--gen-subset", "other", "--prefix-size", "3", "--json", "begun.json", "--beam", "2")
    for record in map(json.loads, lines_of(home / "begun.json")):
        assert record["hypothesis"][:3] == record["reference"][:3]
    words = ["--input", "-", "--prefix-size", "3"]
    error = generate(*words, stdin="a b\n", code=1).stderr
    assert "--prefix-size needs references, and standard input has none" in error


@pytest.mark.long
def test_two_ranks_that_share_the_model_write_what_one_writes(generate, home):
    words = ["--gen-subset", "other", "--beam", "3", "--output"]
    generate(*words, "one.txt")
    command = generate(*words, "two.txt", "--model-parallel-size", "2")
    assert lines_of(home / "two.txt") == lines_of(home / "one.txt")
    assert command.stdout.count("BLEU =") == 1
    piped = generate("--input", "-", "--model-parallel-size", "2", stdin="a b c\nd e\n")
    assert len(piped.stdout.splitlines()) == 2


def test_groups_that_are_kept_apart_begin_with_different_letters(generate, home):
    words = ["--beam", "4", "--nbest", "4", "--json", "diverse.json"]
    words += ["--diverse-beam-groups", "4", "--diverse-beam-strength", "100"]
    generate("--gen-subset", "other", *words)
    records = [json.loads(line) for line in lines_of(home / "diverse.json")]
    for number in {record["line"] for record in records}:
        found = [record["tokens"][:1] for record in records if record["line"] == number]
        assert len({tuple(tokens) for tokens in found}) == 4


def test_the_longest_translation_grows_with_its_source(generate, home):
    words = ["--max-len-a", "0.5", "--max-len-b", "1", "--json", "short.json"]
    generate("--gen-subset", "test", *words)
    for record in map(json.loads, lines_of(home / "short.json")):
        source_tokens = len(record["source"].encode()) + 1
        assert len(record["tokens"]) == int(0.5 * source_tokens + 1)
        assert record["finish_reason"] == "length"


def test_a_source_too_long_for_the_model_is_named(generate, home):
    command = generate("--input", "-", stdin="a b\n" + "a" * 1100 + "\n", code=1)
    assert "standard input, line 2: 1101 tokens exceed the model's source positions, 1024" in (
        command.error
    )


def test_files_of_unequal_length_are_refused(generate, home):
    (home / "short.fr").write_text("a b\n")
    command = generate("--input", "data/test.en", "--reference", "short.fr", code=1)
    assert "data/test.en has 12 lines and short.fr has 1" in command.error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gen-subset", "nothing"], "nothing.en is missing"),
        (["--input", "nothing.en"], "--input nothing.en is no file"),
        (["--input", "data"], "--input data is no file"),
        (["--input", "data/test.en", "--reference", "no.fr"], "--reference no.fr is no file"),
        (["--output", "data"], "--output data is a folder"),
    ],
)
def test_a_missing_file_is_one_sentence(generate, words, message):
    assert message in generate(*words, code=1).error


def test_a_line_that_is_no_text_is_named(generate, home):
    (home / "bad.en").write_bytes(b"a b\n\xff\n")
    assert "bad.en, line 2: not UTF-8" in generate("--input", "bad.en", code=1).error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "--beam is 0"),
        ({"beam": 1, "lenpen": 0.6}, "--lenpen 0.6 ranks the hypotheses of a search"),
        ({"lenpen": float("nan")}, "--lenpen is nan"),
        ({"nbest": 6, "json": "x"}, "--nbest 6 is above --beam 5"),
        ({"nbest": 2}, "--nbest 2 shows more than the best hypothesis in --json alone"),
        ({"reference": "x"}, "--reference belongs to --input"),
        ({"gen_subset": "test", "input": "x"}, "--gen-subset test and --input x both say .*remove"),
        ({"max_len_b": 0}, "--max-len-a and --max-len-b are both 0"),
        ({"max_len_a": -1.0}, "--max-len-a is -1"),
        ({"min_len": -1}, "--min-len is -1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerateConfig(path="run", **settings).validate()


def test_without_sacrebleu_texts_are_still_translated(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert main(["--path", "run", "--cpu", "--input", "data/test.en"]) == 0
    assert capsys.readouterr().out.splitlines() == lines_of(home / "data/test.fr")
    with pytest.raises(ConfigError, match="scoring translations needs the sacrebleu package"):
        main(["--path", "run", "--cpu"])


def test_a_run_that_does_not_translate_is_refused(run, corpus, tiny):
    command = run("train", corpus, *tiny, "--max-update", "1", "--save-dir", "run")
    assert command.code == 0, command.stderr
    refused = run("generate", "--path", "run", "--cpu")
    assert refused.code == 1
    assert "the run's task is streaming_language_modeling, which does not translate" in (
        refused.error
    )
