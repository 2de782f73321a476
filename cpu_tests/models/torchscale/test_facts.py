from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.facts import has_final_norm, stack_facts, stack_hints, unsaid

StateMaker = Callable[..., dict[str, Tensor]]


def test_sizes_are_read_from_shapes(golden_state: StateMaker) -> None:
    facts = stack_facts("decoder", golden_state(side="decoder"))
    assert facts == {
        "decoder_embed_dim": 32,
        "decoder_layers": 3,
        "decoder_ffn_embed_dim": 48,
        "subln": True,
        "multiway": False,
        "layernorm_embedding": False,
        "xpos_rel_pos": False,
        "rel_pos_buckets": 0,
    }


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"inner_norm": False}, "subln", False),
        ({"embedding_norm": True}, "layernorm_embedding", True),
        ({"halves": (".A", ".B")}, "multiway", True),
        ({"halves": (".A", ".B")}, "encoder_ffn_embed_dim", 48),
        ({"buckets": 32}, "rel_pos_buckets", 32),
        ({"buckets": 32}, "encoder_attention_heads", 4),
    ],
)
def test_parts_are_known_by_their_keys(
    golden_state: StateMaker, options: dict[str, object], name: str, value: object
) -> None:
    assert stack_facts("encoder", golden_state(side="encoder", **options))[name] == value


def test_the_table_of_xpos_gives_the_number_of_heads(golden_state: StateMaker) -> None:
    state = golden_state(side="decoder") | {"layers.0.self_attn.xpos.scale": torch.ones(2)}
    facts = stack_facts("decoder", state)
    assert (facts["xpos_rel_pos"], facts["decoder_attention_heads"]) == (True, 8)


@pytest.mark.parametrize("final", [True, False])
def test_a_final_norm_tells_where_a_decoder_norms(golden_state: StateMaker, final: bool) -> None:
    state = golden_state(side="decoder", final_norm=final)
    assert has_final_norm(state) is final
    assert stack_hints("decoder", state)["decoder_normalize_before"] is final


def test_an_encoder_without_a_final_norm_may_norm_anywhere(golden_state: StateMaker) -> None:
    state = golden_state(side="encoder", final_norm=False, inner_norm=False)
    assert "encoder_normalize_before" not in stack_hints("encoder", state)
    assert "encoder_normalize_before" in unsaid("encoder", state, stack_facts("encoder", state))


@pytest.mark.parametrize("tied", [True, False])
def test_equal_tables_are_tied(golden_state: StateMaker, tied: bool) -> None:
    state = golden_state(side="decoder")
    if tied:
        state["output_projection.weight"] = state["embed_tokens.weight"].clone()
    assert stack_hints("decoder", state)["share_decoder_input_output_embed"] is tied


def test_what_leaves_no_trace_is_listed(golden_state: StateMaker) -> None:
    state = golden_state(side="decoder", inner_norm=False)
    state["layers.0.self_attn.xpos.scale"] = torch.ones(4)
    names = unsaid("decoder", state, stack_facts("decoder", state))
    assert names == [
        "activation_fn",
        "layernorm_eps",
        "no_scale_embedding",
        "segment_length",
        "deepnorm",
        "xpos_scale_base",
    ]
    state = golden_state(side="decoder", buckets=8)
    assert "max_rel_pos" in unsaid("decoder", state, stack_facts("decoder", state))
    state = golden_state(side="decoder")
    assert unsaid("decoder", state, stack_facts("decoder", state))[0] == "decoder_attention_heads"


def test_a_missing_layer_is_named(golden_state: StateMaker) -> None:
    state = {k: t for k, t in golden_state(side="decoder").items() if not k.startswith("layers.1.")}
    with pytest.raises(UserError, match=r"no keys of layers\.1"):
        stack_facts("decoder", state)
    with pytest.raises(UserError, match=r"no layers\.0\.self_attn_layer_norm\.weight"):
        stack_facts("decoder", {"embed_tokens.weight": torch.ones(2, 2)})
