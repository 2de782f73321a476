import hashlib
import json
import time

import pytest

from cpu_tests.processes import wait_for
from scalerun.cli.preprocess import preprocess
from scalerun.cli.preprocess_config import PreprocessConfig
from scalerun.data.binarised.indexed_dataset import IndexedFile
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.data.tokenizers.tokenizer_training import train_byte_level_bpe, train_sentencepiece
from scalerun.dataclass.errors import ConfigError, UserError

LINES = [
    " ".join(f"the {word} sleeps on the mat".split()[: i % 7])
    for i, word in enumerate("cat dog owl fox".split() * 25)
]
TRAIN = "\n".join(LINES) + "\n"
PAIR = {"source_lang": "en", "target_lang": "es"}
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
        ({"source_lang": "en"}, "--source-lang and --target-lang are given together"),
        ({**PAIR, "only_source": True}, "--only-source is for text of one language"),
        ({**PAIR, "target_lang": "en"}, "--source-lang and --target-lang are both en"),
        ({**PAIR, "nwordstgt": 9, "tgtdict": "d"}, "--thresholdtgt and --nwordstgt choose words"),
        ({**PAIR, "joined_dictionary": True, "nwordstgt": 9}, "--nwordstgt have no effect"),
        ({**PAIR, "joined_dictionary": True, "srcdict": "d", "tgtdict": "d"}, "--srcdict alone"),
        ({"tgtdict": "d"}, "--tgtdict is for pairs; give --source-lang"),
        ({"joined_dictionary": True}, "--joined-dictionary is for pairs"),
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


@pytest.fixture
def parallel(text):
    """Two text files of each set, in two languages, in the current folder."""
    for name, english in (("train", LINES), ("valid", VALID.splitlines())):
        (text / f"{name}.en").write_text("".join(f"{line}\n" for line in english))
        lines = (" ".join(word[::-1] for word in line.split()) for line in english)
        (text / f"{name}.es").write_text("".join(f"{line}\n" for line in lines))
    return text


def make_pairs(destination="data-bin", **settings):
    make(destination, **{"trainpref": ["train"], "validpref": ["valid"], **PAIR, **settings})


def pair_items(folder, name, language):
    tokenizer = load_vocabulary(folder, language)
    size = tokenizer.dictionary.num_real_symbols
    file = IndexedFile.open(folder / f"{name}.en-es.{language}", num_symbols=size)
    return [
        tokenizer.decode(file.tokens[a:b].tolist())
        for a, b in zip(file.ends, file.ends[1:], strict=False)
    ]


def test_pairs_of_languages_have_a_dictionary_each(parallel):
    make_pairs(workers=2)
    folder = parallel / "data-bin"
    sides = [f"{name}.en-es.{side}" for name in ("train", "valid") for side in ("en", "es")]
    files = [f"{side}.{suffix}" for side in sides for suffix in ("bin", "idx")]
    assert sorted(digests(folder)) == ["dict.en.txt", "dict.es.txt", "preprocess.json", *files]
    assert pair_items(folder, "train", "en") == LINES
    reversed_lines = (parallel / "train.es").read_text().splitlines()
    assert pair_items(folder, "train", "es") == reversed_lines
    assert pair_items(folder, "valid", "es") == ["eht tac <unk>", "", "<unk> tam"]
    sets = json.loads((folder / "preprocess.json").read_text())["sets"]
    assert sets["valid.en-es.es"] == {"items": 3, "tokens": 8, "unknown": 2}


def test_a_joined_dictionary_is_the_same_for_both_and_so_is_a_tokenizers(parallel):
    make_pairs("joined", joined_dictionary=True)
    made = digests(parallel / "joined")
    assert made["dict.en.txt"] == made["dict.es.txt"]
    assert load_vocabulary(parallel / "joined", "es").encode("the eht") != [3, 3]
    make_pairs("given", joined_dictionary=True, tgtdict="joined/dict.en.txt", trainpref=[])
    assert digests(parallel / "given")["dict.es.txt"] == made["dict.es.txt"]
    make_pairs("bytes", tokenizer="bytes")
    made = digests(parallel / "bytes")
    assert made["dict.en.txt"] == made["dict.es.txt"]
    assert pair_items(parallel / "bytes", "train", "en") == LINES
    sets = json.loads((parallel / "bytes/preprocess.json").read_text())["sets"]
    assert sets["train.en-es.es"]["bytes"] == sum(map(len, LINES))


def test_each_language_has_its_own_limits_and_lists(parallel):
    make_pairs("few", nwordssrc=5, thresholdtgt=16, padding_factor=1)
    assert (parallel / "few/dict.en.txt").read_text().split()[::2] == ["the"]
    listed = (parallel / "few/dict.es.txt").read_text().split()
    assert min(map(int, listed[1::2])) >= 16
    assert {"eht", "tac"} <= set(listed)
    given = {"srcdict": "few/dict.en.txt", "tgtdict": "few/dict.es.txt", "trainpref": []}
    make_pairs("again", **given)
    again, few = digests(parallel / "again"), digests(parallel / "few")
    assert again["dict.es.txt"] == few["dict.es.txt"]
    assert again["valid.en-es.es.bin"] == few["valid.en-es.es.bin"]


def test_sides_of_different_length_are_refused_with_both_numbers(parallel):
    (parallel / "valid.es").write_text("eht\n")
    says = "^valid.en has 3 lines and valid.es has 1; line n of one has to be the translation"
    with pytest.raises(UserError, match=says):
        make_pairs()
    assert not (parallel / "data-bin").exists()
    (parallel / "valid.es").unlink()
    with pytest.raises(UserError, match="^valid.es is not there"):
        make_pairs()


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
