"""Which keys a query may see, as numbers added to the scores.

B batch, H heads, T queries, S keys; the queries are the last T of the S tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    padding_BS: Tensor | None = None,
    document_ids_BS: Tensor | None = None,
    device: torch.device,
) -> Tensor:
    """(B or 1, 1, T, S) bool: the key is not later, not padding, and of the query's document."""
    keys = torch.arange(num_keys, device=device)
    seen = (keys[-num_queries:, None] >= keys)[None, None]
    if document_ids_BS is not None:
        queries_BT = document_ids_BS[:, -num_queries:]
        seen = seen & (queries_BT[:, None, :, None] == document_ids_BS[:, None, None, :])
    if padding_BS is not None:
        seen = seen & ~padding_BS[:, None, None, :]
    return seen


def fold_into_bias(
    seen_B1TS: Tensor, bias_BHTS: Tensor | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scores to add, and which rows see nothing.

    A row that sees nothing adds 0 everywhere, since no kernel defines the softmax of nothing; its
    result has to be replaced by 0 afterwards, where the second tensor (B, 1, T, 1) is True.
    """
    empty_rows = ~seen_B1TS.any(-1, keepdim=True)
    hidden = ~(seen_B1TS | empty_rows)
    if bias_BHTS is None:
        bias_BHTS = torch.zeros((), dtype=dtype, device=seen_B1TS.device)
    return torch.where(hidden, float("-inf"), bias_BHTS.to(dtype)), empty_rows
