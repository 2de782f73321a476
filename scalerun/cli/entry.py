"""How every command ends: errors as one sentence, exit codes, signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

import torch

from scalerun.dataclass.errors import UserError
from scalerun.distributed.stop_signal import StopRequestedError

logger = logging.getLogger(__name__)


def run_cli(main: Callable[[], int]) -> None:
    """Run a command's ``main`` and end the process with its exit code.

    0 done, 1 a user's error, 2 a wrong command line, 130 and 143 after SIGINT and SIGTERM. A fault
    of the program itself keeps its traceback.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    open_closed_streams()
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        code = _report(str(error), error.exit_code)
    except FloatingPointError as error:
        code = _report(str(error), 1)
    except torch.OutOfMemoryError as error:
        code = _report(f"out of memory: {str(error).splitlines()[0]}; lower --batch-size", 1)
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        code = _report(f"{what}{error.strerror or error}", 1)
    except StopRequestedError as stop:
        code = 128 + stop.signum
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def open_closed_streams() -> None:
    """Give a process that was started without a standard stream an empty one (``<&-``, ``>&-``).

    Else the next file that is opened would take its number, and messages would be written to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _report(message: str, code: int) -> int:
    logger.debug("the error's origin", exc_info=True)
    print(f"error: {message}", file=sys.stderr)
    return code
