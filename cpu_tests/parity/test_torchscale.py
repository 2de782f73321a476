"""Logits equal those of the package ``torchscale`` 0.3.0 under fresh random settings and weights.

``make test-parity`` gets the package; without it there is nothing to compare with.
B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scalerun.models.torchscale import (
    load_beit3,
    load_decoder,
    load_encoder,
    load_encoder_decoder,
    load_retnet,
)
from scalerun.models.torchscale.configs import OVERRIDDEN

pytest.importorskip("torchscale", reason="torchscale is not installed: see make test-parity")

from torchscale.architecture.config import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    RetNetConfig,
)
from torchscale.architecture.decoder import Decoder
from torchscale.architecture.encoder import Encoder
from torchscale.architecture.encoder_decoder import EncoderDecoder
from torchscale.architecture.retnet import RetNetDecoder
from torchscale.component.embedding import PositionalEmbedding, TextEmbedding
from torchscale.component.multiway_network import MutliwayEmbedding
from torchscale.model.BEiT3 import BEiT3

RELATIVE_DIFFERENCE = 1e-5
"""Of the largest difference to the largest logit."""
BATCH, ROWS = 2, 24


@dataclass
class Case:
    """A configuration, and what is fed to the model."""

    fields: dict[str, Any]
    version: str
    positions: bool
    num_tokens: int
    num_padding: int
    seed: int

    def config(self, kind: type[Any]) -> Any:
        """TorchScale's configuration, made in one of the two ways."""
        if self.version == OVERRIDDEN:
            cfg = kind()
            cfg.override(Namespace(**self.fields))
            return cfg
        return kind(**self.fields)

    def tokens(self, num_tokens: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (BATCH, num_tokens or self.num_tokens)
        return torch.randint(0, self.fields["vocab_size"], shape, generator=generator)

    def padding(self) -> Tensor:
        """(B, T) bool, True at the end of the last sample: TorchScale gives NaN for padding on the
        left of a causal model, and does not count positions from its end."""
        mask = torch.zeros(BATCH, self.num_tokens, dtype=torch.bool)
        if self.num_padding:
            mask[-1, -self.num_padding :] = True
        return mask


@st.composite
def norms(draw: st.DrawFn, *sides: str) -> tuple[dict[str, Any], str]:
    """Where norms sit, and how the configuration came about."""
    fields: dict[str, Any] = {f"{side}_normalize_before": draw(st.booleans()) for side in sides}
    scheme = draw(st.sampled_from(("plain", "subln", "deepnorm")))
    # Both at once: 0.3.0's override would keep both, which its constructors exclude.
    fields |= {"subln": scheme == "subln", "deepnorm": scheme == "deepnorm"}
    if "encoder" in sides:
        fields["normalize_output"] = draw(st.booleans())
    return fields, draw(st.sampled_from(("0.3.0", OVERRIDDEN)))


@st.composite
def relative_positions(draw: st.DrawFn) -> dict[str, Any]:
    """No relative scheme, XPos, or a learned bias; scalerun excludes both at once."""
    scheme = draw(st.sampled_from(("none", "xpos", "bias")))
    if scheme == "xpos":
        return {"xpos_rel_pos": True, "xpos_scale_base": draw(st.integers(8, 600))}
    if scheme == "bias":
        buckets = draw(st.integers(4, 40))
        return {
            "rel_pos_buckets": buckets,
            "max_rel_pos": draw(st.integers(buckets // 4 + 1, 160)),
        }
    return {}


@st.composite
def cases(draw: st.DrawFn, *sides: str) -> Case:
    """Any configuration of models with these sides."""
    heads = draw(st.integers(1, 4))
    dim = heads * 2 * draw(st.integers(1, 8))
    placed, version = draw(norms(*sides))
    fields: dict[str, Any] = {
        "vocab_size": draw(st.integers(3, 40)),
        "activation_fn": draw(st.sampled_from(("relu", "gelu", "swish"))),
        "no_scale_embedding": draw(st.booleans()),
        "layernorm_embedding": draw(st.booleans()),
        "layernorm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-3))),
        "dropout": draw(st.sampled_from((0.0, 0.3))),
        "drop_path_rate": draw(st.sampled_from((0.0, 0.1))),
        **placed,
        **draw(relative_positions()),
    }
    for side in sides:
        fields |= {
            f"{side}_embed_dim": dim,
            f"{side}_attention_heads": heads,
            f"{side}_ffn_embed_dim": draw(st.integers(1, 48)),
            f"{side}_layers": draw(st.integers(1, 4)),
            f"max_{'source' if side == 'encoder' else 'target'}_positions": ROWS,
        }
    num_tokens = draw(st.integers(1, 20))
    return Case(
        fields=fields,
        version=version,
        positions=draw(st.booleans()),
        num_tokens=num_tokens,
        num_padding=draw(st.integers(0, num_tokens - 1)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def filled(model: nn.Module, seed: int) -> Any:
    """The model with random weights throughout, norms and biases included, ready to evaluate."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter += 1
    return model.eval()


def tables(case: Case, dim: int, *, paired: bool = False) -> dict[str, Any]:
    """TorchScale's embeddings for one stack, by the names of its arguments."""
    found: dict[str, Any] = {"embed_tokens": TextEmbedding(case.fields["vocab_size"], dim)}
    if case.positions:
        table = [PositionalEmbedding(ROWS, dim) for _ in range(1 + paired)]
        found["embed_positions"] = MutliwayEmbedding(table) if paired else table[0]
    return found


def check(
    ours: Tensor | None,
    run: Callable[[nn.Module], Tensor],
    model: nn.Module,
    padding: Tensor | None = None,
) -> None:
    """The outputs agree, but for what stands at padding, which means nothing.

    A norm over few features that happen to be nearly equal magnifies any rounding. Cases where
    TorchScale in float32 is too far from itself in float64 to be compared with are not counted.

    Args:
        run: what TorchScale's model computes.
    """
    theirs, exact = run(model), run(model.double())
    assert ours is not None
    assert ours.shape == theirs.shape
    if padding is not None:
        ours, theirs, exact = ours[~padding], theirs[~padding], exact[~padding]
    assert torch.isfinite(theirs).all()
    allowed = RELATIVE_DIFFERENCE * theirs.abs().max()
    assume((theirs - exact).abs().max() <= allowed / 4)
    assert (ours - theirs).abs().max() <= allowed


@given(cases("encoder"), st.sampled_from(("own", "tied", "none")), st.booleans())
@settings(max_examples=40)
@torch.no_grad()
def test_encoders_agree(case: Case, output: str, hiding: bool) -> None:
    case.fields["no_output_layer"] = output == "none"
    cfg = case.config(EncoderConfig)
    model = Encoder(cfg, **tables(case, cfg.encoder_embed_dim))
    if output == "tied":
        # share_encoder_input_output_embed crashes in TorchScale, so it is tied here.
        model.output_projection.weight = model.embed_tokens.weight
    filled(model, case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.rand(case.num_tokens, case.num_tokens, generator=generator) < 0.3
    hidden.fill_diagonal_(False)
    fields = case.fields | {"share_encoder_input_output_embed": output == "tied"}
    ours = load_encoder(fields, model.state_dict(), version=case.version).eval()
    tokens, padding = case.tokens(), case.padding()
    # Of a row whose keys are all padding or hidden, TorchScale makes NaN.
    hiding = hiding and not case.num_padding
    # TorchScale adds 1 where a mask of booleans is set; it means to forbid.
    mask = hidden.float() if hiding else None

    def run(model: nn.Module) -> Tensor:
        return model(tokens, encoder_padding_mask=padding, attn_mask=mask)["encoder_out"]

    found = ours(tokens, padding_mask_BT=padding, hidden_TT=hidden if hiding else None)
    check(found.features if output == "none" else found.logits, run, model, padding)


@given(cases("encoder"), st.integers(-1, 20))
@settings(max_examples=20)
@torch.no_grad()
def test_multiway_encoders_agree(case: Case, split: int) -> None:
    case.fields["multiway"] = True
    split = min(split, case.num_tokens)
    cfg = case.config(EncoderConfig)
    model = filled(Encoder(cfg, **tables(case, cfg.encoder_embed_dim, paired=True)), case.seed)
    ours = load_encoder(case.fields, model.state_dict(), version=case.version).eval()
    tokens, padding = case.tokens(), case.padding()

    def run(model: nn.Module) -> Tensor:
        # TorchScale keeps the last split where none is given, so that one is always given.
        output = model(tokens, encoder_padding_mask=padding, multiway_split_position=split)
        return output["encoder_out"]

    found = ours(tokens, padding_mask_BT=padding, split=None if split < 0 else split)
    check(found.logits, run, model, padding)


@given(cases("decoder"), st.booleans(), st.booleans())
@settings(max_examples=40)
@torch.no_grad()
def test_decoders_agree(case: Case, tied: bool, multiway: bool) -> None:
    case.fields |= {"share_decoder_input_output_embed": tied, "multiway": multiway}
    # Under multiway TorchScale pairs what is in attention alone, and every token takes half A.
    cfg = case.config(DecoderConfig)
    model = filled(Decoder(cfg, **tables(case, cfg.decoder_embed_dim)), case.seed)
    ours = load_decoder(case.fields, model.state_dict(), version=case.version).eval()
    tokens, padding = case.tokens(), case.padding()

    def run(model: nn.Module) -> Tensor:
        return model(tokens, self_attn_padding_mask=padding)[0]

    check(ours(tokens, padding_mask_BT=padding).logits, run, model, padding)


@given(cases("encoder", "decoder"), st.sampled_from(("own", "tied", "all")), st.integers(1, 20))
@settings(max_examples=40)
@torch.no_grad()
def test_encoder_decoders_agree(case: Case, output: str, num_target_tokens: int) -> None:
    case.fields |= {
        "share_decoder_input_output_embed": output == "tied",
        "share_all_embeddings": output == "all",
    }
    cfg = case.config(EncoderDecoderConfig)
    dim = cfg.encoder_embed_dim
    given = {f"encoder_{name}": table for name, table in tables(case, dim).items()}
    given |= {f"decoder_{name}": table for name, table in tables(case, dim).items()}
    if output == "all":
        del given["decoder_embed_tokens"]
    model = filled(EncoderDecoder(cfg, **given), case.seed)
    ours = load_encoder_decoder(case.fields, model.state_dict(), version=case.version).eval()
    source, target, padding = case.tokens(), case.tokens(num_target_tokens), case.padding()

    def run(model: Any) -> Tensor:
        # TorchScale's own forward leaves all padding masks out.
        encoded = model.encoder(source, encoder_padding_mask=padding)
        return model.decoder(target, encoder_out=encoded)[0]

    check(ours(source, target, source_padding_mask_BM=padding).logits, run, model)


@given(cases("encoder"), st.sampled_from(("image", "text", "both")), st.data())
@settings(max_examples=20)
@torch.no_grad()
def test_beit3_agrees(case: Case, content: str, data: st.DataObject) -> None:
    patch_size, side = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    case.fields |= {
        "multiway": True,
        "no_output_layer": True,
        "max_source_positions": ROWS,
        "img_size": patch_size * side,
        "patch_size": patch_size,
        "in_chans": data.draw(st.integers(1, 3)),
    }
    cfg = case.config(EncoderConfig)
    model = filled(BEiT3(cfg), case.seed)
    state = {f"beit3.{key}": tensor for key, tensor in model.state_dict().items()}
    ours = load_beit3(case.fields, state, version=case.version).eval()
    generator = torch.Generator().manual_seed(case.seed)
    shape = (BATCH, cfg.in_chans, cfg.img_size, cfg.img_size)
    images = None if content == "text" else torch.randn(shape, generator=generator)
    masked = None if images is None else torch.rand(BATCH, side**2, generator=generator) < 0.4
    tokens = None if content == "image" else case.tokens()
    padding = None if content == "image" else case.padding()

    def run(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        return model(
            textual_tokens=tokens,
            visual_tokens=None if images is None else images.to(dtype),
            text_padding_position=padding,
            # An integer mask: TorchScale subtracts it from 1, which torch refuses for booleans.
            vision_masked_position=None if masked is None else masked.long(),
        )["encoder_out"]

    features = ours.encode(
        tokens, images_BCHW=images, masked_BP=masked, padding_mask_BT=padding
    ).features
    unimportant = padding
    if padding is not None and images is not None:
        seen = padding.new_zeros(BATCH, features.shape[1] - padding.shape[1])
        unimportant = torch.cat((seen, padding), dim=1)
    check(features, run, model, unimportant)


@given(cases("decoder"), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 9)), st.booleans())
@settings(max_examples=30)
@torch.no_grad()
def test_retnets_agree(case: Case, values: int, chunk_size: int | None, tied: bool) -> None:
    heads = case.fields.pop("decoder_attention_heads")
    unknown = ("xpos_rel_pos", "xpos_scale_base", "rel_pos_buckets", "max_rel_pos")
    case.fields = {name: v for name, v in case.fields.items() if name not in unknown} | {
        "decoder_retention_heads": heads,
        "decoder_value_embed_dim": heads * values * 3,
        "share_decoder_input_output_embed": tied,
        "chunkwise_recurrent": chunk_size is not None,
        "recurrent_chunk_size": chunk_size or 512,
    }
    case.positions = False
    cfg = case.config(RetNetConfig)
    model = filled(RetNetDecoder(cfg, **tables(case, cfg.decoder_embed_dim)), case.seed)
    ours = load_retnet(case.fields, model.state_dict(), version=case.version).eval()
    tokens = case.tokens()

    def run(model: nn.Module) -> Tensor:
        return model(tokens)[0]

    check(ours(tokens).logits, run, model)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """What TorchScale's experts need: a process group, and a histogram of whole numbers."""
    histc = torch.histc
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # On a CPU torch counts real numbers only.
    torch.histc = lambda numbers, *args, **kwargs: histc(numbers.float(), *args, **kwargs)  # type: ignore[assignment]
    yield
    torch.histc = histc
    dist.destroy_process_group()


@st.composite
def experts(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of layers of experts; each stack has one such layer at least."""
    return {
        "moe_freq": draw(st.integers(1, 2)),
        "moe_expert_count": draw(st.integers(2, 6)),
        "moe_top1_expert": draw(st.booleans()),
        "use_xmoe": draw(st.booleans()),
        "moe_second_expert_policy": draw(st.sampled_from(("all", "random", "sampling"))),
        "moe_normalize_gate_prob_before_dropping": draw(st.booleans()),
        "moe_eval_capacity_token_fraction": draw(st.sampled_from((-1.0, 0.25, 1.0))),
    }


@given(st.sampled_from(("encoder", "decoder")), experts(), st.data())
@settings(max_examples=30)
@torch.no_grad()
def test_experts_agree(
    one_process: None, side: str, settings: dict[str, Any], data: st.DataObject
) -> None:
    case = data.draw(cases(side))
    case.fields |= settings | {f"{side}_layers": 2}
    case.version = "0.3.0"  # override leaves out what use_xmoe implies
    kind, config = {"encoder": (Encoder, EncoderConfig), "decoder": (Decoder, DecoderConfig)}[side]
    cfg = case.config(config)
    model = filled(kind(cfg, **tables(case, getattr(cfg, f"{side}_embed_dim"))), case.seed)
    load = {"encoder": load_encoder, "decoder": load_decoder}[side]
    ours: Any = load(case.fields, model.state_dict(), version=case.version).eval()
    tokens = case.tokens()

    def run(model: nn.Module) -> Tensor:
        # Both draw one number for each token and layer, also when they evaluate.
        torch.manual_seed(case.seed)
        output = model(tokens)
        return output["encoder_out"] if side == "encoder" else output[0]

    torch.manual_seed(case.seed)
    check(ours(tokens).logits, run, model)
