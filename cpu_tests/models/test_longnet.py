from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.longnet import longnet_tiny
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.modules import dilated_cache
from scalerun.modules.dilated_attention import DilatedAttention

MakeModel = Callable[..., TransformerDecoder]
TWO = {"segment_length": [4, 8], "dilated_ratio": [1, 2]}
PATTERNS: dict[str, dict[str, Any]] = {
    "two": TWO,
    "sparse": {"segment_length": [6], "dilated_ratio": [3]},
    "mod": {**TWO, "dilated_ratio": [2, 4], "dilated_head_offset": "mod"},
    "three": {"segment_length": [3, 8, 16], "dilated_ratio": [1, 2, 8]},
}
POSITIONS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"decoder_learned_pos": True},
    "rotary": {"rotary": True},
    "xpos": {"xpos_rel_pos": True, "xpos_scale_base": 16},
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)
every_position = pytest.mark.parametrize("position", POSITIONS)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(2, 19, (3, 24), generator=torch.Generator().manual_seed(7))


def small(**changes: Any) -> TransformerDecoder:
    """A float64 decoder in evaluation."""
    sizes: dict[str, Any] = {
        "decoder_embed_dim": 16,
        "decoder_attention_heads": 4,
        "decoder_ffn_embed_dim": 24,
        "decoder_layers": 2,
        "max_target_positions": 32,
    }
    cfg = TransformerConfig(**{**sizes, **changes})
    model = build_model(cfg, vocab_size=19, padding_idx=1, seed=2, device=torch.device("cpu"))
    assert isinstance(model, TransformerDecoder)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the float32 tables of positions, whose center may differ."""
    torch.testing.assert_close(actual, expected, atol=4e-6, rtol=0)


def decode(
    model: TransformerDecoder, tokens: Tensor, cuts: list[int], padding: Tensor | None = None
) -> Tensor:
    """Logits of all tokens, fed to an incremental state in pieces of these lengths."""
    state = model.init_incremental_state(len(tokens), 26)
    masks = [None] * len(cuts) if padding is None else padding.split(cuts, 1)
    pieces = [
        model(piece, padding_mask_BT=mask, incremental_state=state).logits
        for piece, mask in zip(tokens.split(cuts, 1), masks, strict=True)
    ]
    return torch.cat(pieces, 1)


@every_pattern
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit(pattern: str, tokens: Tensor) -> None:
    model = small(**PATTERNS[pattern])
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 19
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9] != after[:, 9]).any(-1).all()


@every_position
@every_pattern
@pytest.mark.parametrize("cuts", [[1] * 24, [5, 1, 4, 2, 12], [24], [10, 14]], ids=len)
@torch.no_grad()
def test_decoding_in_pieces_equals_the_full_forward(
    pattern: str, position: str, cuts: list[int], tokens: Tensor
) -> None:
    model = small(**PATTERNS[pattern], **POSITIONS[position])
    close(decode(model, tokens, cuts), model(tokens).logits)


def test_a_segment_may_be_longer_than_any_sequence(tokens: Tensor) -> None:
    """It costs what the sequence costs."""
    whole = small(segment_length=[10**9], dilated_ratio=[1])
    close(whole(tokens).logits, small()(tokens).logits)
    close(decode(whole, tokens, [20, 1, 1, 1, 1]), whole(tokens).logits)


def test_branches_that_all_leave_out_tokens_are_warned_of() -> None:
    assert longnet_tiny().warnings() == []
    assert longnet_tiny().replace(segment_length=[], dilated_ratio=[]).warnings() == []
    [sentence] = longnet_tiny().replace(dilated_ratio=[2, 4, 16]).warnings()
    assert sentence.startswith("--dilated-ratio 2,4,16 has no 1: heads read nothing at")


@given(st.data())
@settings(max_examples=30, deadline=None)
@torch.no_grad()
def test_padded_prompts_decode_as_if_alone(tokens: Tensor, data: st.DataObject) -> None:
    """Rows are padded on the left and, inside the prompt, on the right."""
    ratios = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    model = small(
        segment_length=[r * data.draw(st.integers(1, 6)) for r in ratios],
        dilated_ratio=ratios,
        dilated_head_offset=data.draw(st.sampled_from(["block", "mod"])),
        **POSITIONS[data.draw(st.sampled_from(sorted(POSITIONS)))],
    )
    padding = torch.zeros(3, 24, dtype=torch.bool)
    for row in range(3):
        padding[row, : data.draw(st.integers(0, 6))] = True
        padding[row, 12 - data.draw(st.integers(0, 3)) : 12] = True
    first = data.draw(st.integers(1, 14))
    cuts = [first, *[1] * 5, 24 - first - 5]
    decoded = decode(model, tokens, cuts, padding)
    assert decoded.isfinite().all()
    close(decoded[~padding], model(tokens, padding_mask_BT=padding).logits[~padding])
    for row in range(3):
        real = ~padding[row]
        close(decoded[row, real], model(tokens[row : row + 1, real]).logits[0])


@every_pattern
@torch.no_grad()
def test_reordered_sequences_continue_as_their_sources(pattern: str, tokens: Tensor) -> None:
    model, order = small(**PATTERNS[pattern], rotary=True), torch.tensor([2, 0, 0, 1])
    state = model.init_incremental_state(3, 26)
    padding = torch.zeros(3, 13, dtype=torch.bool)
    padding[1, :2] = True
    model(tokens[:, :9], padding_mask_BT=padding[:, :9], incremental_state=state)
    state.reorder(order)
    steps = [model(tokens[order, t : t + 1], incremental_state=state).logits for t in range(9, 13)]
    full = model(tokens[:, :13], padding_mask_BT=padding).logits[order, 9:]
    close(torch.cat(steps, 1), full)


@torch.no_grad()
def test_long_pieces_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch, tokens: Tensor) -> None:
    monkeypatch.setattr(dilated_cache, "CHUNK", 3)
    model = small(**TWO)
    close(decode(model, tokens, [2, 22]), model(tokens).logits)


@torch.no_grad()
def test_memory_of_decoding_does_not_grow_with_the_sequence() -> None:
    model = small(**TWO)
    sizes = []
    for length in (300, 3000):
        state = model.init_incremental_state(1, length)
        model(torch.full((1, 20), 3), incremental_state=state)
        cache = state.layers[0]
        assert isinstance(cache, dilated_cache.DilatedCache)
        assert cache.keys_BHSK is not None
        sizes.append(cache.keys_BHSK.numel())
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_a_segment_longer_than_the_sequence_is_dense_attention(tokens: Tensor) -> None:
    dense, dilated = small(rotary=True), small(rotary=True, segment_length=[64], dilated_ratio=[1])
    close(dilated(tokens).logits, dense(tokens).logits)


@torch.no_grad()
def test_half_precision_decodes(tokens: Tensor) -> None:
    model = small(**PATTERNS["three"], rotary=True).bfloat16()
    decoded, full = decode(model, tokens, [10, *[1] * 14]), model(tokens).logits
    assert decoded.dtype == torch.bfloat16
    torch.testing.assert_close(decoded, full, atol=0.15, rtol=0.1)


def test_autocast_trains(tokens: Tensor) -> None:
    model = small(**TWO, xpos_rel_pos=True).float().train()
    exact = model(tokens).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().mean().item() < 0.03 * exact.std().item()
    rounded.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("merge_gradient", ["exact", "torchscale"])
def test_recomputation_changes_no_gradient(merge_gradient: str, tokens: Tensor) -> None:
    results = []
    for recompute in (False, True):
        model = small(
            **TWO,
            dilated_merge_gradient=merge_gradient,
            checkpoint_activations=recompute,
            attention_dropout=0.2,
        ).train()
        torch.manual_seed(11)
        model(tokens).logits.logsumexp(-1).sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_documents_are_not_masked(tokens: Tensor) -> None:
    model = small(**TWO)
    assert not model.masks_documents
    with pytest.raises(ValueError, match="cannot keep documents apart"):
        model(tokens, document_ids_BT=torch.zeros_like(tokens))


def test_blocks_compile_without_a_break(tokens: Tensor) -> None:
    model, compiled = small(**TWO, rotary=True), small(**TWO, rotary=True)
    torch._dynamo.reset()  # other tests may have used up its cache
    compiled.compile_blocks(backend="eager", fullgraph=True)
    one, two = model(tokens).logits, compiled(tokens).logits
    close(two, one)
    one.sum().backward()
    two.sum().backward()
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


def test_flops_do_not_depend_on_the_length() -> None:
    model = small(**TWO)
    per_layer = 12 * 16 * (4 + 8 / 4)
    longer = [model.training_flops_per_token(n) for n in (8, 1000)]
    assert longer[0] == longer[1]
    assert longer[0] == 6 * (2 * (4 * 16 * 16 + 2 * 16 * 24) + 19 * 16) + 2 * per_layer
    assert model.training_flops_per_token(2) < longer[0]


@pytest.mark.parametrize("arch", ["longnet_tiny", "longnet_base"])
def test_presets_are_longnets(arch: str) -> None:
    cfg = ARCH_REGISTRY.config_for(arch)
    assert isinstance(cfg, TransformerConfig)
    cfg.validate()
    assert cfg.axes().mixer == "dilated_attention"
    model = build_model(
        cfg.replace(decoder_layers=1),
        vocab_size=9,
        padding_idx=1,
        seed=1,
        device=torch.device("cpu"),
    )
    assert isinstance(model, TransformerDecoder)
    assert isinstance(model.blocks()[0].mixer, DilatedAttention)
    assert model.max_positions() == cfg.max_target_positions
