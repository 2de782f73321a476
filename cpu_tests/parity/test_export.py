"""The package ``torchscale`` 0.3.0 takes our weights strictly, and computes our logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.torchscale.export import (
    torchscale_fields,
    torchscale_pieces,
    torchscale_tables,
)
from scalerun.modules.positions.learned import OFFSET

pytest.importorskip("torchscale", reason="torchscale is not installed: see make test-parity")

from torchscale.architecture.config import DecoderConfig, RetNetConfig
from torchscale.architecture.decoder import Decoder
from torchscale.architecture.retnet import RetNetDecoder
from torchscale.component.embedding import PositionalEmbedding, TextEmbedding

VOCAB = 23
SMALL: dict[str, Any] = {"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24}
BARE = {"decoder_attention_heads": 2, "no_token_positional_embeddings": True}
LEARNED = {"decoder_attention_heads": 2, "decoder_learned_pos": True, "max_target_positions": 40}
RETNET = {"decoder_retention_heads": 2, "decoder_value_embed_dim": 24}
RETNET |= {"norm_eps_mode": "torchscale_0.3.0"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("transformer_lm", BARE),
    "learned": ("transformer_lm", LEARNED),
    "tied": ("transformer_lm", LEARNED | {"share_decoder_input_output_embed": True}),
    "subln": ("transformer_lm", BARE | {"subln": True, "layernorm_embedding": True}),
    "deepnorm": ("transformer_lm", LEARNED | {"deepnorm": True, "activation_fn": "relu"}),
    "xpos": ("transformer_lm", BARE | {"xpos_rel_pos": True, "no_scale_embedding": False}),
    "buckets": ("transformer_lm", BARE | {"rel_pos_buckets": 8, "max_rel_pos": 16}),
    "retnet": ("retnet_lm", RETNET),
    "tied retnet": ("retnet_lm", RETNET | {"share_decoder_input_output_embed": True}),
}


def theirs(arch: str, cfg: Any, fields: dict[str, Any]) -> Any:
    """TorchScale's model of these fields."""
    given: dict[str, Any] = {"embed_tokens": TextEmbedding(VOCAB, cfg.decoder_embed_dim)}
    if arch == "retnet_lm":
        return RetNetDecoder(RetNetConfig(vocab_size=VOCAB, **fields), **given)
    if cfg.decoder_learned_pos:
        rows = cfg.max_target_positions + OFFSET
        given["embed_positions"] = PositionalEmbedding(rows, cfg.decoder_embed_dim)
    return Decoder(DecoderConfig(vocab_size=VOCAB, **fields), **given)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_package_computes_the_same_logits(case: str) -> None:
    arch, changes = CASES[case]
    cfg = ARCH_REGISTRY.config_for(arch).replace(**SMALL, **changes)
    cpu = torch.device("cpu")
    ours = build_model(cfg, vocab_size=VOCAB, padding_idx=None, seed=3, device=cpu).eval()
    weights = ours.state_dict()
    state: dict[str, Tensor] = dict(torchscale_tables(cfg))
    state |= {piece.key: weights[piece.source] for piece in torchscale_pieces(cfg, weights)}
    model = theirs(arch, cfg, torchscale_fields(cfg)[0]).eval()
    model.load_state_dict(state, strict=True)
    tokens = torch.arange(2 * 7).reshape(2, 7) % VOCAB
    expected = ours(tokens).logits
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-5, atol=1e-5)
