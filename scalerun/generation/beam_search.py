"""BeamSearch: which hypotheses of one prompt go on and which are done.

N hypotheses that go on, V vocabulary, K tokens that may follow each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hypothesis:
    """A partial or finished answer."""

    tokens: tuple[int, ...] = ()
    """Without the end of the document."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probability of each token."""
    total: float = 0.0
    """Log-probability of all that was chosen, the end of the document included."""
    length: int = 0
    """Tokens chosen, the end of the document included."""
    is_cut: bool = False
    """It ran into the length limit."""
    penalty: float = 0.0
    """What its group holds against it, for choosing what earlier groups chose."""

    def score(self, lenpen: float) -> float:
        """What finished answers are compared by: log-probability / length ** lenpen."""
        return self.total / self.length**lenpen

    def rank(self, lenpen: float) -> float:
        """What answers of a group are compared by: the score less the penalty."""
        return (self.total - self.penalty) / self.length**lenpen

    def extended(self, token: int, logprob: float, penalty: float) -> Hypothesis:
        """The answer with one more token."""
        longer = self.ended(logprob, penalty)
        return replace(longer, tokens=(*self.tokens, token), logprobs=(*self.logprobs, logprob))

    def ended(self, logprob: float, penalty: float) -> Hypothesis:
        """The answer with the end of the document chosen."""
        return replace(
            self,
            total=self.total + logprob,
            length=self.length + 1,
            penalty=self.penalty + penalty,
        )


def best_tokens(logprobs_NV: Tensor, *, beam: int) -> tuple[Tensor, Tensor]:
    """The most likely next tokens of hypotheses of any number of prompts.

    Twice the beam of each, because each hypothesis has one extension that ends it: no other token
    can be among the best extensions that its prompt's search looks at. With groups, those that the
    earlier ones have chosen may all fall behind, and twice the beam of a group is still left.

    Args:
        logprobs_NV: ``-inf`` for tokens that must not be chosen.
        beam: the widest of the prompts.

    Returns:
        On the host, (N, K): log-probabilities in float64 and tokens.
    """
    best = logprobs_NV.topk(min(2 * beam, logprobs_NV.shape[1]))
    return best.values.double().cpu(), best.indices.cpu()


class BeamSearch:
    """Keeps the ``beam`` best partial answers and the ``beam`` best finished ones.

    It is over when no partial answer can still beat the worst of ``beam`` finished ones, so with a
    beam as wide as there are answers it finds the best of all.

    With groups it is diverse (Vijayakumar et al. 2016, arXiv:1610.02424, algorithm 1, Hamming
    diversity): each group is a search of its own with ``beam / groups`` answers, and a token costs
    ``strength`` for each answer that earlier groups extended by it in the same step. The costs add
    up along an answer, decide inside of its group, and are not part of its score, by which the
    answers of all groups are sorted in the end.

    Args:
        beam: answers to keep.
        lenpen: a finished answer scores its log-probability / length ** lenpen.
        max_length: tokens after which an answer ends.
        eos: the token that ends an answer.
        stops: whether an answer's text ends with its last token; such an answer is finished.
        groups: a divisor of ``beam``.
        strength: nats, 0 or more.
    """

    def __init__(
        self,
        *,
        beam: int,
        lenpen: float,
        max_length: int,
        eos: int,
        stops: Callable[[Hypothesis], bool],
        groups: int = 1,
        strength: float = 0.0,
    ) -> None:
        self.beam = beam
        self.lenpen = lenpen
        self.strength = strength
        self.live = [Hypothesis()]
        self._groups = [
            _Group(beam // groups, lenpen=lenpen, max_length=max_length, eos=eos, stops=stops)
            for _ in range(groups)
        ]
        self._begun = False

    @property
    def finished(self) -> list[Hypothesis]:
        """The best finished answers so far, the best first."""
        found = [answer for group in self._groups for answer in group.finished]
        return sorted(found, key=lambda answer: -answer.score(self.lenpen))

    def step(self, logprobs_NK: Tensor, tokens_NK: Tensor) -> list[int]:
        """Choose the next tokens.

        Args:
            logprobs_NK: as :func:`best_tokens` gives them for each of ``live``.
            tokens_NK: the tokens that they belong to.

        Returns:
            For each of the new ``live`` the index of the one it continues; empty when it is over.
        """
        parents: list[int] = []
        chosen: Counter[int] = Counter()
        first = 0
        for group in self._groups:
            last = first + len(group.live)
            if group.live:
                costs_NK = self._costs(tokens_NK[first:last], chosen)
                found = group.step(logprobs_NK[first:last], tokens_NK[first:last], costs_NK)
                parents += [first + parent for parent in found]
                chosen.update(group.chosen)
            # All groups begin with one and the same empty answer.
            first = last if self._begun else 0
        self._begun = True
        self.live = [answer for group in self._groups for answer in group.live]
        return parents

    def _costs(self, tokens_NK: Tensor, chosen: Counter[int]) -> Tensor | None:
        """What each token costs a group; None where nothing does."""
        if not chosen or not self.strength:
            return None
        counts = [[chosen[token] for token in row] for row in tokens_NK.tolist()]
        return self.strength * torch.tensor(counts, dtype=torch.float64)


class _Group:
    """One beam search, which is told what tokens cost it; arguments as in :class:`BeamSearch`."""

    def __init__(
        self,
        beam: int,
        *,
        lenpen: float,
        max_length: int,
        eos: int,
        stops: Callable[[Hypothesis], bool],
    ) -> None:
        self.beam = beam
        self.lenpen = lenpen
        self.max_length = max_length
        self.eos = eos
        self.stops = stops
        self.live = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.chosen: list[int] = []
        """The tokens of the last step, one for each answer that was extended or finished."""

    def step(
        self, logprobs_NK: Tensor, tokens_NK: Tensor, costs_NK: Tensor | None = None
    ) -> list[int]:
        """As in :class:`BeamSearch`; ``costs_NK`` are taken from the log-probabilities."""
        parents: list[int] = []
        grown: list[Hypothesis] = []
        self.chosen = []
        for parent, token, logprob, cost in self._candidates(logprobs_NK, tokens_NK, costs_NK):
            self.chosen.append(token)
            hypothesis = self.live[parent]
            if token == self.eos:
                self.finished.append(hypothesis.ended(logprob, cost))
                continue
            hypothesis = hypothesis.extended(token, logprob, cost)
            if self.stops(hypothesis):
                self.finished.append(hypothesis)
                continue
            parents.append(parent)
            grown.append(hypothesis)
            if len(grown) == self.beam:
                break
        if grown and grown[0].length == self.max_length:
            self.finished += [replace(hypothesis, is_cut=True) for hypothesis in grown]
            grown = []
        self.finished.sort(key=lambda hypothesis: -hypothesis.rank(self.lenpen))
        del self.finished[self.beam :]
        self.live = grown
        if self._settled():
            self.live = []
            return []
        return parents

    def _candidates(
        self, logprobs_NK: Tensor, tokens_NK: Tensor, costs_NK: Tensor | None
    ) -> list[tuple[int, int, float, float]]:
        """(parent, token, log-probability, cost) of the best extensions, the best first."""
        if costs_NK is None:
            costs_NK = torch.zeros_like(logprobs_NK)
        totals_N = torch.tensor(
            [answer.total - answer.penalty for answer in self.live], dtype=torch.float64
        )
        totals = (totals_N[:, None] + logprobs_NK - costs_NK).flatten()
        best = totals.sort(descending=True, stable=True)
        places = best.indices[: 2 * self.beam][best.values[: 2 * self.beam] > float("-inf")]
        parents = places // logprobs_NK.shape[1]
        found = [each.flatten()[places].tolist() for each in (tokens_NK, logprobs_NK, costs_NK)]
        return list(zip(parents.tolist(), *found, strict=True))

    def _settled(self) -> bool:
        if not self.live:
            return True
        if len(self.finished) < self.beam:
            return False
        # At best every further token is certain and free, and the length is the one that helps
        # most.
        best = self.live[0]
        reachable = max(
            replace(best, length=length).rank(self.lenpen)
            for length in (best.length + 1, self.max_length)
        )
        return self.finished[-1].rank(self.lenpen) >= reachable
