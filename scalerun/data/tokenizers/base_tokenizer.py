"""BaseTokenizer: text to ids and back, in one piece or as a stream."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.dataclass.errors import UserError

BOS_SYMBOLS = ("<s>", "<BOS>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
PAD_SYMBOLS = ("<pad>", "<PAD>", "[PAD]", "<|pad|>")
EOS_SYMBOLS = ("</s>", "<EOS>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[EOS]", "[SEP]")
UNK_SYMBOLS = ("<unk>", "<UNK>", "[UNK]", "<|unk|>")

Ids = Sequence[int] | npt.NDArray[np.integer]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

PROBE = "a\n\nb  c\td \n"
"""Line ends, runs of spaces and a tab: what normalising tokenizers lose first."""


def content_digest(*parts: str | bytes) -> str:
    """Hex digest of several strings; moving a border between two of them changes it."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


class BaseTokenizer(ABC):
    """Turns text into ids without special symbols, and ids into text.

    Attributes:
        dictionary: sizes and roles of the ids.
        files: what a checkpoint must carry to rebuild the tokenizer: name -> source file.
    """

    dictionary: Dictionary
    files: dict[str, Path]

    @property
    def digest(self) -> str:
        """Hex digest of the vocabulary's content and roles; equal digests give equal ids."""
        return self.dictionary.digest

    def use_rows(self, num_rows: int) -> None:
        """Let embedding and output have so many rows, as a model of another library has.

        Raises:
            UserError: there are more symbols.
        """
        try:
            self.dictionary = self.dictionary.with_rows(num_rows)
        except ValueError as error:
            raise UserError(
                f"--final-vocab-size {num_rows} is too small for the tokenizer: {error}; raise it "
                "or leave it out"
            ) from error

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text. A special symbol spelled out in the text is ordinary text."""

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        """Ids of many texts, the same as one by one; ``num_threads`` is a hint."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. Beginning, padding, end and filler ids have none; bytes that are not
        UTF-8 become U+FFFD."""

    @abstractmethod
    def token_text(self, index: int) -> str:
        """One id as a person wants to see it, such as ``" the"``, ``"<0xE2>"`` or ``"</s>"``."""

    def starts_word(self, index: int) -> bool:
        """Whether the text of an id begins with white space, as a new word does inside a text."""
        # Some spaces are lost by decoding an id alone, and some bytes are only found by it.
        return self.token_text(index)[:1].isspace() or self.decode([index])[:1].isspace()

    def piece(self, index: int) -> str:
        """One id as the vocabulary's file spells it; no two ids have the same piece."""
        return self.token_text(index)

    def is_lossless(self) -> bool:
        """Whether line ends, tabs and runs of spaces survive a round trip."""
        return self.decode(self.encode(PROBE)) == PROBE


class StreamDecoder:
    """Decodes ids one at a time, holding back what later ids may still change.

    The pieces returned by :meth:`push` and :meth:`finish` join to ``tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self._context: list[int] = []  # the last id already shown: it decides about a leading space
        self._pending: list[int] = []

    def push(self, index: int) -> str:
        """The text that this id makes certain; empty inside a character."""
        if index in self.tokenizer.dictionary.dropped_ids:
            return ""
        self._pending.append(index)
        text = self._pending_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._context, self._pending = self._pending[-1:], []
        return text

    def finish(self) -> str:
        """The rest, with an unfinished character as U+FFFD; the decoder starts afresh."""
        text = self._pending_text() if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        shown = self.tokenizer.decode(self._context)
        return self.tokenizer.decode(self._context + self._pending)[len(shown) :]
