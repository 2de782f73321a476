"""The base of all models, and the names by which models and presets are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import nn

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.flags import check_settings
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.modules.init import initialize
from scalerun.registry import Registry, unknown_name


class BaseModel(nn.Module, ABC):
    """A network that a task can train. Its constructor only makes shapes."""

    @classmethod
    @abstractmethod
    def build_model(
        cls, cfg: ScalerunDataclass, *, vocab_size: int, padding_idx: int | None
    ) -> Self:
        """The network that a configuration describes, with unset weights.

        Runs under ``torch.device("meta")``. Use :func:`build_model` for a network that is ready.
        """

    @abstractmethod
    def max_positions(self) -> int | None:
        """The longest sequence (tokens) the model is meant for; None for no limit."""

    @abstractmethod
    def shard_units(self) -> list[nn.Module]:
        """Modules that are each compiled, recomputed and sharded as one."""

    @abstractmethod
    def training_flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of forward and backward for one token.

        6 for each weight that a token is multiplied with (the output projection is one, tied or
        not; looking up an embedding, biases and norms are free), and 12 * width for each key that
        each layer attends to, with no reduction for the causal mask.
        """

    def compile_blocks(self, *, backend: str = "inductor", fullgraph: bool = False) -> None:
        """Compile each shard unit in place; to be called before sharding."""
        for unit in self.shard_units():
            unit.compile(backend=backend, fullgraph=fullgraph)


class Architecture:
    """What a checkpoint's weights mean: the settings of the model that computes with them.

    Equal shapes do not make equal functions: another number of heads or another activation would
    go on with the weights without a word.

    Args:
        cfg: the model's configuration; its ``free_settings`` may change in mid-run.
    """

    def __init__(self, cfg: ScalerunDataclass) -> None:
        self.settings = _fixed_settings(cfg)
        self.defaults = _fixed_settings(type(cfg)())
        """What a checkpoint has that is older than a setting."""

    def state_dict(self) -> dict[str, Any]:
        """The settings, as JSON values."""
        return {"settings": self.settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was made by the same function.

        Raises:
            UserError: it was not; names the first setting that differs.
        """
        saved = state["settings"]
        for name in sorted(saved.keys() | self.settings.keys()):
            before = saved.get(name, self.defaults.get(name))
            now = self.settings.get(name)
            if before != now:
                raise UserError(
                    f"the checkpoint was trained with --{name.replace('_', '-')} {before}, not "
                    f"{now}; use the architecture that it was trained with"
                )


def _fixed_settings(cfg: ScalerunDataclass) -> dict[str, Any]:
    return {
        name: value
        for name, value in cfg.to_dict().items()
        if name != "_name" and name not in cfg.free_settings
    }


MODEL_REGISTRY: Registry[BaseModel] = Registry("--arch", BaseModel)  # type: ignore[type-abstract]
register_model = MODEL_REGISTRY.register


class ArchRegistry:
    """Names of whole configurations. Every model name is one too: the model's defaults."""

    def __init__(self) -> None:
        self._presets: dict[str, tuple[str, Callable[[], ScalerunDataclass]]] = {}

    def names(self) -> list[str]:
        """All names that ``--arch`` accepts, sorted."""
        return sorted({*MODEL_REGISTRY.names(), *self._presets})

    def config_for(self, arch_name: str) -> ScalerunDataclass:
        """A fresh configuration.

        Raises:
            ConfigError: nobody registered the name; the message lists the closest names.
        """
        if arch_name in self._presets:
            model_name, preset = self._presets[arch_name]
            config = preset()
            expected = MODEL_REGISTRY.get(model_name).config_class
            if type(config) is not expected:
                raise TypeError(f"preset {arch_name} must return a {expected.__qualname__}")
            return config.named(arch_name)
        if arch_name in MODEL_REGISTRY:
            return MODEL_REGISTRY.config_for(arch_name)
        raise unknown_name("--arch", arch_name, self.names())

    def register(
        self, arch_name: str, preset: Callable[[], ScalerunDataclass], *, model_name: str
    ) -> None:
        """Add a preset of a model.

        Raises:
            ValueError: the name is taken.
        """
        if arch_name in self._presets or arch_name in MODEL_REGISTRY:
            raise ValueError(f"--arch {arch_name!r} is already registered")
        self._presets[arch_name] = (model_name, preset)


ARCH_REGISTRY = ArchRegistry()

Preset = TypeVar("Preset", bound=Callable[[], ScalerunDataclass])


def register_model_architecture(model_name: str, arch_name: str) -> Callable[[Preset], Preset]:
    """Decorator over a function without arguments that returns a whole configuration."""

    def add(preset: Preset) -> Preset:
        ARCH_REGISTRY.register(arch_name, preset, model_name=model_name)
        return preset

    return add


def build_model(
    cfg: ScalerunDataclass,
    *,
    vocab_size: int,
    padding_idx: int | None,
    seed: int,
    device: torch.device,
) -> BaseModel:
    """The network that a configuration describes, on ``device``, in float32, with drawn weights.

    Args:
        vocab_size: rows of the embedding.
        padding_idx: number of the padding symbol, whose embedding starts at 0.
        seed: decides all weights, whatever the device.

    Raises:
        ConfigError: a setting is of another type, is no choice, or contradicts another one.
    """
    check_settings(cfg)
    model_class = MODEL_REGISTRY.class_for(cfg)
    with torch.device("meta"):
        model = model_class.build_model(cfg, vocab_size=vocab_size, padding_idx=padding_idx)
    model.to_empty(device=device)
    initialize(model, seed)
    return model
