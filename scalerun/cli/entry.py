"""How every command ends: errors as one sentence, exit codes, signals."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable

import torch

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import UserError
from scalerun.distributed.common_error import say_error
from scalerun.distributed.rendezvous import Rendezvous, find_rendezvous
from scalerun.distributed.stop_signal import StopRequestedError

logger = logging.getLogger(__name__)


def run_cli(main: Callable[[], int]) -> None:
    """Run a command's ``main`` and end the process with its exit code.

    0 done, 1 a user's error, 2 a wrong command line, 130 and 143 after SIGINT and SIGTERM. A fault
    of the program itself keeps its traceback.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    open_closed_streams()
    code, error = outcome(main)
    if error is not None:
        print_error(error, _place())
    sys.exit(code)


def outcome(main: Callable[[], int]) -> tuple[int, str | None]:
    """How a command ends: its exit code, and what to tell the user about an error."""
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        return _failed(_noted(error, str(error)), error.exit_code)
    except FloatingPointError as error:
        return _failed(str(error), 1)
    except torch.OutOfMemoryError as error:
        return _failed(f"out of memory: {str(error).splitlines()[0]}; lower --batch-size", 1)
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1, None
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        more = "; free some space" if error.errno == errno.ENOSPC else ""
        return _failed(_noted(error, f"{what}{error.strerror or error}{more}"), 1)
    except StopRequestedError as stop:
        return 128 + stop.signum, None
    except KeyboardInterrupt:
        return 130, None
    return code, None


def open_closed_streams() -> None:
    """Give a process that was started without a standard stream an empty one (``<&-``, ``>&-``).

    Else the next file that is opened would take its number, and messages would be written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def print_error(text: str, place: Rendezvous | None) -> None:
    """Print an error; one that all ranks of a launcher's job have comes from rank 0 alone.

    Args:
        place: of this process among those that the launcher started, if one did.
    """
    say_error(text, place, lambda line: print(f"error: {line}", file=sys.stderr, flush=True))


def _place() -> Rendezvous | None:
    try:
        return find_rendezvous(DistributedConfig())
    except UserError:
        return None  # the environment contradicts itself, and nothing can be asked


def _noted(error: Exception, text: str) -> str:
    """With the rank that met the error, where others did not."""
    return "".join(f"{note}: " for note in getattr(error, "__notes__", ())) + text


def _failed(message: str, code: int) -> tuple[int, str]:
    logger.debug("the error's origin", exc_info=True)
    return code, message
