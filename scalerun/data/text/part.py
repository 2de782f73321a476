"""Part: the documents of a text that are trained on, or those that are held out from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError

_SCALE = 2.0**64


@dataclass(frozen=True)
class Part:
    """One side of a text that is divided in two, by a digest of each document's own text.

    So equal documents lie on one side, and the side of a document depends neither on the files, on
    the documents around it, on the tokenizer nor on a seed: text may be added, moved and renamed.
    """

    fraction: float
    """Share of the documents that is held out, from 0 to 1; more or less, since each is drawn."""
    held_out: bool
    """Whether this is the part that is held out."""

    def __contains__(self, text: object) -> bool:
        """Whether a document with this text lies on this side."""
        assert isinstance(text, str)
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"valid_fraction").digest()
        drawn = int.from_bytes(digest, "little") < self.fraction * _SCALE
        return drawn == self.held_out


def check_valid_fraction(value: float) -> None:
    """Refuse a share of documents that leaves nothing to train on."""
    if not 0 <= value < 1:
        raise ConfigError(f"--valid-fraction is {value:g}; give a share from 0 to below 1")
