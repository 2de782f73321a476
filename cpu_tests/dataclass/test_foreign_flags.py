import logging

import pytest

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.foreign_flags import (
    FOREIGN_FLAGS,
    VALUES_READ_AS,
    without_foreign_flags,
)

KNOWN = ("--ddp-backend", "--fp16", "--log-format", "--save-interval-updates", "--seed")
LEFT_OUT = {name: flag for name, flag in FOREIGN_FLAGS.items() if flag.words == ()}
REFUSED = [name for name, flag in FOREIGN_FLAGS.items() if flag.words is None]


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("joined", [False, True])
def test_a_flag_left_out_takes_its_value_along(name, joined, caplog):
    value = ["7"] if LEFT_OUT[name].takes_value else []
    given = ["=".join([name, *value])] if joined else [name, *value]
    with caplog.at_level(logging.WARNING):
        assert without_foreign_flags(["a", *given, "--seed", "1"], KNOWN) == ["a", "--seed", "1"]
    assert [record.message for record in caplog.records] == [
        f"{name} is left out: {LEFT_OUT[name].why}"
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_would_change_results_is_refused(name):
    with pytest.raises(ConfigError) as error:
        without_foreign_flags([name, "3"], KNOWN)
    assert str(error.value) == f"{name} is not a flag of scalerun: {FOREIGN_FLAGS[name].why}"


def test_a_flag_is_read_as_another():
    words = ["--memory-efficient-fp16", "--no-progress-bar", "--local-save-interval-updates=9"]
    assert without_foreign_flags(words, KNOWN) == [
        *("--fp16", "--log-format", "simple", "--save-interval-updates", "9")
    ]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--remove-bpe"], "subword_nmt"),
        (["--remove-bpe=@@ "], "subword_nmt"),
        (["--remove-bpe", "sentencepiece"], "sentencepiece"),
        (["--remove-bpe=sentencepiece"], "sentencepiece"),
    ],
)
def test_a_value_that_may_be_left_out_is_read_where_it_is_given(words, value):
    expected = ["--post-process", value, "data"]
    assert without_foreign_flags([*words, "data"], KNOWN) == expected
    with pytest.raises(ConfigError, match="--remove-bpe takes sentencepiece or subword_nmt; 'x'"):
        without_foreign_flags(["--remove-bpe=x"], KNOWN)


@pytest.mark.parametrize(("flag", "value"), VALUES_READ_AS)
def test_a_value_is_read_as_another(flag, value):
    expected = [flag, VALUES_READ_AS[flag, value][0]]
    assert without_foreign_flags([flag, value], KNOWN) == expected
    assert without_foreign_flags([f"{flag}={value}"], KNOWN) == expected


def test_what_scalerun_has_is_left_alone(caplog):
    words = ["--seed", "3", "--ddp-backend=pytorch_ddp", "--unknown", "--ddp-backend"]
    assert without_foreign_flags(words, KNOWN) == words
    assert without_foreign_flags(["--local-rank", "0"], ["--local-rank"]) == ["--local-rank", "0"]
    assert not caplog.records


def test_a_missing_value_is_named():
    with pytest.raises(ConfigError, match="^--bucket-cap-mb expects a value$"):
        without_foreign_flags(["--bucket-cap-mb", "--seed", "1"], KNOWN)


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_one_rank_of_a_launcher_speaks(variable, monkeypatch, caplog):
    monkeypatch.setenv(variable, "1")
    assert without_foreign_flags(["--distributed-no-spawn"], KNOWN) == []
    assert not caplog.records
