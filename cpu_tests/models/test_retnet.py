from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.memory_config import MemoryConfig
from scalerun.models.moe_config import MoEConfig
from scalerun.models.retnet import RETNET_SIZES, RetNetConfig, RetNetLM
from scalerun.modules.block import TransformerBlock
from scalerun.modules.residual import deepnorm_gain
from scalerun.modules.retention import RetentionState

VOCAB = 19
SMALL: dict[str, Any] = {
    "decoder_embed_dim": 16,
    "decoder_value_embed_dim": 24,
    "decoder_retention_heads": 2,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 3,
    "max_target_positions": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "chunks_of_5": {"chunkwise_recurrent": True, "recurrent_chunk_size": 5},
    "post_norm": {"decoder_normalize_before": False},
    "deepnorm": {"deepnorm": True, "no_scale_embedding": False, "layernorm_embedding": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
MakeModel = Callable[..., RetNetLM]


@pytest.fixture
def make() -> MakeModel:
    """A small float64 model over 19 symbols, of which 1 is padding, with every weight in use."""

    def build(**changes: Any) -> RetNetLM:
        cfg = RetNetConfig(**{**SMALL, **changes})
        model = build_model(
            cfg, vocab_size=VOCAB, padding_idx=1, seed=1, device=torch.device("cpu")
        )
        assert isinstance(model, RetNetLM)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model.double()

    return build


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, VOCAB, (3, 12), generator=torch.Generator().manual_seed(7))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the float32 tables of angles."""
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@every_kind
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 4, 2], [12], [3] * 4])
@torch.no_grad()
def test_decoding_in_pieces_equals_the_full_forward(
    kind: str, cuts: list[int], make: MakeModel, tokens: Tensor
) -> None:
    model = make(**KINDS[kind]).eval()
    state = model.init_incremental_state(3, 20)
    pieces = [model(piece, incremental_state=state).logits for piece in tokens.split(cuts, 1)]
    close(torch.cat(pieces, 1), model(tokens).logits)


@every_kind
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit(
    kind: str, make: MakeModel, tokens: Tensor
) -> None:
    model = make(**KINDS[kind]).eval()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCAB
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("size", [1, 3, 4, 12, 512])
@torch.no_grad()
def test_chunks_of_any_size_give_the_parallel_logits(
    size: int, make: MakeModel, tokens: Tensor
) -> None:
    whole = make().eval()
    parts = make(chunkwise_recurrent=True, recurrent_chunk_size=size).eval()
    expected = whole(tokens).logits
    torch.testing.assert_close(parts(tokens).logits, expected, atol=1e-10, rtol=0)
    single = parts.float()(tokens).logits.double()
    assert (single - expected).abs().max().item() < 1e-5 * expected.abs().max().item()


@every_kind
@torch.no_grad()
def test_prompts_of_different_lengths_decode_as_if_alone(
    kind: str, make: MakeModel, tokens: Tensor
) -> None:
    """One prompt is padded on the left, one on the right; they are read in two pieces."""
    model = make(**KINDS[kind]).eval()
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, :2] = mask[1, 4:] = True
    prompts = torch.cat((tokens[:1, :1].new_ones(1, 2), tokens[:1, :4]), 1)
    prompts = torch.cat((prompts, tokens[1:2, :6], tokens[2:, :6]))
    state = model.init_incremental_state(3, 20)
    first = model(prompts[:, :3], padding_mask_BT=mask[:, :3], incremental_state=state).logits
    model(prompts[:, 3:], padding_mask_BT=mask[:, 3:], incremental_state=state)
    rest = [model(tokens[:, t : t + 1], incremental_state=state).logits for t in range(6, 9)]
    direct = model(prompts, padding_mask_BT=mask).logits
    assert first.isfinite().all()
    for row, prompt in enumerate((tokens[0, :4], tokens[1, :4], tokens[2, :6])):
        alone = model(torch.cat((prompt, tokens[row, 6:9]))[None]).logits[0]
        close(torch.cat(rest, 1)[row], alone[-3:])
        close(direct[row, ~mask[row]], alone[:-3])


@torch.no_grad()
def test_reordered_sequences_continue_as_their_sources(make: MakeModel, tokens: Tensor) -> None:
    model, order = make().eval(), torch.tensor([2, 0, 0, 1])
    state = model.init_incremental_state(3, 20)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, :2] = True
    model(tokens[:, :5], padding_mask_BT=mask, incremental_state=state)
    state.reorder(order)
    continued = [model(tokens[order, t : t + 1], incremental_state=state).logits for t in (5, 6)]
    full_mask = torch.cat((mask, torch.zeros(3, 2, dtype=torch.bool)), 1)
    full = model(tokens[:, :7], padding_mask_BT=full_mask).logits[order, 5:]
    close(torch.cat(continued, 1), full)


@torch.no_grad()
def test_the_state_does_not_grow_in_twenty_thousand_tokens(make: MakeModel) -> None:
    model = make(decoder_layers=1, chunkwise_recurrent=True).float().eval()
    state = model.init_incremental_state(1, 20000)
    token, sizes = torch.zeros(1, 1, dtype=torch.long), set()
    model(torch.zeros(1, 18000, dtype=torch.long), incremental_state=state)
    for _ in range(2000):
        token = model(token, incremental_state=state).logits.argmax(-1)
        [layer] = state.layers
        assert isinstance(layer, RetentionState)
        assert layer.memory_BHKV is not None
        sizes.add(layer.memory_BHKV.untyped_storage().nbytes())
    assert state.length == 20000
    assert sizes == {16 * 24 // 2 * 4}
    assert layer.memory_BHKV.isfinite().all()


@every_kind
def test_every_parameter_gets_a_gradient(kind: str, make: MakeModel, tokens: Tensor) -> None:
    model = make(**KINDS[kind]).train()
    model(tokens).logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_padding_that_sees_nothing_has_finite_gradients(make: MakeModel, tokens: Tensor) -> None:
    model = make()
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, :4] = mask[1, -3:] = mask[2] = True
    model(tokens, padding_mask_BT=mask).logits[~mask].logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_recomputation_changes_no_gradient(make: MakeModel, tokens: Tensor) -> None:
    gradients = []
    for recompute in (False, True):
        model = make(checkpoint_activations=recompute, dropout=0.2, drop_path_rate=0.3)
        torch.manual_seed(11)
        model(tokens).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@every_kind
def test_blocks_compile_without_a_break(kind: str, make: MakeModel, tokens: Tensor) -> None:
    model, compiled = make(**KINDS[kind]), make(**KINDS[kind])
    torch._dynamo.reset()  # other tests may have used up its cache
    compiled.compile_blocks(backend="eager", fullgraph=True)
    close(compiled(tokens).logits, model(tokens).logits)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    assert all(isinstance(unit, TransformerBlock) for unit in compiled.shard_units())


def test_documents_cannot_be_masked(make: MakeModel, tokens: Tensor) -> None:
    model = make()
    assert not model.masks_documents
    with pytest.raises(ValueError, match="cannot keep documents apart"):
        model(tokens, document_ids_BT=torch.zeros_like(tokens))


def test_flops_follow_the_convention(make: MakeModel) -> None:
    weights = 3 * (2 * 16 * 16 + 3 * 16 * 24 + 3 * 16 * 24) + VOCAB * 16
    assert make().training_flops_per_token(10) == 6 * weights + 3 * 6 * (16 + 24) * 10


def on_meta(arch: str, vocab_size: int) -> RetNetLM:
    cfg = ARCH_REGISTRY.config_for(arch)
    cfg.validate()
    with torch.device("meta"):
        return RetNetLM.build_model(cfg, vocab_size=vocab_size, padding_idx=1)


@pytest.mark.parametrize("arch", RETNET_SIZES)
def test_sizes_are_those_of_torchscale(arch: str) -> None:
    layers, dim, wide, heads = RETNET_SIZES[arch]
    cfg = ARCH_REGISTRY.config_for(arch)
    assert isinstance(cfg, RetNetConfig)
    assert (cfg.activation_fn, cfg.dropout, cfg.layernorm_eps) == ("swish", 0.0, 1e-6)
    assert dim // heads == 256
    model = on_meta(arch, 100)
    assert model.embedding.scale == pytest.approx(dim**0.5)
    assert model.embedding.positions is None
    counted = sum(parameter.numel() for parameter in model.parameters())
    per_layer = 2 * dim**2 + 3 * dim * wide + 3 * dim * wide + 2 * dim
    assert counted == 2 * 100 * dim + layers * per_layer + dim


def test_retnet_tiny_is_about_as_large_as_lm_tiny() -> None:
    sizes = []
    for arch in ("retnet_tiny", "lm_tiny"):
        model = build_model(
            ARCH_REGISTRY.config_for(arch),
            vocab_size=264,
            padding_idx=1,
            seed=1,
            device=torch.device("cpu"),
        )
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_retention_heads": 3}, "--decoder-embed-dim 16 over .*heads 3 must be an even"),
        ({"decoder_retention_heads": 16}, "must be an even width of a head"),
        ({"decoder_value_embed_dim": 25}, "--decoder-value-embed-dim 25 is not a multiple of"),
        ({"recurrent_chunk_size": 4}, "has no effect without --chunkwise-recurrent"),
        (
            {"chunkwise_recurrent": True, "recurrent_chunk_size": 0},
            "--recurrent-chunk-size is 0; give 1 or more",
        ),
        ({"subln": True}, "--subln has no effect on a RetNet"),
        ({"subln": True, "deepnorm": True}, "exclude each other"),
        ({"deepnorm": True, "decoder_normalize_before": True}, "remove --decoder-normalize-before"),
        ({"decoder_layers": 0}, "--decoder-layers is 0; give 1 or more"),
        ({"decoder_embed_dim": 0}, "--decoder-embed-dim is 0"),
        ({"decoder_retention_heads": 0}, "--decoder-retention-heads is 0"),
        ({"dropout": 1.0}, "--dropout is 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        RetNetConfig(**{**SMALL, **changes}).validate()
    assert "\n" not in str(caught.value)


EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "decoder_embed_dim": ({}, 20),
    "decoder_value_embed_dim": ({}, 20),
    "decoder_retention_heads": ({}, 4),
    "decoder_ffn_embed_dim": ({}, 20),
    "decoder_layers": ({}, 2),
    "decoder_normalize_before": ({}, False),
    "activation_fn": ({}, "relu"),
    "dropout": ({}, 0.1),
    "no_emb_dropout": ({"dropout": 0.1}, True),
    "drop_path_rate": ({}, 0.3),
    "activation_dropout": ({}, 0.1),
    "no_scale_embedding": ({}, False),
    "layernorm_embedding": ({}, True),
    "share_decoder_input_output_embed": ({}, True),
    "max_target_positions": ({}, 64),
    "layernorm_eps": ({}, 1e-2),
    "chunkwise_recurrent": ({"norm_eps_mode": "torchscale"}, True),
    "recurrent_chunk_size": ({"chunkwise_recurrent": True, "norm_eps_mode": "torchscale"}, 4),
    "norm_eps_mode": ({}, "torchscale"),
    "deepnorm": ({}, True),
    "keep_norm_placement": ({"deepnorm": True}, True),
    "init": ({}, "torchscale"),
    "megatron_init_sigma": ({"init": "megatron"}, 0.1),
}


@torch.no_grad()
def behaviour(model: RetNetLM) -> tuple[Tensor, int | None]:
    """Logits in training, and the longest sequence."""
    torch.manual_seed(3)
    tokens = torch.arange(520)[None] % VOCAB
    return model(tokens).logits, model.max_positions()


EXPERTS = {"moe_freq": 2, "moe_expert_count": 4, "moe_second_expert_policy": "all"}


@torch.no_grad()
@pytest.mark.parametrize("subln", [False, True])
def test_experts_take_the_place_of_gated_layers(
    subln: bool, make: MakeModel, tokens: Tensor
) -> None:
    model = make(**EXPERTS, subln=subln, moe_eval_capacity_token_fraction=1.0).eval()
    first, second = model.blocks()[:2]
    assert type(first.ffn).__name__ == "GLU"
    assert (second.ffn.experts.inner_norm is not None) == subln
    whole = model(tokens).logits
    state = model.init_incremental_state(3, 12)
    steps = [model(tokens[:, t : t + 1], incremental_state=state).logits for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=0)


SHARED = {each.name for config in (MoEConfig, MemoryConfig) for each in fields(config)}
OWN = {each.name for each in fields(RetNetConfig)} - SHARED


@pytest.mark.parametrize("name", sorted(OWN))
def test_every_flag_has_an_effect_or_is_refused(name: str, make: MakeModel) -> None:
    if name == "subln":
        with pytest.raises(ConfigError, match="--subln has no effect"):
            make(subln=True)
        return
    base, value = EFFECTS[name]
    before, longest = behaviour(make(**base))
    after, longest_after = behaviour(make(**{**base, name: value}))
    assert longest != longest_after or not torch.equal(before, after)


@pytest.mark.parametrize(("deepnorm", "gain"), [(False, 1.0), (True, deepnorm_gain(3))])
def test_torchscale_starts_retention_with_small_weights(deepnorm: bool, gain: float) -> None:
    found = spread(init="torchscale", deepnorm=deepnorm)
    square, oblong = math.sqrt(2 / (64 + 64)), math.sqrt(2 / (64 + 96))
    for name in ("q_proj", "k_proj"):
        assert found[name] == pytest.approx(2**-2.5 * square, rel=0.05)
    assert found["g_proj"] == pytest.approx(2**-2.5 * oblong, rel=0.05)
    assert found["v_proj"] == pytest.approx(gain * 2**-2.5 * oblong, rel=0.05)
    assert found["out_proj"] == pytest.approx(gain * 0.5 * oblong, rel=0.05)


@pytest.mark.parametrize(("deepnorm", "gain"), [(False, 1.0), (True, deepnorm_gain(3))])
def test_the_paper_starts_retention_as_deepnet_does(deepnorm: bool, gain: float) -> None:
    found = spread(deepnorm=deepnorm)
    square, oblong = math.sqrt(2 / (64 + 64)), math.sqrt(2 / (64 + 96))
    expected = {
        "q_proj": square,
        "k_proj": square,
        "g_proj": oblong,
        "v_proj": gain * oblong,
        "out_proj": gain * oblong,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0.05)


def test_megatron_shrinks_the_output() -> None:
    found = spread(init="megatron", megatron_init_sigma=0.02)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        assert found[name] == pytest.approx(0.02, rel=0.05)
    assert found["out_proj"] == pytest.approx(0.02 / math.sqrt(6), rel=0.05)


def spread(**changes: Any) -> dict[str, float]:
    """Root mean square of the projections of the first layer's retention."""
    sizes = {**SMALL, "decoder_embed_dim": 64, "decoder_value_embed_dim": 96}
    cfg = RetNetConfig(**{**sizes, **changes})
    model = build_model(cfg, vocab_size=9, padding_idx=1, seed=1, device=torch.device("cpu"))
    prefix = "layers.0.mixer."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): weight.square().mean().sqrt().item()
        for name, weight in model.state_dict().items()
        if name.startswith(prefix)
    }
