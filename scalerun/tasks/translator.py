"""Translator: sources in, the best translations out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.ranges import at_least
from scalerun.dataclass.sampling_params import MAX_BEAM, SamplingParams, check_groups
from scalerun.generation.events import Generation
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True)
class SearchSettings:
    """How translations are searched for; they may grow with their sources."""

    beam: int = 5
    """Hypotheses of a sentence; 1 takes the likeliest token each time."""
    lenpen: float = 1.0
    """A translation scores its log-probability / length ** lenpen."""
    max_len_a: float = 0.0
    """Tokens of a translation at most: ``max_len_a * source + max_len_b``; the source's tokens
    count with their end, the translation's without."""
    max_len_b: int = 200
    min_len: int = 1
    """Tokens of a translation at least, its end not counted."""
    diverse_beam_groups: int = 1
    """Groups of hypotheses that are kept from each other's words; see :class:`BeamSearch`."""
    diverse_beam_strength: float = 0.5

    def check(self, prefix: str = "--") -> None:
        """Refuse what makes no search.

        Args:
            prefix: what the names of the flags begin with.

        Raises:
            ConfigError: a value is out of range; names the flag.
        """
        if not 1 <= self.beam <= MAX_BEAM:
            raise ConfigError(f"{prefix}beam is {self.beam}; give 1 to {MAX_BEAM}")
        if not math.isfinite(self.lenpen):
            raise ConfigError(f"{prefix}lenpen is {self.lenpen:g}; give a finite number")
        if self.beam == 1 and self.lenpen != 1:
            raise ConfigError(
                f"{prefix}lenpen {self.lenpen:g} ranks the hypotheses of a search, and "
                f"{prefix}beam 1 has none; give {prefix}beam 2 or more"
            )
        check_groups(prefix, self.beam, self.diverse_beam_groups, self.diverse_beam_strength)
        if not 0 <= self.max_len_a < math.inf:
            raise ConfigError(f"{prefix}max-len-a is {self.max_len_a:g}; give 0 or more")
        at_least(f"{prefix}max-len-b", self.max_len_b, 0)
        at_least(f"{prefix}min-len", self.min_len, 0)
        if self.max_len_a == 0 and self.max_len_b and self.min_len > self.max_len_b:
            raise ConfigError(
                f"{prefix}min-len {self.min_len} is above the {self.max_len_b} tokens of "
                f"{prefix}max-len-b; change one"
            )
        if self.max_len_a == 0 == self.max_len_b:
            raise ConfigError(
                f"{prefix}max-len-a and {prefix}max-len-b are both 0, which leaves no room for a "
                "translation; raise one of them"
            )

    def params(
        self, source_length: int, room: int | None = None, prefix: Sequence[int] = ()
    ) -> SamplingParams:
        """How a source of so many tokens is translated.

        Args:
            room: tokens that the model can write at most; None for no limit.
            prefix: what the translation has to begin with, as far as it is allowed to be long.
        """
        longest = max(int(self.max_len_a * source_length + self.max_len_b), 1)
        longest = longest if room is None else min(longest, room)
        return SamplingParams(
            max_new_tokens=longest,
            min_new_tokens=min(self.min_len, longest),
            temperature=1.0 if self.beam > 1 else 0.0,
            beam=self.beam,
            lenpen=self.lenpen,
            diverse_beam_groups=self.diverse_beam_groups,
            diverse_beam_strength=self.diverse_beam_strength,
            prefix=tuple(prefix[:longest]),
        )


class Translator:
    """Translates sources that a tokenizer has made, those of a call side by side.

    Args:
        generator: of an encoder-decoder.
        settings: how to search.
    """

    def __init__(self, generator: SequenceGenerator, settings: SearchSettings) -> None:
        self.generator = generator
        self.settings = settings

    def max_source_length(self) -> int | None:
        """Tokens of the longest source, its end included; None where there is no limit."""
        model = self.generator.model
        assert isinstance(model, EncoderDecoder)
        return model.encoder.max_positions()

    def translate(
        self, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[list[Generation]]:
        """The translations of each source, ``beam`` of them, the best first.

        Args:
            sources: token numbers, each with the end symbol last.
            prefixes: for each source the tokens that its translation has to begin with.

        Raises:
            UserError: a source is longer than the encoder's positions, or the model's output is
                not finite.
        """
        room = self.generator.room(0)
        begun = [()] * len(sources) if prefixes is None else prefixes
        params = [
            self.settings.params(len(source), room, prefix)
            for source, prefix in zip(sources, begun, strict=True)
        ]
        prompts: list[list[int]] = [[] for _ in sources]
        if self.settings.beam > 1:
            return self.generator.hypotheses(prompts, params, sources=sources)
        return [[best] for best in self.generator.generate(prompts, params, sources=sources)]
