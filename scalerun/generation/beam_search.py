"""BeamSearch: which hypotheses of one prompt go on and which are done.

N hypotheses that go on, V vocabulary, K tokens that may follow each of them.
"""

from __future__ import annotations

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

    def score(self, lenpen: float) -> float:
        """What hypotheses are compared by: log-probability / length ** lenpen."""
        return self.total / self.length**lenpen

    def extended(self, token: int, logprob: float) -> Hypothesis:
        """The answer with one more token."""
        longer = self.ended(logprob)
        return replace(longer, tokens=(*self.tokens, token), logprobs=(*self.logprobs, logprob))

    def ended(self, logprob: float) -> Hypothesis:
        """The answer with the end of the document chosen."""
        return replace(self, total=self.total + logprob, length=self.length + 1)


def best_tokens(logprobs_NV: Tensor, *, beam: int) -> tuple[Tensor, Tensor]:
    """The most likely next tokens of hypotheses of any number of prompts.

    Twice the beam of each, because each hypothesis has one extension that ends it: no other token
    can be among the best extensions that its prompt's search looks at.

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

    Args:
        beam: answers to keep.
        lenpen: a finished answer scores its log-probability / length ** lenpen.
        max_length: tokens after which an answer ends.
        eos: the token that ends an answer.
        stops: whether an answer's text ends with its last token; such an answer is finished.
    """

    def __init__(
        self,
        *,
        beam: int,
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

    def step(self, logprobs_NK: Tensor, tokens_NK: Tensor) -> list[int]:
        """Choose the next tokens.

        Args:
            logprobs_NK: as :func:`best_tokens` gives them for each of ``live``.
            tokens_NK: the tokens that they belong to.

        Returns:
            For each of the new ``live`` the index of the one it continues; empty when it is over.
        """
        parents: list[int] = []
        grown: list[Hypothesis] = []
        for parent, token, logprob in self._candidates(logprobs_NK, tokens_NK):
            hypothesis = self.live[parent]
            if token == self.eos:
                self.finished.append(hypothesis.ended(logprob))
                continue
            hypothesis = hypothesis.extended(token, logprob)
            if self.stops(hypothesis):
                self.finished.append(hypothesis)
            elif hypothesis.length == self.max_length:
                self.finished.append(replace(hypothesis, is_cut=True))
            else:
                parents.append(parent)
                grown.append(hypothesis)
                if len(grown) == self.beam:
                    break
        self.finished.sort(key=lambda hypothesis: -hypothesis.score(self.lenpen))
        del self.finished[self.beam :]
        self.live = grown
        if self._settled():
            self.live = []
            return []
        return parents

    def _candidates(self, logprobs_NK: Tensor, tokens_NK: Tensor) -> list[tuple[int, int, float]]:
        """(parent, token, log-probability) of the best extensions, the best first."""
        totals_N = torch.tensor([answer.total for answer in self.live], dtype=torch.float64)
        totals = (totals_N[:, None] + logprobs_NK).flatten()
        best = totals.sort(descending=True, stable=True)
        places = best.indices[: 2 * self.beam][best.values[: 2 * self.beam] > float("-inf")]
        parents = places // logprobs_NK.shape[1]
        tokens, logprobs = tokens_NK.flatten()[places], logprobs_NK.flatten()[places]
        return list(zip(parents.tolist(), tokens.tolist(), logprobs.tolist(), strict=True))

    def _settled(self) -> bool:
        if not self.live:
            return True
        if len(self.finished) < self.beam:
            return False
        # At best every further token is certain, and the length is the one that helps most.
        best = self.live[0]
        reachable = max(
            replace(best, length=length).score(self.lenpen)
            for length in (best.length + 1, self.max_length)
        )
        return self.finished[-1].score(self.lenpen) >= reachable
