from __future__ import annotations

from dataclasses import dataclass

import pytest

from scalerun.dataclass.flags import flags_of
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option


@dataclass
class Keywords(ScalerunDataclass):
    path: str = option("", "what to read", positional=True)
    from_: str = option("", "a word that Python keeps for itself")
    not_a_keyword: int = option(0, "a number")


def test_a_word_that_python_keeps_for_itself_is_a_flag() -> None:
    assert [flag.name for flag in flags_of(Keywords(), "")] == ["PATH", "--from", "--not-a-keyword"]
    cfg = parse_config(Keywords, ["file", "--from", "there"], prog="test")
    assert (cfg.path, cfg.from_) == ("file", "there")


def test_help_names_the_positional(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(Keywords, ["--help"], prog="test")
    assert capsys.readouterr().out.splitlines()[0] == "usage: test [PATH] [flags]"
