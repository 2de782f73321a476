"""A conversation on a terminal: lines edited and remembered, commands, answers broken off."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scalerun.cli.terminal_commands import Command, run_command
from scalerun.dataclass.errors import UserError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT_MARK = "> "
CONTINUED = "  "
"""Before the further lines of a prompt."""
HINT = "Alt-Enter or a \\ at the end begins a new line, Ctrl-C breaks an answer off, Ctrl-D ends."


def talk(
    read: Callable[[], str], commands: Mapping[str, Command], answer: Callable[[str], None]
) -> int:
    """Answer what is typed until it ends; return the exit code.

    Args:
        read: returns a prompt; raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C.
        commands: what lines that begin with a slash may say.
        answer: prints the answer to a prompt.
    """
    while True:
        try:
            text = read()
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
            if text.startswith("/") and not text.startswith("//"):
                said = run_command(commands, text)
                if said:
                    print(said, file=sys.stderr)
            else:
                answer(text[1:] if text.startswith("//") else text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("\n[broken off]", file=sys.stderr)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def prompt_reader(
    name: str, commands: Mapping[str, Command], status: Callable[[], str]
) -> Callable[[], str]:
    """Reads prompts from the terminal, with line editing, search and a history that is kept.

    Args:
        name: of the command; each has a history of its own.
        commands: completed by the tabulator.
        status: the line below the prompt.
    """
    # Not at the top: a pipe needs none of it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = history_file(name)
    session: PromptSession[str] = PromptSession(
        PROMPT_MARK,
        multiline=True,
        key_bindings=_keys(),
        history=FileHistory(str(file)) if file else InMemoryHistory(),
        completer=WordCompleter(sorted(commands), sentence=True),
        complete_while_typing=False,
        prompt_continuation=CONTINUED,
        bottom_toolbar=lambda: f"{status()}  /help",
    )
    return session.prompt


def history_file(name: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the prompts of a command are kept; None where the folder cannot be written.

    The folder is ``$XDG_STATE_HOME/scalerun`` (XDG Base Directory Specification), by default
    ``~/.local/state/scalerun``. Only its owner may read the file.
    """
    home = environment.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(home) / "scalerun" / f"{name}_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return None
    return file if os.access(file, os.W_OK) else None


def dimmed(text: str, stream: IO[str], environment: Mapping[str, str] = os.environ) -> str:
    """The text in a faint colour where a terminal shows colours (``NO_COLOR`` is honoured)."""
    plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return text if plain or not stream.isatty() else f"\x1b[2m{text}\x1b[0m"


def _keys() -> KeyBindings:
    """Enter ends a prompt; Alt-Enter, and Enter after a backslash, begin a new line of it."""
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion:
            buffer.complete_state = None
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> Any:
        event.current_buffer.newline(copy_margin=False)

    return keys
