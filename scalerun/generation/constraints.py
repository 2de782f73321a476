"""Which tokens may follow the beginning of an answer. B answers, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams

Begun = tuple[SamplingParams, Sequence[int]]
"""How an answer is continued, and the tokens that it has so far."""


class Constraints:
    """Rules tokens out, the same for draws and for searches.

    Args:
        eos: the token that ends an answer.
        never: tokens that are never generated, unless an answer has to begin with them.
    """

    def __init__(self, *, eos: int, never: Sequence[int]) -> None:
        self.eos = eos
        self.never = list(never)

    def apply(self, logprobs_BV: Tensor, answers: Sequence[Begun]) -> Tensor:
        """The same with ``-inf`` where an answer must not go; the rest is not normed again.

        Raises:
            UserError: nothing may follow a draw, or ``allowed_tokens`` names no token.
        """
        allowed_BV = logprobs_BV.clone()
        allowed_BV[:, self.never] = float("-inf")
        early = [i for i, (p, tokens) in enumerate(answers) if len(tokens) < p.min_new_tokens]
        allowed_BV[early, self.eos] = float("-inf")
        for i, (params, tokens) in enumerate(answers):
            if len(tokens) < len(params.prefix):
                self._leave(allowed_BV[i], logprobs_BV[i], [params.prefix[len(tokens)]])
            elif params.allowed_tokens is not None:
                named = params.allowed_tokens(tokens)
                if named is None:
                    continue
                self._leave(allowed_BV[i], allowed_BV[i].clone(), named)
                if params.beam == 1 and bool((allowed_BV[i] == float("-inf")).all()):
                    raise UserError(
                        f"allowed_tokens leaves nothing that may follow {list(tokens)}; let it "
                        f"name a token, or {self.eos}, which ends the answer from --min-new-tokens "
                        "on"
                    )
        return allowed_BV

    def _leave(self, row_V: Tensor, before_V: Tensor, named: Sequence[int]) -> None:
        """Let the row have nothing but the named tokens, with what they had before."""
        vocabulary = row_V.shape[0]
        if wrong := [token for token in named if not 0 <= token < vocabulary]:
            raise UserError(
                f"token {wrong[0]} is to follow an answer's beginning, and the vocabulary has "
                f"{vocabulary}; name tokens from 0 to {vocabulary - 1}"
            )
        index = torch.tensor(list(named), dtype=torch.int64, device=row_V.device)
        row_V.fill_(float("-inf"))
        row_V[index] = before_V[index]
