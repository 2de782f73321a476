"""SamplingParams: how one prompt is continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError

MAX_BEAM = 1024
"""More hypotheses than that are a slip of the finger: each holds a key-value cache."""


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued; every prompt of a call may have its own.

    Raises:
        ConfigError: a value is out of range or two contradict each other; names the flag.
    """

    max_new_tokens: int = 128
    """New tokens at most; the end of the document is not counted."""
    min_new_tokens: int = 0
    """Until there are so many, neither the end of the document nor a stop string ends the text."""
    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw among so many of the most likely tokens; 0 for no limit."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability, the one that crosses
    it included."""
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
    document only if it is among them; None for any. It is not asked before ``prefix`` is over."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are cut off."""
    seed: int | None = None
    """The draws of a prompt depend on this alone; None takes a new one each time."""
    truncate_prompt: bool = False
    """Drop the beginning of a prompt that does not fit; otherwise that is an error."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; give 1 or more")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"--min-new-tokens is {self.min_new_tokens}; give 0 to {self.max_new_tokens}, the "
                "value of --max-new-tokens"
            )
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature:g}; give 0 (greedy) or more")
        if self.top_k < 0:
            raise ConfigError(f"--top-k is {self.top_k}; give 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"--top-p is {self.top_p:g}; give a number above 0 and up to 1 (no limit)"
            )
        if not 1 <= self.beam <= MAX_BEAM:
            raise ConfigError(f"--beam is {self.beam}; give 1 to {MAX_BEAM}")
        if not abs(self.lenpen) < float("inf"):
            raise ConfigError(f"--lenpen is {self.lenpen:g}; give a finite number")
        draws = self.temperature != 1 or self.top_k != 0 or self.top_p != 1
        if self.beam > 1 and draws:
            raise ConfigError(
                f"--beam {self.beam} searches and does not draw; leave out --temperature, --top-k "
                "and --top-p"
            )
        if self.beam == 1 and self.lenpen != 1:
            raise ConfigError(
                f"--lenpen {self.lenpen:g} ranks the answers of a beam search; give --beam 2"
            )
        check_groups("--", self.beam, self.diverse_beam_groups, self.diverse_beam_strength)
        if len(self.prefix) > self.max_new_tokens:
            raise ConfigError(
                f"an answer is to begin with {len(self.prefix)} tokens, and --max-new-tokens is "
                f"{self.max_new_tokens}; raise it"
            )
        if not all(self.stop):
            raise ConfigError("--stop has an empty text, which would stop everything")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; give 0 or more, below 2**63")


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
            f"{beam}"
        )
    if not 0 <= strength < float("inf"):
        raise ConfigError(f"{prefix}diverse-beam-strength is {strength:g}; give 0 or more")
