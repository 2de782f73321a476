"""What a stack of blocks is made of, whichever side of a model it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """A point on the five axes: which parts a stack is made of."""

    mixer: str
    """attention, dilated_attention or retention."""
    absolute_position: str
    """learned, sinusoidal or none: added to the embedding."""
    relative_position: str
    """rotary, xpos, relative_bias or none: handed to the mixer."""
    residual: str
    """pre_norm, post_norm or deep_norm."""
    ffn: str
    """ffn or glu."""
    init: str
    """paper, torchscale, megatron or bert."""
    norm: str
    """layer_norm or rms_norm."""
    inner_norm: bool
    """A second norm inside each branch (SubLN)."""
    alpha: float
    """Factor of the residual stream."""
    gain: float
    """Factor of the initial value, output and feed-forward weights."""


@dataclass(frozen=True)
class Stack:
    """Sizes of one stack, and its parts."""

    side: str
    """encoder or decoder: the first word of its flags."""
    axes: Axes
    dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    max_positions: int
    """Longest sequence, in tokens."""
    tied_output: bool
    """The token embedding is the output projection."""
    final_norm: bool
    """A norm after the last block."""
    cross_attention: bool = False
    """Each block also attends to an encoder's output."""
    zero_keys: bool = False
    """Dilated attention counts what fills up the last segment as keys, as TorchScale does."""
    multiway: bool = False
    """Each block has a half of its own for either of two kinds of tokens."""

    @property
    def positions_flag(self) -> str:
        """The flag that sets the longest sequence."""
        return f"--max-{'target' if self.side == 'decoder' else 'source'}-positions"

    @property
    def heads_flag(self) -> str:
        """The flag that sets the number of heads."""
        kind = "retention" if self.axes.mixer == "retention" else "attention"
        return f"--{self.side}-{kind}-heads"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads
