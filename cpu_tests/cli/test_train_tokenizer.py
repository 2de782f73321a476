import json

import pytest

from scalerun.cli.train_tokenizer import TrainTokenizerConfig, read_texts, train_tokenizer
from scalerun.data.text.layout import find_split
from scalerun.data.text.part import Part
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError


@pytest.fixture
def settings(corpus, tmp_path):
    def settings(**changes):
        values = {"data": str(corpus), "vocab_size": 290, "output": str(tmp_path / "out/t.model")}
        cfg = TrainTokenizerConfig(**{**values, **changes})
        cfg.validate()
        return cfg

    return settings


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "unigram"}, {"library": "tokenizers", "output": "t.json"}]
)
def test_the_file_is_deterministic_and_gives_text_back(
    settings, changes, tmp_path, monkeypatch, corpus
):
    monkeypatch.chdir(tmp_path)
    cfg = settings(**changes)
    path = train_tokenizer(cfg)
    first = path.read_bytes()
    assert train_tokenizer(cfg).read_bytes() == first
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.dictionary.num_real_symbols == 290
    assert tokenizer.is_lossless()
    for text in read_texts(find_split(corpus, "train"), cfg):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_only_the_training_split_is_read(settings, corpus):
    before = train_tokenizer(settings()).read_bytes()
    (corpus / "valid/first/00/verse.jsonl").write_text("not even JSON")
    assert train_tokenizer(settings()).read_bytes() == before


def test_what_training_holds_out_is_left_out(settings, corpus):
    split = find_split(corpus, "train")
    everything = list(read_texts(split, settings()))
    kept = list(read_texts(split, settings(valid_fraction=0.3)))
    assert kept == [text for text in everything if text in Part(0.3, held_out=False)]
    assert 0 < len(kept) < len(everything)


def test_the_output_is_checked_before_the_text_is_read(settings, corpus, tmp_path):
    (corpus / "train/00/verse.jsonl").write_text("not even JSON")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="--output .* cannot be written"):
        train_tokenizer(settings())


def test_a_sample_is_taken_evenly(settings, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    texts = [f"{i:04} " + "x" * 10_000 for i in range(400)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines))
    cfg = settings(data=str(folder), sample_megabytes=1)
    sample = [int(text[:4]) for text in read_texts(find_split(folder, "train"), cfg)]
    assert len(sample) == pytest.approx(100, abs=2)
    assert max(b - a for a, b in zip(sample, sample[1:], strict=False)) <= 5


def test_bad_records_stop_or_are_skipped(settings, corpus):
    with (corpus / "train/00/verse.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(UserError, match=r"verse\.jsonl:15: not JSON"):
        train_tokenizer(settings())
    train_tokenizer(settings(bad_records="skip"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "the data folder is missing"),
        (
            {"output": ""},
            "--output is ''; --library sentencepiece writes a file that ends in .model",
        ),
        ({"output": "a.json"}, "ends in .model"),
        ({"output": "a.model", "library": "tokenizers"}, "ends in .json"),
        ({"vocab_size": 0}, "--vocab-size is 0"),
        ({"character_coverage": 0.0}, "--character-coverage is 0"),
        ({"sample_megabytes": -1}, "--sample-megabytes is -1"),
        ({"library": "tokenizers", "output": "a.json", "model_type": "unigram"}, "bpe only"),
    ],
)
def test_wrong_settings_are_refused(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_vocabulary_that_does_not_fit_leaves_the_old_file(settings):
    path = train_tokenizer(settings())
    before = path.read_bytes()
    with pytest.raises(UserError, match="too large for this text; the maximum is"):
        train_tokenizer(settings(vocab_size=50_000))
    with pytest.raises(UserError, match="too small for this text; the minimum is"):
        train_tokenizer(settings(vocab_size=20))
    assert path.read_bytes() == before


def test_text_without_documents_is_refused(settings, tmp_path):
    folder = tmp_path / "blank"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="no text to train a tokenizer on"):
        train_tokenizer(settings(data=str(folder)))


def test_the_command_writes_the_file(run, corpus, tmp_path):
    command = run("train_tokenizer", corpus, "--vocab-size", "300", "--output", "t.model")
    assert command.code == 0, command.stderr
    assert "bytes per token" in command.stderr
    assert (tmp_path / "t.model").exists()
    command = run("train_tokenizer", corpus, "--vocab-size", "90000", "--output", "t.model")
    assert command.code == 1
    assert "the maximum is" in command.error


def test_named_files_are_read_line_by_line(settings, parallel_corpus):
    joint = settings(data=str(parallel_corpus), files=["train.en", "train.es"], vocab_size=285)
    alone = joint.replace(files=["train.es"], vocab_size=280)
    names = {"joint": joint, "alone": alone}
    trained = {name: load_tokenizer(str(train_tokenizer(cfg))) for name, cfg in names.items()}
    # Only a text in which "house" appears gives it fewer pieces than bytes.
    pieces = {name: len(tokenizer.encode("house")) for name, tokenizer in trained.items()}
    assert pieces["joint"] < pieces["alone"]


def test_named_files_that_cannot_be_read_are_refused(settings, parallel_corpus):
    with pytest.raises(UserError, match=r"--files names train\.fr, and .*train\.fr is not a file"):
        train_tokenizer(settings(data=str(parallel_corpus), files=["train.fr"]))
    (parallel_corpus / "train.es").write_bytes(b"el\n\xff\n")
    with pytest.raises(UserError, match=r"train\.es:2: not UTF-8"):
        train_tokenizer(settings(data=str(parallel_corpus), files=["train.es"]))
    with pytest.raises(ConfigError, match="--valid-fraction divides a training set"):
        settings(files=["train.es"], valid_fraction=0.1)
