"""Text of tokens as people read it: pieces of words joined again, unknown ones marked."""

from __future__ import annotations

from collections.abc import Iterable

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SPACE

SUBWORD_NMT, SENTENCEPIECE = "subword_nmt", "sentencepiece"
POST_PROCESSES = (SUBWORD_NMT, SENTENCEPIECE)
"""Whose pieces a vocabulary of words can list; fairseq's names."""
CONTINUED = "@@ "
"""How subword-nmt marks a piece that the next one continues."""
UNKNOWN_REFERENCE = "<<unk>>"
"""What stands for an unknown token in a reference, as in fairseq: no hypothesis has it."""


def join_pieces(text: str, post_process: str | None) -> str:
    """Pieces with spaces between them -> words with spaces between them.

    Args:
        post_process: one of :data:`POST_PROCESSES`; None leaves the text as it is.
    """
    if post_process == SUBWORD_NMT:
        return f"{text} ".replace(CONTINUED, "").rstrip()
    if post_process == SENTENCEPIECE:
        return text.replace(" ", "").replace(SPACE, " ").strip()
    return text


def reference_text(tokenizer: BaseTokenizer, ids: Iterable[int]) -> str:
    """The text of tokens that translations are compared with.

    A guess of ``<unk>`` is no match for a word that the vocabulary lacks, so that has another name.
    """
    parts: list[list[int]] = [[]]
    for index in ids:
        if index == tokenizer.dictionary.unk:
            parts.append([])
        else:
            parts[-1].append(index)
    return f" {UNKNOWN_REFERENCE} ".join(map(tokenizer.decode, parts)).strip()
