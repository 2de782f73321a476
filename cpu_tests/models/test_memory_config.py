"""How a model's settings of activation memory run its blocks, in every kind of model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import Architecture, BaseModel, build_model
from scalerun.models.memory_config import MEMORY_FREE_SETTINGS
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_encoder import TransformerEncoderConfig
from scalerun.models.transformer_mt import TransformerMTConfig

DECODER: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 3,
}
ENCODER: dict[str, Any] = {name.replace("de", "en", 1): value for name, value in DECODER.items()}
RETNET: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_value_embed_dim": 24,
    "decoder_retention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 3,
}
RATES = {"dropout": 0.2, "activation_dropout": 0.2, "drop_path_rate": 0.3}
MOE = {"moe_freq": 2, "moe_expert_count": 4}
KINDS: dict[str, Any] = {
    "decoder": (TransformerConfig, {**DECODER, "rotary": True, "attention_dropout": 0.2}),
    "xpos": (TransformerConfig, {**DECODER, "xpos_rel_pos": True}),
    "biased": (TransformerConfig, {**DECODER, "rel_pos_buckets": 8, "max_rel_pos": 12}),
    "post_norm": (TransformerConfig, {**DECODER, "deepnorm": True}),
    "gated_subln": (TransformerConfig, {**DECODER, "glu": True, "subln": True}),
    "encoder": (TransformerEncoderConfig, {**ENCODER, "attention_dropout": 0.2}),
    "multiway": (TransformerEncoderConfig, {**ENCODER, "multiway": True}),
    "encoder_decoder": (TransformerMTConfig, {**ENCODER, **DECODER}),
    "random_second_experts": (TransformerConfig, {**DECODER, **MOE}),
    "sampled_second_experts": (
        TransformerConfig,
        {**DECODER, **MOE, "moe_second_expert_policy": "sampling"},
    ),
    "xmoe": (TransformerConfig, {**DECODER, **MOE, "use_xmoe": True, "subln": True}),
    "retnet": (RetNetConfig, RETNET),
    "retnet_in_chunks": (
        RetNetConfig,
        {**RETNET, "chunkwise_recurrent": True, "recurrent_chunk_size": 4},
    ),
    "longnet": (
        TransformerConfig,
        {
            **DECODER,
            "segment_length": [4, 8],
            "dilated_ratio": [1, 2],
            "attention_dropout": 0.2,
        },
    ),
    "longnet_exact": (
        TransformerConfig,
        {
            **DECODER,
            "segment_length": [4, 8],
            "dilated_ratio": [1, 2],
            "dilated_merge_gradient": "exact",
        },
    ),
}
MEMORIES: dict[str, dict[str, Any]] = {
    "all": {"checkpoint_activations": True},
    "every_second": {"checkpoint_activations": True, "checkpoint_activations_interval": 2},
    "selective": {"checkpoint_activations": True, "recompute": "selective"},
    "offload": {"offload_activations": True},
    "offload_all": {"checkpoint_activations": True, "offload_activations": True},
}


def make(kind: str, **changes: Any) -> BaseModel:
    config, settings = KINDS[kind]
    cfg = config(**{**settings, **RATES, **changes})
    return build_model(cfg, vocab_size=19, padding_idx=1, seed=1, device=torch.device("cpu"))


def results(model: BaseModel, *, bfloat16: bool) -> list[Tensor]:
    """Logits and gradients of a training pass."""
    tokens = torch.randint(2, 19, (3, 12), generator=torch.Generator().manual_seed(2))
    inputs = (tokens, tokens) if hasattr(model, "encoder") else (tokens,)
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        output = model.train()(*inputs)
    loss = output.logits.float().logsumexp(-1).sum() + sum(each.loss for each in output.reports)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 10
    return [output.logits, *gradients]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
def test_no_bit_of_a_gradient_depends_on_the_settings(
    kind: str, memory: str, bfloat16: bool
) -> None:
    expected = results(make(kind), bfloat16=bfloat16)
    found = results(make(kind, **MEMORIES[memory]), bfloat16=bfloat16)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("memory", ["all", "offload", "every_second"])
def test_compiled_blocks_train_alike(memory: str) -> None:
    one, other = (
        make("gated_subln", dropout=0.0),
        make("gated_subln", dropout=0.0, **MEMORIES[memory]),
    )
    torch._dynamo.reset()
    for model in (one, other):
        model.compile_blocks(backend="aot_eager")
    for found, expected in zip(
        results(other, bfloat16=False), results(one, bfloat16=False), strict=True
    ):
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "checkpoint_activations": ({}, True),
    "checkpoint_activations_interval": ({"checkpoint_activations": True}, 2),
    "recompute": ({"checkpoint_activations": True}, "selective"),
    "offload_activations": ({}, True),
}


def operators(model: BaseModel) -> Counter[str]:
    """How often each operator runs in a training pass."""
    calls: Counter[str] = Counter()

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            calls[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with Counts():
        results(model, bfloat16=False)
    return calls


@pytest.mark.parametrize("name", sorted(MEMORY_FREE_SETTINGS))
@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder", "retnet"])
def test_every_flag_has_an_effect(kind: str, name: str) -> None:
    base, value = EFFECTS[name]
    assert operators(make(kind, **base)) != operators(make(kind, **{**base, name: value}))


REFUSED = [
    ({"checkpoint_activations_interval": 0}, "is 0; give 1 or more"),
    ({"checkpoint_activations_interval": 2}, "has no effect without --checkpoint-activations"),
    ({"recompute": "selective"}, "has no effect without --checkpoint-activations"),
    (
        {"checkpoint_activations": True, "checkpoint_activations_interval": 4},
        "4 recomputes no layer of .*-layers 3",
    ),
    (
        {"checkpoint_activations": True, "recompute": "selective", "offload_activations": True},
        "does not reach what --recompute selective keeps; give",
    ),
]


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder", "retnet"])
@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_settings_that_make_no_sense_are_one_sentence(
    kind: str, changes: dict[str, Any], words: str
) -> None:
    config, settings = KINDS[kind]
    with pytest.raises(ConfigError, match=words) as caught:
        config(**settings, **changes).validate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("memory", MEMORIES)
def test_settings_that_make_sense_are_accepted(memory: str) -> None:
    for config, settings in KINDS.values():
        config(**settings, **MEMORIES[memory]).validate()


def test_all_of_it_may_change_in_mid_run() -> None:
    for config, _ in KINDS.values():
        assert config.free_settings >= MEMORY_FREE_SETTINGS
    saved = Architecture(TransformerConfig(**DECODER)).state_dict()
    for changes in MEMORIES.values():
        Architecture(TransformerConfig(**DECODER, **changes)).load_state_dict(saved)


def test_a_run_on_a_cpu_has_no_other_memory_to_use() -> None:
    cfg = TransformerConfig(offload_activations=True)
    cfg.check_training(on_cpu=False, compiled=True)
    with pytest.raises(ConfigError, match="--offload-activations has no effect on a CPU"):
        cfg.check_training(on_cpu=True, compiled=False)


def test_compiled_blocks_do_not_show_what_is_in_them() -> None:
    cfg = TransformerConfig(checkpoint_activations=True, recompute="selective")
    cfg.check_training(on_cpu=True, compiled=False)
    with pytest.raises(ConfigError, match="--recompute selective does not see the products in"):
        cfg.check_training(on_cpu=True, compiled=True)


def test_a_command_that_would_offload_on_a_cpu_is_one_sentence(
    run: Any, corpus: Any, tiny: list[str]
) -> None:
    failed = run("train", corpus, *tiny, "--offload-activations", "--max-update", "1")
    assert failed.code == 2
    assert "--offload-activations has no effect on a CPU" in failed.error
