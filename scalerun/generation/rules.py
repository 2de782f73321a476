"""What a step of generation chooses, each row by its own parameters.

B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.generation.choice import Choice
from scalerun.generation.constraints import Begun, constrain
from scalerun.generation.sampling import choose_tokens, penalized


class Rules:
    """Which tokens answers may have, and which they choose.

    Args:
        dictionary: of the answers. Its symbols without text, but the end of a document, and the one
            for unknown text are never chosen.
    """

    def __init__(self, dictionary: Dictionary) -> None:
        self.eos = dictionary.eos
        never = set(dictionary.dropped_ids) - {self.eos}
        if dictionary.unk is not None:
            never.add(dictionary.unk)
        self._never = torch.tensor(sorted(never), dtype=torch.int64)

    def allowed(self, logits_BV: Tensor, begun: Sequence[Begun]) -> Tensor:
        """The same with ``-inf`` where an answer must not go."""
        self._never = self._never.to(logits_BV.device)
        allowed_BV = logits_BV.index_fill(1, self._never, float("-inf"))
        early = [i for i, (p, tokens) in enumerate(begun) if len(tokens) < p.min_new_tokens]
        if early:
            allowed_BV[early, self.eos] = float("-inf")
        constrain(allowed_BV, logits_BV, begun, eos=self.eos)
        return allowed_BV

    def choose(self, logits_BV: Tensor, choices: Sequence[Choice]) -> Tensor:
        """The next token of each choice: (B,) int64.

        Args:
            logits_BV: float32, what the model thinks of the tokens that may follow.
        """
        device = logits_BV.device
        allowed_BV = self.allowed(
            self._penalized(logits_BV, choices),
            [(choice.params, choice.tokens) for choice in choices],
        )
        params = [choice.params for choice in choices]
        if all(each.temperature == 0 for each in params):
            return allowed_BV.max(-1).indices
        return choose_tokens(
            allowed_BV,
            temperature_B=_doubles([each.temperature for each in params], device),
            top_k_B=torch.tensor([each.top_k for each in params], device=device),
            top_p_B=_doubles([each.top_p for each in params], device),
            min_p_B=_doubles([each.min_p for each in params], device),
            uniform_B=_doubles([choice.uniform() for choice in choices], device),
        )

    def _penalized(self, logits_BV: Tensor, choices: Sequence[Choice]) -> Tensor:
        rows = [i for i, choice in enumerate(choices) if choice.params.has_penalties]
        if not rows:
            return logits_BV
        device, vocabulary = logits_BV.device, logits_BV.shape[1]
        mine = [choices[i] for i in rows]
        counts, in_prompt = zip(*(each.said(vocabulary, device) for each in mine), strict=True)
        rows_B = torch.tensor(rows, device=device)
        held_BV = penalized(
            logits_BV[rows_B],
            counts_BV=torch.stack(counts),
            in_prompt_BV=torch.stack(in_prompt),
            repetition_B=_doubles([each.params.repetition_penalty for each in mine], device),
            presence_B=_doubles([each.params.presence_penalty for each in mine], device),
            frequency_B=_doubles([each.params.frequency_penalty for each in mine], device),
        )
        return logits_BV.index_copy(0, rows_B, held_BV)


def _doubles(numbers: list[float], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
