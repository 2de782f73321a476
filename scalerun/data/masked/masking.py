"""Which tokens of a sequence a masked language model has to predict, and what it sees instead.

n tokens of the sequence, N of them selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scalerun.data.permutation import Draws
from scalerun.data.token_block_dataset import Ints


@dataclass(frozen=True, slots=True)
class MaskedBlock:
    """One sequence with hidden tokens."""

    tokens: npt.NDArray[Any]
    """(n,) what the model sees."""
    places: Ints
    """(N,) where the selected tokens are, in ascending order."""
    targets: npt.NDArray[Any]
    """(N,) what they were."""


@dataclass(frozen=True)
class Masking:
    """The rule of BERT (Devlin et al. 2018, arXiv:1810.04805), for single tokens or spans.

    ``mask_prob * n`` tokens are selected, rounded up or down at random so that the average is met.
    They form ``N / span_length`` spans, rounded likewise, of at least one token; all ways to cut N
    into so many spans are equally likely, which makes lengths nearly geometric, and so are all ways
    to place the spans with at least one token between two of them. With ``span_length`` 1 there
    are no spans: each set of N tokens is equally likely, neighbours or not.

    Of the selected tokens a share stays as it is and another one becomes random symbols; the
    others become the mask symbol.
    """

    mask_prob: float
    span_length: float
    leave_unmasked_prob: float
    random_token_prob: float
    mask_id: int
    random_ids: tuple[int, int]
    """First of the symbols to draw from, and the one behind the last."""

    def __call__(self, tokens: npt.NDArray[Any], *key: int) -> MaskedBlock:
        """Hide tokens of a sequence; the integers ``key`` decide which."""
        draws = Draws(*key)
        places = self._places(len(tokens), draws)
        count = len(places)
        shift = draws.uniform()
        kept = int(count * self.leave_unmasked_prob + shift)
        changed = int(count * (self.leave_unmasked_prob + self.random_token_prob) + shift)
        order = places[draws.permutation(count)]
        seen = tokens.copy()
        seen[order[changed:]] = self.mask_id
        first, end = self.random_ids
        others = order[kept:changed]
        seen[others] = first + draws.numbers(end - first, len(others))
        return MaskedBlock(seen, places, tokens[places])

    def _places(self, num_tokens: int, draws: Draws) -> Ints:
        """The selected tokens; at least one token of a sequence is not."""
        count = min(draws.round(num_tokens * self.mask_prob), num_tokens - 1)
        if self.span_length == 1 or count <= 0:
            return draws.choose(num_tokens, max(count, 0))
        room = num_tokens - count + 1
        spans = min(max(draws.round(count / self.span_length), 1), count, room)
        cuts = draws.choose(count - 1, spans - 1) + 1
        lengths = np.diff(cuts, prepend=0, append=count)
        visible_before = draws.choose(room, spans)
        return np.repeat(visible_before, lengths) + np.arange(count)
