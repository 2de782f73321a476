"""The settings of dilated attention, and what contradicts what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.modules.dilation import HEAD_OFFSETS, Dilation
from scalerun.modules.merged_attention import MERGE_GRADIENTS


@dataclass
class DilationConfig(ScalerunDataclass):
    """Segments and ratios; without any, attention is dense."""

    segment_length: list[int] = option(
        [], "LongNet: segment lengths (tokens) of the branches of dilated attention"
    )
    dilated_ratio: list[int] = option(
        [], "LongNet: a head keeps one token in so many, for each of --segment-length"
    )
    dilated_head_offset: str = option(
        "block",
        "LongNet: head h of H starts at h // ceil(H / ratio) (block) or at h mod ratio (mod)",
        choices=HEAD_OFFSETS,
    )
    dilated_merge_gradient: str = option(
        "torchscale",
        "LongNet: take the shares of the branches as constants in the backward pass (torchscale), "
        "or not (exact)",
        choices=MERGE_GRADIENTS,
    )

    def check_dilation(self) -> None:
        """Refuse segments that make no sense.

        Raises:
            ConfigError: names the flag.
        """
        for contradicts, message in DILATION_CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message.format(cfg=self))
        for length, ratio in zip(self.segment_length, self.dilated_ratio, strict=True):
            if ratio < 1:
                raise ConfigError(f"--dilated-ratio has {ratio}; give numbers from 1")
            if length < 1:
                raise ConfigError(f"--segment-length has {length}; give numbers from 1")
            if length % ratio:
                raise ConfigError(
                    f"--segment-length has {length}, which is not a multiple of its ratio {ratio} "
                    "in --dilated-ratio; change one of them"
                )

    def warnings(self) -> list[str]:
        found = super().warnings()
        if self.segment_length and 1 not in self.dilated_ratio:
            ratios = ",".join(map(str, self.dilated_ratio))
            found.append(
                f"--dilated-ratio {ratios} has no 1: heads read nothing at the tokens that all of "
                "their branches leave out"
            )
        return found

    def dilation(self, *, zero_keys: bool) -> Dilation:
        """The branches of dilated attention.

        Args:
            zero_keys: as in :class:`Dilation`.
        """
        return Dilation(
            tuple(self.segment_length),
            tuple(self.dilated_ratio),
            head_offset=self.dilated_head_offset,
            zero_keys=zero_keys,
            merge_gradient=self.dilated_merge_gradient,
        )


DILATION_CONTRADICTIONS: tuple[tuple[Callable[[DilationConfig], bool], str], ...] = (
    (
        lambda cfg: len(cfg.segment_length) != len(cfg.dilated_ratio),
        "--segment-length {cfg.segment_length} and --dilated-ratio {cfg.dilated_ratio} need each "
        "other; give as many numbers in both",
    ),
    (
        lambda cfg: not cfg.segment_length and cfg.dilated_head_offset != "block",
        "--dilated-head-offset has no effect without --segment-length; add that or remove this",
    ),
    (
        lambda cfg: not cfg.segment_length and cfg.dilated_merge_gradient != "torchscale",
        "--dilated-merge-gradient has no effect without --segment-length; add that or remove this",
    ),
)
"""Combinations of these settings that make no sense, and the sentence that says so."""
