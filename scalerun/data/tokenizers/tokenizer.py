"""Finding the tokenizer that a user named."""

from __future__ import annotations

import logging
from pathlib import Path

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, StreamDecoder
from scalerun.data.tokenizers.byte_tokenizer import SPECIAL_SYMBOLS, ByteTokenizer
from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.dataclass.errors import ConfigError, UserError

__all__ = ["BYTES", "BaseTokenizer", "StreamDecoder", "load_tokenizer"]

logger = logging.getLogger(__name__)

BYTES = "bytes"


def load_tokenizer(
    spec: str | None,
    vocab_filename: str | None = None,
    merges_filename: str | None = None,
    end_of_document_symbol: str | None = None,
    *,
    final_vocab_size: int | None = None,
    flag: str = "--tokenizer",
) -> BaseTokenizer:
    """The tokenizer that the flags name.

    Args:
        spec: ``bytes``, a sentencepiece ``.model`` or a tokenizers ``.json``.
        vocab_filename: GPT-2's ``vocab.json``, given with ``merges_filename`` instead of ``spec``.
        merges_filename: GPT-2's ``merges.txt``.
        end_of_document_symbol: the symbol that ends a document, when it is not the usual one.
        final_vocab_size: rows of embedding and output; None for the symbols' number.
        flag: what ``spec`` was given with.

    Raises:
        ConfigError: none is named, or two are.
        UserError: a file is missing or of another kind.
    """
    tokenizer = _named(spec, vocab_filename, merges_filename, end_of_document_symbol, flag)
    if final_vocab_size is not None:
        tokenizer.use_rows(final_vocab_size)
    return tokenizer


def _named(
    spec: str | None,
    vocab_filename: str | None,
    merges_filename: str | None,
    end_of_document_symbol: str | None,
    flag: str,
) -> BaseTokenizer:
    if spec is not None and (vocab_filename or merges_filename):
        raise ConfigError("--tokenizer and --vocab-filename/--merges-filename exclude each other")
    if spec is None and not (vocab_filename and merges_filename):
        if vocab_filename or merges_filename:
            raise ConfigError("--vocab-filename and --merges-filename are given together")
        raise ConfigError(
            f"{flag} is required: bytes, a sentencepiece .model file or a tokenizers .json file"
        )
    if spec == BYTES:
        if end_of_document_symbol not in (None, SPECIAL_SYMBOLS[2]):
            raise ConfigError("--end-of-document-symbol does not apply to --tokenizer bytes")
        return ByteTokenizer()
    tokenizer = _from_files(spec, vocab_filename, merges_filename, end_of_document_symbol, flag)
    if not tokenizer.is_lossless():
        logger.warning(
            "%s does not keep line ends, tabs or repeated spaces; generated text will lack them",
            spec or vocab_filename,
        )
    return tokenizer


def _from_files(
    spec: str | None, vocab: str | None, merges: str | None, end_symbol: str | None, flag: str
) -> BaseTokenizer:
    if spec is None:
        assert vocab is not None
        assert merges is not None
        return JsonTokenizer.from_vocab_and_merges(
            _existing("--vocab-filename", vocab), _existing("--merges-filename", merges), end_symbol
        )
    path = _existing(flag, spec)
    if path.suffix == ".json":
        return JsonTokenizer.from_json(path, end_symbol)
    return SentencePieceTokenizer(path, end_symbol)


def _existing(flag: str, name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "does not exist"
    raise UserError(f"{flag} {name} {what}; give a file (or --tokenizer bytes, which needs none)")
