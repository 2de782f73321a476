"""The settings of a transformer decoder, and the point on the five axes that they choose.

The names are those of TorchScale's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.modules.residual import deepnorm_alpha, deepnorm_gain, subln_gain

MEGATRON_SIGMA = 0.006
XPOS_BASE = 512
XPOS_LARGEST_EXPONENT = 80.0


@dataclass(frozen=True)
class Axes:
    """A point on the five axes: which parts a model is made of."""

    mixer: str
    """attention"""
    absolute_position: str
    """learned, sinusoidal or none: added to the embedding."""
    relative_position: str
    """rotary, xpos, relative_bias or none: handed to the mixer."""
    residual: str
    """pre_norm, post_norm or deep_norm."""
    ffn: str
    """ffn or glu."""
    init: str
    """paper, torchscale or megatron."""
    norm: str
    """layer_norm or rms_norm."""
    inner_norm: bool
    """A second norm inside each branch (SubLN)."""
    alpha: float
    """Factor of the residual stream."""
    gain: float
    """Factor of the initial value, output and feed-forward weights."""


@dataclass
class TransformerConfig(ScalerunDataclass):
    """Settings of a decoder; TorchScale's names and, where it trains well, its defaults."""

    free_settings = frozenset(
        {
            "dropout",
            "no_emb_dropout",
            "drop_path_rate",
            "attention_dropout",
            "activation_dropout",
            "max_target_positions",
            "init",
            "megatron_init_sigma",
            "checkpoint_activations",
        }
    )

    decoder_embed_dim: int = option(768, "width of the model")
    decoder_attention_heads: int = option(12, "attention heads; must divide --decoder-embed-dim")
    decoder_ffn_embed_dim: int = option(3072, "inner width of the feed-forward layers")
    decoder_layers: int = option(12, "number of blocks")
    decoder_normalize_before: bool | None = option(
        None, "norm before each branch, or after it (default: before, but after with --deepnorm)"
    )
    activation_fn: str = option(
        "gelu", "activation of the feed-forward layers", choices=("relu", "gelu", "swish")
    )
    dropout: float = option(0.0, "dropout on the embedding and on the output of each branch")
    no_emb_dropout: bool = option(False, "no dropout on the embedding")
    drop_path_rate: float = option(
        0.0, "rate at which the last block's branches are dropped; grows linearly from 0"
    )
    attention_dropout: float = option(0.0, "dropout on attention weights")
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation")
    no_scale_embedding: bool = option(
        True, "do not multiply token embeddings by the square root of the width"
    )
    layernorm_embedding: bool = option(False, "norm after the embedding")
    share_decoder_input_output_embed: bool = option(
        False, "use the token embedding as output projection"
    )
    max_target_positions: int = option(1024, "longest sequence, in tokens")
    layernorm_eps: float = option(1e-5, "added to the variance in each norm")
    rms_norm: bool = option(False, "RMSNorm in place of LayerNorm everywhere")
    glu: bool = option(False, "gated feed-forward layers without biases")
    decoder_learned_pos: bool = option(False, "learned absolute positions")
    no_token_positional_embeddings: bool = option(
        False, "no absolute positions (sinusoidal ones are the default without a relative scheme)"
    )
    rotary: bool = option(False, "rotary positions")
    xpos_rel_pos: bool = option(False, "XPos positions")
    xpos_scale_base: int = option(XPOS_BASE, "distance scale of XPos, in tokens")
    rel_pos_buckets: int = option(0, "distance buckets of a learned score bias; 0 for none")
    max_rel_pos: int = option(0, "distance from which on all tokens share the last bucket")
    deepnorm: bool = option(False, "DeepNorm: scaled post-norm residuals and initial weights")
    subln: bool = option(False, "SubLN: a second norm in each branch, scaled initial weights")
    init: str = option("paper", "how weights start", choices=("paper", "torchscale", "megatron"))
    megatron_init_sigma: float = option(
        MEGATRON_SIGMA, "standard deviation of initial weights with --init megatron"
    )
    checkpoint_activations: bool = option(
        False, "keep only the input of each block and recompute the rest in the backward pass"
    )

    def validate(self) -> None:
        self._check_sizes()
        self._check_rates()
        for contradicts, message in CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message.format(cfg=self))

    def _check_sizes(self) -> None:
        for flag, value in (
            ("--decoder-embed-dim", self.decoder_embed_dim),
            ("--decoder-attention-heads", self.decoder_attention_heads),
            ("--decoder-ffn-embed-dim", self.decoder_ffn_embed_dim),
            ("--decoder-layers", self.decoder_layers),
            ("--max-target-positions", self.max_target_positions),
            ("--xpos-scale-base", self.xpos_scale_base),
        ):
            if value < 1:
                raise ConfigError(f"{flag} is {value}; give 1 or more")
        for flag, value in (
            ("--rel-pos-buckets", self.rel_pos_buckets),
            ("--max-rel-pos", self.max_rel_pos),
        ):
            if value < 0:
                raise ConfigError(f"{flag} is {value}; give 0 or more")
        for flag, number in (
            ("--layernorm-eps", self.layernorm_eps),
            ("--megatron-init-sigma", self.megatron_init_sigma),
        ):
            if not 0.0 < number < math.inf:
                raise ConfigError(f"{flag} is {number:g}; give a number above 0")

    def _check_rates(self) -> None:
        for flag, rate in (
            ("--dropout", self.dropout),
            ("--drop-path-rate", self.drop_path_rate),
            ("--attention-dropout", self.attention_dropout),
            ("--activation-dropout", self.activation_dropout),
        ):
            if not 0.0 <= rate < 1.0:
                raise ConfigError(f"{flag} is {rate:g}; give a rate from 0 to below 1")

    def xpos_exponent(self) -> float:
        """Largest power of e in XPos factors, at the ends of the longest sequence."""
        return self.max_target_positions / 2 / self.xpos_scale_base * -math.log(0.4 / 1.4)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.decoder_embed_dim // self.decoder_attention_heads

    @property
    def normalize_before(self) -> bool:
        """Whether each branch is normed before it rather than after it."""
        if self.decoder_normalize_before is None:
            return not self.deepnorm
        return self.decoder_normalize_before

    @property
    def relative_position(self) -> str:
        """The position scheme that the mixer is handed."""
        if self.rotary:
            return "rotary"
        if self.xpos_rel_pos:
            return "xpos"
        return "relative_bias" if self.rel_pos_buckets > 0 else "none"

    @property
    def absolute_position(self) -> str:
        """The position scheme of the embedding: a relative scheme replaces the default."""
        if self.decoder_learned_pos:
            return "learned"
        if self.no_token_positional_embeddings or self.relative_position != "none":
            return "none"
        return "sinusoidal"

    def axes(self) -> Axes:
        """The parts that these settings choose."""
        residual = "pre_norm" if self.normalize_before else "post_norm"
        return Axes(
            mixer="attention",
            absolute_position=self.absolute_position,
            relative_position=self.relative_position,
            residual="deep_norm" if self.deepnorm else residual,
            ffn="glu" if self.glu else "ffn",
            init=self.init,
            norm="rms_norm" if self.rms_norm else "layer_norm",
            inner_norm=self.subln,
            alpha=deepnorm_alpha(self.decoder_layers) if self.deepnorm else 1.0,
            gain=self._gain(),
        )

    def _gain(self) -> float:
        if self.deepnorm:
            return deepnorm_gain(self.decoder_layers)
        return subln_gain(self.decoder_layers) if self.subln else 1.0


CONTRADICTIONS: tuple[tuple[Callable[[TransformerConfig], bool], str], ...] = (
    (
        lambda cfg: cfg.decoder_embed_dim % cfg.decoder_attention_heads != 0,
        "--decoder-embed-dim {cfg.decoder_embed_dim} is not a multiple of "
        "--decoder-attention-heads {cfg.decoder_attention_heads}; change one of them",
    ),
    (
        lambda cfg: cfg.deepnorm and cfg.subln,
        "--deepnorm and --subln exclude each other; give one of them",
    ),
    (
        lambda cfg: cfg.deepnorm and cfg.decoder_normalize_before is True,
        "--deepnorm norms after each branch; remove --decoder-normalize-before",
    ),
    (
        lambda cfg: cfg.subln and cfg.decoder_normalize_before is False,
        "--subln norms before each branch; remove --no-decoder-normalize-before",
    ),
    (
        lambda cfg: cfg.deepnorm and cfg.init == "megatron",
        "--init megatron sets its own scales and contradicts --deepnorm; give --init paper",
    ),
    (
        lambda cfg: cfg.subln and cfg.init == "megatron",
        "--init megatron sets its own scales and contradicts --subln; give --init paper",
    ),
    (
        lambda cfg: cfg.init != "megatron" and cfg.megatron_init_sigma != MEGATRON_SIGMA,
        "--megatron-init-sigma has no effect without --init megatron; add that or remove this",
    ),
    (
        lambda cfg: cfg.rotary and cfg.xpos_rel_pos,
        "--rotary and --xpos-rel-pos exclude each other (XPos rotates too); give one of them",
    ),
    (
        lambda cfg: cfg.rotary and cfg.rel_pos_buckets > 0,
        "--rotary and --rel-pos-buckets exclude each other; give one of them",
    ),
    (
        lambda cfg: cfg.xpos_rel_pos and cfg.rel_pos_buckets > 0,
        "--xpos-rel-pos and --rel-pos-buckets exclude each other; give one of them",
    ),
    (
        lambda cfg: (cfg.rotary or cfg.xpos_rel_pos) and cfg.head_dim % 2 != 0,
        "rotary and XPos positions need an even width of a head, but --decoder-embed-dim / "
        "--decoder-attention-heads is {cfg.head_dim}",
    ),
    (
        lambda cfg: not cfg.xpos_rel_pos and cfg.xpos_scale_base != XPOS_BASE,
        "--xpos-scale-base has no effect without --xpos-rel-pos; add that or remove this",
    ),
    (
        lambda cfg: cfg.xpos_rel_pos and cfg.xpos_exponent() > XPOS_LARGEST_EXPONENT,
        "--xpos-scale-base {cfg.xpos_scale_base} is too small for --max-target-positions "
        "{cfg.max_target_positions}: factors would overflow; raise it",
    ),
    (
        lambda cfg: (cfg.rel_pos_buckets > 0) != (cfg.max_rel_pos > 0),
        "--rel-pos-buckets and --max-rel-pos need each other; give both or none",
    ),
    (
        lambda cfg: 0 < cfg.rel_pos_buckets < 4,
        "--rel-pos-buckets is {cfg.rel_pos_buckets}; give 4 or more",
    ),
    (
        lambda cfg: 0 < cfg.max_rel_pos <= cfg.rel_pos_buckets // 4,
        "--max-rel-pos {cfg.max_rel_pos} must be above a quarter of --rel-pos-buckets "
        "{cfg.rel_pos_buckets}",
    ),
    (
        lambda cfg: cfg.decoder_learned_pos and cfg.no_token_positional_embeddings,
        "--decoder-learned-pos and --no-token-positional-embeddings exclude each other; "
        "give one of them",
    ),
    (
        lambda cfg: (
            cfg.absolute_position == "sinusoidal"
            and (cfg.decoder_embed_dim % 2 != 0 or cfg.decoder_embed_dim < 4)
        ),
        "sinusoidal positions need an even --decoder-embed-dim from 4, not "
        "{cfg.decoder_embed_dim}; change it or give --decoder-learned-pos",
    ),
)
"""Every combination that makes no sense, and the sentence that says so."""
