"""One configuration from what weights say and what people say, with nothing guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.attention_config import AttentionConfig
from scalerun.models.retnet import RetNetConfig as RetNetSettings
from scalerun.models.torchscale.beit3 import image_fields, translate_beit3
from scalerun.models.torchscale.configs import (
    OVERRIDDEN,
    AttentionFields,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    SharedConfig,
)
from scalerun.models.torchscale.facts import (
    EMBEDDING,
    expert_facts,
    has_final_norm,
    retention_facts,
    same,
    stack_facts,
    stack_hints,
    unsaid,
    unsaid_of_experts,
    unsaid_of_retention,
)
from scalerun.models.torchscale.loader import (
    translate_decoder,
    translate_encoder,
    translate_encoder_decoder,
    translate_mlm,
)
from scalerun.models.torchscale.recognition import Recognized
from scalerun.models.torchscale.retnet import RetNetConfig, retnet_config, translate_retnet
from scalerun.models.torchscale.translate import (
    beit3_config,
    decoder_config,
    encoder_config,
    encoder_decoder_config,
    mlm_config,
)
from scalerun.models.translation import Translation

NOT_OF_THE_MODEL = ("fsdp", "ddp_rank", "checkpoint_activations", "seq_parallel", "flash_attention")
"""Fields of how a model was trained."""


@dataclass(frozen=True)
class Kind:
    """What belongs to a kind of model."""

    config: type[SharedConfig]
    settings: Callable[..., AttentionConfig | RetNetSettings]
    translate: Callable[..., Translation]
    has_positions: bool = True
    """Whether ``settings`` takes settings of absolute positions."""


KINDS = {
    "encoder": Kind(EncoderConfig, encoder_config, translate_encoder),
    "mlm": Kind(EncoderConfig, mlm_config, translate_mlm),
    "decoder": Kind(DecoderConfig, decoder_config, translate_decoder),
    "encoder_decoder": Kind(
        EncoderDecoderConfig, encoder_decoder_config, translate_encoder_decoder
    ),
    "retnet": Kind(RetNetConfig, retnet_config, translate_retnet, has_positions=False),
    "beit3": Kind(EncoderConfig, beit3_config, translate_beit3, has_positions=False),
}


@dataclass(frozen=True)
class Settled:
    """A model whose configuration is certain."""

    translation: Translation
    config: SharedConfig
    versions: tuple[str, ...]
    """Of TorchScale, all of which give this model."""
    assumed: Mapping[str, Any]
    """Fields that neither the weights nor a record say, with TorchScale's defaults."""


def settle(
    found: Recognized,
    given: Mapping[str, Any],
    *,
    complete: bool = False,
    version: str | None = None,
) -> Settled:
    """Join what the weights say with what is given, and translate the model.

    Args:
        given: TorchScale's fields.
        complete: ``given`` is what an example of TorchScale recorded: its other fields have
            TorchScale's defaults, and it went through ``override``.
        version: ``main`` or ``0.3.0``; None where nothing depends on it.

    Raises:
        ConfigError: a field is not TorchScale's, or chooses something that has no form here.
        UserError: something is missing, or the weights contradict it.
    """
    kind = KINDS[found.kind]
    facts, hints = _facts(found)
    if complete:
        given = _of_the_record(kind, given)
    else:
        # TorchScale's way to say that there is none.
        given = {k: v for k, v in given.items() if not (k == "vocab_size" and v == -1)}
    config = kind.config.from_fields({**hints, **facts, **given})
    missing = [name for name in _unsaid(found, facts, given, version) if name not in given]
    if missing and not complete:
        raise UserError(_request(missing, found, config, version))
    for name, value in facts.items():
        if getattr(config, name) != value:
            raise UserError(
                f"the weights have {name} {value}, but the configuration gives "
                f"{getattr(config, name)}; correct it, or give the weights that belong to it"
            )
    versions = _versions(found, config, version, complete=complete)
    translation = kind.translate(config, found.state, version=versions[0])
    assumed = {name: getattr(config, name) for name in missing}
    return Settled(translation, config, versions, assumed)


def _facts(found: Recognized) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and hints of all stacks together."""
    facts: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    for side, state in found.sides.items():
        is_retnet = found.kind == "retnet"
        own = retention_facts(state) if is_retnet else stack_facts(side, state)
        own |= expert_facts(state)
        for name, value in own.items():
            if facts.setdefault(name, value) != value:
                raise UserError(f"encoder and decoder differ in {name}, which no model's may")
        hints |= stack_hints(side, state)
    tables = {side: state.get(EMBEDDING) for side, state in found.sides.items()}
    if found.kind == "encoder_decoder":
        hints.pop("share_encoder_input_output_embed", None)
        first, second = tables.values()
        shared = first is not None and second is not None and same(first, second)
        hints["share_all_embeddings"] = shared and hints["share_decoder_input_output_embed"]
    if found.kind == "beit3":
        facts |= image_fields(found.state)
    facts.setdefault("moe_freq", 0)
    facts["vocab_size"] = found.num_rows
    return facts, hints


def _unsaid(
    found: Recognized, facts: Mapping[str, Any], given: Mapping[str, Any], version: str | None
) -> list[str]:
    """Fields that the weights do not decide, and that this model depends on."""
    if found.kind == "retnet":
        names = unsaid_of_retention(facts)
    else:
        names = []
        for side, state in found.sides.items():
            names += [name for name in unsaid(side, state, facts) if name not in names]
        # LongNet came after 0.3.0.
        names = [name for name in names if not (name == "segment_length" and version == "0.3.0")]
        if given.get("segment_length"):
            names.append("dilated_ratio")
    return names + (unsaid_of_experts(facts, given) if facts["moe_freq"] else [])


def _request(
    missing: list[str], found: Recognized, config: SharedConfig, version: str | None
) -> str:
    """The sentence that asks for everything that is missing, the version included."""
    sentence = (
        f"the weights alone do not say {', '.join(missing)}; name them in a YAML or JSON file "
        "for --torchscale-config"
    )
    defaults = {field.name: field.default for field in fields(config)}
    left_out = [name for name in missing if name != "dilated_ratio"]  # which has no default
    if left_out:
        sentence += " (where you left them out, TorchScale took "
        sentence += ", ".join(f"{name}: {yaml_word(defaults[name])}" for name in left_out) + ")"
    # Whatever the heads are: the versions do not differ in them.
    heads: dict[str, Any] = {name: 1 for name in missing if name.endswith("_heads")}
    trial = replace(config, **heads)
    try:
        differ = _differ(_fitting(found, trial, _candidates(trial, version)))
    except ConfigError:
        differ = False  # what is missing fits no default, and more cannot be said yet
    return f"{sentence}, and give --torchscale-version" if differ else sentence


def _of_the_record(kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``override`` takes from a record: known fields that are set."""
    known = {field.name for field in fields(kind.config)} - {*NOT_OF_THE_MODEL, "vocab_size"}
    return {name: v for name, v in given.items() if name in known and v is not None}


def _versions(
    found: Recognized,
    config: SharedConfig,
    version: str | None,
    *,
    complete: bool,
) -> tuple[str, ...]:
    """The versions that fit the weights.

    Raises:
        UserError: none does, or two do and differ.
    """
    candidates = _candidates(config, version)
    if complete:
        candidates = [OVERRIDDEN if each == "0.3.0" else each for each in candidates]
    fitting = _fitting(found, config, candidates)
    if not fitting:
        norms = _final_norms(found)
        has = " and ".join(f"{'a' if n else 'no'} norm after the {s}" for s, n in norms.items())
        names = [f"{side}_normalize_before" for side in norms] + ["deepnorm", "subln"]
        raise UserError(
            f"the weights have {has}, which the configuration and TorchScale "
            f"{' or '.join(candidates)} do not give; check {', '.join(names)} and "
            "--torchscale-version"
        )
    if _differ(fitting):
        raise ConfigError(
            "TorchScale main and 0.3.0 read this configuration differently, and the weights fit "
            "both; give --torchscale-version"
        )
    return tuple(fitting)


def _candidates(config: SharedConfig, version: str | None) -> list[str]:
    """Versions that have such a configuration."""
    if version is not None:
        return [version]
    if isinstance(config, AttentionFields) and config.segment_length:
        return ["main"]
    return ["main", "0.3.0"]


def _fitting(
    found: Recognized, config: SharedConfig, candidates: list[str]
) -> dict[str, dict[str, Any]]:
    """Our settings by version, for those whose norms are where the weights have them."""
    kind = KINDS[found.kind]
    # Absolute positions are known by their weights; none at all contradicts nothing.
    bare = {"no_token_positional_embeddings": True} if kind.has_positions else {}
    norms = _final_norms(found)
    fitting: dict[str, dict[str, Any]] = {}
    for each in candidates:
        cfg = kind.settings(config, version=each, **bare)
        if {stack.side: stack.final_norm for stack in cfg.stacks()} == norms:
            fitting[each] = cfg.to_dict()
    return fitting


def _final_norms(found: Recognized) -> dict[str, bool]:
    return {side: has_final_norm(state) for side, state in found.sides.items()}


def _differ(fitting: Mapping[str, dict[str, Any]]) -> bool:
    """Whether versions make different models of one configuration."""
    return len({str(sorted(each.items())) for each in fitting.values()}) > 1


def yaml_word(value: Any) -> str:
    """A field's value as a YAML file has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
