"""The settings of stacks whose mixer is attention, and what contradicts what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.block_config import BlockConfig
from scalerun.models.dilation_config import DilationConfig
from scalerun.models.stack import Axes, Stack

XPOS_BASE = 512
XPOS_LARGEST_EXPONENT = 80.0


@dataclass
class AttentionConfig(BlockConfig, DilationConfig):
    """Attention, its positions, and the form of the per-token layers."""

    free_settings = BlockConfig.free_settings | {"attention_dropout", "dilated_merge_gradient"}

    attention_dropout: float = option(0.0, "dropout on attention weights")
    rms_norm: bool = option(False, "RMSNorm in place of LayerNorm everywhere")
    glu: bool = option(False, "gated feed-forward layers without biases")
    no_token_positional_embeddings: bool = option(
        False, "no absolute positions (sinusoidal ones are the default without a relative scheme)"
    )
    sinusoidal_pos: bool = option(False, "sinusoidal positions, also beside a relative scheme")
    rotary: bool = option(False, "rotary positions")
    xpos_rel_pos: bool = option(False, "XPos positions")
    xpos_scale_base: int = option(XPOS_BASE, "distance scale of XPos, in tokens")
    rel_pos_buckets: int = option(0, "distance buckets of a learned score bias; 0 for none")
    max_rel_pos: int = option(0, "distance from which on all tokens share the last bucket")

    def stacks(self) -> list[Stack]:
        """The stacks of the model."""
        raise NotImplementedError

    def validate(self) -> None:
        super().validate()
        for flag, value, low in (
            ("--xpos-scale-base", self.xpos_scale_base, 1),
            ("--rel-pos-buckets", self.rel_pos_buckets, 0),
            ("--max-rel-pos", self.max_rel_pos, 0),
        ):
            if value < low:
                raise ConfigError(f"{flag} is {value}; give {low} or more")
        self.check_dilation()
        self.check_sizes()
        self.check_moe(self.stacks())
        self.check_memory(self.stacks())
        for stack in self.stacks():
            for contradicts, message in ATTENTION_CONTRADICTIONS:
                if contradicts(self, stack):
                    raise ConfigError(message.format(cfg=self, stack=stack))

    def check_sizes(self) -> None:
        """Refuse sizes below 1.

        Raises:
            ConfigError: names the flag.
        """
        for stack in self.stacks():
            for name, value in (
                ("embed-dim", stack.dim),
                ("attention-heads", stack.num_heads),
                ("ffn-embed-dim", stack.ffn_dim),
                ("layers", stack.num_layers),
            ):
                if value < 1:
                    raise ConfigError(f"--{stack.side}-{name} is {value}; give 1 or more")
            if stack.max_positions < 1:
                raise ConfigError(
                    f"{stack.positions_flag} is {stack.max_positions}; give 1 or more"
                )

    def rates(self) -> dict[str, float]:
        return super().rates() | {"--attention-dropout": self.attention_dropout}

    @property
    def relative_position(self) -> str:
        """The position scheme that the mixers are handed."""
        if self.rotary:
            return "rotary"
        if self.xpos_rel_pos:
            return "xpos"
        return "relative_bias" if self.rel_pos_buckets > 0 else "none"

    def absolute_position(self, *, learned: bool) -> str:
        """The position scheme of an embedding: a relative scheme replaces the default."""
        if learned:
            return "learned"
        if self.sinusoidal_pos:
            return "sinusoidal"
        if self.no_token_positional_embeddings or self.relative_position != "none":
            return "none"
        return "sinusoidal"

    def axes_for(
        self, *, normalize_before: bool | None, learned: bool, alpha: float, gain: float
    ) -> Axes:
        """The parts of one stack.

        Args:
            normalize_before: where the norms sit, or None for the default.
            learned: whether it has learned absolute positions.
            alpha: DeepNorm's factor of the residual stream.
            gain: DeepNorm's or SubLN's factor of initial weights.
        """
        return Axes(
            mixer="dilated_attention" if self.segment_length else "attention",
            absolute_position=self.absolute_position(learned=learned),
            relative_position=self.relative_position,
            residual=self.residual(normalize_before),
            ffn="glu" if self.glu else "ffn",
            init=self.init,
            norm="rms_norm" if self.rms_norm else "layer_norm",
            inner_norm=self.subln,
            alpha=alpha if self.deepnorm else 1.0,
            gain=gain if self.deepnorm or self.subln else 1.0,
        )


def xpos_exponent(cfg: AttentionConfig, stack: Stack) -> float:
    """Largest power of e in XPos factors, at the ends of the longest sequence."""
    return stack.max_positions / 2 / cfg.xpos_scale_base * -math.log(0.4 / 1.4)


ATTENTION_CONTRADICTIONS: tuple[tuple[Callable[[AttentionConfig, Stack], bool], str], ...] = (
    (
        lambda cfg, stack: stack.dim % stack.num_heads != 0,
        "--{stack.side}-embed-dim {stack.dim} is not a multiple of "
        "--{stack.side}-attention-heads {stack.num_heads}; change one of them",
    ),
    (
        lambda cfg, stack: cfg.rotary and cfg.xpos_rel_pos,
        "--rotary and --xpos-rel-pos exclude each other (XPos rotates too); add --no-rotary or "
        "--no-xpos-rel-pos",
    ),
    (
        lambda cfg, stack: cfg.rotary and cfg.rel_pos_buckets > 0,
        "--rotary and --rel-pos-buckets exclude each other; add --no-rotary or remove the buckets",
    ),
    (
        lambda cfg, stack: cfg.xpos_rel_pos and cfg.rel_pos_buckets > 0,
        "--xpos-rel-pos and --rel-pos-buckets exclude each other; give one of them",
    ),
    (
        lambda cfg, stack: (cfg.rotary or cfg.xpos_rel_pos) and stack.head_dim % 2 != 0,
        "rotary and XPos positions need an even width of a head, but --{stack.side}-embed-dim / "
        "--{stack.side}-attention-heads is {stack.head_dim}",
    ),
    (
        lambda cfg, stack: bool(cfg.segment_length) and cfg.rel_pos_buckets > 0,
        "--segment-length and --rel-pos-buckets exclude each other; give --rotary or "
        "--xpos-rel-pos instead of a bias",
    ),
    (
        lambda cfg, stack: max(cfg.dilated_ratio, default=1) > stack.max_positions,
        "--dilated-ratio {cfg.dilated_ratio} has a number above {stack.positions_flag} "
        "{stack.max_positions}: a head would keep no second token; lower it or raise these",
    ),
    (
        lambda cfg, stack: stack.zero_keys and not cfg.segment_length,
        "--encoder-zero-keys has no effect without --segment-length; add that or remove this",
    ),
    (
        lambda cfg, stack: not cfg.xpos_rel_pos and cfg.xpos_scale_base != XPOS_BASE,
        "--xpos-scale-base has no effect without --xpos-rel-pos; add that or remove this",
    ),
    (
        lambda cfg, stack: cfg.xpos_rel_pos and xpos_exponent(cfg, stack) > XPOS_LARGEST_EXPONENT,
        "--xpos-scale-base {cfg.xpos_scale_base} is too small for sequences of "
        "{stack.max_positions} tokens: factors would overflow; raise it",
    ),
    (
        lambda cfg, stack: (cfg.rel_pos_buckets > 0) != (cfg.max_rel_pos > 0),
        "--rel-pos-buckets and --max-rel-pos need each other; give both or none",
    ),
    (
        lambda cfg, stack: 0 < cfg.rel_pos_buckets < 4,
        "--rel-pos-buckets is {cfg.rel_pos_buckets}; give 4 or more",
    ),
    (
        lambda cfg, stack: 0 < cfg.max_rel_pos <= cfg.rel_pos_buckets // 4,
        "--max-rel-pos {cfg.max_rel_pos} must be above a quarter of --rel-pos-buckets "
        "{cfg.rel_pos_buckets}",
    ),
    (
        lambda cfg, stack: cfg.sinusoidal_pos and cfg.no_token_positional_embeddings,
        "--sinusoidal-pos and --no-token-positional-embeddings exclude each other; give one of "
        "them",
    ),
    (
        lambda cfg, stack: cfg.sinusoidal_pos and stack.axes.absolute_position == "learned",
        "--sinusoidal-pos and --{stack.side}-learned-pos exclude each other; give one of them",
    ),
    (
        lambda cfg, stack: (
            stack.axes.absolute_position == "learned" and cfg.no_token_positional_embeddings
        ),
        "--{stack.side}-learned-pos and --no-token-positional-embeddings exclude each other; "
        "give one of them",
    ),
    (
        lambda cfg, stack: cfg.glu and cfg.moe_freq == 1,
        "--glu has no effect with --moe-freq 1, since experts are not gated; remove one of them",
    ),
    (
        lambda cfg, stack: (
            stack.axes.absolute_position == "sinusoidal" and (stack.dim % 2 != 0 or stack.dim < 4)
        ),
        "sinusoidal positions need an even --{stack.side}-embed-dim from 4, not "
        "{stack.dim}; change it or give --{stack.side}-learned-pos",
    ),
)
"""Every combination that makes no sense, and the sentence that says so."""
