"""One tiny model of every kind that can generate, and a vocabulary of twelve letters for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import build_model
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_mt import TransformerMTConfig

BOS, PAD, EOS, UNK, A = range(5)
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
CONTEXT = 40


class Letters(BaseTokenizer):
    """a to l; with four special symbols, 16."""

    def __init__(self, letters: str = "abcdefghijkl") -> None:
        self.letters = letters
        self.dictionary = Dictionary(A + len(letters), BOS, PAD, EOS, UNK, digest="letters")
        self.files = {}

    def encode(self, text: str) -> list[int]:
        return [A + self.letters.index(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.letters[i - A] for i in ids if A <= i < A + len(self.letters))

    def token_text(self, index: int) -> str:
        return SPECIALS[index] if index < A else self.decode([index])


def _decoder(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        decoder_embed_dim=16,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=32,
        decoder_layers=2,
        max_target_positions=CONTEXT,
        **settings,
    )


def _retnet(**settings: Any) -> RetNetConfig:
    return RetNetConfig(
        decoder_embed_dim=16,
        decoder_value_embed_dim=24,
        decoder_retention_heads=2,
        decoder_ffn_embed_dim=24,
        decoder_layers=2,
        max_target_positions=CONTEXT,
        **settings,
    )


def _translator(**settings: Any) -> TransformerMTConfig:
    sizes = {"embed_dim": 16, "attention_heads": 2, "ffn_embed_dim": 32, "layers": 2}
    both = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    return TransformerMTConfig(
        **both, max_source_positions=CONTEXT, max_target_positions=CONTEXT, **settings
    )


DILATED: dict[str, Any] = {"segment_length": [4, 8], "dilated_ratio": [1, 2]}
EXPERTS: dict[str, Any] = {
    "moe_freq": 2,
    "moe_expert_count": 3,
    "moe_deterministic_eval": True,
    "moe_eval_capacity_token_fraction": 1.0,
}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "sinusoidal": _decoder,
    "learned": lambda: _decoder(decoder_learned_pos=True),
    "rotary": lambda: _decoder(rotary=True),
    "xpos": lambda: _decoder(xpos_rel_pos=True),
    "relative_bias": lambda: _decoder(rel_pos_buckets=8, max_rel_pos=12),
    "subln": lambda: _decoder(subln=True),
    "deepnorm": lambda: _decoder(deepnorm=True),
    "experts": lambda: _decoder(**EXPERTS),
    "longnet": lambda: _decoder(rotary=True, **DILATED),
    "retnet": _retnet,
    "retnet_chunks": lambda: _retnet(chunkwise_recurrent=True, recurrent_chunk_size=3),
    "translator": _translator,
    "relative_translator": lambda: _translator(rel_pos_buckets=8, max_rel_pos=12),
}


def tiny_model(name: str, *, seed: int = 1) -> BaseDecoder | EncoderDecoder:
    """A model with drawn weights, large enough to have opinions."""
    dictionary = Letters().dictionary
    model = build_model(
        ARCHITECTURES[name](),
        vocab_size=len(dictionary),
        padding_idx=dictionary.pad,
        seed=seed,
        device=torch.device("cpu"),
    )
    assert isinstance(model, BaseDecoder | EncoderDecoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
