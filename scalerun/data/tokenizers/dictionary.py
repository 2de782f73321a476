"""Which ids a vocabulary has and which of them play a special role."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

VOCABULARY_MULTIPLE = 8
"""Vocabularies are padded to a multiple of this, which matrix units of accelerators ask for."""


@dataclass(frozen=True)
class Dictionary:
    """The ids of a vocabulary, with the special ones named by role instead of by position.

    Ids from ``num_real_symbols`` to ``len(self) - 1`` are fillers: no text ever holds them.
    """

    num_real_symbols: int
    """Symbols that the tokenizer has, the special ones included."""
    bos: int
    """Beginning of a text; equal to ``eos`` in vocabularies that have one such symbol."""
    pad: int
    """Fills the end of short sequences; never a target for that. It is ``eos`` in vocabularies
    without a row for it."""
    eos: int
    """End of a document: it separates documents in training and starts the first one."""
    unk: int | None
    """Stands for what the vocabulary cannot spell; None where it can spell everything."""
    digest: str
    """Hex digest of the vocabulary and its roles."""
    num_rows: int | None = None
    """Size of embedding and output where another library chose it."""
    adds_pad: bool = False
    """The tokenizer has no symbol for padding, which is the last of the real symbols here."""

    def __post_init__(self) -> None:
        for role in ("bos", "pad", "eos", "unk"):
            index = getattr(self, role)
            if index is not None and not 0 <= index < self.num_real_symbols:
                raise ValueError(f"{role} id {index} is outside 0..{self.num_real_symbols - 1}")

    def __len__(self) -> int:
        """Symbols with fillers: the size of embedding and output."""
        if self.num_rows is not None:
            return self.num_rows
        return -(-self.num_real_symbols // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def with_rows(self, num_rows: int) -> Dictionary:
        """The same symbols in an embedding of so many rows.

        Where there is no row for a symbol of padding that was added, padding is ``eos``.

        Raises:
            ValueError: there are fewer rows than symbols.
        """
        if num_rows == len(self):
            return self
        if num_rows < self.num_real_symbols - self.adds_pad:
            raise ValueError(f"{self.num_real_symbols - self.adds_pad} symbols need as many rows")
        digest = hashlib.sha256(f"{self.digest} {num_rows}".encode()).hexdigest()
        sized = replace(self, num_rows=num_rows, digest=digest)
        if num_rows >= self.num_real_symbols:
            return sized
        return replace(sized, num_real_symbols=num_rows, pad=self.eos, adds_pad=False)

    @property
    def padding_row(self) -> int | None:
        """The row that only padding looks up, and that nothing is to be learned for."""
        return None if self.pad == self.eos else self.pad

    @property
    def dropped_ids(self) -> frozenset[int]:
        """Ids without text: beginning, padding, end and the fillers."""
        fillers = range(self.num_real_symbols, len(self))
        return frozenset((self.bos, self.pad, self.eos, *fillers))

    @property
    def token_dtype(self) -> str:
        """The smallest numpy type that holds every id: ``uint16`` or ``uint32``."""
        return "uint16" if len(self) <= 1 << 16 else "uint32"
