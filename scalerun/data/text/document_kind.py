"""DocumentKind: what text files hold, and how it becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerun.data.text.jsonl_dataset import JsonlDataset
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, Ids


@dataclass(frozen=True)
class EncodedDocuments:
    """Tokens of some documents, without their end symbols."""

    ids: Sequence[Ids]
    num_bytes: list[int]
    """UTF-8 bytes of the text that each document predicts."""
    sources: list[int] | None = None
    """Tokens at the start of each document that are given, not predicted; None for none."""


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document, handed to what reads and keeps text."""

    name: str
    """Belongs to the keys of token files and to fingerprints, but for plain text."""
    reader: Callable[..., JsonlDataset]
    """Gives the documents of a file; called as :class:`JsonlDataset` is."""
    encode: Callable[[BaseTokenizer, Sequence[str], int], EncodedDocuments]
    """Documents to tokens, with a number of threads."""
    cut: str = "their end"
    """What a document that is longer than a sequence loses, for people."""


def encode_texts(
    tokenizer: BaseTokenizer, texts: Sequence[str], num_threads: int
) -> EncodedDocuments:
    """Tokens of plain texts."""
    ids = tokenizer.encode_batch(texts, num_threads=num_threads)
    return EncodedDocuments(ids, [len(text.encode()) for text in texts])


PLAIN_TEXT = DocumentKind("text", JsonlDataset, encode_texts)
"""Text that is predicted from its first to its last token."""
