"""Checkpoints of models with experts: one file that all ranks share, and one for each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.weight_file import WeightFile, read_weight_file

SHARED = re.compile(r"(.+)-shared(\.\w+)")
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
GATE = re.compile(r".*\.gate\.wg(\.weight)?")
RANK_PART = "expert"
"""Stands in every key that belongs to the files of ranks."""


def read_checkpoint(path: Path, *, allow_namespace: bool = False) -> WeightFile:
    """Read a file; beside one that is called ``NAME-shared.pt`` also all ``NAME-rank-R.pt``.

    Arguments and errors as in :func:`~scalerun.models.weight_file.read_weight_file`.
    """
    shared = read_weight_file(path, allow_namespace=allow_namespace)
    match = SHARED.fullmatch(path.name)
    if match is None:
        return shared
    ranks: list[dict[str, Tensor]] = []
    while (file := path.with_name(f"{match[1]}-rank-{len(ranks)}{match[2]}")).is_file():
        ranks.append(read_weight_file(file, allow_namespace=allow_namespace).state)
    if not ranks:
        raise UserError(f"{path} is one part of a checkpoint, and {file.name} is not beside it")
    return WeightFile(shared.state | joined_experts(shared.state, ranks), shared.record)


def joined_experts(
    shared: Mapping[str, Tensor], ranks: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The experts of all ranks, under their numbers in the whole model.

    With at least as many experts as ranks, each rank has its own: the local expert j of E / W is
    number ``rank * E / W + j``. With fewer, each rank has one, number ``rank mod E``.

    Args:
        shared: has the gates, which know how many experts there are.

    Raises:
        UserError: experts are missing, or copies of one differ.
    """
    num_experts = next((t.shape[0] for key, t in shared.items() if GATE.fullmatch(key)), None)
    if num_experts is None:
        raise UserError("the shared file has no gate (moe_layer.gate.wg), so it has no experts")
    joined: dict[str, Tensor] = {}
    for rank, state in enumerate(ranks):
        for key, tensor in state.items():
            if RANK_PART not in key:
                continue
            match = EXPERT.fullmatch(key)
            if match is None:
                raise UserError(f"the file of rank {rank} has {key}, which is no part of an expert")
            first = rank * num_experts // len(ranks)
            number = (first if num_experts >= len(ranks) else rank % num_experts) + int(match[2])
            name = f"{match[1]}{number}{match[3]}"
            if name in joined and not torch.equal(joined[name], tensor):
                raise UserError(f"the ranks have different copies of {name}")
            joined[name] = tensor
    found = {int(match[2]) for key in joined if (match := EXPERT.fullmatch(key))}
    if found != set(range(num_experts)):
        raise UserError(
            f"the files of {len(ranks)} ranks have {len(found)} experts, and the gates choose "
            f"among {num_experts}; files of ranks are missing"
        )
    return joined
