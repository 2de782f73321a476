"""Which models can be trained by ranks that each have a slice of every sequence."""

from __future__ import annotations

from torch import nn

from scalerun.dataclass.errors import ConfigError
from scalerun.modules.moe.experts import Experts
from scalerun.modules.residual import Residual


def check_sequence_parallel(model: nn.Module, *, num_ranks: int, shares_sequences: bool) -> None:
    """Refuse a model that would compute something else from slices of sequences.

    Args:
        num_ranks: ``--seq-parallel-size``.
        shares_sequences: whether the model can be handed slices at all.

    Raises:
        ConfigError: names the flag.
    """
    flag = f"--seq-parallel-size {num_ranks}"
    if not shares_sequences:
        raise ConfigError(
            f"{flag} gives each rank a slice of every sequence, which only decoders can use whose "
            "attention is dilated (--segment-length, --dilated-ratio); leave it out, or choose "
            "such an --arch as longnet_base"
        )
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ConfigError(
            f"{flag} does not go with --moe-freq: experts would be chosen, and filled, for a slice "
            "of a batch instead of all of it; remove one of them"
        )
    if any(module.drop_path > 0 for module in model.modules() if isinstance(module, Residual)):
        raise ConfigError(
            f"{flag} does not go with --drop-path-rate, which would leave out a layer for a slice "
            "of a sequence; remove one of them"
        )
