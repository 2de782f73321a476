"""Serve a model over HTTP, to the clients of OpenAI's completions and to a page of its own."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from scalerun.cli.entry import run_cli
from scalerun.cli.inference_config import InferenceConfig
from scalerun.cli.session import usable
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.ranges import above_zero, at_least
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.launch import choose_device
from scalerun.generation.engine import Engine
from scalerun.logging.console import setup_logging

PROG = "scalerun-serve"
API_KEY_VARIABLE = "SCALERUN_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")

# As a script, the module has no name of its own.
logger = logging.getLogger("scalerun.cli.interactive_hosted")


@dataclass
class HostedConfig(InferenceConfig):
    """Everything that ``scalerun.cli.interactive_hosted`` can be told."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 for all that this host has")
    port: int = option(8000, "port to listen at; 0 takes a free one")
    api_key: str | None = option(
        None,
        "clients must show this key; other users of this host can see a command line, so rather "
        f"put it into the environment as {API_KEY_VARIABLE}",
    )
    served_model_name: str | None = option(
        None, "the model's name for clients (default: that of the run folder)"
    )
    max_num_seqs: int = option(16, "answers that are generated side by side")
    max_num_tokens: int = option(
        65536, "tokens of prompts and answers that are held side by side, which limits memory"
    )
    max_queue: int = option(64, "prompts that may wait; what comes beyond them is refused")
    max_tokens_limit: int = option(4096, "new tokens that a request may ask for")
    max_body_bytes: int = option(2**20, "size of a request's body")
    request_timeout: float = option(120.0, "seconds that an answer may take, waiting included")
    shutdown_timeout: float = option(
        20.0, "seconds that answers under way have to end after SIGINT or SIGTERM"
    )

    def validate(self) -> None:
        super().validate()
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port is {self.port}; give 0 (any that is free) to 65535")
        at_least("--max-num-seqs", self.max_num_seqs, 1)
        at_least("--max-num-tokens", self.max_num_tokens, 1)
        at_least("--max-queue", self.max_queue, 1)
        at_least("--max-tokens-limit", self.max_tokens_limit, 1)
        at_least("--max-body-bytes", self.max_body_bytes, 1024)
        above_zero("--request-timeout", self.request_timeout)
        at_least("--shutdown-timeout", self.shutdown_timeout, 0)
        for flag, seconds in (
            ("--request-timeout", self.request_timeout),
            ("--shutdown-timeout", self.shutdown_timeout),
        ):
            if not math.isfinite(seconds):
                raise ConfigError(f"{flag} is {seconds:g}; give a number of seconds")
        if self.api_key == "":
            raise ConfigError("--api-key is empty; leave it out to let everybody in")
        if self.served_model_name == "":
            raise ConfigError("--served-model-name is empty; give a name, or leave it out")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet.

    Raises:
        UserError: there is no such address here, or somebody else has it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"--host {host} is no address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # Else the port of a server that has just ended would be taken for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _not_free(host, port, error) from error
    return listener


def start_listening(listener: socket.socket) -> None:
    """From now on clients can connect.

    Raises:
        UserError: another server, which was bound at the same time, was faster.
    """
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _not_free(host, port, error) from error


def _not_free(host: str, port: int, error: OSError) -> UserError:
    return UserError(
        f"--host {host} --port {port} cannot be listened at: {error.strerror}; give another, or "
        "--port 0 for any that is free"
    )


def url_of(listener: socket.socket) -> str:
    """Where a socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and serve it until a signal comes: 130 after SIGINT, 0 after SIGTERM."""
    cfg = parse_config(HostedConfig, argv, prog=PROG)
    setup_logging("simple")
    api_key = cfg.api_key or os.environ.get(API_KEY_VARIABLE) or None
    if api_key is None and cfg.host not in LOCAL:
        logger.warning("--host %s without an API key: whoever reaches it may use it", cfg.host)
    try:
        from scalerun.service.application import ServiceLimits
        from scalerun.service.server import Settings, serve
    except ImportError as error:
        raise UserError(
            f"the server needs {error.name}; install it with pip install --editable '.[serve]'"
        ) from error
    device = choose_device(cpu=cfg.cpu)
    with bound_socket(cfg.host, cfg.port) as listener:
        # Only now, so that --help need not wait for torch's distributed packages.
        from scalerun.cli.inference import load_for_inference

        loaded = load_for_inference(
            cfg.path, device=device, use_ema=cfg.use_ema, user_dir=cfg.user_dir
        )
        tokenizer, model = usable(loaded.task.tokenizer, loaded.model)
        precision = cfg.precision(loaded.cfg.common, device)
        engine = Engine(
            model, tokenizer, max_num_seqs=cfg.max_num_seqs, max_num_tokens=cfg.max_num_tokens
        )
        name = cfg.served_model_name or loaded.checkpoint.parent.name
        settings = Settings(
            name=name,
            limits=ServiceLimits(
                max_tokens=cfg.max_tokens_limit,
                max_body_bytes=cfg.max_body_bytes,
                request_seconds=cfg.request_timeout,
            ),
            api_key=api_key,
            max_queue=cfg.max_queue,
            shutdown_seconds=cfg.shutdown_timeout,
        )
        start_listening(listener)
        logger.info("serving %s of update %d at %s", name, loaded.num_updates, url_of(listener))
        return serve(engine, settings, listener, autocast=precision.autocast)


def cli_main() -> None:
    """Entry point of the console script."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
