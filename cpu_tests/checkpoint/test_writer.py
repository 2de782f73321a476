"""A save that dies, at any instant and in any way, costs no checkpoint."""

import errno
import os
import random
import resource
import shutil
import signal
import time

import pytest

from scalerun.checkpoint import checkpoint_folder, writer
from scalerun.dataclass.errors import UserError


@pytest.fixture
def child(manager, state_at):
    """Fork a process that saves updates until it is killed; return its process number."""

    def start(first, *, lethal_call=0, **settings):
        pid = os.fork()
        if pid:
            return pid
        try:
            if lethal_call:
                kill_at_call(lethal_call)
            made = manager(**settings)
            for number in range(first, first + 1000):
                made.save(number, state_at(number))
            made.wait()
        finally:
            os._exit(9)

    return start


def killed(pid):
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_at_call(count):
    """Kill this process at its count-th call that changes a name or forces data to the disk."""
    left = [count]

    def lethal(call):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
        setattr(os, name, lethal(getattr(os, name)))


@pytest.mark.parametrize("first", [2, 0])
def test_a_save_killed_at_any_step_leaves_the_newest_committed_one(
    child, manager, saved, state_at, number_of, run_dir, first
):
    """The steps are all calls that matter to what another process sees; two saves are swept."""
    expected = -1
    if first:
        saved(1)
        expected = 1
    for step in range(1, 32):
        pid = child(first, lethal_call=step, save_async=False, keep_last_updates=2)
        assert killed(pid)
        state = state_at(0)
        loaded = manager(save_async=False).load_latest(state)
        if loaded is None:
            assert expected == -1
            continue
        assert number_of(state) == loaded.num_updates >= expected
        expected = loaded.num_updates
        assert (run_dir / "checkpoint_last").read_text() == f"checkpoint_{expected}\n"
        assert not [entry for entry in run_dir.iterdir() if entry.name.startswith(".")]
    assert expected >= first + 1


def test_a_run_killed_at_random_instants_resumes_from_what_it_committed(
    child, manager, state_at, number_of, run_dir
):
    generator = random.Random(1)
    newest = 0
    for _ in range(15):
        pid = child(newest + 1, save_async=True, keep_last_updates=2)
        time.sleep(generator.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert killed(pid)
        committed = [
            number for number, _ in checkpoint_folder.CheckpointFolder(run_dir).checkpoints()
        ]
        state = state_at(0)
        loaded = manager(keep_last_updates=2).load_latest(state)
        if loaded is None:
            assert not committed
            continue
        assert number_of(state) == loaded.num_updates == max(committed) >= newest
        newest = loaded.num_updates
    assert newest > 1


def test_a_run_folder_that_is_gone_is_said_to_be_gone(manager, state_at, run_dir):
    made = manager()
    shutil.rmtree(run_dir)
    with pytest.raises(UserError) as caught:
        made.save(1, state_at(1), final=True)
    assert "is gone, it was deleted or moved during the run" in str(caught.value)
    assert "intact" not in str(caught.value)


def test_too_small_a_disk_is_noticed_before_writing(saved, manager, state_at, monkeypatch, run_dir):
    saved(1)
    before = sorted(run_dir.rglob("*"))
    usage = writer.shutil.disk_usage(run_dir)._replace(free=1000)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"has 1000 bytes free and checkpoint_2 needs [0-9]{7}"):
        manager().save(2, state_at(2))
    assert sorted(run_dir.rglob("*")) == before


@pytest.mark.parametrize("save_async", [True, False])
def test_a_write_that_fails_half_way_costs_nothing(
    saved, manager, state_at, number_of, run_dir, save_async
):
    saved(1)
    before = sorted(run_dir.rglob("*"))
    made = manager(save_async=save_async)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(UserError, match=r"checkpoint_2 could not be written .*File too large"):
            (made.save(2, state_at(2)), made.wait())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(run_dir.rglob("*")) == before
    made.save(2, state_at(2), final=True)
    state = state_at(0)
    assert manager().load_latest(state).num_updates == number_of(state) == 2


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_full_disk_at_any_call_is_an_error_of_the_user(
    saved, manager, state_at, monkeypatch, run_dir, call
):
    saved(1)
    before = sorted(run_dir.rglob("*"))
    made = manager(save_async=False)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(UserError, match=r"No space left on device; the checkpoints .* intact"):
            made.save(2, state_at(2))
    assert sorted(run_dir.rglob("*")) == before
