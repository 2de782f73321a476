"""A vocabulary in the format of the tokenizers library, with the roles of its symbols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scalerun.data.base_tokenizer import PROBE, BaseTokenizer
from scalerun.data.byte_tokenizer import NUM_BYTES, SPECIAL_SYMBOLS, ByteTokenizer
from scalerun.data.json_tokenizer import JsonTokenizer
from scalerun.data.sentencepiece_tokenizer import SPACE, SentencePieceTokenizer

TOKENIZER_FILE = "tokenizer.json"
ROLES_FILE = "tokenizer_config.json"
PROBES = (
    PROBE,
    "Once upon a time, in 1984, there were (at least) 3 owls: they'd sat on the mat!",
    "  two spaces, naïve café \u4f60\u597d \U0001f989 \u2581 </s> <s>",
    "def f(x):\n    return x_1 ** -2.5e-3\n",
)
"""Texts that a copy has to spell as the original does."""


def export_tokenizer(tokenizer: BaseTokenizer, folder: Path, *, max_length: int | None) -> bool:
    """Write files that ``transformers.AutoTokenizer`` reads; say whether there is such a form.

    A text that they encode begins with the end symbol, as generation does here.

    Args:
        tokenizer: of any kind.
        folder: is there.
        max_length: longest sequence of the model.
    """
    model = _model(tokenizer)
    if model is None or not _spells_alike(model, tokenizer):
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


def _model(tokenizer: BaseTokenizer) -> Tokenizer | None:
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.copied_model()
    if isinstance(tokenizer, ByteTokenizer):
        return _of_bytes()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_pieces(tokenizer)
    return None


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


def _of_pieces(tokenizer: SentencePieceTokenizer) -> Tokenizer | None:
    """A unigram model of the same pieces and scores, where it spells as the original does."""
    pieces = tokenizer.pieces()
    has_bytes = any(piece == "<0x00>" for piece, _ in pieces)
    prefix = tokenizer.piece(tokenizer.encode("a")[0]).startswith(SPACE)
    model = Tokenizer(models.Unigram(pieces, tokenizer.dictionary.unk, byte_fallback=has_bytes))
    steps: list[Any] = [normalizers.Replace(Regex(" "), SPACE)]
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *steps] if prefix else steps
    )
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return model


def _spells_alike(model: Tokenizer, tokenizer: BaseTokenizer) -> bool:
    return all(
        model.encode(text, add_special_tokens=False).ids == list(tokenizer.encode(text))
        for text in PROBES
    )
