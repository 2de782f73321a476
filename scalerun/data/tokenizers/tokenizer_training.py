"""Making a tokenizer from text, so that encoding and decoding give the text back."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scalerun.dataclass.errors import UserError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
NUM_BYTES = 256

# Characters that sentencepiece uses for itself: it would skip a sentence with one of them. They
# are spelled in bytes later, but for the line feed, which becomes a piece.
_BORDERS = re.compile("[\0\n\t\N{LOWER ONE EIGHTH BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}]")
_MAX_CHARACTERS = 4000
"""Sentencepiece skips longer sentences (it counts bytes: four for a character at most)."""


def train_sentencepiece(
    texts: Iterable[str], *, vocab_size: int, model_type: str, character_coverage: float
) -> bytes:
    """Train a sentencepiece model; the same texts give the same bytes.

    Sentencepiece's defaults lose line ends, repeated and leading spaces, and compatibility
    characters. This model keeps them: no normalisation, no dummy prefix, the line feed is a piece,
    and what the vocabulary lacks is spelled in bytes.

    Args:
        texts: documents.
        vocab_size: pieces, with 4 special ones, the line feed and 256 bytes.
        model_type: ``bpe`` or ``unigram``.
        character_coverage: share of the text's characters that get a piece of their own.

    Raises:
        UserError: no text, or a vocabulary that is too small or too large for it.
    """
    characters: Counter[str] = Counter()
    lines = list(_sentences(texts, characters))
    if not lines:
        raise UserError("the training text is empty; there is nothing to train a tokenizer on")
    smallest = _num_required(characters, character_coverage) + NUM_BYTES + len(SPECIAL_SYMBOLS) + 1
    if vocab_size < smallest:
        raise UserError(
            f"--vocab-size {vocab_size} is too small for this text; the minimum is {smallest} "
            "(fewer with a lower --character-coverage)"
        )
    bos, pad, eos, unk = SPECIAL_SYMBOLS
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type=model_type,
        character_coverage=character_coverage,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        user_defined_symbols=["\n"],
        max_sentence_length=4 * _MAX_CHARACTERS,
        hard_vocab_limit=False,  # so that the largest possible size can be told
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        bos_piece=bos,
        pad_piece=pad,
        eos_piece=eos,
        unk_piece=unk,
        num_threads=1,  # the sums of several threads depend on their timing
        minloglevel=2,
    )
    found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    _check_size(vocab_size, found)
    return model.getvalue()


def train_byte_level_bpe(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Train a byte-level BPE of the `tokenizers` library; return its JSON.

    Raises:
        UserError: no text, or a vocabulary that is too small or too large for it.
    """
    smallest = NUM_BYTES + len(SPECIAL_SYMBOLS)
    if vocab_size < smallest:
        raise UserError(f"--vocab-size {vocab_size} is too small; the minimum is {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_SYMBOLS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _check_size(vocab_size, tokenizer.get_vocab_size())
    return tokenizer.to_str(pretty=True).encode()


def _check_size(wanted: int, found: int) -> None:
    if found < wanted:
        raise UserError(f"--vocab-size {wanted} is too large for this text; the maximum is {found}")


def _sentences(texts: Iterable[str], characters: Counter[str]) -> Iterator[str]:
    """Lines, the long ones cut at spaces; counts their characters."""
    for text in texts:
        for line in _BORDERS.split(text):
            characters.update(line)
            while len(line) > _MAX_CHARACTERS:
                cut = line.rfind(" ", 1, _MAX_CHARACTERS)
                cut = cut if cut > 0 else _MAX_CHARACTERS
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line


def _num_required(characters: Counter[str], coverage: float) -> int:
    """How many of the most frequent characters make up ``coverage`` of the text."""
    wanted, covered = coverage * characters.total(), 0
    for number, (_, count) in enumerate(characters.most_common()):
        if covered >= wanted:
            return number
        covered += count
    return len(characters)
