"""A family of models of the transformers library, as tables: its settings and its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.flags import check_settings
from scalerun.models import transformer_lm
from scalerun.models.renames import Renames
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.translation import Translation, drop_tied

State = Mapping[str, Tensor]

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "swish",
    "swish": "swish",
}
"""Their name of an activation -> ours. Where ours has several, the first is written."""
SYMBOLS = ("vocab_size", "bos_token_id", "eos_token_id")
"""Settings of the vocabulary, which every family has."""


@dataclass(frozen=True)
class Family:
    """How decoders of one ``model_type`` are written down there."""

    model_type: str
    defaults: Mapping[str, Any]
    """What the library takes for a field that ``config.json`` leaves out; all fields read here."""
    same: Mapping[str, str]
    """Their field -> our setting of the same meaning."""
    only: Mapping[str, Any]
    """Fields that can be converted with one value alone."""
    constant: Mapping[str, Any]
    """Our settings that all models of the family have."""
    more: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Our settings that follow from several fields."""
    renames: Renames
    prepare: Callable[[State], State]
    """Brings a state dict to the names and shapes of the table."""
    unused: str = r"(?!)"
    """A pattern of keys that hold no weights."""

    def complete(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """All fields that are read here.

        Args:
            name: the file they come from, for messages.

        Raises:
            UserError: names a field that has another type, or a value there is no form for.
        """
        found = {key: config.get(key, default) for key, default in self.defaults.items()}
        for key, default in self.defaults.items():
            if not _fits(found[key], default, may_lack=default is None or key in SYMBOLS):
                kind = "int" if default is None else type(default).__name__
                raise UserError(f"{name} has {key} {found[key]!r}; give it as {kind}")
        for key, value in self.only.items():
            if found[key] != value:
                raise UserError(
                    f"{name} has {key} {found[key]!r}, which has no form here; only {value!r} does"
                )
        if found["activation_function"] not in ACTIVATIONS:
            raise UserError(
                f"{name} has activation_function {found['activation_function']!r}, which has no "
                f"form here (these have: {', '.join(ACTIVATIONS)})"
            )
        return found

    def translate(self, config: Mapping[str, Any], state: State, name: str) -> Translation:
        """The model in our words.

        Args:
            config: what :meth:`complete` gives.
            state: weights by their keys.
            name: where the weights come from, for messages.

        Raises:
            UserError: a setting or a weight has no form here, or a weight is missing or has
                another shape.
        """
        same = {ours: config[theirs] for theirs, ours in self.same.items()}
        cfg = TransformerConfig(
            activation_fn=ACTIVATIONS[config["activation_function"]],
            **{**self.constant, **same, **self.more(config)},
        )
        check_settings(cfg)
        weights: dict[str, Tensor] = {}
        for key, tensor in self.prepare(state).items():
            ours = self.renames.ours(key)
            if ours is None:
                raise UserError(f"{name} has {key}, which no {self.model_type} model has here")
            weights[ours] = tensor
        if cfg.share_decoder_input_output_embed:
            drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
        translation = Translation(transformer_lm.MODEL, cfg, weights, config["vocab_size"])
        self._check_shapes(translation, name)
        return translation

    def _check_shapes(self, translation: Translation, name: str) -> None:
        """Refuse weights that do not fit the settings, by their own names."""
        expected = translation.template().state_dict()
        for ours, template in expected.items():
            key, found = self.renames.theirs(ours), translation.weights.get(ours)
            if found is None:
                raise UserError(f"{name} lacks {key}, which the settings ask for")
            if found.shape != template.shape:
                raise UserError(
                    f"{name} has {key} in shape {tuple(found.shape)}, and the settings ask for "
                    f"{tuple(template.shape)}"
                )
        for ours in translation.weights.keys() - expected.keys():
            raise UserError(f"{name} has {self.renames.theirs(ours)}, which the settings exclude")


def _fits(value: Any, default: Any, *, may_lack: bool) -> bool:
    """Whether a field's value has the type of its default; None stands for a whole number."""
    if value is None:
        return may_lack
    kind = int if default is None else type(default)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
