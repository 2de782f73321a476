"""A vocabulary in the format of the tokenizers library, with the roles of its symbols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scalerun.data.tokenizers.base_tokenizer import PROBE, BaseTokenizer
from scalerun.data.tokenizers.byte_tokenizer import NUM_BYTES, SPECIAL_SYMBOLS, ByteTokenizer
from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SPACE, SentencePieceTokenizer

TOKENIZER_FILE = "tokenizer.json"
ROLES_FILE = "tokenizer_config.json"
NEVER = -1e6
"""Score of a piece that texts are not spelled with."""
PROBES = (
    PROBE,
    "Once upon a time, in 1984, there were (at least) 3 owls: they'd sat on the mat!",
    "  two spaces, naïve café \u4f60\u597d \U0001f989",
    "def f(x):\n    return x_1 ** -2.5e-3\n",
)
"""Texts that a copy has to spell as the original does."""


def export_tokenizer(tokenizer: BaseTokenizer, folder: Path, *, max_length: int | None) -> bool:
    """Write files that ``transformers.AutoTokenizer`` reads; say whether there is such a form.

    A text that they encode begins with the end symbol, as generation does here. Only where a text
    spells out the name of a special symbol may copies of sentencepiece's unigram models differ.

    Args:
        tokenizer: of any kind.
        folder: is there.
        max_length: longest sequence of the model.
    """
    alike = (model for model in _models(tokenizer) if _spells_alike(model, tokenizer))
    model = next(alike, None)
    if model is None:
        return False
    dictionary = tokenizer.dictionary
    symbols = {
        role: model.id_to_token(index)
        for role, index in (
            ("bos_token", dictionary.eos),
            ("eos_token", dictionary.eos),
            ("pad_token", dictionary.pad),
            ("unk_token", dictionary.unk),
        )
        if index is not None
    }
    eos = symbols["eos_token"]
    symbols["pad_token"] = symbols["pad_token"] or eos
    model.add_special_tokens(sorted({symbol for symbol in symbols.values() if symbol}))
    model.post_processor = processors.TemplateProcessing(
        single=f"{eos} $A", pair=f"{eos} $A $B:1", special_tokens=[(eos, dictionary.eos)]
    )
    roles: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **symbols}
    roles |= {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    roles |= {"padding_side": "left"} | (
        {} if max_length is None else {"model_max_length": max_length}
    )
    model.save(str(folder / TOKENIZER_FILE))
    text = json.dumps(roles, indent=1, ensure_ascii=False) + "\n"
    (folder / ROLES_FILE).write_text(text, encoding="utf-8")
    return True


def _models(tokenizer: BaseTokenizer) -> Iterator[Tokenizer]:
    """Models of the library that may spell as the tokenizer does."""
    if isinstance(tokenizer, JsonTokenizer):
        yield tokenizer.copied_model()
    if isinstance(tokenizer, ByteTokenizer):
        yield _of_bytes()
    if isinstance(tokenizer, SentencePieceTokenizer):
        # Which of the two a sentencepiece file is, it does not tell.
        yield _of_pieces(tokenizer, _unigram(tokenizer))
        yield _of_pieces(tokenizer, _bpe(tokenizer))


def _of_bytes() -> Tokenizer:
    """Each byte is a symbol, and no two are joined."""
    letters = _letters_of_bytes()
    names = [*letters, *SPECIAL_SYMBOLS]
    model = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model


def _letters_of_bytes() -> list[str]:
    """GPT-2's printable letter for each byte: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, more = [], 0x100
    for byte in range(NUM_BYTES):
        letters.append(chr(byte if byte in printable else more))
        more += byte not in printable
    return letters


def _of_pieces(tokenizer: SentencePieceTokenizer, pieces: models.Model) -> Tokenizer:
    """A sentencepiece file's pieces, with its way of writing spaces."""
    prefix = tokenizer.piece(tokenizer.encode("a")[0]).startswith(SPACE)
    model = Tokenizer(pieces)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    model.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return model


def _unigram(tokenizer: SentencePieceTokenizer) -> models.Model:
    pieces = tokenizer.pieces()
    scored = [(piece, NEVER if score is None else score) for piece, score in pieces]
    return models.Unigram(scored, tokenizer.dictionary.unk, byte_fallback=_has_bytes(pieces))


def _bpe(tokenizer: SentencePieceTokenizer) -> models.Model:
    """The pair with the best piece is joined first, whatever two parts it is made of."""
    pieces = tokenizer.pieces()
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    scores = {piece: score for piece, score in pieces if score is not None}
    merges: list[tuple[str, str]] = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += sorted(
            (pair for pair in cuts if pair[0] in scores and pair[1] in scores),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
    unk = tokenizer.dictionary.unk
    name = None if unk is None else tokenizer.piece(unk)
    return models.BPE(
        vocab=ids, merges=merges, unk_token=name, fuse_unk=True, byte_fallback=_has_bytes(pieces)
    )


def _has_bytes(pieces: list[tuple[str, float | None]]) -> bool:
    return any(piece == "<0x00>" for piece, _ in pieces)


def _spells_alike(model: Tokenizer, tokenizer: BaseTokenizer) -> bool:
    return all(
        model.encode(text, add_special_tokens=False).ids == list(tokenizer.encode(text))
        for text in PROBES
    )
