from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.torchscale.loader import load_decoder
from scalerun.models.torchscale.recognition import recognize
from scalerun.models.torchscale.settling import Settled, settle
from scalerun.modules.retention_decay import log_decays

StateMaker = Callable[..., dict[str, Tensor]]
NEEDED: dict[str, Any] = {
    "activation_fn": "gelu",
    "layernorm_eps": 1e-5,
    "no_scale_embedding": True,
    "segment_length": None,
}
DECODER = NEEDED | {"decoder_attention_heads": 4}
ENCODER = NEEDED | {"encoder_attention_heads": 4}
PLAIN = {"inner_norm": False}
POST = {"inner_norm": False, "final_norm": False}


@pytest.fixture
def decoder(golden_state: StateMaker) -> Callable[..., Settled]:
    def make(
        given: dict[str, Any],
        state: dict[str, Any] | None = None,
        side: str = "decoder",
        **options: Any,
    ) -> Settled:
        tensors = golden_state(side=side, prefix=f"{side}.", **(state or {}))
        return settle(recognize(tensors), given, **options)

    return make


@torch.no_grad()
def test_what_the_weights_say_need_not_be_given(
    golden_state: StateMaker,
    decoder: Callable[..., Settled],
    golden_tokens: Tensor,
    decoder_sizes: dict[str, int],
) -> None:
    ours = decoder(DECODER | {"activation_fn": "relu"}).translation.build().eval()
    fields = decoder_sizes | {"activation_fn": "relu"}
    expected = load_decoder(fields, golden_state(side="decoder"), version="main")
    # The fixture's values depend on the key, and these had a prefix.
    ours.load_state_dict(expected.state_dict())
    assert torch.equal(ours(golden_tokens).logits, expected.eval()(golden_tokens).logits)


@pytest.mark.parametrize("name", DECODER)
def test_what_they_do_not_say_is_asked_for(decoder: Callable[..., Settled], name: str) -> None:
    given = {key: value for key, value in DECODER.items() if key != name}
    with pytest.raises(UserError, match=f"do not say {name}; name them in a YAML"):
        decoder(given)


def test_everything_that_is_missing_is_listed_at_once(decoder: Callable[..., Settled]) -> None:
    with pytest.raises(UserError) as caught:
        decoder({}, PLAIN)
    assert (
        "do not say decoder_attention_heads, activation_fn, layernorm_eps, no_scale_embedding, "
        "segment_length, deepnorm;" in str(caught.value)
    )
    assert "no_scale_embedding: true, segment_length: null, deepnorm: false)" in str(caught.value)


def test_segments_and_their_ratios_are_asked_for_together(decoder: Callable[..., Settled]) -> None:
    """Ratios have no default that TorchScale could have taken."""
    given = DECODER | {"segment_length": [4, 8]}
    with pytest.raises(UserError, match="do not say dilated_ratio; .* --torchscale-config$"):
        decoder(given)
    del given["activation_fn"]
    with pytest.raises(UserError, match="do not say activation_fn, dilated_ratio; name"):
        decoder(given)


def test_the_old_version_has_no_segments(decoder: Callable[..., Settled]) -> None:
    given = {key: value for key, value in DECODER.items() if key != "segment_length"}
    assert decoder(given, version="0.3.0").versions == ("0.3.0",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("subln", False),
        ("decoder_layers", 4),
        ("decoder_embed_dim", 64),
        ("decoder_ffn_embed_dim", 32),
        ("multiway", True),
        ("layernorm_embedding", True),
        ("xpos_rel_pos", True),
        ("rel_pos_buckets", 32),
        ("deepnorm", True),
        ("vocab_size", 24),
    ],
)
def test_a_contradiction_is_refused(
    decoder: Callable[..., Settled], name: str, value: object
) -> None:
    with pytest.raises(UserError, match="but the configuration gives"):
        decoder(DECODER | {name: value})


def test_fields_that_torchscale_does_not_have_are_refused(
    decoder: Callable[..., Settled],
) -> None:
    with pytest.raises(ConfigError, match="no field 'layers'"):
        decoder(DECODER | {"layers": 3})
    with pytest.raises(ConfigError, match="layernorm_eps is 'small'; give a float"):
        decoder(DECODER | {"layernorm_eps": "small"})


@pytest.mark.parametrize(
    ("state", "fits", "residual"), [(PLAIN, "main", "pre_norm"), (POST, "0.3.0", "deep_norm")]
)
def test_the_final_norm_tells_the_versions_apart(
    decoder: Callable[..., Settled], state: dict[str, Any], fits: str, residual: str
) -> None:
    """The constructors place the norms of a DeepNorm decoder in 0.3.0 only."""
    given = DECODER | {"deepnorm": True, "decoder_normalize_before": True}
    settled = decoder(given, state)
    assert settled.versions == (fits,)
    assert settled.translation.cfg.decoder_stack().axes.residual == residual  # type: ignore[attr-defined]
    other = {"main": "0.3.0", "0.3.0": "main"}[fits]
    with pytest.raises(UserError, match=f"TorchScale {other} do not give"):
        decoder(given, state, version=other)


def test_a_version_that_matters_is_asked_for(decoder: Callable[..., Settled]) -> None:
    """``override`` leaves an encoder's norms where they are in 0.3.0 only."""
    record = ENCODER | {
        "deepnorm": True,
        "subln": False,
        "encoder_normalize_before": True,
        "normalize_output": False,
    }
    with pytest.raises(ConfigError, match="give --torchscale-version"):
        decoder(record, POST, "encoder", complete=True)
    for version, residual in (("main", "deep_norm"), ("0.3.0", "pre_norm")):
        settled = decoder(record, POST, "encoder", complete=True, version=version)
        assert settled.translation.cfg.encoder_stack().axes.residual == residual  # type: ignore[attr-defined]


def test_a_record_needs_no_more_and_may_say_more(decoder: Callable[..., Settled]) -> None:
    record = {
        "_name": "lm_base",
        "decoder_attention_heads": 4,
        "fsdp": True,
        "seq_parallel": True,
        "max_target_positions": None,
        "adaptive_softmax_dropout": 0.3,
        "dropout": 0.1,
        "segment_length": "",
    }
    settled = decoder(record, complete=True)
    assert settled.config.dropout == 0.1
    assert settled.config.activation_fn == "gelu"
    # A field that is not set is not said; "" says that there are no segments.
    assert settled.assumed == {
        "activation_fn": "gelu",
        "layernorm_eps": 1e-5,
        "no_scale_embedding": True,
    }
    assert not decoder(DECODER).assumed


def test_other_kinds_settle_too(golden_state: StateMaker) -> None:
    state = golden_state(side="encoder", prefix="encoder.", output=False)
    state |= golden_state(side="decoder", prefix="decoder.", cross=True)
    both = settle(recognize(state), ENCODER | DECODER)
    assert both.translation.arch == "transformer_mt"
    head = {"dense.weight": (32, 32), "dense.bias": (32,), "bias": (23,)}
    head |= {"layer_norm.weight": (32,), "layer_norm.bias": (32,)}
    state = golden_state(side="encoder", prefix="encoder.", output=False)
    state |= {f"encoder.output_projection.{key}": torch.ones(s) for key, s in head.items()}
    assert settle(recognize(state), ENCODER).translation.arch == "transformer_mlm"


def test_two_stacks_have_one_kind_of_norms(golden_state: StateMaker) -> None:
    state = golden_state(side="encoder", prefix="encoder.", output=False)
    state |= golden_state(side="decoder", prefix="decoder.", cross=True, inner_norm=False)
    with pytest.raises(UserError, match="differ in subln"):
        settle(recognize(state), ENCODER | DECODER)


def retnet_state() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (23, 16)}
    shapes |= {"output_projection.weight": (23, 16), "layer_norm.weight": (16,)}
    for name, rows, columns in (
        ("retention.q_proj", 16, 16),
        ("retention.k_proj", 16, 16),
        ("retention.v_proj", 24, 16),
        ("retention.g_proj", 24, 16),
        ("retention.out_proj", 16, 24),
        ("ffn.fc1", 20, 16),
        ("ffn.gate", 20, 16),
        ("ffn.fc2", 16, 20),
    ):
        shapes[f"layers.0.{name}.weight"] = (rows, columns)
    for name in ("retention_layer_norm", "final_layer_norm"):
        shapes[f"layers.0.{name}.weight"] = (16,)
    state = {f"decoder.{key}": torch.ones(shape) for key, shape in shapes.items()}
    return state | {"decoder.retnet_rel_pos.decay": log_decays(2)}


def test_a_retnet_depends_on_the_version() -> None:
    given = {"activation_fn": "swish", "layernorm_eps": 1e-6, "no_scale_embedding": False}
    found = recognize(retnet_state())
    with pytest.raises(UserError, match="do not say deepnorm; .*, and give --torchscale-version$"):
        settle(found, given)
    with pytest.raises(UserError, match=r"deepnorm: false\)$"):
        settle(found, given, version="main")
    with pytest.raises(ConfigError, match="give --torchscale-version"):
        settle(found, given | {"deepnorm": False})
    for version, mode in (("main", "torchscale"), ("0.3.0", "torchscale_0.3.0")):
        settled = settle(found, given | {"deepnorm": False}, version=version)
        assert settled.translation.arch == "retnet_lm"
        cfg: Any = settled.translation.cfg
        assert (cfg.norm_eps_mode, cfg.decoder_retention_heads) == (mode, 2)
        assert (cfg.decoder_value_embed_dim, cfg.decoder_ffn_embed_dim) == (24, 20)
        settled.translation.build()
    with pytest.raises(UserError, match="decoder_layers 1, but the configuration gives 2"):
        settle(found, given | {"deepnorm": False, "decoder_layers": 2}, version="main")


def with_experts(state: dict[str, Tensor], *, xmoe: bool) -> dict[str, Tensor]:
    """The state dict with two experts in place of the second layer's feed-forward layer."""
    found = {}
    for key, tensor in state.items():
        if ".layers.1.ffn." in key:
            for number in "01":
                found[key.replace("ffn", f"moe_layer.experts.{number}", 1)] = tensor
        else:
            found[key] = tensor
    gate = "decoder.layers.1.moe_layer.gate"
    if xmoe:
        return found | {
            f"{gate}.wg": torch.ones(2, 16),
            f"{gate}.wg_reduction.weight": torch.ones(16, 32),
        }
    return found | {f"{gate}.wg.weight": torch.ones(2, 32)}


@pytest.mark.parametrize("xmoe", [True, False])
def test_experts_are_known_by_their_gates(golden_state: StateMaker, xmoe: bool) -> None:
    found = recognize(with_experts(golden_state(side="decoder", prefix="decoder."), xmoe=xmoe))
    given = DECODER | {"moe_top1_expert": False, "moe_gating_use_fp32": True}
    missing = "moe_eval_capacity_token_fraction"
    if not xmoe:
        missing += ", moe_second_expert_policy, moe_normalize_gate_prob_before_dropping"
    with pytest.raises(UserError, match=f"do not say {missing};"):
        settle(found, given)
    given |= {"moe_eval_capacity_token_fraction": -1.0}
    if not xmoe:
        given["moe_second_expert_policy"] = "all"
        given["moe_normalize_gate_prob_before_dropping"] = False
    settled = settle(found, given)
    cfg: Any = settled.translation.cfg
    assert (cfg.moe_freq, cfg.moe_expert_count) == (2, 2)
    assert cfg.moe_gate == ("xmoe" if xmoe else "linear")
    settled.translation.build()
    with pytest.raises(UserError, match="moe_freq 2, but the configuration gives 1"):
        settle(found, given | {"moe_freq": 1})


def test_segments_have_to_be_said_and_are_taken_over(decoder: Callable[..., Settled]) -> None:
    given = DECODER | {"segment_length": [4, 8], "dilated_ratio": [1, 2]}
    settled = decoder(given)
    assert settled.versions == ("main",)
    assert settled.translation.cfg.segment_length == [4, 8]  # type: ignore[attr-defined]
