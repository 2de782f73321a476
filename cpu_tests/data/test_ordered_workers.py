import os
import signal
import time

import pytest

from cpu_tests.processes import children
from scalerun.data.ordered_workers import OrderedWorkers
from scalerun.dataclass.errors import UserError


def slow_square(number):
    time.sleep(0.002 * (number % 3))
    return number**2


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("pieces", [0, 1, 4, 30])
def test_results_come_in_the_order_of_the_work(count, pieces):
    with OrderedWorkers(slow_square, count) as workers:
        assert list(workers.map(range(pieces))) == [i**2 for i in range(pieces)]
        assert list(workers.map([7])) == [49]


def test_pieces_and_results_may_be_larger_than_a_pipe():
    with OrderedWorkers(bytes.upper, 3) as workers:
        assert list(workers.map([b"a" * 3_000_000] * 7)) == [b"A" * 3_000_000] * 7


def test_no_more_is_read_than_the_processes_work_on():
    taken = []

    def pieces():
        for i in range(50):
            taken.append(i)
            yield i

    with OrderedWorkers(slow_square, 3) as workers:
        for done, _ in enumerate(workers.map(pieces()), start=1):
            assert len(taken) <= done + 3


def fails_at_3(number):
    if number == 3:
        raise UserError("three is no number")
    return number


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_comes_up_in_its_place(count):
    seen = []
    with pytest.raises(UserError, match="three"), OrderedWorkers(fails_at_3, count) as workers:
        for result in workers.map(range(9)):
            seen.append(result)
    assert seen == [0, 1, 2]


def dies(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_killed_is_told_of():
    message = "a worker process has ended by itself.*--workers"
    with pytest.raises(UserError, match=message), OrderedWorkers(dies, 2) as workers:
        list(workers.map(range(9)))


def test_the_processes_end_with_their_parent(tmp_path):
    """Also where it was killed, and cannot tell them."""
    before = set(children(os.getpid()))
    pid = os.fork()
    if pid == 0:
        workers = OrderedWorkers(slow_square, 3)
        (tmp_path / "pids").write_text(" ".join(map(str, children(os.getpid()))))
        next(workers.map(range(9)))
        (tmp_path / "ready").touch()
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    started = [int(word) for word in (tmp_path / "pids").read_text().split()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + 30
    while any(is_running(each) for each in started):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(started) == 3
    assert set(children(os.getpid())) <= before


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
