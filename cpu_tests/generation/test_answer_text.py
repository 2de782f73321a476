import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.generation.answer_text import AnswerText

BYTES = ByteTokenizer()


def stream(
    text: str | bytes, stop: tuple[str, ...] = (), *, stop_after: int = 0, prompt: str = ""
) -> tuple[list[str], AnswerText]:
    """Push the bytes of a text; the pieces, the last of them from finish()."""
    answer = AnswerText(BYTES, BYTES.encode(prompt), stop)
    pieces = []
    tokens = text.encode() if isinstance(text, str) else text
    for count, token in enumerate(tokens, start=1):
        pieces.append(answer.push(token, may_stop=count >= stop_after))
        if answer.stopped:
            break
    pieces.append(answer.finish())
    return pieces, answer


@given(st.text(max_size=20), st.lists(st.text("ab\né", min_size=1, max_size=3), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, answer = stream(text, tuple(stops))
    assert "".join(pieces) == answer.text
    # The stop that is complete first decides; of several complete at once, the longest.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        end = min(ends)[0]
        assert answer.text == text[: min(start for at, start in ends if at == end)]
    else:
        assert answer.text == text
    assert answer.stopped == bool(ends)


@given(st.binary(max_size=12))
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes) -> None:
    pieces, answer = stream(data)
    assert "".join(pieces) == answer.text == data.decode(errors="replace")


def test_a_character_is_shown_when_it_is_complete() -> None:
    pieces, _ = stream("aé")
    assert pieces == ["a", "", "é", ""]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    pieces, answer = stream("a EN ENDE", ("END",))
    assert pieces == ["a", " ", "", "", "EN ", "", "", "", ""]
    assert answer.text == "a EN "


def test_a_stop_string_at_the_end_is_given_out_when_it_stays_incomplete() -> None:
    pieces, answer = stream("abc", ("cd",))
    assert pieces == ["a", "b", "", "c"]
    assert not answer.stopped


def test_a_stop_string_that_is_complete_too_early_is_text() -> None:
    pieces, answer = stream("a.b.c", (".",), stop_after=3)
    assert "".join(pieces) == answer.text == "a.b"
    pieces, answer = stream("xxENDyy", ("END",), stop_after=5)
    assert answer.text == "xx"
    pieces, answer = stream("xxENDyy", ("END",), stop_after=6)
    assert "".join(pieces) == answer.text == "xxENDyy"


def test_the_first_of_overlapping_stops_cuts() -> None:
    assert stream("xabcd", ("bc", "abc"))[1].text == "x"
    assert stream("xabcd", ("abcd", "bc"))[1].text == "xa"


def test_a_stop_string_does_not_reach_into_the_prompt() -> None:
    _, answer = stream("Db", ("END",), prompt="EN")
    assert answer.text == "Db"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sp")
    words = random.Random(1).choices(["the", "cat", "sat", "on", "a", "mat", "and", "ran"], k=2000)
    (folder / "text").write_text("\n".join(" ".join(words[i : i + 8]) for i in range(0, 2000, 8)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return folder / "m.model"


def test_an_answer_goes_on_after_its_prompt_with_the_space_between_words(
    sentencepiece_model: Path,
) -> None:
    from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

    tokenizer = SentencePieceTokenizer(sentencepiece_model)
    prompt, whole = "the cat", "the cat sat on a mat"
    tokens = tokenizer.encode(whole)
    start = len(tokenizer.encode(prompt))
    answer = AnswerText(tokenizer, tokens[:start], ())
    pieces = [answer.push(token, may_stop=True) for token in tokens[start:]]
    assert prompt + "".join(pieces) + answer.finish() == whole
