"""Nested state: tensors on one side, plain JSON values on the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

TensorTree = dict[str, Any]
"""Nested dictionaries with string keys whose leaves are tensors."""


def split_state(state: Mapping[str, Any], where: str = "") -> tuple[TensorTree, dict[str, Any]]:
    """Part nested dictionaries into (tensors, everything else), each with the same nesting.

    Raises:
        TypeError: a key is not a string, or a leaf is neither a tensor nor plain JSON.
    """
    tensors: TensorTree = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        path = f"{where}.{key}" if where else str(key)
        if not isinstance(key, str):
            raise TypeError(f"state key {path} is a {type(key).__name__}, not a string")
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping):
            inner_tensors, inner_plain = split_state(value, path)
            if inner_tensors:
                tensors[key] = inner_tensors
            if inner_plain or not inner_tensors:
                plain[key] = inner_plain
        else:
            _check_plain(value, path)
            plain[key] = value
    return tensors, plain


def merge_state(tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`split_state`."""
    merged = dict(plain)
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            merged[key] = value
        else:
            merged[key] = merge_state(value, merged.get(key, {}))
    return merged


def flatten_tensors(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Name each tensor of a tree by its keys joined with dots.

    Raises:
        ValueError: two tensors get the same name.
    """
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        inner = {name: value} if isinstance(value, Tensor) else flatten_tensors(value, f"{name}.")
        if twice := flat.keys() & inner.keys():
            raise ValueError(f"two tensors of the state are named {min(twice)}")
        flat.update(inner)
    return flat


def to_json(plain: Mapping[str, Any]) -> bytes:
    """JSON text from which every float comes back to the last bit."""
    return (json.dumps(plain, indent=1) + "\n").encode()


def _check_plain(value: Any, path: str) -> None:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"state key {path}.{key} is a {type(key).__name__}, not a string")
            _check_plain(item, f"{path}.{key}")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(
            f"state {path} is a {type(value).__name__}; give tensors in dictionaries or JSON values"
        )
