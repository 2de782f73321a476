"""Chat: what the model reads is what fine-tuning would show it."""

import contextlib
import io
import json

import pytest
import torch

from cpu_tests.cli.test_interactive_cli import converse
from scalerun.cli.conversation import Conversation
from scalerun.cli.interactive_ft import PROG, ChatConfig, ChatSession, check_fine_tuned
from scalerun.cli.session import LoadedGenerator
from scalerun.cli.settings import Settings
from scalerun.data.text.example import EXAMPLES, parse_example
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig

SMALL = ("--path", "run", "--max-new-tokens", "6", "--temperature", "0")


class Listening(SequenceGenerator):
    """Keeps the prompts that it was given."""

    def generate(self, prompts, params, **rest):
        self.heard = [*getattr(self, "heard", []), *map(list, prompts)]
        return super().generate(prompts, params, **rest)


@pytest.fixture(scope="module")
def model():
    cfg = TransformerConfig(
        decoder_embed_dim=16, decoder_attention_heads=2, decoder_ffn_embed_dim=16,
        decoder_layers=1, max_target_positions=100, decoder_learned_pos=True,
    )  # fmt: skip
    return build_model(cfg, vocab_size=264, padding_idx=1, seed=1, device=torch.device("cpu"))


@pytest.fixture
def chat(model):
    def chat(*words):
        settings = Settings(ChatConfig, [*SMALL, *words], PROG)
        generator = Listening(model, ByteTokenizer())
        return ChatSession(settings, generator, autocast=contextlib.nullcontext, out=io.StringIO())

    return chat


def talk(session, *lines):
    commands = session.commands()
    session.settings.commands = lambda: commands
    return converse(session, *lines, EOFError)


@pytest.mark.parametrize("separator", [r"\n", " || "])
def test_the_model_reads_the_source_that_a_saved_turn_has_in_training(chat, tmp_path, separator):
    session = chat("--turn-separator", separator)
    talk(session, "hello ", "how are you?", "why", f"/save {tmp_path / 'turns.jsonl'}")
    lines = (tmp_path / "turns.jsonl").read_bytes().splitlines()
    examples = [parse_example(line) for line in lines]
    encoded = EXAMPLES.encode(ByteTokenizer(), examples, 1)
    sources = [ids[:given] for ids, given in zip(encoded.ids, encoded.sources, strict=True)]
    assert [list(source) for source in sources] == session.generator.heard
    first, second, _ = session.conversation.turns
    assert second.source.startswith(f"hello {first.answer}".rstrip())


def test_the_oldest_turns_make_room_and_it_is_said(chat, capsys):
    session = chat()
    talk(session, *("x" * 30 for _ in range(4)))
    assert max(map(len, session.generator.heard)) <= 94
    assert "the oldest turn does not fit into the context any more" in capsys.readouterr().err
    talk(session, "y" * 95)
    assert "error: --max-new-tokens 6 after a prompt of 95 tokens" in capsys.readouterr().err
    assert len(session.conversation.turns) == 4


def test_turns_can_be_limited_forgotten_repeated_and_begun_anew(chat, capsys):
    session = chat("--history-turns", "0")
    talk(session, "a", "b", "/retry", "/undo")
    heard = [bytes(prompt).decode() for prompt in session.generator.heard]
    assert heard == ["a", "b", "b"]
    assert [turn.said for turn in session.conversation.turns] == ["a"]
    talk(session, "/reset", "/undo", "/save x", "/save")
    said = capsys.readouterr().err
    assert "error: nothing has been said yet\n" in said
    assert "so there is nothing to save" in said
    assert "/save has no name" in said


def test_nothing_is_saved_over(tmp_path):
    conversation = Conversation()
    conversation.add("a", "b", "a")
    (tmp_path / "there").write_text("mine")
    for name, reason in (("there", "the file exists"), ("no/where", "No such file")):
        with pytest.raises(UserError, match=reason):
            conversation.save(tmp_path / name)
    assert (tmp_path / "there").read_text() == "mine"


def test_a_line_of_json_for_each_turn(chat):
    session = chat("--json")
    talk(session, "a", "b")
    records = [json.loads(line) for line in session.out.getvalue().splitlines()]
    assert [record["prompt"] for record in records] == ["a", "b"]


def test_a_model_that_saw_no_examples_is_refused():
    loaded = LoadedGenerator("lm", "streaming_language_modeling", None, contextlib.nullcontext)
    with pytest.raises(UserError, match="needs one of --task streaming_finetune_language_modeling"):
        check_fine_tuned(loaded)


@pytest.mark.parametrize("words", [["--truncate-prompt"], ["--history-turns", "-1"]])
def test_a_bad_value_names_its_flag(words):
    with pytest.raises(ConfigError, match=words[0]):
        Settings(ChatConfig, [*SMALL, *words], PROG)
