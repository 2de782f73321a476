"""An encoder, and a decoder that reads its output.

B batch, M source tokens, T target tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.models.base_decoder import DecoderOutput, FeatureLoss
from scalerun.models.base_model import BaseModel
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.models.transformer_encoder import TransformerEncoder
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.incremental_state import EncodedSource, IncrementalState
from scalerun.modules.moe.moe_layer import MoELayer


class Encoded(NamedTuple):
    """A source that is ready for the decoder."""

    source: EncodedSource
    reports: tuple[Auxiliary, ...]
    """One for each layer of the encoder that has an auxiliary loss."""


class EncoderDecoder(BaseModel):
    """Encodes a source once and predicts the target's next tokens from both.

    Args:
        encoder_parts: makes the encoder's parts.
        decoder_parts: makes the decoder's parts.
        share_embeddings: the decoder's token embedding is the encoder's.
    """

    parts_class: type[TransformerParts] = TransformerParts
    takes_loss: ClassVar[bool] = True

    def __init__(
        self,
        encoder_parts: TransformerParts,
        decoder_parts: TransformerParts,
        *,
        share_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.padding_idx = encoder_parts.padding_idx
        self.target_padding_idx = decoder_parts.padding_idx
        self.encoder = TransformerEncoder(encoder_parts, output_layer=False)
        shared = self.encoder.embedding.tokens if share_embeddings else None
        self.decoder = TransformerDecoder(decoder_parts, decoder_parts.embedding(shared))
        layers = [part for part in self.decoder.modules() if isinstance(part, MoELayer)]
        # Attention sees no padding on the right anyway.
        self._hides_target_padding = any(layer.mask_padding for layer in layers)

    @classmethod
    def build_model(
        cls,
        cfg: Any,
        *,
        vocab_size: int,
        padding_idx: int | None,
        source_vocab_size: int | None = None,
        source_padding_idx: int | None = None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> Self:
        """As in :class:`BaseModel`.

        Args:
            source_vocab_size: rows of the encoder's embedding where the source has a vocabulary of
                its own; None where both sides have the same.
            source_padding_idx: number of that vocabulary's padding symbol.

        Raises:
            ConfigError: two vocabularies are to share an embedding.
        """
        joint = source_vocab_size is None
        if cfg.share_all_embeddings and not joint:
            raise ConfigError(
                "--share-all-embeddings needs one vocabulary for source and target; give one "
                "--tokenizer for both, or --no-share-all-embeddings"
            )
        encoder = cls.parts_class(
            cfg,
            cfg.encoder_stack(),
            vocab_size=vocab_size if source_vocab_size is None else source_vocab_size,
            padding_idx=padding_idx if joint else source_padding_idx,
            meshes=meshes,
        )
        decoder = cls.parts_class(
            cfg,
            cfg.decoder_stack(),
            vocab_size=vocab_size,
            padding_idx=padding_idx,
            meshes=meshes,
        )
        return cls(encoder, decoder, share_embeddings=cfg.share_all_embeddings)

    def forward(
        self,
        source_BM: Tensor | None,
        tokens_BT: Tensor,
        *,
        source_padding_mask_BM: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        last_token_only: bool = False,
        loss: FeatureLoss | None = None,
    ) -> DecoderOutput:
        """Logits (B, T, V) of the token that follows each target token; reports of both stacks.

        Args:
            source_BM: (B, M) int64; None after the first call with an incremental state, which
                keeps what was encoded.
            tokens_BT: (B, T) int64; with an incremental state the new ones.
            source_padding_mask_BM: (B, M) bool, True for padding; by default where the source is
                the padding symbol.
            padding_mask_BT: (B, T) bool; needed only where padding is on the left. By default
                where the target is the padding symbol, for experts that are not to see it.
            incremental_state: from :meth:`init_incremental_state`; see :class:`BaseDecoder`.
            last_token_only: compute the logits of the last token alone.
            loss: computed in place of the logits.
        """
        source: EncodedSource | None = None
        reports: tuple[Auxiliary, ...] = ()
        if source_BM is not None:
            source, reports = self.encode(source_BM, padding_mask_BM=source_padding_mask_BM)
        pad = self.target_padding_idx
        if padding_mask_BT is None and self._hides_target_padding and pad is not None:
            padding_mask_BT = tokens_BT == pad
        output = self.decoder(
            tokens_BT,
            padding_mask_BT=padding_mask_BT,
            incremental_state=incremental_state,
            last_token_only=last_token_only,
            source=source,
            loss=loss,
        )
        return output._replace(reports=reports + output.reports)

    def encode(self, source_BM: Tensor, *, padding_mask_BM: Tensor | None = None) -> Encoded:
        """The encoder's part of :meth:`forward`; its source goes to the decoder, once."""
        if padding_mask_BM is None and self.padding_idx is not None:
            padding_mask_BM = source_BM == self.padding_idx
        output = self.encoder(source_BM, padding_mask_BT=padding_mask_BM)
        return Encoded(EncodedSource(output.features, padding_mask_BM), output.reports)

    def init_incremental_state(self, batch_size: int, max_length: int) -> IncrementalState:
        """An empty state of the decoder; see :class:`BaseDecoder`."""
        return self.decoder.init_incremental_state(batch_size, max_length)

    def max_positions(self) -> int | None:
        return self.decoder.max_positions()

    def shard_units(self) -> list[nn.Module]:
        return [*self.encoder.shard_units(), *self.decoder.shard_units()]

    def training_flops_per_token(self, sequence_length: int) -> int:
        encoder = self.encoder.training_flops_per_token(sequence_length)
        return encoder + self.decoder.training_flops_per_token(sequence_length)
