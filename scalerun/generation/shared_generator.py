"""SharedGenerator: one rank is asked, and all that share the model's products answer with it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.ranks import Control
from scalerun.generation.events import Generation
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder


class SharedGenerator(SequenceGenerator):
    """A generator whose calls rank 0 makes alone, while the others :meth:`follow`.

    All ranks have the same logits to the bit, since they are gathered, and the same seeds, so they
    choose the same tokens without asking each other. With one rank nothing is sent.

    Args:
        model: whose products a tensor axis shares; or whole, with one rank.
        tokenizer: the vocabulary of what is generated.
        ranks: carries the calls to all ranks of the axis.
    """

    def __init__(
        self,
        model: BaseDecoder | EncoderDecoder,
        tokenizer: BaseTokenizer,
        *,
        ranks: Control,
    ) -> None:
        super().__init__(model, tokenizer)
        self._ranks = ranks

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Where rank 0 makes its calls; at the end the others are let go."""
        try:
            yield
        finally:
            self._ranks.from_main(None)

    def follow(self) -> None:
        """Take part in rank 0's calls until it ends; for the other ranks."""
        while (call := self._ranks.from_main(None)) is not None:
            # Rank 0 has the same error, and whoever called it decides what becomes of it.
            with contextlib.suppress(UserError):
                super()._answers(*call, None)

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sources: Sequence[Sequence[int]] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> list[list[Generation]]:
        seeded = [
            each if each.seed is not None else replace(each, seed=secrets.randbits(63))
            for each in params
        ]
        self._ranks.from_main((prompts, seeded, sources))
        return super()._answers(prompts, seeded, sources, on_text)
