from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.models.base_model import ARCH_REGISTRY
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.models.transformer_lm import TransformerLM
from scalerun.modules.moe.gates import XMoEGate
from scalerun.modules.moe.moe_layer import MoELayer

MakeModel = Callable[..., TransformerDecoder]
MOE: dict[str, Any] = {"moe_freq": 1, "moe_expert_count": 5}
ROOMY = {**MOE, "moe_eval_capacity_token_fraction": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "top2": {},
    "top1": {"moe_top1_expert": True},
    "all": {"moe_second_expert_policy": "all"},
    "xmoe": {"use_xmoe": True},
    "cosine": {"use_xmoe": True, "moe_gate": "xmoe_cosine"},
    "subln_rms": {"subln": True, "rms_norm": True},
    "deepnorm_rotary": {"deepnorm": True, "rotary": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, 19, (3, 12), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def model(request: pytest.FixtureRequest, make_model: MakeModel) -> TransformerDecoder:
    """A float64 decoder in evaluation that never refuses a token a place."""
    return make_model(**ROOMY, **KINDS[request.node.callspec.params["kind"]]).double().eval()


def decode(model: TransformerDecoder, tokens: Tensor, cuts: list[int]) -> Tensor:
    state = model.init_incremental_state(len(tokens), 20)
    pieces = [model(piece, incremental_state=state).logits for piece in tokens.split(cuts, 1)]
    return torch.cat(pieces, 1)


@every_kind
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 4, 2]])
@torch.no_grad()
def test_with_places_for_all_decoding_equals_the_full_forward(
    kind: str, cuts: list[int], model: TransformerDecoder, tokens: Tensor
) -> None:
    torch.testing.assert_close(decode(model, tokens, cuts), model(tokens).logits, atol=2e-6, rtol=0)


@every_kind
@torch.no_grad()
def test_with_places_for_all_a_later_token_never_changes_an_earlier_logit(
    kind: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 19
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@every_kind
@torch.no_grad()
def test_left_padding_changes_no_logit(
    kind: str, model: TransformerDecoder, tokens: Tensor
) -> None:
    padded, mask = torch.ones_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    for row, length in enumerate([12, 8, 3]):
        padded[row, 12 - length :] = tokens[row, :length]
        mask[row, 12 - length :] = False
    logits = model(padded, padding_mask_BT=mask).logits
    for row, length in enumerate([12, 8, 3]):
        alone = model(tokens[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, 12 - length :], alone, atol=2e-6, rtol=0)


@torch.no_grad()
def test_without_places_for_all_decoding_differs(make_model: MakeModel, tokens: Tensor) -> None:
    """Each step has places of its own, which are fewer for a token the longer the others are."""
    model = make_model(**MOE, moe_second_expert_policy="all").double().eval()
    full, steps = model(tokens).logits, decode(model, tokens, [1] * 12)
    assert (full - steps).abs().max() > 1e-3


@torch.no_grad()
def test_what_evaluation_draws_depends_on_torchs_generator_alone(
    make_model: MakeModel, tokens: Tensor
) -> None:
    model = make_model(**ROOMY, moe_deterministic_eval=False).double().eval()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(tokens).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_recomputation_changes_no_gradient(make_model: MakeModel, tokens: Tensor) -> None:
    found = []
    for recompute in (False, True):
        model = make_model(
            **MOE, use_xmoe=True, dropout=0.1, checkpoint_activations=recompute
        ).train()
        torch.manual_seed(5)
        output = model(tokens)
        loss = output.logits.square().mean() + sum(report.loss for report in output.reports)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_experts_drop_out_before_they_are_added_up(make_model: MakeModel) -> None:
    block = make_model(**{**MOE, "moe_freq": 3}, dropout=0.25).blocks()
    assert isinstance(block[2].ffn, MoELayer)
    assert (block[2].ffn.experts.dropout, block[2].ffn_residual.dropout) == (0.25, 0.0)
    assert (block[1].ffn_residual.dropout, block[2].mixer_residual.dropout) == (0.25, 0.25)


def test_a_token_costs_two_experts_and_the_gate(make_model: MakeModel) -> None:
    dense, mixed = make_model(), make_model(**{**MOE, "moe_freq": 3})
    more = 2 * 16 * 24 + 5 * 16
    assert mixed.flops_per_token(8) - dense.flops_per_token(8) == 6 * more


@pytest.mark.parametrize(
    ("arch", "vocab", "millions"), [("xmoe_tiny", 264, 2.7), ("xmoe_base", 100, 412)]
)
def test_presets_have_the_size_they_say(arch: str, vocab: int, millions: float) -> None:
    cfg = ARCH_REGISTRY.config_for(arch)
    assert isinstance(cfg, TransformerConfig)
    cfg.validate()
    with torch.device("meta"):
        model = TransformerLM.build_model(cfg, vocab_size=vocab, padding_idx=1)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    layer = model.blocks()[1].ffn
    assert isinstance(layer, MoELayer)
    assert isinstance(layer.router.gate, XMoEGate)
    assert layer.router.gating.normalize_before_dropping


@pytest.mark.parametrize(
    ("arch", "dense", "experts"),
    [
        ("xmoe_base", "lm_base", 64),
        ("xmoe_gpt_base", "gpt_base", 2),
        ("xmoe_bert_base", "bert_base", 64),
        ("xmoe_mt_base", "mt_tied_base", 2),
    ],
)
def test_presets_add_the_documented_experts_and_nothing_else(
    arch: str, dense: str, experts: int
) -> None:
    cfg = ARCH_REGISTRY.config_for(arch)
    cfg.validate()
    mixed, plain = cfg.to_dict(), ARCH_REGISTRY.config_for(dense).to_dict()
    differing = {name for name in plain if mixed[name] != plain[name]} - {"_name"}
    assert {name: mixed[name] for name in differing} == {
        "moe_freq": 2,
        "moe_expert_count": experts,
        "use_xmoe": True,
        "moe_normalize_gate_prob_before_dropping": True,
    }
    assert mixed["moe_gating_use_fp32"]
    assert mixed["moe_second_expert_policy"] == "random"
    assert mixed["moe_eval_capacity_token_fraction"] == -1.0
