import multiprocessing
import os
import signal
import time

import pytest

from scalerun.data.text.preparation import BackgroundPreparation, quiet_fork
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


class SlowTokenizer(ByteTokenizer):
    def encode_batch(self, texts, **options):
        time.sleep(0.05)
        return super().encode_batch(texts)


@pytest.fixture
def files(text_file, monkeypatch):
    monkeypatch.setattr("scalerun.data.text.token_cache.BATCH_DOCUMENTS", 1)
    return [text_file(b'{"text": "x"}\n' * 6, f"{name}.jsonl") for name in "ab"]


@pytest.fixture
def cache(tmp_path):
    return TokenCache(tmp_path / "cache", SlowTokenizer())


def names(cache, pattern="*.tokens"):
    return sorted(path.name[0] for path in cache.folder.glob(pattern))


def test_files_are_prepared_while_others_work(files, cache):
    background = BackgroundPreparation(cache)
    assert background.start(files)
    assert not background.start(files)  # one at a time
    wait_until(lambda: not background.is_running)
    assert names(cache) == ["a", "b"]


def test_a_file_that_is_needed_early_is_waited_for(files, cache):
    BackgroundPreparation(cache).start(files)
    wait_until(lambda: names(cache, "*.lock"))
    assert cache.load(files[0]).num_documents == 6


def test_a_failure_leaves_the_error_to_whoever_needs_the_file(text_file, cache, caplog):
    background = BackgroundPreparation(cache)
    background.start([text_file(b"{")])
    wait_until(lambda: not background.is_running)
    assert names(cache) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_does_not_stop_a_quiet_process(signum):
    ready, done = multiprocessing.Event(), multiprocessing.Event()

    def work():
        ready.set()
        done.wait(20)

    process = multiprocessing.get_context("fork").Process(target=work)
    with quiet_fork():
        process.start()
    assert ready.wait(20)
    os.kill(process.pid, signum)
    time.sleep(0.05)
    assert process.is_alive()
    done.set()
    process.join(20)
    assert process.exitcode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}


def parent_of_a_preparation(cache, files, pid):
    background = BackgroundPreparation(cache)
    background.start(files)
    pid.value = background._process.pid
    time.sleep(60)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] != "Z"


def test_it_ends_by_itself_when_its_parent_is_killed(text_file, cache, monkeypatch):
    monkeypatch.setattr("scalerun.data.text.token_cache.BATCH_DOCUMENTS", 1)
    file = text_file(b'{"text": "x"}\n' * 2000)
    context = multiprocessing.get_context("fork")
    pid = context.Value("i", 0)
    parent = context.Process(target=parent_of_a_preparation, args=(cache, [file], pid))
    parent.start()
    wait_until(lambda: pid.value and names(cache, "*.lock"))
    os.kill(parent.pid, signal.SIGKILL)
    parent.join(20)
    wait_until(lambda: not is_alive(pid.value))
    assert names(cache) == []
    assert not list(cache.folder.glob(".*.tmp"))
