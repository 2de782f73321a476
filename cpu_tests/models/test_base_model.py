from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_model import (
    ARCH_REGISTRY,
    MODEL_REGISTRY,
    Architecture,
    build_model,
    register_model,
    register_model_architecture,
)
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import KVCache
from scalerun.modules.mixer import Mixer

CPU = torch.device("cpu")


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of the test are forgotten afterwards."""
    monkeypatch.setattr(MODEL_REGISTRY, "_entries", dict(MODEL_REGISTRY._entries))
    monkeypatch.setattr(ARCH_REGISTRY, "_presets", dict(ARCH_REGISTRY._presets))


def test_model_names_are_architectures_and_configs_know_their_name() -> None:
    assert {"transformer_lm", "lm_tiny", "opt_175b"} <= set(ARCH_REGISTRY.names())
    assert ARCH_REGISTRY.config_for("lm_tiny")._name == "lm_tiny"
    assert ARCH_REGISTRY.config_for("transformer_lm") == TransformerConfig()


def test_each_call_returns_a_fresh_config() -> None:
    assert ARCH_REGISTRY.config_for("lm_tiny") is not ARCH_REGISTRY.config_for("lm_tiny")


def test_kinds_are_the_models_without_their_presets() -> None:
    kinds = ARCH_REGISTRY.kinds()
    assert {"transformer_lm", "retnet_lm"} <= set(kinds) < set(ARCH_REGISTRY.names())
    settings = [set(ARCH_REGISTRY.config_for(name).to_dict()) for name in kinds]
    assert all(
        set(ARCH_REGISTRY.config_for(name).to_dict()) in settings for name in ARCH_REGISTRY.names()
    )


def test_an_unknown_architecture_is_refused_with_the_closest_names() -> None:
    with pytest.raises(ConfigError, match="--arch 'lm_tny' is not known; did you mean lm_tiny"):
        ARCH_REGISTRY.config_for("lm_tny")


def test_a_name_is_registered_once(isolated: None) -> None:
    for name in ("lm_tiny", "transformer_lm"):
        with pytest.raises(ValueError, match="already registered"):
            register_model_architecture("transformer_lm", name)(TransformerConfig)


def test_a_preset_must_return_its_models_config(isolated: None) -> None:
    @dataclass
    class OtherConfig(TransformerConfig):
        pass

    register_model_architecture("transformer_lm", "odd")(OtherConfig)
    with pytest.raises(TypeError, match="must return a TransformerConfig"):
        ARCH_REGISTRY.config_for("odd")


def test_built_weights_are_a_function_of_the_seed(
    make_config: Callable[..., TransformerConfig],
) -> None:
    def weights(seed: int, layers: int) -> dict[str, torch.Tensor]:
        model = build_model(
            make_config(decoder_layers=layers), vocab_size=9, padding_idx=1, seed=seed, device=CPU
        )
        return model.state_dict()

    one, same, deeper, other = weights(1, 2), weights(1, 2), weights(1, 3), weights(2, 2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], deeper[name]) for name in one)
    assert not torch.equal(one["embedding.tokens.weight"], other["embedding.tokens.weight"])
    assert one["embedding.tokens.weight"][1].tolist() == [0.0] * 16


def test_a_contradictory_config_builds_nothing(
    make_config: Callable[..., TransformerConfig],
) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        build_model(
            make_config(deepnorm=True, subln=True),
            vocab_size=9,
            padding_idx=None,
            seed=1,
            device=CPU,
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation_fn": "geluu"}, "--activation-fn: 'geluu' is not a choice; did you mean gelu"),
        ({"init": "x"}, "--init: 'x' is not a choice"),
        ({"moe_gate": "q"}, "--moe-gate: 'q' is not a choice"),
        ({"decoder_layers": "2"}, "--decoder-layers: '2' is not a whole number"),
        ({"decoder_layers": True}, "--decoder-layers: True is not a whole number"),
        ({"dropout": None}, "--dropout: None is not a number"),
        ({"segment_length": 4}, "--segment-length: 4 is not a list of whole numbers"),
    ],
)
def test_what_a_flag_cannot_be_builds_nothing(
    changes: dict[str, Any], words: str, make_config: Callable[..., TransformerConfig]
) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(make_config(**changes), vocab_size=9, padding_idx=None, seed=1, device=CPU)


class MeanMixer(Mixer):
    """Each token sees the mean of all tokens so far."""

    def forward(self, x_BTD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        steps = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)
        return x_BTD.cumsum(1) / steps[:, None]

    def init_state(self, batch_size: int, max_length: int) -> KVCache:
        return KVCache(max_length)

    def num_active_weights(self) -> int:
        return 0

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        return 0


def test_a_new_mixer_is_one_override(isolated: None) -> None:
    @dataclass
    class MeanConfig(TransformerConfig):
        pass

    class MeanParts(TransformerParts):
        def mixer(self, layer: int) -> Mixer:
            return MeanMixer()

    @register_model("mean_lm", MeanConfig)
    class MeanLM(TransformerLM):
        parts_class = MeanParts

    cfg = ARCH_REGISTRY.config_for("mean_lm")
    assert isinstance(cfg, MeanConfig)
    model = build_model(
        cfg.replace(decoder_embed_dim=16, decoder_attention_heads=2, decoder_layers=2),
        vocab_size=9,
        padding_idx=None,
        seed=1,
        device=CPU,
    )
    assert isinstance(model, MeanLM)
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_a_checkpoint_older_than_a_setting_goes_on_with_its_default(
    make_config: Callable[..., TransformerConfig],
) -> None:
    old = Architecture(make_config()).state_dict()
    del old["settings"]["glu"]
    Architecture(make_config()).load_state_dict(old)
    with pytest.raises(UserError, match="with --no-glu, not --glu; use the arch"):
        Architecture(make_config(glu=True)).load_state_dict(old)


def test_settings_are_compared_by_what_they_resolve_to(
    make_config: Callable[..., TransformerConfig],
) -> None:
    moe = {"moe_freq": 1, "moe_expert_count": 2}
    for one, other in (
        ({**moe, "use_xmoe": True}, {**moe, "use_xmoe": True, "moe_gate": "xmoe"}),
        ({**moe, "moe_gate": "linear"}, moe),
        ({}, {"decoder_normalize_before": True}),
        ({"deepnorm": True}, {"deepnorm": True, "decoder_normalize_before": False}),
    ):
        Architecture(make_config(**one)).load_state_dict(
            Architecture(make_config(**other)).state_dict()
        )
    with pytest.raises(UserError, match="trained with --moe-gate linear, not xmoe; use"):
        Architecture(make_config(**moe, use_xmoe=True)).load_state_dict(
            Architecture(make_config(**moe)).state_dict()
        )
    with pytest.raises(UserError, match="--decoder-normalize-before, not --no-decoder-normalize"):
        Architecture(make_config(decoder_normalize_before=False)).load_state_dict(
            Architecture(make_config()).state_dict()
        )


def test_a_setting_of_another_model_is_named(make_config: Callable[..., TransformerConfig]) -> None:
    state = {"settings": {"norm_eps_mode": "torchscale"}}
    with pytest.raises(UserError, match="with --norm-eps-mode torchscale, not a model that has no"):
        Architecture(TransformerConfig()).load_state_dict(state)


def test_a_new_run_is_warned_once_of_all_that_differs(
    make_config: Callable[..., TransformerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    old = Architecture(make_config()).state_dict()
    new = make_config(segment_length=[4, 8], dilated_ratio=[1, 2], activation_fn="relu")
    Architecture(new).adapt(old, Path("run"))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "the weights of run were trained with --activation-fn gelu, now relu; --dilated-ratio [], "
        "now 1,2; --segment-length [], now 4,8"
    )
    Architecture(make_config()).adapt(old, Path("run"))
    assert len(caplog.records) == 1
    Architecture(new).adapt(None, Path("run"))
    assert "run has no architecture, so nothing shows" in caplog.text


def test_a_new_run_with_another_number_of_heads_is_warned_and_not_refused(
    make_config: Callable[..., TransformerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """The shapes are the same."""
    old = Architecture(make_config()).state_dict()
    Architecture(make_config(decoder_attention_heads=4)).adapt(old, Path("run"))
    assert "were trained with --decoder-attention-heads 2, now 4" in caplog.text
