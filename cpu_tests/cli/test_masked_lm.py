"""TorchScale's documented commands for masked language models, made small by their last flags."""

import json
import shlex
import socket

import pytest

from cpu_tests.masked_data import make_masked_data, sentences, write_index, write_shard

BERT = """
    --task pretraining --tokens-per-sample 512 --mask-prob 0.15 --span-length 3.0
    --leave-unmasked-prob 0.0 --random-token-prob 0.0 --arch mlm_base
    --share-encoder-input-output-embed --required-batch-size-multiple 8
    --spm-model data/sentencepiece.bpe.model --dict-file data/dict.txt
    --optimizer adam --adam-betas '(0.9,0.98)' --adam-eps 1e-6 --clip-norm 2.0
    --lr-scheduler polynomial_decay --lr 0.0005 --warmup-updates 10000 --total-num-update 125000
    --max-update 125000 --max-sentences 32 --update-freq 1 --log-format simple --log-interval 100
    --disable-validation --save-interval-updates 5000 --no-epoch-checkpoints
    --fp16 --fp16-init-scale 4 --fp16-scale-window 256 --min-loss-scale 0.0001 --seed 1
    --ddp-backend=no_c10d --distributed-no-spawn --reset-dataloader --batch-read-ahead 10000
    --rel-pos-buckets 32 --max-rel-pos 128 --deepnorm
"""
DENSE = f"{BERT} --criterion masked_lm"
MOE = f"""{BERT}
    --moe-expert-count 64 --moe-freq 2 --moe-gating-use-fp32 --moe-second-expert-policy random
    --moe-normalize-gate-prob-before-dropping --moe-eval-capacity-token-fraction -1.0
    --criterion masked_lm_moe_cross_entropy --moe-gate-loss-wt 0.01
    --moe-gate-loss-combine-method sum --use-xmoe --pad-to-max-length
"""
SMALL = """
    --tokens-per-sample 48 --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32
    --encoder-attention-heads 2 --max-sentences 8 --lr 0.01 --warmup-updates 5 --max-update 40
    --log-interval 5 --cpu
"""


@pytest.fixture
def data(tmp_path):
    return make_masked_data(tmp_path / "data")


def words_of(command, *more):
    return ["data", *shlex.split(command + SMALL), *more]


def train(run, *words):
    command = run("train", *words)
    assert command.code == 0, command.stderr
    return command


def falls(found):
    losses = [record["loss"] for record in found]
    return sum(losses[-2:]) / 2 < losses[0] - 0.5


@pytest.mark.parametrize("command", [DENSE, MOE], ids=["dense", "moe"])
def test_the_documented_command_trains_in_one_process(run, data, records, tmp_path, command):
    experts = ["--moe-expert-count", "4"] if command is MOE else []
    train(run, *words_of(command, "--save-dir", "run", *experts))
    found = records(tmp_path / "run", "train")
    assert falls(found)
    assert all(0 <= record["accuracy"] <= 1 and record["wpb"] > 0 for record in found)
    assert all(record["ppl"] == pytest.approx(2 ** record["loss"]) for record in found)
    if command is MOE:
        names = {"moe_gate_loss", "entropy_gating", "overflow_expert1", "unused_expert1_count"}
        assert names <= found[-1].keys()


@pytest.mark.long
@pytest.mark.parametrize("command", [DENSE, MOE], ids=["dense", "moe"])
def test_the_documented_command_trains_in_two_processes(start, data, records, tmp_path, command):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    experts = ["--moe-expert-count", "4"] if command is MOE else []
    words = words_of(command, "--save-dir", "run", *experts, "--max-sentences", "4")
    ranks = [
        start(
            "train", *words,
            env={
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.wait() == 0, rank.stderr
    assert falls(records(tmp_path / "run", "train"))


def test_a_run_that_was_killed_goes_on_to_the_bit(run, start, data, records, tmp_path):
    words = words_of(DENSE, "--max-update", "12", "--log-interval", "1", "--dropout", "0.1")
    train(run, *words, "--save-dir", "straight")
    train(run, *words, "--save-dir", "halved", "--max-update", "5")
    train(run, *words, "--save-dir", "halved", "--num-workers", "1")
    straight, halved = (
        [(r["num_updates"], r["loss"], r["accuracy"]) for r in records(tmp_path / name, "train")]
        for name in ("straight", "halved")
    )
    assert straight == halved


def test_validate_gives_what_training_reported_whatever_the_batch_size(
    run, data, records, tmp_path
):
    more = [
        "--no-fp16",
        "--no-disable-validation",
        "--max-update",
        "6",
        "--validate-interval-updates",
        "3",
    ]
    train(run, *words_of(DENSE, "--save-dir", "run", *more))
    reported = records(tmp_path / "run", "valid", num_updates=6)[-1]
    for size in ("1", "8"):
        command = run(
            "validate", data, "--path", "run", "--cpu", "--json", "v.json", "--batch-size", size
        )
        assert command.code == 0, command.stderr
        assert "accuracy" in command.stdout
        numbers = json.loads((tmp_path / "v.json").read_text())["valid"]
        for key in ("loss", "accuracy", "tokens"):
            assert numbers[key] == pytest.approx(reported[key], rel=1e-5)
    (data / "dict.txt").unlink()  # the checkpoint has the vocabulary
    assert run("validate", data, "--path", "run", "--cpu").code == 0


def spoiled_shard(content):
    def spoil(data):
        (data / "shard/train/00000.txt").write_bytes(content)

    return spoil


def without_shard(data):
    (data / "shard/train/00001.txt").unlink()


def with_negative_weight(data):
    write_index(data, "train", [{"source": ["shard/train/00000.txt"], "weight": -1}])


BAD = {
    "bytes": (spoiled_shard(b"good\n\xff\n"), "shard/train/00000.txt:2: not UTF-8"),
    "empty shard": (spoiled_shard(b""), "shard/train/00000.txt:1: the file has no sentence"),
    "missing shard": (without_shard, "1: entry 1 names shard/train/00001.txt, which is not a"),
    "weight": (with_negative_weight, "json/train.json:1: entry 1: weight is -1; give"),
    "no index": (lambda data: (data / "json/train.json").unlink(), "json/train.json is not there"),
    "no list": (lambda data: (data / "dict.txt").unlink(), "data/dict.txt does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_ends_in_one_sentence(run, data, case):
    spoil, says = BAD[case]
    spoil(data)
    command = run("train", *words_of(DENSE, "--save-dir", "run"))
    assert command.code == 1
    assert says in command.error
    assert "Traceback" not in command.stderr


def test_bad_lines_can_be_skipped_and_are_listed(run, data, records, tmp_path):
    good = "\n".join(sentences(20, seed=4)).encode()
    spoiled_shard(good + b"\n\xff\n" + good)(data)
    write_shard(data / "shard/train/00001.txt", [[" ".join(sentences(40, seed=2))], ["the cat"]])
    words = words_of(DENSE, "--save-dir", "run", "--bad-records", "skip", "--max-update", "8")
    train(run, *words)
    [bad] = [json.loads(x) for x in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert (bad["file"], bad["line"]) == ("shard/train/00000.txt", 21)
    [long] = records(tmp_path / "run", "event", event="long_sentences")
    assert long["sentences"] == 1
