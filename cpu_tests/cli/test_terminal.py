"""A real terminal, as a program sees it: keys go in, what is shown comes out."""

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest

from scalerun.cli.terminal import dimmed, history_file

PROGRAM = """
import signal
import sys
import time
from scalerun.cli.terminal import prompt_reader, talk
from scalerun.cli.terminal_commands import Command, with_help

signal.signal(signal.SIGINT, signal.default_int_handler)  # as every command does


def answer(text):
    print(f"<{text!r}>", flush=True)
    if text == "slow":
        for _ in range(600):  # one long sleep would not hear a signal that comes just before it
            time.sleep(0.1)

commands = with_help({"/twice": Command("TEXT", "say it twice", lambda rest: rest * 2)})
sys.exit(talk(prompt_reader("test", commands, lambda: "the status"), commands, answer))
"""
ENTER, ALT_ENTER, UP, CONTROL_C, CONTROL_D, TAB = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04", "\t"


class Terminal:
    def __init__(self, home):
        self.own, theirs = pty.openpty()
        self.shown = ""
        env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def at_prompt(self, *keys):
        """Type as soon as the line below the prompt is there."""
        self.sees("the status")
        self.keys(*keys)

    def keys(self, *keys):
        for key in keys:
            os.write(self.own, key.encode())

    def sees(self, text, timeout=20):
        """Wait until the terminal shows a text, without what moves the cursor; forget until it."""
        end = time.monotonic() + timeout
        while True:
            plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.shown)
            if text in plain:
                self.shown = ""
                return
            assert time.monotonic() < end, f"{text!r} is not in {plain!r}"
            if select.select([self.own], [], [], 0.1)[0]:
                try:
                    data = os.read(self.own, 65536).decode(errors="replace")
                except OSError:  # the other side has ended
                    continue
                if "\x1b[6n" in data:  # where is the cursor?
                    os.write(self.own, b"\x1b[1;1R")
                self.shown += data

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.own)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start():
        opened.append(Terminal(tmp_path / "state"))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_lines_are_edited_joined_completed_and_remembered_by_the_next_session(terminal):
    first = terminal()
    first.at_prompt("a cat", ENTER)
    first.sees("<'a cat'>")
    first.at_prompt("one\\", ENTER, "two", ALT_ENTER, "three", ENTER)
    first.sees("<'one\\ntwo\\nthree'>")
    first.at_prompt("\x1b[200~pasted\nlines\x1b[201~", ENTER)
    first.sees("<'pasted\\nlines'>")
    first.at_prompt("/tw", TAB)
    first.sees("/twice")
    first.keys(" ab", ENTER)
    first.sees("abab")
    first.at_prompt("日本 é", ENTER)
    first.sees("<'日本 é'>")
    first.at_prompt(CONTROL_D)
    assert first.process.wait(10) == 0
    second = terminal()
    second.at_prompt(UP, ENTER)
    second.sees("<'日本 é'>")
    second.at_prompt("\x12", "a c", ENTER, ENTER)  # searched backwards
    second.sees("<'a cat'>")


def test_control_c_ends_an_answer_and_at_the_prompt_the_command(terminal):
    shell = terminal()
    shell.at_prompt("slow", ENTER)
    shell.sees("<'slow'>")
    shell.keys(CONTROL_C)
    shell.sees("[broken off]")
    shell.at_prompt("next", ENTER)
    shell.sees("<'next'>")
    shell.at_prompt(CONTROL_C)
    assert shell.process.wait(10) == 130


def test_a_mistake_is_said_and_the_conversation_goes_on(terminal):
    shell = terminal()
    shell.at_prompt("/twise a", ENTER)
    shell.sees("error: /twise is not a command; did you mean /twice?")
    shell.at_prompt("/quit", ENTER)
    assert shell.process.wait(10) == 0


def test_only_its_owner_reads_the_history_and_without_a_folder_there_is_none(tmp_path):
    file = history_file("x", {"XDG_STATE_HOME": str(tmp_path)})
    assert file == tmp_path / "scalerun/x_history"
    assert file.stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    assert history_file("x", {"XDG_STATE_HOME": str(tmp_path / "file")}) is None


def test_faint_text_is_for_terminals_that_show_colours():
    own, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        assert dimmed("a", stream, {}) == "\x1b[2ma\x1b[0m"
        assert dimmed("a", stream, {"NO_COLOR": "1"}) == "a"
        assert dimmed("a", stream, {"TERM": "dumb"}) == "a"
    os.close(own)
    with open(os.devnull, "w") as stream:
        assert dimmed("a", stream, {}) == "a"
