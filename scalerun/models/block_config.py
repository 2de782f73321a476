"""The settings that every stack of blocks has; names and meanings are TorchScale's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.memory_config import MEMORY_FREE_SETTINGS, MemoryConfig
from scalerun.models.moe_config import MOE_FREE_SETTINGS, MoEConfig

MEGATRON_SIGMA = 0.006


@dataclass
class BlockConfig(MoEConfig, MemoryConfig):
    """Rates, norms, initial weights, and which layers have experts."""

    free_settings = (
        MOE_FREE_SETTINGS
        | MEMORY_FREE_SETTINGS
        | {
            "dropout",
            "no_emb_dropout",
            "drop_path_rate",
            "activation_dropout",
            "init",
            "megatron_init_sigma",
        }
    )

    activation_fn: str = option(
        "gelu",
        "activation of the feed-forward layers; gelu_tanh is GPT-2's approximation of gelu",
        choices=("relu", "gelu", "gelu_tanh", "swish"),
    )
    dropout: float = option(0.0, "dropout on the embedding and on the output of each branch")
    no_emb_dropout: bool = option(False, "no dropout on the embedding")
    drop_path_rate: float = option(
        0.0, "rate at which the last block's branches are dropped; grows linearly from 0"
    )
    activation_dropout: float = option(0.0, "dropout after the feed-forward activation")
    no_scale_embedding: bool = option(
        True, "do not multiply token embeddings by the square root of the width"
    )
    layernorm_embedding: bool = option(False, "norm after the embedding")
    layernorm_eps: float = option(1e-5, "added to the variance in each norm")
    deepnorm: bool = option(False, "DeepNorm: scaled post-norm residuals and initial weights")
    subln: bool = option(False, "SubLN: a second norm in each branch, scaled initial weights")
    keep_norm_placement: bool = option(
        False,
        "--deepnorm and --subln leave the norms where --decoder-normalize-before (on by default) "
        "puts them, as TorchScale's main branch does",
    )
    init: str = option(
        "paper", "how weights start", choices=("paper", "torchscale", "megatron", "bert")
    )
    megatron_init_sigma: float = option(
        MEGATRON_SIGMA, "standard deviation of initial weights with --init megatron"
    )

    def validate(self) -> None:
        for flag, rate in self.rates().items():
            if not 0.0 <= rate < 1.0:
                raise ConfigError(f"{flag} is {rate:g}; give a rate from 0 to below 1")
        for flag, number in (
            ("--layernorm-eps", self.layernorm_eps),
            ("--megatron-init-sigma", self.megatron_init_sigma),
        ):
            if not 0.0 < number < math.inf:
                raise ConfigError(f"{flag} is {number:g}; give a number above 0")
        for contradicts, message in BLOCK_CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message.format(cfg=self))

    def rates(self) -> dict[str, float]:
        """Every rate of dropping something, by flag."""
        return {
            "--dropout": self.dropout,
            "--drop-path-rate": self.drop_path_rate,
            "--activation-dropout": self.activation_dropout,
        }

    def resolved(self) -> Self:
        copy = super().resolved()
        copy.keep_norm_placement = False  # what it stands for
        for name in ("encoder_normalize_before", "decoder_normalize_before"):
            if hasattr(self, name):
                setattr(copy, name, self.residual(getattr(self, name)) == "pre_norm")
        return copy

    def residual(self, normalize_before: bool | None) -> str:
        """Where the norms sit: before each branch by default, but after it with DeepNorm."""
        after = "deep_norm" if self.deepnorm else "post_norm"
        wants_before = normalize_before is not False
        follows = self.deepnorm and not self.keep_norm_placement
        return "pre_norm" if wants_before and not follows else after


BLOCK_CONTRADICTIONS: tuple[tuple[Callable[[BlockConfig], bool], str], ...] = (
    (
        lambda cfg: cfg.deepnorm and cfg.subln,
        "--deepnorm and --subln exclude each other; give one of them",
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
        lambda cfg: cfg.keep_norm_placement and not (cfg.deepnorm or cfg.subln),
        "--keep-norm-placement has no effect without --deepnorm or --subln; remove it",
    ),
    (
        lambda cfg: cfg.init != "megatron" and cfg.megatron_init_sigma != MEGATRON_SIGMA,
        "--megatron-init-sigma has no effect without --init megatron; add that or remove this",
    ),
)
"""Combinations of these settings that make no sense, and the sentence that says so."""
