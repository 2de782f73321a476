"""Parameter groups: which parameters decay, and whose learning rate is scaled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from scalerun.dataclass.errors import ConfigError
from scalerun.modules.moe.experts import is_expert_parameter


def build_param_groups(
    named_params: Mapping[str, nn.Parameter],
    *,
    weight_decay: float,
    decay_all: bool = False,
    decay_exclude: Sequence[str] = (),
    lr_scale: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Split parameters into groups for a ``torch.optim`` optimizer.

    A parameter with fewer than two dimensions (a bias, the gain of a norm) does not decay, unless
    ``decay_all`` is set; the dimension over which experts are stacked does not count. One whose
    name matches a pattern of ``decay_exclude`` never decays. The first pattern of ``lr_scale`` that
    matches a name decides its factor, 1 without a match. Patterns are shell-style: ``*`` stands for
    any characters, dots included. Kernels take no mixture of plain tensors and DTensors, so these
    are apart too.

    Returns:
        Groups with the keys ``params``, ``names``, ``weight_decay`` and ``lr_scale``, in order of
        first appearance, none of them empty.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    lr_scale = lr_scale or {}
    _check_patterns("--weight-decay-exclude", decay_exclude, named_params)
    _check_patterns("--lr-scale", tuple(lr_scale), named_params)
    groups: dict[tuple[bool, float, bool], dict[str, Any]] = {}
    for name, param in named_params.items():
        decays = decay_all or param.ndim - is_expert_parameter(name) >= 2
        if any(fnmatchcase(name, pattern) for pattern in decay_exclude):
            decays = False
        scale = next((f for pattern, f in lr_scale.items() if fnmatchcase(name, pattern)), 1.0)
        group = groups.setdefault(
            (decays, scale, hasattr(param, "device_mesh")),
            {
                "params": [],
                "names": [],
                "weight_decay": weight_decay if decays else 0.0,
                "lr_scale": scale,
            },
        )
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


def freeze(named_params: Iterable[tuple[str, nn.Parameter]], patterns: Sequence[str]) -> None:
    """Take parameters out of training whose name matches a pattern.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    params = dict(named_params)
    _check_patterns("--freeze-params", patterns, params)
    for name, param in params.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            param.requires_grad_(False)


def _check_patterns(flag: str, patterns: Sequence[str], names: Mapping[str, nn.Parameter]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            example = next(iter(names), "")
            raise ConfigError(
                f"{flag} has {pattern!r}, which matches no parameter; use a parameter's name with "
                f"* for any characters (the first one here is {example})"
            )
