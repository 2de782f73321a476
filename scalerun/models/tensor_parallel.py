"""What the ranks of a tensor axis can share, and what they cannot."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.stack import Stack


@runtime_checkable
class HasStacks(Protocol):
    """A configuration whose model is made of stacks."""

    def stacks(self) -> list[Stack]:
        """All of them."""


def check_tensor_parallel(
    cfg: ScalerunDataclass, *, ranks: int, sequence_parallel: bool, vocab_size: int | None = None
) -> None:
    """Refuse a model that so many ranks cannot share in equal parts, before it is built.

    Args:
        cfg: the model's configuration. One without stacks is whole on every rank, and passes.
        ranks: ``--model-parallel-size``.
        sequence_parallel: whether tokens are to be spread as well.
        vocab_size: rows of the embedding; None if they are not known yet.

    Raises:
        ConfigError: names the flag.
    """
    if ranks == 1 or not isinstance(cfg, HasStacks):
        return
    cannot = f"cannot be shared equally by --model-parallel-size {ranks} ranks"
    for stack in cfg.stacks():
        for flag, number in (
            (stack.heads_flag, stack.num_heads),
            (f"--{stack.side}-ffn-embed-dim", stack.ffn_dim),
        ):
            if number % ranks:
                raise ConfigError(f"{flag} {number} {cannot}; change one of them")
        if sequence_parallel and stack.multiway:
            raise ConfigError(
                "--sequence-parallel spreads a sequence over the ranks, and with --multiway its "
                "two kinds of tokens would be on other ranks in each batch; remove one of them"
            )
    if vocab_size is not None and vocab_size % ranks:
        raise ConfigError(
            f"the {vocab_size} symbols of the vocabulary {cannot}; choose a tokenizer with a "
            f"multiple of {ranks} symbols, or another --model-parallel-size"
        )
