from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import read_fairseq_dictionary, rows_in_our_order
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.dataclass.errors import UserError

FILLERS = tuple(f"madeupword9{i}" for i in range(8))


@pytest.fixture(scope="module", params=[-1, 3], ids=["without_padding", "with_padding"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SentencePieceTokenizer:
    """A model as sentencepiece makes it by itself, or with a symbol for padding."""
    path = tmp_path_factory.mktemp("tokenizer") / "text"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the cat {word} on the mat" for word in ("sat", "slept") * 20]),
        model_prefix=str(path),
        vocab_size=18,
        pad_id=request.param,
        minloglevel=2,
    )
    return SentencePieceTokenizer(path.with_suffix(".model"))


@pytest.fixture
def dictionary(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> Callable[..., Path]:
    """Writes a ``dict.txt`` as fairseq makes it: other order, filled up to a multiple of 8."""

    def write(*, drop: int = 0, extra: tuple[str, ...] = ()) -> Path:
        own = tokenizer.dictionary
        special = {own.bos, own.pad, own.eos, own.unk}
        pieces = [tokenizer.piece(i) for i in range(own.num_real_symbols) if i not in special]
        symbols = [*pieces[drop:][::-1], *extra]
        symbols += [f"madeupword{i:04d}" for i in range(-(len(symbols) + 4) % 8)]
        path = tmp_path / "dict.txt"
        path.write_text("".join(f"{symbol} 7\n" for symbol in symbols), encoding="utf-8")
        return path

    return write


def test_symbols_are_numbered_after_four_special_ones(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("▁the 10\n▁a b 3\n", encoding="utf-8")
    assert read_fairseq_dictionary(path) == {"▁the": 4, "▁a b": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the\n", "dict.txt:1 is 'the'"),
        ("a 1\n\nb 2\n", "dict.txt:2"),
        ("a 1\na 2\n", ":2 has 'a'"),
    ],
)
def test_a_line_that_is_no_symbol_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "dict.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_fairseq_dictionary(tmp_path / "dict.txt")


def test_each_id_gets_the_row_of_its_piece(
    tokenizer: SentencePieceTokenizer, dictionary: Callable[..., Path]
) -> None:
    path, own = dictionary(), tokenizer.dictionary
    order = rows_in_our_order(path, tokenizer, len(own))
    assert sorted(order) == list(range(len(own)))
    names = {number: symbol for symbol, number in read_fairseq_dictionary(path).items()}
    assert (order[own.bos], order[own.pad], order[own.eos]) == (0, 1, 2)
    assert own.unk is not None
    assert order[own.unk] == 3
    for index in tokenizer.encode("the cat sat"):
        assert names[order[index]] == tokenizer.piece(index)
    assert all(names[row].startswith("madeup") for row in order[own.num_real_symbols :])


def test_another_vocabulary_is_refused(
    tokenizer: SentencePieceTokenizer, dictionary: Callable[..., Path]
) -> None:
    size = len(tokenizer.dictionary)
    with pytest.raises(UserError, match=r"gives \d+ symbols .* but the embedding has 999 rows"):
        rows_in_our_order(dictionary(), tokenizer, 999)
    with pytest.raises(UserError, match="which --tokenizer .* has; they are not one"):
        rows_in_our_order(dictionary(drop=1), tokenizer, size)
    with pytest.raises(UserError, match="'<mask>', which --tokenizer .* does not have"):
        rows_in_our_order(dictionary(extra=("<mask>",)), tokenizer, size)
    with pytest.raises(UserError, match="rows can be neither added nor dropped"):
        rows_in_our_order(dictionary(extra=FILLERS), tokenizer, size + 8)
    with pytest.raises(UserError, match="belongs to a sentencepiece model"):
        rows_in_our_order(dictionary(), ByteTokenizer(), size)
