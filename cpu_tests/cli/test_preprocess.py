import hashlib
import json
import time

import pytest

from cpu_tests.processes import wait_for
from scalerun.cli.preprocess import PreprocessConfig, preprocess
from scalerun.data.binarised.indexed_dataset import IndexedFile
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.data.tokenizers.tokenizer_training import train_byte_level_bpe, train_sentencepiece
from scalerun.dataclass.errors import ConfigError, UserError

LINES = [
    " ".join(f"the {word} sleeps on the mat".split()[: i % 7])
    for i, word in enumerate("cat dog owl fox".split() * 25)
]
TRAIN = "\n".join(LINES) + "\n"
VALID = "the cat purrs\n\na mat\n"


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Two text files in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "valid.txt").write_text(VALID)
    return tmp_path


def make(destination="data-bin", **settings):
    values = {"trainpref": ["train.txt"], "validpref": ["valid.txt"], "destdir": destination}
    cfg = PreprocessConfig(**{**values, **settings})
    cfg.validate()
    preprocess(cfg)


def items_of(folder, name):
    """The text of each item, as the folder's own vocabulary reads it."""
    tokenizer = load_vocabulary(folder)
    file = IndexedFile.open(folder / name, num_symbols=tokenizer.dictionary.num_real_symbols)
    ids = [file.tokens[a:b].tolist() for a, b in zip(file.ends, file.ends[1:], strict=False)]
    assert all(item[-1] == 2 and 2 not in item[:-1] for item in ids)
    return [tokenizer.decode(item) for item in ids]


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_words_of_the_training_text_become_the_vocabulary(text, caplog):
    caplog.set_level("INFO", logger="scalerun")
    make(only_source=True)
    folder = text / "data-bin"
    assert sorted(digests(folder)) == [
        "dict.txt", "preprocess.json", "train.bin", "train.idx", "valid.bin", "valid.idx",
    ]  # fmt: skip
    words = sorted(set(TRAIN.split()), key=lambda word: (-TRAIN.split().count(word), word))
    lines = (folder / "dict.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines[: len(words)]] == words
    assert lines[0] == f"the {TRAIN.split().count('the')}"
    assert (len(lines) + 4) % 8 == 0
    assert items_of(folder, "train") == LINES
    assert items_of(folder, "valid") == ["the cat <unk>", "", "<unk> mat"]
    assert "valid: valid.txt has 3 items, 8 tokens; 25.000% of them are not in the" in caplog.text
    sets = json.loads((folder / "preprocess.json").read_text())["sets"]
    assert sets["valid"] == {"items": 3, "tokens": 8, "unknown": 2}


def test_the_vocabulary_can_be_cut_or_given(text):
    make("rare", thresholdsrc=16, padding_factor=1)
    assert set(items_of(text / "rare", "valid")) == {"the cat <unk>", "", "<unk> <unk>"}
    make("few", nwordssrc=5)
    assert (text / "few/dict.txt").read_text().split()[::2][:2] == ["the", "madeupword0000"]
    make("given", srcdict="few/dict.txt", trainpref=[])
    assert items_of(text / "given", "valid") == ["the <unk> <unk>", "", "<unk> <unk>"]


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(text, monkeypatch, kind):
    monkeypatch.setattr("scalerun.data.binarised.binarisation.BATCH_BYTES", 64)
    tokenizer = {} if kind == "words" else {"tokenizer": kind}
    for workers in (1, 2, 3):
        make(f"by{workers}", workers=workers, **tokenizer)
    assert digests(text / "by1") == digests(text / "by2") == digests(text / "by3")


@pytest.mark.parametrize("kind", ["bytes", "model", "json", "gpt2"])
def test_any_tokenizer_gives_the_text_back_and_lies_in_the_folder(text, kind):
    corpus = [TRAIN, VALID]
    if kind == "model":
        content = train_sentencepiece(
            corpus, vocab_size=290, model_type="bpe", character_coverage=1.0
        )
    elif kind != "bytes":
        content = train_byte_level_bpe(corpus, vocab_size=280)
    flags = {"tokenizer": "bytes" if kind == "bytes" else f"mine.{kind}"}
    if kind == "gpt2":
        model = json.loads(content)["model"]
        (text / "v.json").write_text(json.dumps(model["vocab"]))
        (text / "m.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
        flags = {"vocab_filename": "v.json", "merges_filename": "m.txt"}
    elif kind != "bytes":
        (text / f"mine.{kind}").write_bytes(content)
    make(**flags, workers=2)
    for path in text.glob("*.*"):
        if path.is_file():
            path.unlink()
    assert items_of(text / "data-bin", "train") == LINES
    assert items_of(text / "data-bin", "valid") == VALID.splitlines()
    record = json.loads((text / "data-bin/preprocess.json").read_text())
    assert record["sets"]["train"]["bytes"] == sum(map(len, LINES))
    again = [name for name in digests(text / "data-bin") if name.startswith(("tok", "voc", "mer"))]
    assert again == {
        "bytes": [], "model": ["tokenizer.model"], "json": ["tokenizer.json"],
        "gpt2": ["merges.txt", "vocab.json"],
    }[kind]  # fmt: skip


def test_several_files_become_numbered_sets_and_json_lines_are_documents(text):
    (text / "b.jsonl").write_text('{"text": "the cat\\nsleeps"}\n')
    make(trainpref=["train.txt", "b.jsonl"], testpref=["valid.txt"], validpref=[])
    assert items_of(text / "data-bin", "train1") == ["the cat sleeps"]
    assert len(items_of(text / "data-bin", "test")) == 3


def test_a_run_that_was_killed_leaves_nothing_that_looks_complete(text, start):
    (text / "long.txt").write_text(TRAIN * 20_000)
    words = ["--trainpref", "long.txt", "--tokenizer", "bytes", "--destdir", "out"]
    command = start("preprocess", *words, "--workers", "2")
    wait_for(lambda: (text / ".out.partial/.train.bin.tmp").exists(), "temporary file")
    time.sleep(0.1)
    command.kill()
    assert not (text / "out").exists()
    make("out")
    assert items_of(text / "out", "train") == LINES
    assert len(digests(text / "out")) == 6
    assert not (text / ".out.partial").exists()


def test_after_an_error_there_is_no_folder(text):
    (text / "valid.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(UserError, match=r"valid\.txt:2: not UTF-8"):
        make(workers=2)
    assert not (text / "data-bin").exists()


def test_what_is_there_is_never_overwritten(text):
    (text / "data-bin").mkdir()
    make()
    before = digests(text / "data-bin")
    with pytest.raises(UserError, match="--destdir .*data-bin is not empty"):
        make()
    assert digests(text / "data-bin") == before


def test_two_runs_do_not_fill_one_folder(text, start):
    (text / "long.txt").write_text(TRAIN * 20_000)
    command = start("preprocess", "--trainpref", "long.txt", "--tokenizer", "bytes")
    wait_for(lambda: (text / ".data-bin.partial/.train.bin.tmp").exists(), "temporary file")
    with pytest.raises(UserError, match="data-bin is being made by another process"):
        make()
    command.kill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only_source": False}, "--no-only-source asks for pairs"),
        ({"trainpref": [], "validpref": []}, "nothing to binarise"),
        ({"trainpref": []}, "a vocabulary is needed: --srcdict, --tokenizer, or --trainpref"),
        ({"destdir": ""}, "--destdir is empty"),
        ({"workers": 0}, "--workers is 0; give 1 to 512"),
        ({"padding_factor": 0}, "--padding-factor is 0"),
        ({"tokenizer": "bytes", "nwordssrc": 9}, "--thresholdsrc and --nwordssrc choose words"),
        ({"end_of_document_symbol": "x"}, "--end-of-document-symbol belongs to --tokenizer"),
    ],
)
def test_settings_without_a_meaning_are_refused(text, settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_files_that_are_not_there_are_named(text):
    with pytest.raises(UserError, match="nowhere.txt is not there"):
        make(trainpref=["nowhere.txt"])
    (text / "d.txt").write_text("the\n")
    with pytest.raises(UserError, match=r"^--srcdict d\.txt:1 is 'the'"):
        make(srcdict="d.txt")


@pytest.mark.long
def test_a_folder_of_pieces_can_be_trained_on_scored_and_asked(run, text, records):
    words = ["--trainpref", "train.txt", "--validpref", "valid.txt", "--tokenizer", "bytes"]
    done = run("preprocess", *words, "--only-source", "--workers", "2", "--destdir", "data-bin")
    assert done.code == 0, done.stderr
    done = run(
        "train", "data-bin", "--task", "language_modeling", "--arch", "lm_tiny",
        "--sample-break-mode", "complete_doc", "--tokens-per-sample", "64", "--batch-size", "4",
        "--decoder-layers", "1", "--lr", "0.01", "--max-update", "20", "--log-interval", "1",
        "--save-dir", "run", "--cpu",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    losses = [r["loss"] for r in records(text / "run", "train")]
    assert losses[-1] < 0.7 * losses[0]
    done = run("validate", "--path", "run", "--cpu", "--json", "valid.json")
    assert done.code == 0, done.stderr
    numbers = json.loads((text / "valid.json").read_text())["valid"]
    num_bytes = len(VALID.replace("\n", ""))
    assert numbers["tokens"] == num_bytes + 2  # the empty line parts two texts
    assert numbers["bits_per_byte"] == pytest.approx(
        numbers["loss"] * numbers["tokens"] / num_bytes, rel=1e-6
    )
    done = run("interactive_cli", "--path", "run", "--cpu", stdin="the\n")
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("the")


def test_nothing_to_binarise_is_refused_and_leaves_no_folder(text):
    (text / "empty.txt").write_text("")
    with pytest.raises(UserError, match="^empty.txt has no text"):
        make(validpref=["empty.txt"])
    with pytest.raises(UserError, match="^--srcdict empty.txt lists no symbol"):
        make(srcdict="empty.txt")
    with pytest.raises(ConfigError, match="--nwordssrc is -3"):
        make(nwordssrc=-3)
    assert not (text / "data-bin").exists()
