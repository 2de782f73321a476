"""The settings of mixtures of experts; names and meanings are TorchScale's where it has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.stack import Stack
from scalerun.modules.moe.router import Gating

MOE_FREE_SETTINGS = frozenset(
    {
        "moe_gating_use_fp32",
        "moe_eval_capacity_token_fraction",
        "moe_deterministic_eval",
    }
)
"""What may change in mid-run."""

MOE_OPTIONS = (
    "moe_expert_count",
    "moe_top1_expert",
    "moe_gate",
    "use_xmoe",
    "moe_gating_use_fp32",
    "moe_second_expert_policy",
    "moe_normalize_gate_prob_before_dropping",
    "moe_eval_capacity_token_fraction",
    "moe_deterministic_eval",
    "moe_mask_padding",
)
"""Fields that need ``moe_freq``."""


@dataclass
class MoEConfig(ScalerunDataclass):
    """Which layers have experts, how many, and by what rules tokens go to them."""

    moe_freq: int = option(0, "every n-th layer has experts; 0 for none")
    moe_expert_count: int = option(0, "experts of a layer")
    moe_top1_expert: bool = option(False, "a token goes to one expert and not to two")
    moe_gate: str | None = option(
        None,
        "what chooses experts: linear, the gate of TorchScale's X-MoE, or the cosine gate of its "
        "paper (default: linear, but xmoe with --use-xmoe)",
        choices=("linear", "xmoe", "xmoe_cosine"),
    )
    use_xmoe: bool = option(
        False, "X-MoE: its gate, random second experts, weights normalised before dropping"
    )
    moe_gating_use_fp32: bool = option(True, "compute the gate in float32, whatever the rest is in")
    moe_second_expert_policy: str = option(
        "random",
        "when a token's second expert is used: always, with probability twice its weight, or "
        "always but drawn by Gumbel noise",
        choices=("random", "sampling", "all"),
    )
    moe_normalize_gate_prob_before_dropping: bool = option(
        False, "make a token's two weights add up to 1 before choices are dropped, not after"
    )
    moe_eval_capacity_token_fraction: float = option(
        -1.0, "places of an expert in evaluation, as a share of tokens; -1: as in training"
    )
    moe_deterministic_eval: bool = option(
        True,
        "draw no second experts in evaluation: use those that are used more often than not; "
        "--no-moe-deterministic-eval draws from torch's own generator, whatever --seed is",
    )
    moe_mask_padding: bool = option(True, "do not route padding; TorchScale does")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        return self.moe_freq > 0 and (layer + 1) % self.moe_freq == 0

    def resolved(self) -> Self:
        copy = super().resolved()
        if self.moe_freq > 0:
            copy.use_xmoe = False  # what it stands for
            copy.moe_gate = self.gate_name()
            copy.moe_normalize_gate_prob_before_dropping = self.gating().normalize_before_dropping
        return copy

    def gate_name(self) -> str:
        """The gate that these settings choose."""
        return self.moe_gate or ("xmoe" if self.use_xmoe else "linear")

    def gating(self) -> Gating:
        """The rules that these settings choose."""
        return Gating(
            top_k=1 if self.moe_top1_expert else 2,
            second_expert=self.moe_second_expert_policy,
            normalize_before_dropping=self.use_xmoe or self.moe_normalize_gate_prob_before_dropping,
            float32=self.moe_gating_use_fp32,
            eval_capacity_fraction=self.moe_eval_capacity_token_fraction,
            deterministic_eval=self.moe_deterministic_eval,
        )

    def check_moe(self, stacks: Sequence[Stack]) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: names the flag.
        """
        for flag, count in (
            ("--moe-freq", self.moe_freq),
            ("--moe-expert-count", self.moe_expert_count),
        ):
            if count < 0:
                raise ConfigError(f"{flag} is {count}; give 0 or more")
        share = self.moe_eval_capacity_token_fraction
        if not (0.0 < share <= 1.0 or share == -1.0):
            raise ConfigError(
                f"--moe-eval-capacity-token-fraction is {share:g}; give a share above 0 and up to "
                "1, or -1"
            )
        if self.moe_freq == 0:
            self._check_unused()
            return
        for contradicts, message in MOE_CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message.format(cfg=self))
        if all(self.moe_freq > stack.num_layers for stack in stacks):
            layers = " or ".join(f"--{stack.side}-layers {stack.num_layers}" for stack in stacks)
            raise ConfigError(
                f"--moe-freq {self.moe_freq} gives no layer of {layers} experts; lower it"
            )
        if any(stack.multiway for stack in stacks):
            raise ConfigError(
                "--moe-freq and --multiway exclude each other: a mixture of experts has no "
                "halves; give one of them"
            )

    def check_expert_parallel(self, ranks: int) -> None:
        """Refuse a number of ranks that the experts of a layer cannot be spread over.

        Raises:
            ConfigError: names both flags.
        """
        if self.moe_freq == 0:
            raise ConfigError(
                f"--expert-parallel-size {ranks} has no effect without --moe-freq; add that, or "
                "leave it out"
            )
        if self.moe_expert_count % ranks:
            raise ConfigError(
                f"--expert-parallel-size {ranks} does not divide --moe-expert-count "
                f"{self.moe_expert_count}; choose a divisor"
            )

    def _check_unused(self) -> None:
        unset = MoEConfig()
        for name in MOE_OPTIONS:
            if getattr(self, name) != getattr(unset, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} has no effect without --moe-freq; add that")


MOE_CONTRADICTIONS: tuple[tuple[Callable[[MoEConfig], bool], str], ...] = (
    (
        lambda cfg: cfg.moe_expert_count == 0,
        "--moe-freq needs experts; give --moe-expert-count 1 or more",
    ),
    (
        lambda cfg: cfg.use_xmoe and cfg.moe_gate == "linear",
        "--use-xmoe and --moe-gate linear exclude each other; add --no-use-xmoe or remove "
        "--moe-gate",
    ),
    (
        lambda cfg: cfg.use_xmoe and cfg.moe_second_expert_policy != "random",
        "--use-xmoe draws second experts at random and excludes --moe-second-expert-policy "
        "{cfg.moe_second_expert_policy}; give --no-use-xmoe --moe-gate xmoe, or the policy random",
    ),
    (
        lambda cfg: cfg.moe_top1_expert and cfg.moe_second_expert_policy != "random",
        "--moe-second-expert-policy {cfg.moe_second_expert_policy} has no effect with "
        "--moe-top1-expert; give --no-moe-top1-expert or the policy random",
    ),
    (
        lambda cfg: cfg.moe_top1_expert and cfg.moe_normalize_gate_prob_before_dropping,
        "--moe-normalize-gate-prob-before-dropping has no effect with --moe-top1-expert; add "
        "--no-moe-normalize-gate-prob-before-dropping or --no-moe-top1-expert",
    ),
    (
        lambda cfg: not cfg.moe_deterministic_eval and cfg.moe_top1_expert,
        "--no-moe-deterministic-eval has no effect with --moe-top1-expert, which draws nothing; "
        "give --moe-deterministic-eval or --no-moe-top1-expert",
    ),
    (
        lambda cfg: not cfg.moe_deterministic_eval and cfg.moe_second_expert_policy == "all",
        "--no-moe-deterministic-eval has no effect with --moe-second-expert-policy all, which "
        "draws nothing; give --moe-deterministic-eval or another policy",
    ),
)
"""Combinations of these settings that make no sense, and the sentence that says so."""
