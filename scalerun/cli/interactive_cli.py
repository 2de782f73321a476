"""Continue prompts from the terminal or from standard input.

On a terminal each line that is typed is a prompt: Ctrl-C breaks an answer off, Ctrl-D (or Ctrl-C
at the prompt) ends. From a pipe or file each line is a prompt, in order, until the input ends. An
empty line is an empty prompt: the model begins a document of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from scalerun.cli.entry import run_cli
from scalerun.cli.shared_inference import SharedInferenceConfig
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.launch import choose_device
from scalerun.distributed.ranks import Ranks
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.generation.shared_generator import SharedGenerator
from scalerun.logging.console import setup_logging
from scalerun.models.base_decoder import BaseDecoder

PROG = "scalerun-interactive"
PROMPT_MARK = "> "
DEFAULT_NEW_TOKENS = 128
DEFAULT_TOP_P = 0.9
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass
class InteractiveConfig(SharedInferenceConfig):
    """Everything that ``scalerun.cli.interactive_cli`` can be told."""

    max_new_tokens: int | None = option(
        None,
        f"new tokens at most (default: {DEFAULT_NEW_TOKENS}, or what the context has room for)",
    )
    min_new_tokens: int = option(0, "new tokens before anything may end the answer")
    temperature: float = option(1.0, "divides the logits; 0 takes the most likely token (greedy)")
    top_k: int = option(0, "draw among this many of the most likely tokens; 0 for no limit")
    top_p: float | None = option(
        None,
        "draw among the most likely tokens that together have this probability; 1 for no limit "
        f"(default: {DEFAULT_TOP_P:g}, no limit with --beam)",
    )
    beam: int = option(1, "search for the likeliest answer with this many hypotheses; 1 draws")
    lenpen: float = option(
        1.0,
        "with --beam, score = log-probability / length ** lenpen: larger prefers longer answers",
    )
    diverse_beam_groups: int = option(
        1, "groups of hypotheses, each kept from the tokens that earlier ones chose; divides --beam"
    )
    diverse_beam_strength: float = option(
        0.5, "nats that a token costs for each hypothesis of earlier groups that chose it"
    )
    stop: list[str] = option(
        [],
        "texts that end an answer and are cut off; repeat the flag for more; \\n, \\t, \\xHH and "
        "\\uHHHH stand for what a shell or a list cannot hold, such as \\x2c for a comma",
    )
    seed: int | None = option(None, "seed of every prompt's draws (default: a new one each time)")
    truncate_prompt: bool = option(False, "drop the beginning of prompts too long for the context")
    json: bool = option(False, "print one JSON object for each prompt")

    def validate(self) -> None:
        super().validate()
        if self.max_new_tokens == 0:
            raise ConfigError("--max-new-tokens is 0; give 1 or more")
        if self.max_new_tokens is None and self.min_new_tokens > DEFAULT_NEW_TOKENS:
            raise ConfigError(
                f"--min-new-tokens {self.min_new_tokens} needs a --max-new-tokens as large; the "
                f"default is {DEFAULT_NEW_TOKENS}"
            )
        self.params(DEFAULT_NEW_TOKENS)

    def params(self, default_new_tokens: int) -> SamplingParams:
        """The parameters of one prompt.

        Args:
            default_new_tokens: ``max_new_tokens`` where the user gave none.

        Raises:
            ConfigError: a value is out of range or two contradict each other.
        """
        top_p = self.top_p
        if top_p is None:
            top_p = DEFAULT_TOP_P if self.beam == 1 else 1.0
        return SamplingParams(
            max_new_tokens=self.max_new_tokens or default_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=top_p,
            beam=self.beam,
            lenpen=self.lenpen,
            diverse_beam_groups=self.diverse_beam_groups,
            diverse_beam_strength=self.diverse_beam_strength,
            stop=tuple(map(unescaped, self.stop)),
            seed=self.seed,
            truncate_prompt=self.truncate_prompt,
        )


class Session:
    """Answers prompts one after the other and prints what comes.

    Args:
        cfg: how to generate and print.
        generator: the model.
        autocast: makes the context to compute in.
        out: where answers are printed.
    """

    def __init__(
        self,
        cfg: InteractiveConfig,
        generator: SequenceGenerator,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        out: IO[str],
    ) -> None:
        self.cfg = cfg
        self.generator = generator
        self.autocast = autocast
        self.out = out

    def answer(self, prompt: str) -> None:
        """Print the answer to one prompt: as it comes, or as one JSON object.

        Raises:
            UserError: the prompt does not fit into the model's context.
        """
        tokens = self.generator.tokenizer.encode(prompt)
        params = self.cfg.params(self._default_new_tokens(len(tokens)))
        self.generator.fit(tokens, params)  # an error comes before anything is printed
        if not self.cfg.json:
            self._print(prompt)
        try:
            with self.autocast():
                [result] = self.generator.generate(
                    [tokens], [params], on_text=None if self.cfg.json else self._print_piece
                )
        except UserError:
            if not self.cfg.json:
                self._print("\n")
            raise
        if not self.cfg.json:
            self._print("\n")
            return
        record = {
            "prompt": prompt,
            "text": result.text,
            "tokens": result.tokens,
            "token_logprobs": result.token_logprobs,
            "finish_reason": result.finish_reason,
        }
        self._print(json.dumps(record) + "\n")

    def _default_new_tokens(self, prompt_length: int) -> int:
        room = self.generator.room(prompt_length)
        if room == 0 and self.cfg.truncate_prompt:
            room = (self.generator.room(0) or 0) // 2
        # Without any room the smallest request gives the error that says so.
        fitting = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room)
        return max(fitting, self.cfg.min_new_tokens, 1)

    def _print_piece(self, index: int, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def unescaped(text: str) -> str:
    r"""The text with ``\n``, ``\t``, ``\r``, ``\\``, ``\xHH`` and ``\uHHHH`` replaced."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        return _ESCAPES[name] if name in _ESCAPES else chr(int(name[1:], 16))

    return re.sub(r"\\([ntr\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})", replaced, text)


def piped_prompts(lines: Iterable[bytes], name: str = "standard input") -> Iterator[str]:
    """The lines of a text, without their ends and without a byte-order mark.

    Args:
        name: where they come from, for messages.

    Raises:
        UserError: a line is not UTF-8.
    """
    for number, line in enumerate(lines, start=1):
        try:
            prompt = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 (byte {error.start + 1})") from error
        yield prompt.removesuffix("\n").removesuffix("\r")


def answer_pipe(session: Session, lines: Iterable[bytes]) -> None:
    """Answer every line; text answers are set apart by an empty line.

    Raises:
        UserError: a line is not UTF-8 or does not fit; names the line.
    """
    for number, prompt in enumerate(piped_prompts(lines), start=1):
        if number > 1 and not session.cfg.json:
            session.out.write("\n")
        try:
            session.answer(prompt)
        except ConfigError:
            raise
        except UserError as error:
            raise UserError(f"standard input, line {number}: {error}") from error


def answer_terminal(session: Session, read_line: Callable[[str], str]) -> int:
    """Answer what is typed until it ends; return the exit code.

    Args:
        read_line: shows a mark and returns a line; raises EOFError at Ctrl-D.
    """
    print("Ctrl-C breaks an answer off, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            prompt = read_line(PROMPT_MARK)
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130
        except UnicodeDecodeError:
            print("error: the line is not text in the terminal's encoding", file=sys.stderr)
            continue
        try:
            session.answer(prompt)
        except KeyboardInterrupt:
            print("\n[broken off]", file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def line_reader() -> Callable[[str], str]:
    """``input``, with line editing and history where the platform has it."""
    with contextlib.suppress(ImportError):
        # Not at the top: loading it writes to the terminal, and a pipe must stay clean.
        import readline  # noqa: F401
    return input


def usable(tokenizer: BaseTokenizer | None, model: object) -> tuple[BaseTokenizer, BaseDecoder]:
    """The tokenizer and decoder of a run, if it has both.

    Raises:
        UserError: the run's task reads no text, or its model predicts no next token.
    """
    if tokenizer is None:
        raise UserError("--path: the run's task has no tokenizer, so there is nothing to prompt")
    if not isinstance(model, BaseDecoder):
        raise UserError(f"--path: {type(model).__name__} is no decoder and cannot continue text")
    return tokenizer, model


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and answer prompts; 0 at the end of the input."""
    cfg = parse_config(InteractiveConfig, argv, prog=PROG)
    setup_logging("none")
    if cfg.model_parallel_size > 1 and sys.stdin.isatty():
        raise ConfigError(
            f"--model-parallel-size {cfg.model_parallel_size} answers prompts from a pipe or a "
            "file, and standard input is a terminal; redirect it"
        )
    return cfg.on_every_rank(lambda ranks: answer(cfg, ranks))


def answer(cfg: InteractiveConfig, ranks: Ranks) -> int:
    """One rank's part: rank 0 reads and prints, the others compute with it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal cannot show
    device = choose_device(cpu=cfg.cpu, local_rank=ranks.local_rank)
    # Only now, so that --help need not wait for torch's distributed packages.
    from scalerun.cli.inference import load_for_inference

    loaded = load_for_inference(
        cfg.path,
        device=device,
        use_ema=cfg.use_ema,
        user_dir=cfg.user_dir,
        meshes=ranks.model_meshes,
    )
    precision = cfg.precision(loaded.cfg.common, device)
    tokenizer, model = usable(loaded.task.tokenizer, loaded.model)
    generator = SharedGenerator(model, tokenizer, ranks=ranks.control)
    if not ranks.is_main:
        with precision.autocast():
            generator.follow()
        return 0
    session = Session(cfg, generator, autocast=precision.autocast, out=sys.stdout)
    with generator.leading():
        if sys.stdin.isatty():
            return answer_terminal(session, line_reader())
        answer_pipe(session, sys.stdin.buffer)
    return 0


def cli_main() -> None:
    """Entry point of the console script."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
