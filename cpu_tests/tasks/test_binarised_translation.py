"""Translation of pairs that were binarised before."""

import json
import shutil

import pytest
import torch

from cpu_tests.binarised import (
    english_lines,
    pairs_folder,
    translated,
    write_dictionary,
    write_pairs,
    write_set,
)
from scalerun.data.length_batches import BatchLimits
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models import ARCH_REGISTRY
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task


@pytest.fixture
def folder(tmp_path):
    return pairs_folder(tmp_path / "pairs")


@pytest.fixture
def make_task(tmp_path, folder):
    def make(**settings):
        cfg = TASK_REGISTRY.config_for("translation").replace(**{"data": str(folder), **settings})
        cfg.validate()
        task = setup_task(
            cfg, seed=1, cache_dir=tmp_path / "run/cache", quarantine=tmp_path / "run/bad.jsonl"
        )
        limits = BatchLimits(max_sentences=8)
        task.set_batch_limits(train=limits, valid=limits)
        return task

    return make


def pairs_of(task, split):
    """The texts of the pairs of a set, in the order of the files."""
    dataset = task.load_dataset(split)
    return [tuple(side.text(row) for side in dataset.sides) for row in dataset.lines]


def texts(lines):
    return [(" ".join(line), " ".join(translated(line))) for line in lines]


def test_languages_vocabularies_and_pairs_are_those_of_the_folder(make_task):
    task = make_task()
    assert task.cfg.languages == ("en", "es")
    assert not task.has_joint_vocabulary
    assert [len(t.dictionary) for t in (task.source_tokenizer, task.tokenizer)] == [16, 16]
    assert pairs_of(task, "train") == texts(english_lines(46))
    assert pairs_of(task, "valid") == texts(english_lines(9)[3:])
    assert task.valid_subsets(["valid", "test"]) == ["valid", "test"]
    assert task.load_dataset("valid").counts().num_bytes == 0


@pytest.mark.parametrize("given", [{"source_lang": "es"}, {"target_lang": "en"}])
def test_one_language_decides_the_direction(make_task, given):
    task = make_task(**given)
    assert task.cfg.languages == ("es", "en")
    assert pairs_of(task, "valid") == [(b, a) for a, b in texts(english_lines(9)[3:])]


def test_equal_dictionaries_are_a_joint_vocabulary(make_task, tmp_path):
    data = pairs_folder(tmp_path / "joint", joint=True)
    task = make_task(data=str(data))
    assert task.source_tokenizer is task.tokenizer
    model = task.build_model(
        ARCH_REGISTRY.config_for("mt_tiny"), seed=1, device=torch.device("cpu")
    )
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
    assert set(task.assets()) == {"dict.en.txt", "dict.es.txt"}
    assert pairs_of(task, "test") == texts(english_lines(12))


def test_a_checkpoint_needs_no_folder_for_its_vocabulary(make_task, tmp_path):
    task = make_task()
    assets = tmp_path / "assets"
    assets.mkdir()
    for name, path in task.assets().items():
        shutil.copy(path, assets / name)
    cfg = task.with_assets(task.cfg, assets)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/valid.en").write_text("the cat\nzebra\n")
    (tmp_path / "text/valid.es").write_text("el gato\nperro\n")
    again = make_task(
        data=str(tmp_path / "text"),
        **{name: getattr(cfg, name) for name in ("source_lang", "target_lang", "vocabulary")},
    )
    again.load_state_dict(task.state_dict())
    assert pairs_of(again, "valid") == [("the cat", "el gato"), ("<unk>", "perro")]
    other = write_pairs(tmp_path / "other", {"valid": [["the"]]})
    write_dictionary(other)
    (other / "dict.txt").rename(other / "dict.es.txt")
    with pytest.raises(UserError, match=r"other/dict\.es\.txt is not the dictionary in .*assets"):
        make_task(data=str(other), vocabulary=cfg.vocabulary).load_dataset("valid")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source_lang": "fr"}, "has pairs of en and es, not of fr"),
        ({"source_lang": "en", "target_lang": "fr"}, "has no dict.fr.txt"),
        ({"tokenizer": "bytes"}, "has binarised pairs, whose vocabulary is dict.en.txt and no"),
        ({"tokenizer": "bytes", "vocabulary": "x"}, "--vocabulary names a folder of dictionaries"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(make_task, settings, message):
    with pytest.raises((ConfigError, UserError), match=message):
        make_task(**settings).load_dataset("valid")


def with_an_empty_line(folder):
    write_set(folder / "valid.en-es.en", [[4, 2], [2], [2], [5, 2]])
    write_set(folder / "valid.en-es.es", [[4, 2], [2], [4, 2], [5, 2]])


def test_pairs_of_empty_lines_are_left_out_and_half_empty_ones_stop_or_are_listed(
    make_task, folder, tmp_path
):
    with_an_empty_line(folder)
    says = r"valid\.en-es\.en\.bin, item 3: the item is empty, and that of valid\.en-es\.es\.bin"
    with pytest.raises(UserError, match=says):
        make_task().load_dataset("valid")
    task = make_task(bad_records="skip")
    assert pairs_of(task, "valid") == [("the", "el"), ("cat", "gato")]
    [report, bad] = task.data_report()
    assert (report["pairs"], report["pairs_blank"], report["pairs_bad"]) == (2, 1, 1)
    [record] = map(json.loads, (tmp_path / "run/bad.jsonl").read_text().splitlines())
    assert (record["file"], record["line"], bad["line"]) == ("valid.en-es.en.bin", 3, 3)
    assert record["record"] == " ||| el"


def test_sides_of_different_length_are_named_with_both_numbers(make_task, folder):
    write_set(folder / "valid.en-es.es", [[4, 2]] * 5)
    says = r"valid\.en-es\.en\.bin has 6 items and .*valid\.en-es\.es\.bin has 5; item n of one"
    with pytest.raises(UserError, match=says):
        make_task().load_dataset("valid")


WORDS = [
    "--task", "translation", "--arch", "mt_tiny", "--no-share-all-embeddings",
    *(
        word
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", 1), ("embed-dim", 32), ("ffn-embed-dim", 32), ("attention-heads", 2),
        )
        for word in (f"--{side}-{name}", str(value))
    ),
    "--dropout", "0.1", "--max-tokens", "64", "--lr", "0.01", "--log-interval", "1", "--cpu",
    "--validate-interval", "0", "--lr-scheduler", "constant",
]  # fmt: skip


@pytest.mark.long
def test_a_run_goes_on_where_it_stopped_and_translates(run, folder, records, tmp_path):
    for name, stops in (("straight", ["100"]), ("resumed", ["5", "12"])):
        for updates in stops:
            words = ["--max-update", updates, "--save-dir", name, "--num-workers", "1"]
            command = run("train", folder, *WORDS, *words, "--dropout", "0")
            assert command.code == 0, command.stderr
    losses = {
        name: [(r["num_updates"], r["loss"]) for r in records(tmp_path / name, "train")]
        for name in ("straight", "resumed")
    }
    assert losses["resumed"] == losses["straight"][:12]
    translate = ["generate", "--path", "straight", "--cpu", "--beam", "2", "--output", "out.txt"]
    command = run(*translate, "--scores", "scores.json")
    assert command.code == 0, command.stderr
    expected = [b for _, b in texts(english_lines(12))]
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert sum(a == b for a, b in zip(lines, expected, strict=True)) >= 4
    assert json.loads((tmp_path / "scores.json").read_text())["sentences"] == 12
    folder.rename(tmp_path / "elsewhere")  # the checkpoint has the vocabulary
    for suffix in (".idx", ".bin"):
        (tmp_path / f"elsewhere/test.en-es.es{suffix}").unlink()
    command = run(*translate, "elsewhere")
    assert command.code == 0, command.stderr
    assert "has no test in es to compare with, so nothing will be scored" in command.stderr
    assert (tmp_path / "out.txt").read_text().splitlines() == lines
    command = run(*translate, "--input", "-", stdin="the cat\n\n")
    assert command.code == 0, command.stderr
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_token_outside_of_the_dictionary_ends_the_run_in_one_sentence(run, folder, workers):
    write_set(folder / "train.en-es.es", [[4, 2]] * 29 + [[12, 2]])
    words = ["--max-update", "60", "--save-dir", "run", "--num-workers", workers]
    command = run("train", folder, *WORDS, *words)
    assert command.code == 1
    assert "train.en-es.es.bin has the token 12, but dict.es.txt has 12 symbols" in command.error
    assert "Traceback" not in command.stderr


def test_pieces_are_joined_and_unknown_words_are_no_match(run, folder, tmp_path):
    listing = (folder / "dict.es.txt").read_text()
    listing = listing.replace("gato ", "ga@@ ").replace("casa ", "to ")
    (folder / "dict.es.txt").write_text(listing)
    write_set(folder / "test.en-es.en", [[4, 5, 2]])
    write_set(folder / "test.en-es.es", [[4, 5, 11, 3, 2]])
    words = ["--max-update", "1", "--save-dir", "run", "--eval-bleu", "--eval-bleu-beam", "1"]
    words += ["--eval-bleu-post-process", "subword_nmt", "--valid-subset", "test"]
    command = run("train", folder, *WORDS, *words)
    assert command.code == 0, command.stderr
    command = run(
        "generate", "--path", "run", "--cpu", "--json", "all.json", "--remove-bpe", "--output", "o"
    )
    assert command.code == 0, command.stderr
    record = json.loads((tmp_path / "all.json").read_text().splitlines()[0])
    assert record["reference"] == "el gato <<unk>>"
    assert "--remove-bpe is read as --post-process subword_nmt" in command.stderr
