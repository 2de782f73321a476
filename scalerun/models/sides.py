"""The settings of an encoder and those of a decoder; a model has one or both."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.block_config import BlockConfig


@dataclass
class EncoderSide(ScalerunDataclass):
    """Sizes of an encoder."""

    encoder_embed_dim: int = option(768, "width of the encoder")
    encoder_attention_heads: int = option(
        12, "attention heads of the encoder; must divide --encoder-embed-dim"
    )
    encoder_ffn_embed_dim: int = option(3072, "inner width of the encoder's feed-forward layers")
    encoder_layers: int = option(12, "number of blocks of the encoder")
    encoder_normalize_before: bool | None = option(
        None,
        "norm before each branch of the encoder, or after it (default: before, but after with "
        "--deepnorm)",
    )
    normalize_output: bool = option(
        True, "norm after the last block of an encoder that norms before each branch"
    )
    encoder_learned_pos: bool = option(False, "learned absolute positions in the encoder")
    encoder_zero_keys: bool = option(
        False,
        "LongNet: the encoder also reads the zeros that fill up the last segment, as in TorchScale",
    )
    max_source_positions: int = option(1024, "longest sequence of the encoder, in tokens")


@dataclass
class DecoderSide(ScalerunDataclass):
    """Sizes of a decoder."""

    decoder_embed_dim: int = option(768, "width of the decoder")
    decoder_attention_heads: int = option(
        12, "attention heads of the decoder; must divide --decoder-embed-dim"
    )
    decoder_ffn_embed_dim: int = option(3072, "inner width of the decoder's feed-forward layers")
    decoder_layers: int = option(12, "number of blocks of the decoder")
    decoder_normalize_before: bool | None = option(
        None,
        "norm before each branch of the decoder, or after it (default: before, but after with "
        "--deepnorm)",
    )
    share_decoder_input_output_embed: bool = option(
        False, "use the decoder's token embedding as output projection"
    )
    decoder_learned_pos: bool = option(False, "learned absolute positions in the decoder")
    max_target_positions: int = option(1024, "longest sequence of the decoder, in tokens")


def check_norm_placement(cfg: BlockConfig, normalize_before: bool | None, side: str) -> None:
    """Refuse a place of the norms that DeepNorm or SubLN excludes.

    Raises:
        ConfigError: names both flags.
    """
    flag = f"{side}-normalize-before"
    if cfg.keep_norm_placement:
        return
    if cfg.deepnorm and normalize_before is True:
        raise ConfigError(f"--deepnorm norms after each branch; remove --{flag}")
    if cfg.subln and normalize_before is False:
        raise ConfigError(f"--subln norms before each branch; remove --no-{flag}")
