from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.models.memory_config import MEMORY_FREE_SETTINGS
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder

FOUR_HEADS = {"decoder_attention_heads": 4}
DILATED = {"segment_length": [8, 16], "dilated_ratio": [1, 4]}

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"decoder_attention_heads": 3}, "--decoder-embed-dim 16 is not a multiple of"),
    ({"deepnorm": True, "subln": True}, "--deepnorm and --subln exclude each other"),
    ({"deepnorm": True, "decoder_normalize_before": True}, "remove --decoder-normalize-before"),
    ({"subln": True, "decoder_normalize_before": False}, "remove --no-decoder-normalize-before"),
    ({"rotary": True, "xpos_rel_pos": True}, "--rotary and --xpos-rel-pos exclude"),
    ({"rotary": True, "rel_pos_buckets": 8, "max_rel_pos": 9}, "--rotary and --rel-pos-buckets"),
    ({"xpos_rel_pos": True, "rel_pos_buckets": 8, "max_rel_pos": 9}, "--xpos-rel-pos and --rel-"),
    ({"rotary": True, "decoder_attention_heads": 16}, "need an even width of a head.* is 1"),
    ({"xpos_rel_pos": True, "decoder_attention_heads": 16}, "need an even width of a head"),
    ({"xpos_scale_base": 64}, "--xpos-scale-base has no effect without --xpos-rel-pos"),
    ({"xpos_rel_pos": True, "max_target_positions": 100000}, "too small for"),
    ({"rel_pos_buckets": 8}, "--rel-pos-buckets and --max-rel-pos need each other"),
    ({"max_rel_pos": 8}, "--rel-pos-buckets and --max-rel-pos need each other"),
    ({"rel_pos_buckets": 2, "max_rel_pos": 8}, "give 4 or more"),
    ({"rel_pos_buckets": 32, "max_rel_pos": 8}, "must be above a quarter"),
    (
        {"decoder_learned_pos": True, "no_token_positional_embeddings": True},
        "--decoder-learned-pos and --no-token-positional-embeddings exclude",
    ),
    ({"decoder_embed_dim": 2}, "sinusoidal positions need an even"),
    ({"subln": True, "init": "megatron"}, "--init megatron .* contradicts --subln"),
    ({"deepnorm": True, "init": "megatron"}, "--init megatron .* contradicts --deepnorm"),
    ({"segment_length": [4], "dilated_ratio": [1, 2]}, "give as many numbers in both"),
    ({"segment_length": [4]}, r"--segment-length \[4\] and --dilated-ratio \[\] need each other"),
    ({"dilated_ratio": [4]}, "need each other"),
    (
        {"segment_length": [6], "dilated_ratio": [4]},
        "has 6, which is not a multiple of",
    ),
    ({"segment_length": [6], "dilated_ratio": [0]}, "--dilated-ratio has 0; give numbers from 1"),
    (
        {"segment_length": [-4], "dilated_ratio": [2]},
        "--segment-length has -4; give numbers from 1",
    ),
    (
        {"segment_length": [33], "dilated_ratio": [33]},
        r"--dilated-ratio \[33\] has a number above --max-target-positions 32",
    ),
    ({**DILATED, "rel_pos_buckets": 8, "max_rel_pos": 9}, "give --rotary or --xpos-rel-pos"),
    ({"dilated_head_offset": "mod"}, "--dilated-head-offset has no effect"),
    ({"dilated_merge_gradient": "exact"}, "--dilated-merge-gradient has no effect"),
    ({"megatron_init_sigma": 0.02}, "--megatron-init-sigma has no effect"),
    ({"moe_freq": 1, "moe_expert_count": 4, "glu": True}, "--glu has no effect with --moe-freq 1"),
    ({"keep_norm_placement": True}, "--keep-norm-placement has no effect"),
    ({"sinusoidal_pos": True, "decoder_learned_pos": True}, "--sinusoidal-pos and --decoder-lear"),
    ({"sinusoidal_pos": True, "no_token_positional_embeddings": True}, "--sinusoidal-pos and --no"),
]
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"decoder_layers": 0}, "--decoder-layers is 0; give 1 or more"),
    ({"decoder_embed_dim": -4}, "--decoder-embed-dim is -4"),
    ({"max_target_positions": 0}, "--max-target-positions is 0"),
    ({"rel_pos_buckets": -1}, "--rel-pos-buckets is -1; give 0 or more"),
    ({"dropout": 1.0}, "--dropout is 1; give a rate from 0 to below 1"),
    ({"drop_path_rate": -0.1}, "--drop-path-rate is -0.1"),
    ({"attention_dropout": float("nan")}, "--attention-dropout is nan"),
    ({"layernorm_eps": 0.0}, "--layernorm-eps is 0"),
    ({"layernorm_eps": float("nan")}, "--layernorm-eps is nan"),
    ({"megatron_init_sigma": float("inf")}, "--megatron-init-sigma is inf"),
]


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS + BAD_VALUES)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str, make_config: Callable[..., TransformerConfig]
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_config(**changes).validate()
    assert "\n" not in str(caught.value)


def test_defaults_are_valid() -> None:
    TransformerConfig().validate()


def test_a_relative_scheme_replaces_the_default_positions(
    make_config: Callable[..., TransformerConfig],
) -> None:
    assert make_config().axes().absolute_position == "sinusoidal"
    axes = make_config(rotary=True).axes()
    assert (axes.absolute_position, axes.relative_position) == ("none", "rotary")
    axes = make_config(xpos_rel_pos=True, decoder_learned_pos=True).axes()
    assert (axes.absolute_position, axes.relative_position) == ("learned", "xpos")


def test_deepnorm_is_post_norm_and_everything_else_pre_norm(
    make_config: Callable[..., TransformerConfig],
) -> None:
    assert make_config(deepnorm=True).axes().residual == "deep_norm"
    assert make_config(deepnorm=True, decoder_normalize_before=False).axes().alpha > 1
    assert make_config(subln=True).axes().residual == "pre_norm"
    assert make_config(decoder_normalize_before=False).axes().residual == "post_norm"


NAMES = {field.name for field in fields(TransformerConfig)}
MOE = {"moe_freq": 2, "moe_expert_count": 4}
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "decoder_embed_dim": ({}, 20),
    "decoder_attention_heads": ({}, 4),
    "decoder_ffn_embed_dim": ({}, 20),
    "decoder_layers": ({}, 2),
    "decoder_normalize_before": ({}, False),
    "activation_fn": ({}, "relu"),
    "dropout": ({}, 0.1),
    "no_emb_dropout": ({"dropout": 0.1}, True),
    "drop_path_rate": ({}, 0.3),
    "attention_dropout": ({}, 0.1),
    "activation_dropout": ({}, 0.1),
    "no_scale_embedding": ({}, False),
    "layernorm_embedding": ({}, True),
    "share_decoder_input_output_embed": ({}, True),
    "max_target_positions": ({}, 64),
    "layernorm_eps": ({}, 1e-2),
    "rms_norm": ({}, True),
    "glu": ({}, True),
    "decoder_learned_pos": ({}, True),
    "no_token_positional_embeddings": ({}, True),
    "sinusoidal_pos": ({"rotary": True}, True),
    "keep_norm_placement": ({"deepnorm": True}, True),
    "rotary": ({}, True),
    "xpos_rel_pos": ({}, True),
    "xpos_scale_base": ({"xpos_rel_pos": True}, 16),
    "rel_pos_buckets": ({"rel_pos_buckets": 8, "max_rel_pos": 20}, 16),
    "max_rel_pos": ({"rel_pos_buckets": 8, "max_rel_pos": 20}, 6),
    "segment_length": (DILATED, [4, 16]),
    "dilated_ratio": (DILATED, [1, 2]),
    "dilated_head_offset": ({**DILATED, "dilated_ratio": [1, 2], **FOUR_HEADS}, "mod"),
    "dilated_merge_gradient": (DILATED, "exact"),
    "deepnorm": ({}, True),
    "subln": ({}, True),
    "init": ({}, "torchscale"),
    "megatron_init_sigma": ({"init": "megatron"}, 0.1),
    "moe_freq": (MOE, 1),
    "moe_expert_count": (MOE, 3),
    "moe_top1_expert": (MOE, True),
    "moe_gate": (MOE, "xmoe"),
    "use_xmoe": ({**MOE, "moe_gate": "xmoe"}, True),
    "moe_gating_use_fp32": (MOE, False),
    "moe_second_expert_policy": (MOE, "all"),
    "moe_normalize_gate_prob_before_dropping": (MOE, True),
    "moe_eval_capacity_token_fraction": (MOE, 0.25),
    "moe_deterministic_eval": (MOE, False),
    "moe_mask_padding": (MOE, False),
}


def behaviour(model: TransformerDecoder) -> tuple[list[Tensor | None], int | None]:
    """Logits and a gradient in training and, of padded samples in bfloat16, logits in evaluation;
    the longest sequence."""
    torch.manual_seed(3)
    tokens = torch.arange(32)[None] % 19
    trained = model(tokens).logits
    trained.logsumexp(-1).sum().backward()
    model.eval()
    padding = torch.arange(32)[None] < 20
    with torch.autocast("cpu", torch.bfloat16):
        evaluated = model(tokens, padding_mask_BT=padding).logits
    return [trained, model.embedding.tokens.weight.grad, evaluated], model.max_positions()


@pytest.mark.parametrize("name", sorted(NAMES - MEMORY_FREE_SETTINGS))
def test_every_flag_has_an_effect(name: str, make_model: Callable[..., TransformerDecoder]) -> None:
    base, value = EFFECTS[name]
    before, longest = behaviour(make_model(**base))
    after, longest_after = behaviour(make_model(**{**base, name: value}))
    assert longest != longest_after or not all(map(torch.equal, before, after))
