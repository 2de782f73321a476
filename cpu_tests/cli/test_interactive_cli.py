import contextlib
import io
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerun.cli.interactive_cli import PROG, InteractiveConfig, main
from scalerun.cli.sampling_config import unescaped
from scalerun.cli.session import Session, piped_prompts, usable
from scalerun.cli.settings import Settings
from scalerun.cli.terminal import talk
from scalerun.cli.terminal_commands import with_help
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.configs import CommonConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.distributed.mesh import ONE_RANK
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig

CONTEXT = 160


@pytest.fixture(scope="module")
def generator() -> SequenceGenerator:
    """A model that says readable bytes, drawn and not trained."""
    tokenizer = ByteTokenizer()
    cfg = TransformerConfig(
        decoder_embed_dim=16,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=16,
        decoder_layers=1,
        max_target_positions=CONTEXT,
        decoder_learned_pos=True,
    )
    model = build_model(
        cfg,
        vocab_size=264,
        padding_idx=tokenizer.dictionary.pad,
        seed=1,
        device=torch.device("cpu"),
    )
    assert isinstance(model, BaseDecoder)
    return SequenceGenerator(model, tokenizer)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, generator: SequenceGenerator) -> dict[str, Any]:
    """Puts the drawn model in place of a checkpoint; what it was asked for."""
    asked: dict[str, Any] = {}

    def load_for_inference(path: str | None, **settings: Any) -> object:
        asked.update(path=path, **settings)
        task = SimpleNamespace(tokenizer=generator.tokenizer)
        named = SimpleNamespace(_name="drawn")
        cfg = SimpleNamespace(common=CommonConfig(), task=named, model=named)
        return SimpleNamespace(cfg=cfg, task=task, model=generator.model, num_updates=0)

    monkeypatch.setattr("scalerun.cli.inference.load_for_inference", load_for_inference)
    return asked


@pytest.fixture
def pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: dict[str, Any]
) -> Callable[..., str]:
    """Run the command on bytes from a pipe; what it printed."""

    def run(data: bytes, *flags: str, code: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["--path", "run", "--cpu", *flags]) == code
        return capsys.readouterr().out

    return run


def test_each_line_of_a_pipe_gives_its_prompt_and_a_continuation(
    pipe: Callable[..., str], generator: SequenceGenerator
) -> None:
    out = pipe(b"ab\ncd", "--temperature", "0", "--max-new-tokens", "3", "--min-new-tokens", "3")
    cfg = InteractiveConfig(path="run", temperature=0.0, max_new_tokens=3, min_new_tokens=3)
    answers = generator.generate([[97, 98], [99, 100]], [cfg.params(9)] * 2)
    assert out == f"ab{answers[0].text}\n\ncd{answers[1].text}\n"


def test_json_is_one_object_for_each_line(
    pipe: Callable[..., str], generator: SequenceGenerator
) -> None:
    lines = pipe("é\n\n b \n".encode(), "--json", "--max-new-tokens=4", "--seed", "3").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["prompt"] for record in records] == ["é", "", " b "]
    for record in records:
        assert list(record) == ["prompt", "text", "tokens", "token_logprobs", "finish_reason"]
        assert record["text"] == generator.tokenizer.decode(record["tokens"])
        assert len(record["tokens"]) == len(record["token_logprobs"]) <= 4
        assert all(logprob < 0 for logprob in record["token_logprobs"])
        assert record["finish_reason"] in ("stop", "length")


def test_a_seed_gives_a_prompt_the_same_answer_wherever_it_stands(
    pipe: Callable[..., str],
) -> None:
    first = pipe(b"a\nb\n", "--json", "--seed", "3").splitlines()
    second = pipe(b"b\n\na\n", "--json", "--seed", "3").splitlines()
    assert (first[0], first[1]) == (second[2], second[0])


def test_no_input_gives_no_output(pipe: Callable[..., str]) -> None:
    assert pipe(b"") == ""


def test_lines_lose_their_ends_and_nothing_else() -> None:
    lines = io.BytesIO("\ufeffa\r\n b \u2028c\n\r\n\ufeffd".encode())
    assert list(piped_prompts(lines)) == ["a", " b \u2028c", "", "\ufeffd"]


def test_a_line_that_is_no_text_is_named() -> None:
    with pytest.raises(UserError, match=r"standard input, line 2: not UTF-8 \(byte 2\)"):
        list(piped_prompts(io.BytesIO(b"a\nb\xff\n")))


def test_a_prompt_that_does_not_fit_is_named_and_the_answers_before_it_stay(
    pipe: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="standard input, line 2: --max-new-tokens 9 after a"):
        pipe(b"a\n" + b"b" * 155, "--json", "--max-new-tokens", "9")
    assert json.loads(capsys.readouterr().out)["prompt"] == "a"


def test_an_error_stands_on_a_line_of_its_own(
    pipe: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="give at most 158"):
        pipe(b"ab\n", "--max-new-tokens", "2000")
    assert capsys.readouterr().out == ""

    def fail(self: SequenceGenerator, *arguments: object, **settings: object) -> None:
        raise UserError("the output is not finite")

    monkeypatch.setattr(SequenceGenerator, "generate", fail)
    with pytest.raises(UserError, match="not finite"):
        pipe(b"ab\n")
    assert capsys.readouterr().out == "ab\n"


def test_the_default_length_shrinks_to_what_the_context_has_room_for(
    pipe: Callable[..., str],
) -> None:
    flags = ("--json", "--seed", "1", "--temperature", "0")
    [line] = pipe(b"b" * 150, *flags).splitlines()
    assert len(json.loads(line)["tokens"]) == 10
    with pytest.raises(UserError, match="--max-new-tokens 1 after a prompt of 160 tokens"):
        pipe(b"b" * 160, *flags)
    [line] = pipe(b"b" * 500, *flags, "--truncate-prompt").splitlines()
    assert len(json.loads(line)["tokens"]) == CONTEXT // 2


@pytest.mark.parametrize("flag", ["--beam=3", "--bf16", "--stop=e,a", "--top-k=5"])
def test_every_way_of_generating_answers(pipe: Callable[..., str], flag: str) -> None:
    record = json.loads(pipe(b"ab", "--json", "--max-new-tokens", "5", flag))
    assert len(record["tokens"]) <= 5


def test_what_to_load_is_passed_on(pipe: Callable[..., str], load: dict[str, Any]) -> None:
    pipe(b"", "--use-ema", "--user-dir", "plugins")
    assert load == {
        "path": "run",
        "device": torch.device("cpu"),
        "use_ema": True,
        "user_dir": "plugins",
        "meshes": ONE_RANK,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--path is required: a run folder or a checkpoint folder"),
        (["--path", "x", "--top-p", "2"], "--top-p is 2; give"),
        (["--path", "x", "--temperature=-1"], "--temperature is -1; give"),
        (["--path", "x", "--top-k=-2"], "--top-k is -2; give"),
        (["--path", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        (
            ["--path", "x", "--max-new-tokens", "4", "--min-new-tokens", "5"],
            "--min-new-tokens is 5; give 0 to 4",
        ),
        (
            ["--path", "x", "--min-new-tokens", "129"],
            "--min-new-tokens 129 needs a --max-new-tokens as large; the default is 128",
        ),
        (["--path", "x", "--beam", "2", "--top-k", "3"], "--beam 2 searches and does not draw"),
        (["--path", "x", "--lenpen", "2"], "--lenpen 2 ranks the answers of a beam search"),
        (["--path", "x", "--seed=-1"], "--seed is -1; give 0 or more"),
        (["--path", "x", "--tempratur", "1"], "--tempratur is not a flag; did you mean --temper"),
    ],
)
def test_a_bad_value_names_its_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(flags)


def test_top_p_is_limited_by_default_unless_a_beam_searches() -> None:
    assert InteractiveConfig().params(1).top_p == 0.9
    assert InteractiveConfig(top_p=1.0).params(1).top_p == 1.0
    assert InteractiveConfig(beam=2).params(1).top_p == 1.0


def test_escapes_spell_what_a_list_cannot_hold() -> None:
    assert unescaped(r"a\n\t\r\\n\x2c\u00e9\q") == "a\n\t\r\\n,é\\q"
    assert InteractiveConfig(stop=[r"\n\n", "x"]).params(1).stop == ("\n\n", "x")


def test_a_run_without_text_cannot_be_prompted(generator: SequenceGenerator) -> None:
    with pytest.raises(UserError, match="the run's task has no tokenizer"):
        usable(None, generator.model)
    with pytest.raises(UserError, match="Linear is no decoder and cannot continue text"):
        usable(generator.tokenizer, torch.nn.Linear(1, 1))


def terminal_session(generator: SequenceGenerator, out: io.StringIO) -> Session[Any]:
    words = ["--path", "run", "--max-new-tokens", "5", "--min-new-tokens", "5"]
    settings = Settings(InteractiveConfig, words, PROG)
    return Session(settings, generator, autocast=contextlib.nullcontext, out=out)


def typed(*events: str | type[BaseException] | BaseException) -> Callable[[], str]:
    script = iter(events)

    def read() -> str:
        event = next(script)
        if isinstance(event, str):
            return event
        raise event

    return read


def converse(session: Session[Any], *events: str | type[BaseException] | BaseException) -> int:
    return talk(typed(*events), with_help(session.settings.commands()), session.answer)


def test_a_terminal_is_answered_until_control_d(generator: SequenceGenerator) -> None:
    out = io.StringIO()
    assert converse(terminal_session(generator, out), "ab", "cd", EOFError) == 0
    lines = out.getvalue()
    assert lines.startswith("ab")
    assert "\ncd" in lines


def test_control_c_at_the_prompt_ends_with_130(generator: SequenceGenerator) -> None:
    assert converse(terminal_session(generator, io.StringIO()), KeyboardInterrupt) == 130


def test_control_c_breaks_an_answer_off_and_the_next_prompt_is_answered(
    generator: SequenceGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.alarms: Iterator[bool] = iter([False, True])

        def write(self, text: str) -> int:
            if next(self.alarms, False):
                raise KeyboardInterrupt
            return super().write(text)

    out = Interrupted()
    assert converse(terminal_session(generator, out), "ab", "cd", EOFError) == 0
    assert out.getvalue().startswith("abcd")
    assert "[broken off]" in capsys.readouterr().err


def test_an_error_on_a_terminal_is_shown_and_the_next_prompt_is_answered(
    generator: SequenceGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    bad_line = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    events = ("x" * 200, bad_line, "cd", EOFError)
    assert converse(terminal_session(generator, out), *events) == 0
    err = capsys.readouterr().err
    assert "error: --max-new-tokens 5 after a prompt of 200 tokens exceeds" in err
    assert "error: the line is not text in the terminal's encoding" in err
    assert out.getvalue().startswith("cd")


def test_settings_change_between_prompts(
    generator: SequenceGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    session = terminal_session(generator, out)
    more = ["/set max-new-tokens 7", "/set min_new_tokens 7", "/set temperature 0", "ab"]
    assert converse(session, *more, "/defaults", EOFError) == 0
    [answer] = generator.generate(
        [[97, 98]],
        [
            InteractiveConfig(
                path="run", max_new_tokens=7, min_new_tokens=7, temperature=0.0
            ).params(1)
        ],
    )
    assert out.getvalue() == f"ab{answer.text}\n"
    assert capsys.readouterr().err.splitlines()[:3] == more_shown()
    assert session.cfg.max_new_tokens == 5


def more_shown() -> list[str]:
    return ["max-new-tokens 7", "min-new-tokens 7", "temperature 0.0"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature -1", "--temperature is -1; give 0 (greedy) or more"),
        ("/set temperature hot", "--temperature: 'hot' is not a number"),
        ("/set temprature 1", "/set temprature is not known; the settings are max-new-tokens"),
        ("/set path run2", "/set path is not known"),
        ("/set", "/set without a name is not known"),
        ("/set seed", "/set seed has no value; type /set seed VALUE"),
        ("/hlep", "/hlep is not a command; did you mean /help?"),
        ("/settings all", "/settings takes nothing behind it, and 'all' was given"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_changes_nothing(
    generator: SequenceGenerator, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    session = terminal_session(generator, io.StringIO())
    before = session.cfg.to_dict()
    assert converse(session, line, EOFError) == 0
    assert message in capsys.readouterr().err
    assert session.cfg.to_dict() == before


def test_two_slashes_begin_a_prompt_with_one(generator: SequenceGenerator) -> None:
    out = io.StringIO()
    assert converse(terminal_session(generator, out), "//ab", "/quit") == 0
    assert out.getvalue().startswith("/ab")


def test_a_list_is_replaced_and_emptied(generator: SequenceGenerator) -> None:
    session = terminal_session(generator, io.StringIO())
    converse(session, "/set stop a", "/set stop b", EOFError)
    assert session.cfg.stop == ["b"]
    converse(session, "/set stop []", EOFError)
    assert session.cfg.stop == []
