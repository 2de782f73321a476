"""The base of all models that predict the next token.

B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from scalerun.models.base_model import BaseModel
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.megatron.mappings import gather_from

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

FeatureLoss = Callable[[Tensor, Tensor, "DeviceMesh | None"], Tensor]
"""Features (B, T, D), the weight of the output projection (V, D), and the axis that the vocabulary
is spread over, or None -> a scalar. With an axis the weight is this rank's rows, and the gradient
of the features this rank's share of a sum.

A model calls it in place of projecting. Features and weight never leave the model, so it does not
matter how they are sharded or when they are gathered; the logits need not exist all at once.
"""


class DecoderOutput(NamedTuple):
    """What a decoder returns."""

    logits: Tensor | None
    """(B, T, V), or (B, 1, V) when only the last token's were asked for; None with a loss. This
    rank's part of V where :attr:`vocab_mesh` is not None."""
    reports: tuple[Auxiliary, ...] = ()
    """One for each layer that has an auxiliary loss."""
    loss: Tensor | None = None
    """What the :data:`FeatureLoss` returned, if one was given."""
    vocab_mesh: DeviceMesh | None = None
    """Axis that the vocabulary is spread over; None if each rank has all of it."""

    def whole_logits(self) -> Tensor:
        """The logits of the whole vocabulary; all ranks of the axis have to call it."""
        assert self.logits is not None
        return gather_from(self.logits, self.vocab_mesh)


class BaseDecoder(BaseModel):
    """A model whose logits at t depend on tokens 0..t alone.

    One with ``takes_loss`` has a further argument ``loss``, a :data:`FeatureLoss` or None.
    """

    @abstractmethod
    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        last_token_only: bool = False,
    ) -> DecoderOutput:
        """Logits of the token that follows each token.

        Args:
            tokens_BT: (B, T) int64. With an incremental state only the new tokens: a prompt, a
                part of one, or one token; the state is extended by them.
            positions_BT: (B, T) int64 from 0, for tables of absolute positions. By default
                positions count the tokens that are not padding. Relative schemes always do.
            document_ids_BT: (B, T) int64; a token sees earlier tokens with its own id only.
            padding_mask_BT: (B, T) bool, True for padding, which no token sees. It may be on either
                side. A token that sees nothing gets zeros from the mixer: finite, and meaningless.
            incremental_state: from :meth:`init_incremental_state`; excludes ``positions_BT`` and
                ``document_ids_BT``, for positions follow from the state.
            last_token_only: compute the logits of the last token alone.

        Raises:
            ValueError: more tokens than learned positions or than the state has room for, or
                documents for a model without :attr:`masks_documents`.
        """

    @property
    def masks_documents(self) -> bool:
        """Whether ``document_ids_BT`` can be given."""
        return True

    @property
    def reads_positions(self) -> bool:
        """Whether ``positions_BT`` changes anything."""
        return True

    @abstractmethod
    def init_incremental_state(self, batch_size: int, max_length: int) -> IncrementalState:
        """An empty decoding state.

        Args:
            batch_size: sequences.
            max_length: tokens (padding included) that a sequence may reach.
        """
