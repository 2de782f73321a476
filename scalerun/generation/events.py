"""What comes of a request: its prompt's score, token by token its answers, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scalerun.dataclass.errors import UserError

STOP = "stop"
LENGTH = "length"

Alternatives = list[tuple[int, float]]
"""The likeliest tokens at a place, the likeliest first, each with its natural log-probability."""


@dataclass(frozen=True)
class PromptScore:
    """What the model thinks of a prompt."""

    logprobs: list[float]
    """Natural log-probability of each token that was read, the separator ahead of all not."""
    top_logprobs: list[Alternatives]
    """For each of them what might have stood there; empty unless it was asked for."""


@dataclass(frozen=True)
class Generation:
    """A continuation."""

    tokens: list[int]
    """New tokens, those of a stop string included, the end of the document not."""
    token_logprobs: list[float]
    """Natural log-probability of each token under the model's own distribution: at temperature 1,
    with no penalty and no token ruled out."""
    text: str
    """The new text, without the stop string."""
    finish_reason: str
    """``stop``: the document ended or a stop string came; ``length``: ``max_new_tokens``."""
    score: float
    """Log-probability of the continuation, with the end of the document if it was chosen; in a
    beam search divided by length ** lenpen."""
    top_logprobs: list[Alternatives] = field(default_factory=list)
    """For each token what might have stood there; empty unless it was asked for."""
    prompt: PromptScore | None = None
    """With ``echo``."""


@dataclass(frozen=True)
class PromptEvent:
    """The prompt was read and scored, as ``echo`` asks for."""

    tokens: list[int]
    """Those that were read, without the separator."""
    score: PromptScore


@dataclass(frozen=True)
class TokenEvent:
    """An answer has a token more. There are none where answers are ranked at the end."""

    choice: int
    """The answer's number, from 0."""
    token: int
    text: str
    """What is now certain of the text; may be empty."""
    logprob: float
    top_logprobs: Alternatives
    """Empty unless it was asked for."""


@dataclass(frozen=True)
class FinishedEvent:
    """An answer has ended; the last event of each ``choice``."""

    choice: int
    text: str
    """The rest of the text, which no :class:`TokenEvent` had."""
    generation: Generation


@dataclass(frozen=True)
class FailedEvent:
    """The request has no answer, or no more of them; its last event."""

    error: UserError


Event = PromptEvent | TokenEvent | FinishedEvent | FailedEvent
Listener = Callable[[Event], None]
"""Called for each event of a request. It may cancel and submit requests, and must not raise."""
