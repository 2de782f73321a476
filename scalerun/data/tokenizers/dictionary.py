"""Which ids a vocabulary has and which of them play a special role."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Fills the end of short sequences; never a target."""
    eos: int
    """End of a document: it separates documents in training and starts the first one."""
    unk: int | None
    """Stands for what the vocabulary cannot spell; None where it can spell everything."""
    digest: str
    """Hex digest of the vocabulary and its roles."""

    def __post_init__(self) -> None:
        for role in ("bos", "pad", "eos", "unk"):
            index = getattr(self, role)
            if index is not None and not 0 <= index < self.num_real_symbols:
                raise ValueError(f"{role} id {index} is outside 0..{self.num_real_symbols - 1}")

    def __len__(self) -> int:
        """Symbols with fillers: the size of embedding and output."""
        return -(-self.num_real_symbols // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def dropped_ids(self) -> frozenset[int]:
        """Ids without text: beginning, padding, end and the fillers."""
        fillers = range(self.num_real_symbols, len(self))
        return frozenset((self.bos, self.pad, self.eos, *fillers))

    @property
    def token_dtype(self) -> str:
        """The smallest numpy type that holds every id: ``uint16`` or ``uint32``."""
        return "uint16" if len(self) <= 1 << 16 else "uint32"
