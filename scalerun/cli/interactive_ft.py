"""Talk with a model that was fine-tuned on examples (--task streaming_finetune_language_modeling).

On a terminal what is typed is the next thing said, and lines that begin with a slash are commands:
/help lists them. From a pipe or file each line is the next thing said, and the conversation ends
with the input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scalerun.cli.conversation import Conversation
from scalerun.cli.entry import run_cli
from scalerun.cli.sampling_config import DEFAULT_NEW_TOKENS, SamplingConfig, unescaped
from scalerun.cli.session import LoadedGenerator, Session, answer_pipe, on_every_rank
from scalerun.cli.settings import Settings
from scalerun.cli.terminal import HINT, prompt_reader, talk
from scalerun.cli.terminal_commands import Command, with_help
from scalerun.data.text.example import Example
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.logging.console import setup_logging

PROG = "scalerun-chat"
TASK = "streaming_finetune_language_modeling"


@dataclass
class ChatConfig(SamplingConfig):
    """Everything that ``scalerun.cli.interactive_ft`` can be told."""

    turn_separator: str = option(
        r"\n", "stands between the turns that the model reads; \\n and the like as in --stop"
    )
    history_turns: int | None = option(
        None, "earlier turns that the model reads (default: all that fit into the context)"
    )

    def validate(self) -> None:
        super().validate()
        if self.truncate_prompt:
            raise ConfigError(
                "--truncate-prompt would cut a turn in its middle; leave it out: turns that do not "
                "fit are left out, the oldest first"
            )
        if self.history_turns is not None and self.history_turns < 0:
            raise ConfigError(f"--history-turns is {self.history_turns}; give 0 or more")


class ChatSession(Session[ChatConfig]):
    """Answers what is said by what was said before; arguments as for :class:`Session`."""

    def __init__(
        self,
        settings: Settings[ChatConfig],
        generator: SequenceGenerator,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        out: IO[str],
    ) -> None:
        super().__init__(settings, generator, autocast=autocast, out=out)
        self.conversation = Conversation()

    def answer(self, prompt: str) -> None:
        """Print the answer to what is said next, and remember both.

        Raises:
            UserError: it does not fit into the model's context by itself.
        """
        cfg = self.cfg
        self.conversation.separator = unescaped(cfg.turn_separator)
        source, dropped = self.conversation.source(
            prompt, fits=self._fits, at_most=cfg.history_turns
        )
        tokens = self._tokens(source)
        params = self.params_for(tokens)
        if dropped:
            what = "turn does" if dropped == 1 else f"{dropped} turns do"
            print(f"[the oldest {what} not fit into the context any more]", file=sys.stderr)
        if cfg.json:
            result = self.ask(tokens, params)
            self.print_record(prompt, result)
        else:
            result = self.say(tokens, params, edit=_without_first_space())
        self.conversation.add(prompt, result.text.strip(), source)

    def commands(self) -> dict[str, Command]:
        """What a person can type about the conversation."""
        return {
            "/reset": Command("", "begin a new conversation", self._reset),
            "/undo": Command("", "forget the last turn", self._undo),
            "/retry": Command("", "answer the last turn again", self._retry),
            "/save": Command("FILE", "write the turns as examples to fine-tune on", self._save),
        }

    def _tokens(self, source: str) -> list[int]:
        """Those that an example with this source has in training."""
        return self.generator.tokenizer.encode(Example(source, "").source)

    def _fits(self, source: str) -> bool:
        room, whole = self.generator.room(len(self._tokens(source))), self.generator.room(0)
        if room is None or whole is None:
            return True
        wanted = self.cfg.max_new_tokens or self.cfg.min_new_tokens
        return room >= (wanted or min(DEFAULT_NEW_TOKENS, whole // 2))

    def _reset(self, rest: str) -> str:
        self.conversation.turns.clear()
        return "a new conversation"

    def _undo(self, rest: str) -> str:
        return f"forgotten: {self.conversation.undo().said}"

    def _retry(self, rest: str) -> None:
        self.answer(self.conversation.undo().said)

    def _save(self, rest: str) -> str:
        if not rest:
            raise UserError("/save has no name; type /save FILE")
        self.conversation.save(Path(rest).expanduser())
        return f"{len(self.conversation.turns)} turns are in {rest}"


def _without_first_space() -> Callable[[str], str]:
    """Drops the space that stands between a source and its target; for the pieces in order."""
    begun = False

    def edit(piece: str) -> str:
        nonlocal begun
        piece = piece if begun else piece.lstrip()
        begun = begun or bool(piece)
        return piece

    return edit


def check_fine_tuned(loaded: LoadedGenerator) -> None:
    """Refuse a model that never saw where a source ends and its answer begins.

    Raises:
        UserError: it was trained on another task.
    """
    if loaded.task != TASK:
        raise UserError(
            f"--path: the run was trained with --task {loaded.task}, and a conversation needs one "
            f"of --task {TASK}; fine-tune it with --finetune-from-model, or continue text with "
            "scalerun.cli.interactive_cli"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and talk; 0 at the end of the input."""
    settings = Settings(ChatConfig, argv, PROG)
    setup_logging("none")
    return on_every_rank(settings.cfg, lambda loaded: converse(settings, loaded))


def converse(settings: Settings[ChatConfig], loaded: LoadedGenerator) -> int:
    """Answer what is typed, or what a pipe holds; return the exit code.

    Raises:
        UserError: the model was not fine-tuned.
    """
    check_fine_tuned(loaded)
    session = ChatSession(settings, loaded.generator, autocast=loaded.autocast, out=sys.stdout)
    if not sys.stdin.isatty():
        answer_pipe(session, sys.stdin.buffer)
        return 0
    commands = with_help({**session.commands(), **settings.commands()})
    print(f"{loaded.name}. {HINT}", file=sys.stderr)
    read = prompt_reader(PROG, commands, lambda: f"{loaded.name}  {settings.summary()}")
    return talk(read, commands, session.answer)


def cli_main() -> None:
    """Entry point of the console script."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
