"""Request: a prompt, and how it is to be continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalerun.dataclass.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued."""

    prompt: Sequence[int]
    """Tokens without special symbols; may be empty."""
    params: SamplingParams = SamplingParams()
    source: Sequence[int] | None = None
    """What an encoder-decoder reads, as in training; None for other models."""
