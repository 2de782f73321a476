"""Session: a loaded model that answers, and prints its answers as they come."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Generic

from scalerun.cli.sampling_config import SamplingConfig
from scalerun.cli.settings import C, Settings
from scalerun.cli.terminal import dimmed
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.launch import choose_device
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.generation.events import Generation
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.generation.shared_generator import SharedGenerator
from scalerun.models.base_decoder import BaseDecoder


@dataclass(frozen=True)
class LoadedGenerator:
    """A checkpoint's model, ready to continue text."""

    name: str
    """Architecture and finished updates."""
    task: str | None
    """The name of the task it was trained on."""
    generator: SharedGenerator
    autocast: Callable[[], AbstractContextManager[object]]
    """Makes the context to compute in."""


def load_generator(cfg: SamplingConfig, ranks: Ranks = ALONE) -> LoadedGenerator:
    """Load what ``--path`` names.

    Args:
        ranks: that share the model; each loads its part.

    Raises:
        UserError: there is no checkpoint, or nothing that continues text.
    """
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
    task = loaded.cfg.task
    return LoadedGenerator(
        f"{loaded.cfg.model._name}, {loaded.num_updates:,} updates",
        None if task is None else task._name,
        SharedGenerator(model, tokenizer, ranks=ranks.control),
        precision.autocast,
    )


def on_every_rank(cfg: SamplingConfig, talk: Callable[[LoadedGenerator], int]) -> int:
    """Load the model on all ranks that share it; rank 0 talks, the others compute with it.

    Returns:
        The exit code.

    Raises:
        ConfigError: several ranks, and a terminal to talk on.
        UserError: the model cannot be loaded.
    """
    if cfg.model_parallel_size > 1 and sys.stdin.isatty():
        raise ConfigError(
            f"--model-parallel-size {cfg.model_parallel_size} answers prompts from a pipe or a "
            "file, and standard input is a terminal; redirect it"
        )

    def work(ranks: Ranks) -> int:
        loaded = load_generator(cfg, ranks)
        if ranks.is_main:
            with loaded.generator.leading():
                return talk(loaded)
        with loaded.autocast():
            loaded.generator.follow()
        return 0

    return cfg.on_every_rank(work)


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


class Session(Generic[C]):
    """Answers prompts one after the other and prints what comes.

    Args:
        settings: how to generate and print; they may change between prompts.
        generator: the model.
        autocast: makes the context to compute in.
        out: where answers are printed.
    """

    def __init__(
        self,
        settings: Settings[C],
        generator: SequenceGenerator,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        out: IO[str],
    ) -> None:
        self.settings = settings
        self.generator = generator
        self.autocast = autocast
        self.out = out

    @property
    def cfg(self) -> C:
        """The settings as they are now."""
        return self.settings.cfg

    def answer(self, prompt: str) -> None:
        """Print the answer to one prompt: as it comes, or as one JSON object.

        Raises:
            UserError: the prompt does not fit into the model's context.
        """
        tokens = self.generator.tokenizer.encode(prompt)
        params = self.params_for(tokens)
        if self.cfg.json:
            self.print_record(prompt, self.ask(tokens, params))
        else:
            self.say(tokens, params, before=dimmed(prompt, self.out))

    def params_for(self, tokens: Sequence[int]) -> SamplingParams:
        """How a prompt is continued.

        Raises:
            UserError: it does not fit into the model's context.
        """
        rooms = self.generator.room(len(tokens)), self.generator.room(0)
        params = self.cfg.fitting_params(*rooms)
        self.generator.fit(tokens, params)
        return params

    def ask(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        show: Callable[[str], None] | None = None,
    ) -> Generation:
        """The answer to a prompt; ``show`` is called with its pieces as they come."""
        on_text = None if show is None else lambda index, text: show(text)
        with self.autocast():
            [result] = self.generator.generate([tokens], [params], on_text=on_text)
        return result

    def say(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        before: str = "",
        edit: Callable[[str], str] = lambda piece: piece,
    ) -> Generation:
        """Print the answer to a prompt as it comes, on a terminal with the speed.

        Args:
            before: printed first.
            edit: is given each piece of the answer, and returns what is printed.
        """
        self.print(before)
        started = time.monotonic()
        try:
            result = self.ask(tokens, params, lambda piece: self.print(edit(piece)))
        except UserError:
            self.print("\n")
            raise
        self.print("\n")
        if self.out.isatty():
            count, seconds = len(result.tokens), time.monotonic() - started
            speed = f"[{count} tokens, {count / max(seconds, 1e-9):.1f} tokens/s]"
            print(dimmed(speed, sys.stderr), file=sys.stderr)
        return result

    def print_record(self, prompt: str, result: Generation) -> None:
        """Print an answer as one JSON object."""
        record = {
            "prompt": prompt,
            "text": result.text,
            "tokens": result.tokens,
            "token_logprobs": result.token_logprobs,
            "finish_reason": result.finish_reason,
        }
        self.print(json.dumps(record) + "\n")

    def print(self, text: str) -> None:
        """Print at once."""
        self.out.write(text)
        self.out.flush()


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


def answer_pipe(session: Session[C], lines: Iterable[bytes]) -> None:
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
