"""What a block keeps of its forward pass for its backward pass, and where it keeps it.

B batch, T time, D model width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext

RECOMPUTE_CHOICES = ("all", "selective")

KEPT_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
    }
)
"""Products with a weight and fused attention: most of the work of a block, in few tensors.

Products of activations (``bmm``) are not among them: attention written out has T * T elements. Nor
are those of experts, whose biases are added in place, into what would be kept.
"""


@dataclass(frozen=True)
class ActivationMemory:
    """How the blocks of a stack are run where a backward pass follows. No gradient depends on it.

    Recomputation is that of Chen et al. 2016, arXiv:1604.06174; its selective form follows
    Korthikanti et al. 2022, arXiv:2205.05198, and keeps more than they do: whatever a product with
    a weight gives.
    """

    recompute: str | None = None
    """``all``: a block keeps its input alone and is run again in the backward pass; ``selective``:
    it also keeps what :data:`KEPT_OPERATORS` gave; None: it keeps all that it needs."""
    interval: int = 1
    """Every n-th block is one that recomputes; the others keep everything."""
    offload: bool = False
    """What a block keeps waits in host memory; weights stay where they are."""

    def run(
        self, layer: nn.Module, x_BTD: Tensor, context: BlockContext, *, number: int
    ) -> tuple[Tensor, Auxiliary | None]:
        """What the layer with this number (from 0) returns.

        Recomputation draws the random numbers of the forward pass again.
        """
        if not torch.is_grad_enabled():
            return layer(x_BTD, context)
        with self.place(layer):
            if self.recompute is None or (number + 1) % self.interval:
                return layer(x_BTD, context)
            if self.recompute == "all":
                return checkpoint(layer, x_BTD, context, use_reentrant=False)
            keep_products = partial(create_selective_checkpoint_contexts, keeps)
            return checkpoint(layer, x_BTD, context, use_reentrant=False, context_fn=keep_products)

    def place(self, layer: nn.Module) -> AbstractContextManager[object]:
        """The context in which what the layer keeps goes where it belongs."""
        return HostMemory(layer) if self.offload else nullcontext()


def keeps(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether what an operator gave is kept.

    One that draws random numbers is always run again, since later draws follow its own.
    """
    name = operator.name()
    # Of the product of a vector with a matrix torch takes the row away in place.
    is_vector = name == "aten::mm" and args[0].shape[0] == 1
    if name in KEPT_OPERATORS and not is_vector and dropout_of(operator, args, kwargs) == 0.0:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The rate of dropout that an operator is called with; 0 for one that has none."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0))


class HostMemory(saved_tensors_hooks):
    """Within it, what autograd saves is copied to host memory, and back when it is asked for.

    Both copies are queued on the current stream: on a GPU the host waits for neither.

    Args:
        layer: its parameters are not copied, for they exist all the time.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        """The host's copy and where it came from, or the tensor itself."""
        if self.stays(tensor):
            return tensor
        # Page-locked memory, without which a copy would stop the host.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(self, packed: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        """The tensor that was packed."""
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    def stays(self, tensor: Tensor) -> bool:
        """Whether a copy is larger than what it would free, as for weights and broadcast values."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < tensor.numel() * tensor.element_size():
            return True
        # Looked up at each call, since a sharded layer gathers its weights only when it runs.
        held = (local_part(parameter) for parameter in self.layer.parameters())
        return any(p.untyped_storage().data_ptr() == storage.data_ptr() for p in held)


def local_part(parameter: Tensor) -> Tensor:
    """The tensor itself, or what this process holds of a DTensor."""
    # Not by its class: importing DTensor takes every command most of a second.
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local
