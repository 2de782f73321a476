"""What only one rank meets ends all of them with one sentence, or only delays them."""

import socket

import pytest

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train
from cpu_tests.world import run_world
from scalerun.dataclass.errors import UserError


@pytest.fixture
def as_ranks(start, tmp_path):
    """Start the command once for each rank, each in a folder and with flags of its own."""

    def as_ranks(*ranks, common=(), seconds=20):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        commands = []
        for rank, (folder, words) in enumerate(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            words = [*common, "--distributed-timeout-seconds", seconds, *words]
            env = {name: str(value) for name, value in place.items()}
            commands.append(start("train", "data", *words, cwd=folder, env=env))
        for command in commands:
            command.wait(60)
        return commands

    return as_ranks


@pytest.fixture
def homes(tmp_path):
    """Two folders with the same data."""
    for name in ("here", "there"):
        make_corpus(tmp_path / name / "data")
    return tmp_path / "here", tmp_path / "there"


def error(commands):
    """The sentence that rank 0 says for all."""
    assert [c.code for c in commands] == [commands[0].code] * len(commands)
    assert commands[0].code in (1, 2)
    for command in commands:
        assert "Traceback" not in command.stderr
    first, *others = (command.stderr.count("error: ") for command in commands)
    assert first == 1, commands[0].stderr
    assert not any(others), [c.stderr for c in commands]
    return commands[0].error.removeprefix("error: ")


@pytest.fixture
def flags(tiny, tmp_path):
    return [*tiny, "--max-update", "6", "--save-dir", tmp_path / "run"]


def test_a_rank_without_the_data_ends_all(as_ranks, homes, flags):
    here, there = homes
    (there / "data").rename(there / "elsewhere")
    message = error(as_ranks((here, ()), (there, ()), common=flags))
    assert message.startswith("rank 1: the data folder data ")


@pytest.mark.parametrize(
    ("common", "message"),
    [(("--layers", "2"), "--layers is not a flag"), (("--tokenizer", "no"), "--tokenizer no does")],
)
def test_what_is_wrong_everywhere_is_said_once(common, message, as_ranks, homes, flags):
    here, _ = homes
    assert error(as_ranks((here, ()), (here, ()), common=[*flags, *common])).startswith(message)


def test_a_mistyped_flag_of_one_rank_is_that_ranks_alone(as_ranks, homes, flags):
    here, _ = homes
    first, second = as_ranks((here, ()), (here, ("--layers", "2")), common=flags, seconds=4)
    assert (first.code, second.code) == (1, 2)
    assert first.error.startswith("error: rank 0: the other 1 ranks could not be met")
    assert second.error.startswith("error: rank 1: --layers is not a flag")


def test_a_rank_with_other_data_ends_all(as_ranks, homes, flags):
    here, there = homes
    file = there / "data/train/00/verse.jsonl"
    file.write_text(file.read_text().replace("cat", "cow"))
    message = error(as_ranks((here, ()), (there, ()), common=flags))
    assert "rank 1" in message
    assert "training text" in message


def test_a_bad_record_that_one_rank_meets_ends_all_and_loses_nothing(tmp_path):
    data = make_corpus(tmp_path / "data")

    def work(rank):
        words = [*ARCHITECTURES["dense"], "--no-save-async"]
        trainer = make_trainer(data, tmp_path / "run", words, updates=6, data_size=2)
        read = trainer.next_batches

        def meet_a_bad_record(stream):
            if rank == 1 and trainer.num_updates == 3:
                raise UserError("verse.jsonl:7 is no JSON")
            return read(stream)

        trainer.next_batches = meet_a_bad_record
        with pytest.raises(UserError) as caught:
            train(trainer)
        return str(caught.value), (tmp_path / "run/checkpoint_3").is_dir()

    assert run_world(2, work) == [("verse.jsonl:7 is no JSON", True)] * 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (("--lr", "0.02"), "rank 0 was given --lr 0.01 and rank 1 0.02; give every rank the same"),
        (("--model-parallel-size", "2"), "rank 0 was given --model-parallel-size 1 and rank 1 2"),
        (("--replicate-size", "2"), "rank 0 was given --replicate-size 1 and rank 1 2"),
        (("--ddp-backend", "pytorch_ddp"), "rank 0 was given --ddp-backend fully_sharded and rank"),
    ],
)
def test_unequal_flags_end_all(own, message, as_ranks, homes, flags):
    here, _ = homes
    assert error(as_ranks((here, ()), (here, own), common=flags)).startswith(message)
