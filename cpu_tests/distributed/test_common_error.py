"""An error of all ranks is said once; one that some have, by each of those, and never lost."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest

from cpu_tests.world import run_world
from scalerun.distributed import common_error
from scalerun.distributed.common_error import meet, open_store, say_error
from scalerun.distributed.launch import Rendezvous


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def place_of(rank, port, size=3):
    return Rendezvous(rank, size, rank, "127.0.0.1", port, hosts_store=rank == 0)


def ends(rank, text, port, *, joined=False):
    """What a rank says of an error, and after how many seconds."""
    place, said, start = place_of(rank, port), [], time.monotonic()
    store = open_store(place, timedelta(seconds=20))
    if joined:
        meet(store, place.world_size, timedelta(seconds=20))
    if text is not None:
        say_error(text, place, said.append)
    return said, time.monotonic() - start, store  # which the others may still need


def world(work):
    """Results of three ranks that stay until all have theirs."""

    def rank_of_world(rank):
        said, seconds, _ = work(rank)
        time.sleep(0.5)
        return said, seconds

    return run_world(3, rank_of_world)


@pytest.mark.parametrize("joined", [False, True])
def test_what_all_ranks_say_is_said_once_by_rank_0(port, joined):
    results = world(lambda rank: ends(rank, "no such flag", port, joined=joined))
    assert [said for said, _ in results] == [["no such flag"], [], []]


def test_errors_that_differ_are_each_said_with_their_rank(port):
    results = world(lambda rank: ends(rank, f"error of {rank > 1}", port))
    assert [said for said, _ in results] == [
        ["rank 0: error of False"],
        ["rank 1: error of False"],
        ["rank 2: error of True"],
    ]


def test_an_error_of_one_rank_does_not_wait_for_ranks_that_are_well(port, monkeypatch):
    monkeypatch.setattr(common_error, "PATIENCE_SECONDS", 60.0)

    def work(rank):
        if rank != 1:
            store = open_store(place_of(rank, port), timedelta(seconds=20))
            store.add("joined", 1)
            time.sleep(1)
            return [], 0.0, store
        return ends(rank, "no such file", port)

    _, (said, seconds), _ = world(work)
    assert said == ["rank 1: no such file"]
    assert seconds < 20


def test_those_who_do_not_come_are_counted_and_nothing_else_is_printed(port, capfd):
    store = open_store(place_of(0, port), timedelta(seconds=20))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="1 of 3 came"):
        meet(store, 3, timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="Connection refused"):
        open_store(place_of(1, port + 1), timedelta(seconds=0.5))
    assert time.monotonic() - start < 10
    assert capfd.readouterr().err == ""


def test_nobody_is_waited_for_beyond_the_patience(port, monkeypatch):
    monkeypatch.setattr(common_error, "PATIENCE_SECONDS", 0.3)
    said = []
    say_error("alone", place_of(0, port), said.append)
    say_error("no store", place_of(1, port + 1), said.append)
    assert said == ["rank 0: alone", "rank 1: no store"]


def test_a_signal_ends_the_wait_and_loses_nothing(port, monkeypatch):
    monkeypatch.setattr(common_error, "PATIENCE_SECONDS", 60.0)
    said, before = [], signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    say_error("ended by the launcher", place_of(0, port), said.append)
    assert said == ["rank 0: ended by the launcher"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_alone_says_it_plainly(port):
    said = []
    say_error("plain", None, said.append)
    say_error("plain", place_of(0, port, size=1), said.append)
    assert said == ["plain", "plain"]
