"""BeamSearch: which hypotheses of one prompt go on and which are done.

N hypotheses that go on, V vocabulary.
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

    def step(self, logprobs_NV: Tensor) -> list[int]:
        """Choose the next tokens.

        Args:
            logprobs_NV: of the token after each of ``live``; ``-inf`` where it must not go.

        Returns:
            For each of the new ``live`` the index of the one it continues; empty when it is over.
        """
        parents: list[int] = []
        grown: list[Hypothesis] = []
        for parent, token, logprob in self._candidates(logprobs_NV):
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
        return [] if self._settled() else parents

    def _candidates(self, logprobs_NV: Tensor) -> list[tuple[int, int, float]]:
        """(parent, token, log-probability) of the best extensions, the best first.

        Twice the beam, because each parent has one extension that ends it.
        """
        totals_N = torch.tensor(
            [hypothesis.total for hypothesis in self.live],
            dtype=torch.float64,
            device=logprobs_NV.device,
        )
        totals_NV = totals_N[:, None] + logprobs_NV.double()
        best = totals_NV.flatten().topk(min(2 * self.beam, totals_NV.numel()))
        places = best.indices[best.values > float("-inf")]
        logprobs = logprobs_NV.flatten()[places].tolist()
        vocabulary = logprobs_NV.shape[1]
        return [
            (place // vocabulary, place % vocabulary, logprob)
            for place, logprob in zip(places.tolist(), logprobs, strict=True)
        ]

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
