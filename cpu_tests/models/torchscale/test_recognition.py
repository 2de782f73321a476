from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.recognition import recognize

StateMaker = Callable[..., dict[str, Tensor]]


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_prefix_names_the_stack(golden_state: StateMaker, side: str) -> None:
    found = recognize(golden_state(side=side, prefix=f"{side}."))
    assert found.kind == side
    assert found.state.keys() == golden_state(side=side).keys()
    assert found.num_rows == 23


def test_both_prefixes_are_an_encoder_decoder(golden_state: StateMaker) -> None:
    state = golden_state(side="encoder", prefix="encoder.", output=False)
    state |= golden_state(side="decoder", prefix="decoder.", cross=True)
    found = recognize(state)
    assert found.kind == "encoder_decoder"
    assert found.state == state
    assert found.sides["decoder"].keys() == golden_state(side="decoder", cross=True).keys()


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_fields_name_a_stack_without_prefix(golden_state: StateMaker, side: str) -> None:
    state = golden_state(side=side)
    assert recognize(state, [f"{side}_layers", "dropout"]).kind == side
    with pytest.raises(UserError, match="do not tell an encoder from a decoder") as caught:
        recognize(state, ["dropout", "layernorm_eps"])
    assert str(caught.value).endswith(
        "what they do not say either: activation_fn, no_scale_embedding, segment_length"
    )


@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("encoder", {"buckets": 8}),
        ("decoder", {"buckets": 8}),
        ("encoder", {"halves": (".A", ".B")}),
    ],
)
def test_some_keys_name_their_stack(
    golden_state: StateMaker, side: str, options: dict[str, object]
) -> None:
    assert recognize(golden_state(side=side, **options)).kind == side


def test_a_head_makes_a_masked_language_model(golden_state: StateMaker) -> None:
    state = golden_state(side="encoder", prefix="encoder.")
    state["encoder.output_projection.dense.weight"] = torch.ones(32, 32)
    assert recognize(state).kind == "mlm"


@pytest.mark.parametrize("prefix", ["decoder.", ""])
def test_retention_makes_a_retnet(prefix: str) -> None:
    state = {f"{prefix}layers.0.retention.q_proj.weight": torch.ones(2, 2)}
    assert recognize(state).kind == "retnet"


@pytest.mark.parametrize("prefix", ["beit3.", ""])
def test_image_embeddings_make_a_beit3(golden_state: StateMaker, prefix: str) -> None:
    state = golden_state(side="encoder", prefix=f"{prefix}encoder.", halves=(".A", ".B"))
    state |= {f"{prefix}vision_embed.cls_token": torch.ones(1, 1, 32)}
    state |= {f"{prefix}text_embed.weight": torch.ones(64, 32)}
    around = {"head.weight": torch.ones(2)} if prefix else {}
    found = recognize(state | around)
    assert (found.kind, found.left_out) == ("beit3", tuple(around))
    assert found.num_rows == 64
    assert set(found.state) == {key.removeprefix(prefix) for key in state}


def test_other_models_are_refused(golden_state: StateMaker) -> None:
    state = golden_state(side="decoder", prefix="decoder.")
    with pytest.raises(UserError, match="begin with transformer"):
        recognize(state | {"transformer.h.0.weight": torch.ones(1)})
