"""Starts the commands under test as real processes, without paying for ``import torch`` each time.

Reads one JSON request a line on standard input, answers with one JSON line:
``{"start": {"module", "argv", "cwd", "stdin", "stdout", "stderr", "env"}}`` -> ``{"pid"}``,
``{"wait": pid}`` -> ``{"code"}`` (minus the signal's number after a kill), ``{"poll": pid}`` -> the
same or null.
"""

import importlib
import json
import os
import sys

COMMANDS = (
    "train", "validate", "interactive_cli", "interactive_ft", "train_tokenizer", "convert",
    "checkpoint", "preprocess", "generate", "interactive_hosted",
)  # fmt: skip
IMPORTED_LATE = (
    "scalerun.cli.assembly",
    "scalerun.cli.inference",
    "scalerun.cli.converted_run",
    "scalerun.cli.averaged_run",
    "scalerun.cli.checkpoint_report",
    "scalerun.service.server",
    "torch._dynamo",
)
"""The last by torch's optimizers when they are made: half of the time of a small run."""


def start(request):
    pid = os.fork()
    if pid:
        return {"pid": pid}
    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    os.dup2(os.open(request["stdout"], flags), 1)
    os.dup2(os.open(request["stderr"], flags), 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = [request["module"], *request["argv"]]
    importlib.import_module(request["module"]).cli_main()
    os._exit(0)


def finished(pid, options):
    done, status = os.waitpid(pid, options)
    return {"code": os.waitstatus_to_exitcode(status)} if done else None


def main():
    for name in (*(f"scalerun.cli.{command}" for command in COMMANDS), *IMPORTED_LATE):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = start(request["start"])
        elif "wait" in request:
            answer = finished(request["wait"], 0)
        else:
            answer = finished(request["poll"], os.WNOHANG)
        print(json.dumps(answer), flush=True)


main()
