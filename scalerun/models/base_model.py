"""The base of all models, and the names by which models and presets are chosen."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.flags import check_settings
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.models.sequence_parallel import check_sequence_parallel
from scalerun.models.tensor_parallel import check_tensor_parallel
from scalerun.modules.init import initialize
from scalerun.modules.moe.experts import Experts
from scalerun.registry import Registry, unknown_name

logger = logging.getLogger(__name__)


class BaseModel(nn.Module, ABC):
    """A network that a task can train. Its constructor only makes shapes."""

    takes_loss: ClassVar[bool] = False
    """Whether ``forward`` takes a ``loss``, a ``FeatureLoss`` of ``base_decoder``."""
    is_compiled: bool = False
    """Whether :meth:`compile_blocks` was called."""

    @property
    def shares_sequences(self) -> bool:
        """Whether ranks of a sequence axis may each be handed a slice of every sequence."""
        return False

    @classmethod
    @abstractmethod
    def build_model(
        cls,
        cfg: ScalerunDataclass,
        *,
        vocab_size: int,
        padding_idx: int | None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> Self:
        """The network that a configuration describes, with unset weights.

        Runs under ``torch.device("meta")``. Use :func:`build_model` for a network that is ready.

        Args:
            meshes: axes to spread layers over. A layer that knows nothing of them is computed whole
                by every rank, which is right, only not cheaper.
        """

    @abstractmethod
    def max_positions(self) -> int | None:
        """The longest sequence (tokens) the model is meant for; None for no limit."""

    @abstractmethod
    def shard_units(self) -> list[nn.Module]:
        """Modules that are each compiled, recomputed and sharded as one."""

    def slice_length(self, num_tokens: int) -> int:
        """Tokens that each rank of the sequence axis is handed of sequences of ``num_tokens``.

        Slices are equally long; the last ones may reach past the end.
        """
        return num_tokens

    def expert_units(self) -> list[nn.Module]:
        """Modules whose parameters are stacks over experts, which an axis of their own may cut."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    @abstractmethod
    def training_flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of forward and backward for one token.

        6 for each weight that a token is multiplied with (the output projection is one, tied or
        not; looking up an embedding, biases and norms are free), and 12 * width for each key that
        each layer attends to, with no reduction for the causal mask.
        """

    def compile_blocks(self, *, backend: str = "inductor", fullgraph: bool = False) -> None:
        """Compile each shard unit in place; to be called before sharding."""
        self.is_compiled = True
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
        self.cfg = cfg

    def state_dict(self) -> dict[str, Any]:
        """The settings, as JSON values."""
        return {"settings": _fixed_settings(self.cfg)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was made by the same function.

        Raises:
            UserError: it was not; names the first setting that differs.
        """
        for before, now in self.differences(state):
            raise UserError(
                f"the checkpoint was trained with {before}, not {now}; use the architecture that "
                "it was trained with, or start a new run from it: --save-dir NEW --restore-file OLD"
            )

    def adapt(self, state: dict[str, Any] | None, source: Path) -> None:
        """Warn of what differs, where a new run takes the weights of ``source`` and their shapes.

        Args:
            state: the checkpoint's; None if it does not have one.
        """
        if state is None:
            logger.warning("%s has no architecture, so nothing shows that this run's fits", source)
            return
        found = [f"{before}, now {now}" for before, now in self.differences(state)]
        if found:
            logger.warning("the weights of %s were trained with %s", source, "; ".join(found))

    def differences(self, state: dict[str, Any]) -> list[tuple[str, str]]:
        """What a checkpoint was trained with and what is given now, in a user's words.

        A checkpoint that is older than a setting has its default.
        """
        kind = type(self.cfg)
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        saved = state["settings"]
        own = kind(**{name: value for name, value in saved.items() if name in known})
        before = saved | _fixed_settings(own.resolved())
        now = _fixed_settings(self.cfg.resolved())
        return [
            (_spelled(name, before), _spelled(name, now, alone=False))
            for name in sorted(before.keys() - self.cfg.free_settings)
            if name not in now or before[name] != now[name]
        ]


def _fixed_settings(cfg: ScalerunDataclass) -> dict[str, Any]:
    return {
        name: value
        for name, value in cfg.to_dict().items()
        if name != "_name" and name not in cfg.free_settings
    }


def _spelled(name: str, settings: Mapping[str, Any], *, alone: bool = True) -> str:
    """A setting as a user gives it.

    Args:
        alone: with the name of the flag, which need not be said twice.
    """
    flag = name.replace("_", "-")
    if name not in settings:
        return f"a model that has no --{flag}"
    value = settings[name]
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    words = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    words = "none" if value is None else words or "[]"
    return f"--{flag} {words}" if alone else words


MODEL_REGISTRY: Registry[BaseModel] = Registry("--arch", BaseModel)  # type: ignore[type-abstract]
register_model = MODEL_REGISTRY.register


class ArchRegistry:
    """Names of whole configurations. Every model name is one too: the model's defaults."""

    def __init__(self) -> None:
        self._presets: dict[str, tuple[str, Callable[[], ScalerunDataclass]]] = {}

    def names(self) -> list[str]:
        """All names that ``--arch`` accepts, sorted."""
        return sorted({*MODEL_REGISTRY.names(), *self._presets})

    def kinds(self) -> list[str]:
        """Names of the models, sorted, without those of the presets."""
        return MODEL_REGISTRY.names()

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
    meshes: ModelMeshes = ONE_RANK,
    prepare: Callable[[BaseModel], None] = lambda model: None,
    **source: int | None,
) -> BaseModel:
    """The network that a configuration describes, on ``device``, in float32, with drawn weights.

    Args:
        vocab_size: rows of the embedding.
        padding_idx: number of the padding symbol, whose embedding starts at 0.
        seed: decides all weights, whatever the device and the meshes.
        meshes: axes to spread layers over.
        prepare: called with the model while it is shapes alone, as what recomputes, compiles and
            shards it has to be.
        source: ``source_vocab_size`` and ``source_padding_idx`` of an encoder-decoder whose source
            has a vocabulary of its own.

    Raises:
        ConfigError: a setting is of another type, is no choice, or contradicts another one, or the
            ranks of an axis cannot share the model, or its sequences.
    """
    check_settings(cfg)
    if meshes.tensor is not None:
        for size in {vocab_size, source.get("source_vocab_size") or vocab_size}:
            check_tensor_parallel(
                cfg,
                ranks=meshes.tensor.size(),
                sequence_parallel=meshes.sequence_parallel,
                vocab_size=size,
            )
    model_class = MODEL_REGISTRY.class_for(cfg)
    with torch.device("meta"):
        model = model_class.build_model(
            cfg, vocab_size=vocab_size, padding_idx=padding_idx, meshes=meshes, **source
        )
    if meshes.sequence is not None:
        check_sequence_parallel(
            model,
            num_ranks=meshes.sequence.size(),
            shares_sequences=model.shares_sequences,
        )
    prepare(model)
    model.to_empty(device=device)
    initialize(model, seed)
    return model
