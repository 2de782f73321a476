"""SamplingParams: how one prompt is continued."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError

MAX_BEAM = 1024
"""More hypotheses than that are a slip of the finger: each holds a key-value cache."""
MAX_PENALTY = 100
"""Above it nothing changes but the rounding, and logits may leave the range of float32."""
MAX_LOGPROBS = 100
"""Alternatives of a token that can be asked for."""


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued; every prompt of a call may have its own.

    Logits go through the rules in this order: ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty``, ``temperature``, ``top_k``, ``top_p``, ``min_p``. Log-probabilities are
    those of the model itself, before any of them.

    Raises:
        ConfigError: a value is out of range or two contradict each other; names the flag, and the
            field as its ``param``.
    """

    max_new_tokens: int = 128
    """New tokens at most; the end of the document is not counted. 0 only with ``echo``."""
    min_new_tokens: int = 0
    """Until there are so many, neither the end of the document nor a stop string ends the text."""
    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw among so many of the most likely tokens; 0 for no limit."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability, the one that crosses
    it included."""
    min_p: float = 0.0
    """Draw among tokens that have at least this share of the likeliest one's probability (Nguyen
    et al. 2024, arXiv:2407.01082); 0 for no limit."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the answer has are divided by it, negative ones
    multiplied (Keskar et al. 2019, arXiv:1909.05858, section 4.1)."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of each token as often as the answer has it."""
    n: int = 1
    """Answers to the prompt."""
    best_of: int | None = None
    """Draw so many, and give the ``n`` with the highest log-probability per token; None gives all
    that are drawn, in their order."""
    beam: int = 1
    """Hypotheses of a beam search; 1 draws or is greedy."""
    lenpen: float = 1.0
    """A finished hypothesis scores its log-probability / (its length, with the end) ** lenpen."""
    diverse_beam_groups: int = 1
    """Groups that the hypotheses are searched in, each kept from what earlier ones have chosen."""
    diverse_beam_strength: float = 0.5
    """Nats that a token costs for each hypothesis of earlier groups that has it in the same place.
    """
    prefix: tuple[int, ...] = ()
    """Tokens that the answer has to begin with; they are part of it, and of its score."""
    allowed_tokens: Callable[[Sequence[int]], Sequence[int] | None] | None = None
    """Given the tokens of an answer so far, which may follow: those named, with the end of the
    document only if it is among them; None for any. Where none is left the answer ends. It is not
    asked before ``prefix`` is over."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are cut off."""
    seed: int | None = None
    """The draws of an answer depend on this and its number alone; None takes a new one each
    time."""
    logprobs: int | None = None
    """Give so many of the likeliest tokens at each place, with their log-probabilities; None, like
    0, gives those of the chosen tokens alone."""
    echo: bool = False
    """Give the log-probabilities of the prompt's tokens too."""
    truncate_prompt: bool = False
    """Drop the beginning of a prompt that does not fit; otherwise that is an error."""

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_draws()
        self._check_penalties()
        self._check_answers()
        self._check_search()
        if not all(self.stop):
            raise ConfigError("--stop has an empty text, which would stop everything", param="stop")

    @property
    def num_rows(self) -> int:
        """Sequences that are continued at once: answers drawn, or hypotheses."""
        return self.beam if self.beam > 1 else self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether no answer is sure to be given before all are done."""
        return self.num_rows > self.n or self.beam > 1

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes a logit."""
        repeats = self.repetition_penalty != 1
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _check_lengths(self) -> None:
        least = 0 if self.echo else 1
        if self.max_new_tokens < least:
            what = "0 (score the prompt) or more" if self.echo else "1 or more"
            raise ConfigError(
                f"--max-new-tokens is {self.max_new_tokens}; give {what}", param="max_new_tokens"
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"--min-new-tokens is {self.min_new_tokens}; give 0 to {self.max_new_tokens}, the "
                "value of --max-new-tokens",
                param="min_new_tokens",
            )

    def _check_draws(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature is {self.temperature:g}; give 0 (greedy) or more",
                param="temperature",
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k is {self.top_k}; give 0 (no limit) or more", param="top_k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"--top-p is {self.top_p:g}; give a number above 0 and up to 1 (no limit)",
                param="top_p",
            )
        if not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"--min-p is {self.min_p:g}; give a number from 0 (no limit) to 1", param="min_p"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; give 0 or more, below 2**63", param="seed")

    def _check_penalties(self) -> None:
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ConfigError(
                f"--repetition-penalty is {self.repetition_penalty:g}; give {1 / MAX_PENALTY:g} to "
                f"{MAX_PENALTY} (1 for none)",
                param="repetition_penalty",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not abs(value) <= MAX_PENALTY:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} is {value:g}; give {-MAX_PENALTY} to {MAX_PENALTY} (0 for none)",
                    param=name,
                )

    def _check_answers(self) -> None:
        if not 1 <= self.n <= MAX_BEAM:
            raise ConfigError(f"--n is {self.n}; give 1 to {MAX_BEAM}", param="n")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_BEAM:
            raise ConfigError(
                f"--best-of is {self.best_of}; give {self.n}, the value of --n, to {MAX_BEAM}",
                param="best_of",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(
                f"--logprobs is {self.logprobs}; give 0 to {MAX_LOGPROBS}", param="logprobs"
            )

    def _check_search(self) -> None:
        if not 1 <= self.beam <= MAX_BEAM:
            raise ConfigError(f"--beam is {self.beam}; give 1 to {MAX_BEAM}", param="beam")
        if not math.isfinite(self.lenpen):
            raise ConfigError(f"--lenpen is {self.lenpen:g}; give a finite number", param="lenpen")
        limited = self.top_k != 0 or self.top_p != 1 or self.min_p != 0
        if self.beam > 1 and (self.temperature != 1 or limited):
            raise ConfigError(
                f"--beam {self.beam} searches and does not draw; leave out --temperature, --top-k, "
                "--top-p and --min-p",
                param="beam",
            )
        if self.beam > 1 and self.has_penalties:
            raise ConfigError(
                f"--beam {self.beam} compares answers by the model's own probabilities; leave out "
                "--repetition-penalty, --presence-penalty and --frequency-penalty",
                param="beam",
            )
        if self.beam > 1 and self.max_new_tokens == 0:
            raise ConfigError(
                f"--beam {self.beam} searches for answers, and --max-new-tokens 0 wants none; "
                "leave one out",
                param="beam",
            )
        if self.beam > 1 and self.logprobs:
            raise ConfigError(
                f"--beam {self.beam} keeps no alternatives of its tokens; leave out --logprobs",
                param="logprobs",
            )
        if self.beam > 1 and (self.best_of is not None or self.n > self.beam):
            raise ConfigError(
                f"--beam {self.beam} ranks so many answers by itself; leave out --best-of, and "
                f"give at most --n {self.beam}",
                param="n" if self.best_of is None else "best_of",
            )
        if self.beam == 1 and self.lenpen != 1:
            raise ConfigError(
                f"--lenpen {self.lenpen:g} ranks the answers of a beam search; give --beam 2",
                param="lenpen",
            )
        check_groups("--", self.beam, self.diverse_beam_groups, self.diverse_beam_strength)
        if len(self.prefix) > self.max_new_tokens:
            raise ConfigError(
                f"an answer is to begin with {len(self.prefix)} tokens, and --max-new-tokens is "
                f"{self.max_new_tokens}; raise it",
                param="max_new_tokens",
            )


def check_groups(prefix: str, beam: int, groups: int, strength: float) -> None:
    """Refuse what makes no diverse beam search.

    Args:
        prefix: what the names of the flags begin with.

    Raises:
        ConfigError: names the flag.
    """
    if groups < 1 or beam % groups:
        raise ConfigError(
            f"{prefix}diverse-beam-groups is {groups}; give a divisor of {prefix}beam, which is "
            f"{beam}",
            param="diverse_beam_groups",
        )
    if not 0 <= strength < math.inf:
        raise ConfigError(
            f"{prefix}diverse-beam-strength is {strength:g}; give 0 or more",
            param="diverse_beam_strength",
        )
