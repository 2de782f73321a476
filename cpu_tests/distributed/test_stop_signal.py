"""The first signal asks, the second insists."""

import os
import signal
import subprocess
import sys

import pytest

from scalerun.distributed.stop_signal import StopRequestedError, StopSignal


def test_a_signal_breaks_off_what_is_not_deferred():
    with StopSignal() as stop:
        with pytest.raises(StopRequestedError) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.signum == signal.SIGTERM
        assert stop.exit_code == 143


def test_a_deferred_signal_waits_and_an_immediate_wait_sees_it():
    with StopSignal() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGINT
        assert stop.exit_code == 130
        with pytest.raises(StopRequestedError), stop.immediate():
            pass


def test_the_handlers_from_before_come_back():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_signal_stops_at_once():
    code = """
import os, signal
from scalerun.distributed.stop_signal import StopSignal
with StopSignal() as stop, stop.deferred():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("not here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143
    assert done.stdout == "still here\n"
