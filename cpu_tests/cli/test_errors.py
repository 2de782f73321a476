"""Whatever a user can get wrong ends in one sentence, a code that is not 0, and nothing lost."""

import gzip
import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from scalerun.checkpoint.atomic import FileRecord, hash_file
from scalerun.checkpoint.manifest import read_manifest

LAST = ["--max-update", "4", "--save-interval-updates", "2", "--save-dir", "run"]


def text_line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def checkpoint_files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("checkpoint*/**/*")
        if path.is_file()
    }


def spoil_train(content):
    def spoil(data):
        (data / "train/00/verse.jsonl").write_bytes(content)

    return spoil


def remove(name):
    return lambda data: shutil.rmtree(data / name)


def empty_training_set(data):
    for file in (data / "train").rglob("*.jsonl"):
        file.write_bytes(b"")


BAD_DATA = {
    "missing folder": (lambda data: shutil.rmtree(data), "does not exist"),
    "no training set": (remove("train"), "train"),
    "empty corpus": (empty_training_set, "no documents"),
    "binary file": (spoil_train(os.urandom(64) + b"\x00\xff\xfe"), "verse.jsonl:1"),
    "truncated JSON": (spoil_train(text_line("a") + b'{"text": "b'), "verse.jsonl:2"),
    "invalid UTF-8": (spoil_train(b'{"text": "caf\xe9"}\n'), "verse.jsonl:1"),
    "null text": (spoil_train(text_line("a") + b'\n{"text": null}\n'), "verse.jsonl:3"),
    "number for text": (spoil_train(b'{"text": 3}\n'), "verse.jsonl:1"),
    "missing text": (spoil_train(b'{"txet": "a", "id": 1}\n'), "txet"),
    "a list for a record": (spoil_train(b'["a"]\n'), "verse.jsonl:1"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_ends_in_one_sentence(run, corpus, tiny, case):
    spoil, says = BAD_DATA[case]
    spoil(corpus)
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 1, command.stderr
    assert command.error.startswith("error: ")
    assert says in command.error
    assert "Traceback" not in command.stderr


BAD_FLAGS = {
    "set that is not there": (["--valid-subset", "valid/third"], 1, "first"),
    "no set to validate on": (["--valid-subset="], 2, "--disable-validation"),
    "everything held out": (["--valid-fraction", "1"], 2, "--valid-fraction"),
    "lr 0": (["--lr", "0"], 2, "--lr"),
    "negative lr": (["--lr", "-1"], 2, "--lr"),
    "batch larger than the data": (["--batch-size", "5000"], 1, "--batch-size 5000"),
    "unknown tokenizer file": (["--tokenizer", "nowhere.model"], 1, "nowhere.model"),
    "heads that do not divide": (["--decoder-attention-heads", "3"], 2, "heads"),
    "sample longer than positions": (
        ["--decoder-learned-pos", "--max-target-positions", "16"],
        2,
        "--max-target-positions",
    ),
    "mistyped restore file": (["--restore-file", "chekpoint_2"], 1, "chekpoint_2"),
    "unknown architecture": (["--arch", "lm_tinny"], 2, "lm_tiny"),
    "warm-up longer than the run": (["--warmup-updates", "9"], 2, "--warmup-updates"),
    "unknown corpus": (["--corpus-weights", "prose=1"], 1, "prose"),
    "plug-in folder that is not there": (["--user-dir", "nowhere"], 2, "nowhere"),
    "several processes": ([], 2, "WORLD_SIZE"),
    "missing tracker": (["--aim-repo", "aim"], 2, "pip install aim"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_settings_end_in_one_sentence(run, corpus, tiny, case):
    words, code, says = BAD_FLAGS[case]
    env = {"WORLD_SIZE": "2"} if case == "several processes" else {}
    command = run("train", corpus, *tiny, *LAST, *words, env=env)
    assert command.code == code, command.stderr
    assert command.error.startswith("error: ")
    assert says in command.error
    assert "Traceback" not in command.stderr


AT_ONCE = {
    "schedule without an end": (["--max-update", "0", "--max-epoch", "1"], "--max-update"),
    "sample longer than positions": (
        ["--decoder-learned-pos", "--max-target-positions", "16"],
        "--max-target-positions",
    ),
    "missing tracker": (["--aim-repo", "aim"], "pip install aim"),
    "tracker's folder": (["--tensorboard-logdir", "data/train/00/verse.jsonl/x"], "--tensorboard"),
    "pattern without parameters": (["--lr-scale", "nothing*=0.1"], "nothing*"),
    "experts without their loss": (
        ["--moe-freq", "1", "--moe-expert-count", "2"],
        "give --criterion moe_cross_entropy",
    ),
    "loss without experts": (["--criterion", "moe_cross_entropy"], "needs a model with experts"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_what_has_nothing_to_do_with_the_text_is_said_before_it_is_read(run, corpus, tiny, case):
    words, says = AT_ONCE[case]
    spoil_train(b"bad\n")(corpus)
    command = run("train", corpus, *tiny, *LAST, *words)
    assert command.code in (1, 2)
    assert says in command.error


def test_a_run_folder_that_cannot_be_written_is_named(run, corpus, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    command = run("train", corpus, *tiny, *LAST[:-1], "file/run")
    assert command.code == 1
    assert "--save-dir file/run cannot be written" in command.error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_run_folder_is_named(run, corpus, tiny, tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 1
    assert "cannot be written" in command.error


def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoints(run, corpus, tiny, tmp_path):
    """On a file system of its own that is too small for a second checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        words = [
            *tiny,
            "--max-update",
            "50",
            "--save-interval-updates",
            "1",
            "--save-dir",
            "disk/run",
        ]
        command = run("train", corpus, *words, "--cache-dir", tmp_path / "cache")
        assert command.code == 1
        assert "bytes" in command.error or "space" in command.error or "full" in command.error
        assert "Traceback" not in command.stderr
        pointer = (disk / "run/checkpoint_last").read_text().strip()
        shutil.copytree(disk / "run" / pointer, tmp_path / "copy" / pointer)
        score = run("validate", corpus, "--path", tmp_path / "copy" / pointer, "--cpu")
        assert score.code == 0, score.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def trained(run, corpus, tiny, tmp_path):
    assert run("train", corpus, *tiny, *LAST).code == 0
    return tmp_path / "run"


def test_a_bad_validation_set_is_noticed_before_training(run, corpus, tiny, records, tmp_path):
    (corpus / "valid/second/00/verse.jsonl").write_bytes(b"[]\n")
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 1
    assert "second/00/verse.jsonl:1" in command.error
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_bad_record_far_into_a_validation_set_loses_nothing(run, corpus, tiny, records, tmp_path):
    (corpus / "valid/second/01").mkdir()
    (corpus / "valid/second/01/verse.jsonl").write_bytes(b"[]\n")
    words = ["--max-update", "3", "--save-dir", "run"]
    command = run("train", corpus, *tiny, *words)
    assert command.code == 1
    assert "second/01/verse.jsonl:1" in command.error
    assert (tmp_path / "run/checkpoint_3").is_dir()
    (corpus / "valid/second/01/verse.jsonl").write_bytes(text_line("Repaired."))
    command = run("train", corpus, *tiny, *words)
    assert command.code == 0, command.stderr
    assert len(records(tmp_path / "run", "valid", num_updates=3)) == 2


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing file", "empty manifest"])
def test_a_damaged_checkpoint_is_named_kept_and_passed_over(run, corpus, tiny, trained, damage):
    tensors = next((trained / "checkpoint_4").glob("*.distcp"))
    content = tensors.read_bytes()
    if damage == "truncated":
        tensors.write_bytes(content[:-100])
    elif damage == "one bit":
        middle = len(content) // 2
        tensors.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "missing file":
        tensors.unlink()
    else:
        (trained / "checkpoint_4/manifest.json").write_text("")
    damaged = {p.name: p.read_bytes() for p in (trained / "checkpoint_4").iterdir()}
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 0, command.stderr
    assert "checkpoint_4 is damaged" in command.stderr
    kept = [
        {p.name: p.read_bytes() for p in folder.iterdir()}
        for folder in trained.glob("checkpoint_4*")
        if folder.is_dir()
    ]
    assert damaged in kept
    assert run("validate", corpus, "--path", trained / "checkpoint_4", "--cpu").code == 0


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_anew(run, corpus, tiny, trained):
    for file in trained.glob("checkpoint_*/*.distcp"):
        file.write_bytes(b"")
    before = checkpoint_files(trained)
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 1
    assert "damaged" in command.error
    assert checkpoint_files(trained) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens-per-sample", "16"], "--reset-dataloader"),
        (["--decoder-embed-dim", "32"], "does not fit"),
        (["--decoder-layers", "3"], "does not fit"),
        (["--decoder-attention-heads", "4"], "with --decoder-attention-heads 2, not 4"),
        (["--activation-fn", "relu"], "with --activation-fn gelu, not relu"),
        (["--optimizer", "sgd", "--momentum", "0.9"], "optimizer"),
    ],
)
def test_a_run_that_goes_on_with_other_settings_says_what_does_not_fit(
    run, corpus, tiny, trained, words, says
):
    before = checkpoint_files(trained)
    command = run("train", corpus, *tiny, *LAST, "--max-update", "8", *words)
    assert command.code == 1, command.stderr
    assert says in command.error
    assert checkpoint_files(trained) == before


FIRST_KEYS = (
    "does not fit the model: model.layers.2.mixer_residual.norm.weight (16,) is not in the "
    "checkpoint; "
)


def test_weights_of_another_architecture_are_told_by_their_first_keys(run, corpus, tiny, trained):
    words = [*LAST, "--decoder-layers", "3", "--save-dir", "new", "--restore-file", trained]
    command = run("train", corpus, *tiny, *words)
    assert command.code == 1
    assert FIRST_KEYS in command.error
    assert "use the architecture and the tokenizer that it was trained with" in command.error
    # As plug-in code makes them that was changed since.
    checkpoint = trained / "checkpoint_4"
    file = checkpoint / "config.json"
    content = json.loads(file.read_text())
    content["model"]["decoder_layers"] = 3
    file.write_text(json.dumps(content))
    manifest = read_manifest(checkpoint)
    record = FileRecord(file.stat().st_size, hash_file(file))
    replace(manifest, files=manifest.files | {file.name: record}).rewrite(checkpoint)
    for name in ("validate", "interactive_cli"):
        command = run(name, "--path", trained, "--cpu", stdin="the\n")
        assert command.code == 1
        assert FIRST_KEYS in command.error


OTHER_LOSS = """
from dataclasses import dataclass
from scalerun.criterions import register_criterion
from scalerun.criterions.cross_entropy import CrossEntropy
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass

@dataclass
class OtherConfig(ScalerunDataclass):
    pass

@register_criterion("other_loss", OtherConfig)
class OtherLoss(CrossEntropy):
    pass
"""


def test_another_criterion_is_refused_on_resume_and_welcome_in_a_new_run(
    run, corpus, tiny, trained, tmp_path
):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/other.py").write_text(OTHER_LOSS)
    other = ["--user-dir", "plugins", "--criterion", "other_loss", "--max-update", "6"]
    refused = run("train", corpus, *tiny, *LAST, *other)
    assert refused.code == 1
    assert "trained with --criterion cross_entropy, not other_loss" in refused.error
    new = [*other, "--save-dir", "new", "--restore-file", "run"]
    assert run("train", corpus, *tiny, *new).code == 0


def test_dense_weights_become_a_longnet_in_a_new_run_alone(run, corpus, tiny, trained, tmp_path):
    longnet = ["--segment-length", "8,16", "--dilated-ratio", "2,2", "--max-update", "6"]
    refused = run("train", corpus, *tiny, *LAST, *longnet)
    assert refused.code == 1
    assert "trained with --dilated-ratio [], not 2,2" in refused.error
    words = [*tiny, *longnet, "--save-dir", "new", "--restore-file", "run"]
    new = run("train", corpus, *words)
    assert new.code == 0, new.stderr
    assert new.stderr.count("were trained with --dilated-ratio [], now 2,2; --segment-length") == 1
    assert new.stderr.count("--dilated-ratio 2,2 has no 1") == 1
    again = run("train", corpus, *words)
    assert again.code == 0, again.stderr
    assert "were trained with" not in again.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--decoder-attention-heads", "4"],
        ["--tokens-per-sample", "16"],
        ["--tokenizer", "nowhere.model"],
        ["--valid-subset", "valid/third"],
    ],
)
def test_a_refused_command_does_not_describe_the_run(run, corpus, tiny, trained, words):
    files = [trained / name for name in ("config.yaml", "command.txt", "versions.json")]
    before = [file.read_bytes() for file in files]
    for file in files:
        os.utime(file, (1, 1))
    assert run("train", corpus, *tiny, *LAST, "--max-update", "8", *words).code == 1
    assert [file.read_bytes() for file in files] == before
    assert all(file.stat().st_mtime == 1 for file in files)


def test_bad_data_leaves_no_description(run, corpus, tiny, tmp_path):
    spoil_train(b"[]\n")(corpus)
    assert run("train", corpus, *tiny, *LAST).code == 1
    assert not (tmp_path / "run/config.yaml").exists()


def test_settings_that_leave_the_function_as_it_is_may_change(run, corpus, tiny, trained):
    words = ["--dropout", "0.3", "--clip-norm", "1", "--weight-decay", "0.1", "--max-update", "6"]
    command = run("train", corpus, *tiny, *LAST, *words)
    assert command.code == 0, command.stderr


def test_changed_data_is_noticed_on_resume(run, corpus, tiny, trained):
    with open(corpus / "train/01/verse.jsonl", "ab") as file:
        file.write(text_line("One more document."))
    command = run("train", corpus, *tiny, *LAST, "--max-update", "8")
    assert command.code == 1
    assert "--reset-dataloader" in command.error


def test_another_vocabulary_is_refused_on_resume(run, corpus, tiny, trained, tmp_path):
    made = run(
        "train_tokenizer", corpus, "--vocab-size", "290", "--output", tmp_path / "small.model"
    )
    assert made.code == 0, made.stderr
    command = run("train", corpus, *tiny, *LAST, "--max-update", "8", "--tokenizer", "small.model")
    assert command.code == 1
    assert "vocabulary" in command.error or "does not fit" in command.error


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("validate", [], 2, "--path is required"),
        ("validate", ["--path", "nowhere"], 1, "nowhere"),
        ("validate", ["--path", "run", "--use-ema"], 1, "--store-ema"),
        ("validate", ["--path", "run", "--valid-subset", "valid/x"], 1, "first"),
        ("validate", ["--path", "run", "--json", "run/config.yaml/x.json"], 1, "--json"),
        ("validate", ["nodata", "--path", "run"], 1, "nodata"),
        ("interactive_cli", [], 2, "--path is required"),
        ("interactive_cli", ["--path", "run", "--top-p", "2"], 2, "--top-p"),
        ("interactive_cli", ["--path", "run", "--temperature", "-1"], 2, "--temperature"),
        ("interactive_cli", ["--path", "run", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        ("interactive_cli", ["--path", "run", "--max-new-tokens", "99999"], 1, "99999"),
    ],
)
def test_the_other_commands_say_what_is_wrong(run, trained, name, words, code, says):
    command = run(name, *words, stdin="hello\n")
    assert command.code == code, command.stderr
    assert says in command.error
    assert "Traceback" not in command.stderr


def test_a_checkpoint_cannot_run_code(run, corpus, trained, tmp_path):
    """A pickle inside it is refused, also when the manifest was made to fit."""
    mark = tmp_path / "ran"
    evil = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    (trained / "checkpoint_4/.metadata").write_bytes(evil)
    manifest = trained / "checkpoint_4/manifest.json"
    content = json.loads(manifest.read_text())
    text = json.dumps(content)
    import hashlib

    for name, record in content["files"].items():
        if name == ".metadata":
            record["size" if "size" in record else "bytes"] = len(evil)
            record["sha256"] = hashlib.sha256(evil).hexdigest()
    assert json.dumps(content) != text
    manifest.write_text(json.dumps(content))
    command = run("validate", corpus, "--path", trained / "checkpoint_4", "--cpu")
    assert command.code != 0
    assert not mark.exists()
    assert "Traceback" not in command.stderr


def test_odd_but_harmless_files_train_normally(run, corpus, tiny, tmp_path):
    first = corpus / "train/00/verse.jsonl"
    lines = first.read_bytes().splitlines()
    strange = "\ufeff".encode() + b"\r\n".join(lines[:5]) + b"\n\n\r\n" + b"\n".join(lines[5:])
    strange += b'\n{"text": ""}\n{"text": "line\\u2028separator"}\n{"text": "raw \xe2\x80\xa8 one"}'
    first.write_bytes(strange)
    second = corpus / "train/01/verse.jsonl"
    (corpus / "train/01/verse.jsonl.gz").write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    (corpus / "train/.DS_Store").write_bytes(b"\x00")
    (corpus / "train/00/notes.md").write_text("not data")
    (corpus / "train/.ipynb_checkpoints").mkdir()
    command = run("train", corpus, *tiny, *LAST)
    assert command.code == 0, command.stderr
