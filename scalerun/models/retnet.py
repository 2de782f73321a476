"""RetNet: a decoder whose blocks retain instead of attending (Sun et al. 2023, arXiv:2307.08621).

It differs from the plain decoder in its mixer, which decodes from a state of fixed size, in its
norms, which are RMSNorm, and in its per-token layers, which are gated; there are no position
embeddings. The sizes are those of TorchScale's examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.block_config import BlockConfig
from scalerun.models.blocks import StackParts
from scalerun.models.sides import check_norm_placement
from scalerun.models.stack import Axes, Stack
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.init import LinearInit, xavier_uniform, zeros
from scalerun.modules.linear import product_dtype
from scalerun.modules.mixer import Mixer
from scalerun.modules.residual import deepnorm_alpha, deepnorm_gain
from scalerun.modules.retention import NORM_EPS_MODES, Retention, RetentionInit

MODEL = "retnet_lm"
CHUNK_SIZE = 512


@dataclass
class RetNetConfig(BlockConfig):
    """Settings of a RetNet; TorchScale's names."""

    free_settings = BlockConfig.free_settings | {
        "max_target_positions",
        "chunkwise_recurrent",
        "recurrent_chunk_size",
    }

    activation_fn: str = option(
        "swish", "activation of the feed-forward layers", choices=("relu", "gelu", "swish")
    )
    layernorm_eps: float = option(1e-6, "added to the mean square in each norm")
    decoder_embed_dim: int = option(768, "width of the decoder, of its queries and of its keys")
    decoder_value_embed_dim: int = option(1296, "width of the values")
    decoder_retention_heads: int = option(
        3, "retention heads; twice as many must divide --decoder-embed-dim"
    )
    decoder_ffn_embed_dim: int = option(1296, "inner width of the feed-forward layers")
    decoder_layers: int = option(12, "number of blocks")
    decoder_normalize_before: bool | None = option(
        None,
        "norm before each branch, or after it (default: before, but after with --deepnorm)",
    )
    share_decoder_input_output_embed: bool = option(
        False, "use the token embedding as output projection"
    )
    max_target_positions: int = option(1024, "longest sequence, in tokens")
    chunkwise_recurrent: bool = option(
        False, "go through a sequence chunk by chunk: time and memory grow with its length alone"
    )
    recurrent_chunk_size: int = option(CHUNK_SIZE, "tokens of a chunk")
    norm_eps_mode: str = option(
        "scale_free",
        "what --layernorm-eps is measured against in the norm of each head: the same in every form "
        "of retention, or as in TorchScale",
        choices=NORM_EPS_MODES,
    )

    def validate(self) -> None:
        super().validate()
        check_norm_placement(self, self.decoder_normalize_before, "decoder")
        for name in (
            "decoder_embed_dim",
            "decoder_value_embed_dim",
            "decoder_retention_heads",
            "decoder_ffn_embed_dim",
            "decoder_layers",
            "max_target_positions",
            "recurrent_chunk_size",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; give 1 or more")
        for contradicts, message in CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message.format(cfg=self))
        self.check_moe(self.stacks())
        self.check_memory(self.stacks())

    def stacks(self) -> list[Stack]:
        """The stacks of the model."""
        return [self.decoder_stack()]

    def decoder_stack(self) -> Stack:
        """The one stack of the model."""
        residual = self.residual(self.decoder_normalize_before)
        axes = Axes(
            mixer="retention",
            absolute_position="none",
            relative_position="none",
            residual=residual,
            ffn="glu",
            init=self.init,
            norm="rms_norm",
            inner_norm=False,
            alpha=deepnorm_alpha(self.decoder_layers) if self.deepnorm else 1.0,
            gain=deepnorm_gain(self.decoder_layers) if self.deepnorm else 1.0,
        )
        return Stack(
            side="decoder",
            axes=axes,
            dim=self.decoder_embed_dim,
            ffn_dim=self.decoder_ffn_embed_dim,
            num_layers=self.decoder_layers,
            num_heads=self.decoder_retention_heads,
            max_positions=self.max_target_positions,
            tied_output=self.share_decoder_input_output_embed,
            final_norm=residual == "pre_norm",
        )


CONTRADICTIONS: tuple[tuple[Callable[[RetNetConfig], bool], str], ...] = (
    (
        lambda cfg: cfg.decoder_embed_dim % (2 * cfg.decoder_retention_heads) != 0,
        "--decoder-embed-dim {cfg.decoder_embed_dim} over --decoder-retention-heads "
        "{cfg.decoder_retention_heads} must be an even width of a head; change one of them",
    ),
    (
        lambda cfg: cfg.decoder_value_embed_dim % cfg.decoder_retention_heads != 0,
        "--decoder-value-embed-dim {cfg.decoder_value_embed_dim} is not a multiple of "
        "--decoder-retention-heads {cfg.decoder_retention_heads}; change one of them",
    ),
    (
        lambda cfg: not cfg.chunkwise_recurrent and cfg.recurrent_chunk_size != CHUNK_SIZE,
        "--recurrent-chunk-size has no effect without --chunkwise-recurrent; add that or remove "
        "this",
    ),
    (
        lambda cfg: cfg.subln and cfg.moe_freq == 0,
        "--subln has no effect on a RetNet without experts, whose heads are normed and whose "
        "feed-forward layers are gated; remove it or add --moe-freq",
    ),
)
"""Every combination that makes no sense, and the sentence that says so."""


class RetNetParts(StackParts):
    """Makes the parts of a RetNet."""

    cfg: RetNetConfig

    def mixer(self, layer: int) -> Mixer:
        cfg = self.cfg
        return Retention(
            cfg.decoder_embed_dim,
            cfg.decoder_value_embed_dim,
            cfg.decoder_retention_heads,
            init=self.retention_init(),
            norm_eps=cfg.layernorm_eps,
            norm_eps_mode=cfg.norm_eps_mode,
            chunk_size=cfg.recurrent_chunk_size if cfg.chunkwise_recurrent else None,
            tp_mesh=self.meshes.tensor,
        )

    def retention_init(self) -> RetentionInit:
        """How the five projections start.

        The paper starts its weights as DeepNet does, which says nothing of the gate: with ``paper``
        it starts as the gate of the feed-forward layers. TorchScale's code draws
        from Xavier-uniform with gains of its own, and scales values and output for DeepNorm.
        """
        drawn, gain = self.weights.attention, self.axes.gain
        if self.axes.init != "torchscale":
            return RetentionInit(
                q=drawn.q, k=drawn.k, v=drawn.v, g=self.weights.ffn.gate, out=drawn.out
            )
        plain = LinearInit(xavier_uniform(2**-2.5), zeros)
        return RetentionInit(
            q=plain,
            k=plain,
            v=LinearInit(xavier_uniform(gain * 2**-2.5), zeros),
            g=plain,
            out=LinearInit(xavier_uniform(gain * 2**-1), zeros),
        )


@register_model(MODEL, RetNetConfig)
class RetNetLM(TransformerDecoder):
    """``--arch retnet_lm``, with the defaults of :class:`RetNetConfig`."""

    parts_class = RetNetParts

    def run_layers(
        self, x_BTD: Tensor, context: BlockContext, *, state: IncrementalState | None = None
    ) -> tuple[Tensor, list[Auxiliary]]:
        mixer = self.blocks()[0].mixer
        assert isinstance(mixer, Retention)
        assert context.positions_BT is not None
        num_tokens = context.positions_BT.shape[1]
        tables = mixer.tables(context, num_tokens, product_dtype(x_BTD))
        return super().run_layers(x_BTD, replace(context, rotation=tables), state=state)


@register_model_architecture(MODEL, "retnet_tiny")
def retnet_tiny() -> RetNetConfig:
    """About the size of ``lm_tiny``: minutes on a CPU."""
    return RetNetConfig(
        decoder_embed_dim=128,
        decoder_value_embed_dim=216,
        decoder_ffn_embed_dim=216,
        decoder_retention_heads=2,
        decoder_layers=4,
        no_scale_embedding=False,
        share_decoder_input_output_embed=True,
    )


def retnet(*, layers: int, dim: int, value_dim: int, heads: int) -> RetNetConfig:
    """A size of TorchScale's language-modelling example; heads are 256 wide."""
    return RetNetConfig(
        decoder_embed_dim=dim,
        decoder_value_embed_dim=value_dim,
        decoder_ffn_embed_dim=value_dim,
        decoder_retention_heads=heads,
        decoder_layers=layers,
        no_scale_embedding=False,
    )


RETNET_SIZES = {
    "retnet_base": (6, 512, 864, 2),
    "retnet_medium": (16, 1024, 1728, 4),
    "retnet_xl": (24, 2048, 3456, 8),
    "retnet_3b": (32, 2560, 4280, 10),
    "retnet_7b": (32, 4096, 6912, 16),
    "retnet_13b": (40, 5120, 8560, 20),
    "retnet_65b": (64, 8192, 13824, 32),
}
"""Layers, width, width of values and feed-forward layers, heads."""

for _name, (_layers, _dim, _value_dim, _heads) in RETNET_SIZES.items():
    register_model_architecture(MODEL, _name)(
        partial(retnet, layers=_layers, dim=_dim, value_dim=_value_dim, heads=_heads)
    )
