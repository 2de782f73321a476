"""Real processes that talk by gloo, for tests of what several ranks do together."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor  # seconds that forked ranks need not spend each


def run_world(size, work, *args, timeout=120):
    """Call ``work(rank, *args)`` in ``size`` forked ranks of one process group -> their results.

    All ranks end at the first failure, which is raised here with the rank's traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, size, Path(folder) / "store", theirs, work, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes, timeout):
    results, open_pipes = [None] * len(pipes), {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + timeout
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(end - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_pipes.values())} did not end in {timeout} s")
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                failed, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if failed:
                raise AssertionError(f"rank {rank} failed:\n{result}")
            results[rank] = result
    return results


def _rank(rank, size, store, pipe, work, args):
    torch.set_num_threads(1)
    os.environ.pop("COVERAGE_PROCESS_START", None)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size
        )
        _send(pipe, (False, work(rank, *args)))
    except BaseException:  # noqa: BLE001
        _send(pipe, (True, traceback.format_exc()))
    finally:
        pipe.close()
        time.sleep(0.1)  # a neighbour may still be receiving
        os._exit(0)


def _send(pipe, answer):
    # Not with send(), which would hand tensors over as shared memory of a process that ends.
    pipe.send_bytes(pickle.dumps(answer))
