"""Weights that go to TorchScale and come back are the same, and so is what computes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import ARCH_REGISTRY, Architecture, build_model
from scalerun.models.torchscale.export import (
    torchscale_fields,
    torchscale_pieces,
    torchscale_tables,
)
from scalerun.models.torchscale.recognition import recognize
from scalerun.models.torchscale.settling import settle

VOCAB = 23
SMALL: dict[str, Any] = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24}
HEADS = {"decoder_attention_heads": 2}
MOE = {"moe_freq": 2, "moe_expert_count": 4, "moe_mask_padding": False}
DRAWN = {"moe_deterministic_eval": False}
"""TorchScale also draws second experts when it evaluates."""
RETNET = SMALL | {"decoder_retention_heads": 2, "decoder_value_embed_dim": 24}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer_lm", {}),
    "tied": ("transformer_lm", {"share_decoder_input_output_embed": True}),
    "learned": ("transformer_lm", {"decoder_learned_pos": True, "max_target_positions": 40}),
    "none": ("transformer_lm", {"no_token_positional_embeddings": True}),
    "subln": ("transformer_lm", {"subln": True, "activation_fn": "relu"}),
    "deepnorm": ("transformer_lm", {"deepnorm": True}),
    "post": ("transformer_lm", {"decoder_normalize_before": False}),
    "kept": ("transformer_lm", {"deepnorm": True, "keep_norm_placement": True}),
    "xpos": ("transformer_lm", {"xpos_rel_pos": True, "layernorm_embedding": True}),
    "buckets": ("transformer_lm", {"rel_pos_buckets": 8, "max_rel_pos": 16}),
    "longnet": ("transformer_lm", {"segment_length": [8, 16], "dilated_ratio": [1, 2]}),
    "experts": ("transformer_lm", MOE | {"moe_second_expert_policy": "all"}),
    "one expert": ("transformer_lm", MOE | {"moe_top1_expert": True}),
    "xmoe": ("transformer_lm", MOE | DRAWN | {"use_xmoe": True, "subln": True}),
    "retnet": ("retnet_lm", {"norm_eps_mode": "torchscale"}),
    "tied retnet": (
        "retnet_lm",
        {"norm_eps_mode": "torchscale_0.3.0", "share_decoder_input_output_embed": True},
    ),
    "retnet experts": (
        "retnet_lm",
        MOE | DRAWN | {"norm_eps_mode": "torchscale", "use_xmoe": True},
    ),
}


def settings(arch: str, changes: dict[str, Any]) -> Any:
    sizes = RETNET if arch.startswith("retnet") else SMALL | HEADS
    return ARCH_REGISTRY.config_for(arch).replace(**sizes, **changes)


def model_of(cfg: Any) -> Any:
    cpu = torch.device("cpu")
    return build_model(cfg, vocab_size=VOCAB, padding_idx=None, seed=3, device=cpu).eval()


def exported(cfg: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """TorchScale's state dict."""
    state = {}
    for piece in torchscale_pieces(cfg, weights):
        tensor = weights[piece.source]
        state[piece.key] = tensor if piece.expert is None else tensor[piece.expert]
    tables = torchscale_tables(cfg)
    assert not state.keys() & tables.keys()
    return state | tables


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_there_and_back_is_the_same_model_to_the_bit(case: str) -> None:
    cfg = settings(*CASES[case])
    model = model_of(cfg)
    weights = model.state_dict()
    fields, version = torchscale_fields(cfg)
    back = settle(recognize(exported(cfg, weights), fields), fields, version=version).translation
    loaded = back.build().eval()
    found = loaded.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    saved = {name: value for name, value in cfg.to_dict().items() if name != "_name"}
    differing = dict(Architecture(back.cfg).differences({"settings": saved}))
    assert all("pos" in name for name in differing)  # positions are spelled otherwise
    tokens = torch.arange(2 * 7).reshape(2, 7) % VOCAB
    logits = []
    for each in (model, loaded):
        torch.manual_seed(5)  # a gate may draw
        logits.append(each(tokens).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        ("transformer_lm", {"rms_norm": True}, "--rms-norm"),
        ("transformer_lm", {"glu": True}, "--glu"),
        ("transformer_lm", {"rotary": True}, "--rotary"),
        ("transformer_lm", MOE | {"moe_mask_padding": True}, "--moe-mask-padding"),
        ("transformer_lm", MOE | {"moe_gate": "xmoe_cosine"}, "--moe-gate xmoe_cosine"),
        ("retnet_lm", {}, "--norm-eps-mode scale_free"),
    ],
)
def test_what_torchscale_has_no_form_for_is_named(
    arch: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=f"the model has {says}, which TorchScale has no form for"):
        torchscale_fields(settings(arch, changes))


@pytest.mark.parametrize("arch", ["transformer_encoder", "mlm_tiny", "mt_tiny", "beit3"])
def test_other_kinds_of_models_do_not_go_back(arch: str) -> None:
    with pytest.raises(UserError, match=f"--arch {arch} cannot be converted to TorchScale"):
        torchscale_fields(ARCH_REGISTRY.config_for(arch))


def test_a_tensor_without_a_name_there_is_named() -> None:
    cfg = settings("transformer_lm", {})
    with pytest.raises(UserError, match=r"the model has layers\.0\.mixer\.q_norm\.weight, which"):
        torchscale_pieces(cfg, {"layers.0.mixer.q_norm.weight": torch.ones(4)})
