"""BEiT-3: one encoder for images, for text, and for both in one sequence.

Source: Wang et al. 2022, arXiv:2208.10442. Against the plain encoder each block has a half of its
own for image patches and for text (multiway), only attention is shared, and the sequence may begin
with the patches of an image.

B batch, T text tokens, P patches, C channels, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_encoder import (
    EncoderOutput,
    TransformerEncoder,
    TransformerEncoderConfig,
)
from scalerun.modules.multiway import MultiwayPositions
from scalerun.modules.positions.learned import LearnedPositions
from scalerun.modules.vision_embedding import VisionEmbedding

MODEL = "beit3"


@dataclass
class BEiT3Config(TransformerEncoderConfig):
    """Settings of an encoder of images and text; names are TorchScale's."""

    multiway: bool = option(True, "always on: a half of each block for patches and for text")
    encoder_learned_pos: bool = option(True, "always on: learned absolute positions")
    no_output_layer: bool = option(True, "no output projection: the model returns features alone")
    subln: bool = option(True, "SubLN: a second norm in each branch, scaled initial weights")
    img_size: int = option(224, "side of the images, in pixels")
    patch_size: int = option(16, "side of a patch, in pixels; must divide --img-size")
    in_chans: int = option(3, "channels of the images")

    def validate(self) -> None:
        super().validate()
        for flag, value in (
            ("--img-size", self.img_size),
            ("--patch-size", self.patch_size),
            ("--in-chans", self.in_chans),
        ):
            if value < 1:
                raise ConfigError(f"{flag} is {value}; give 1 or more")
        if self.img_size % self.patch_size:
            raise ConfigError(
                f"--img-size {self.img_size} is not a multiple of --patch-size {self.patch_size}"
            )
        if not (self.multiway and self.encoder_learned_pos):
            raise ConfigError(
                "--arch beit3 has multiway layers and learned positions; remove --no-multiway and "
                "--no-encoder-learned-pos, or give --arch transformer_encoder"
            )


class BEiT3Parts(TransformerParts):
    """The parts of an encoder, with a table of positions for patches beside the one for text."""

    cfg: BEiT3Config

    def vision_embedding(self) -> VisionEmbedding:
        """From images to vectors, with a class token in front."""
        return VisionEmbedding(
            self.cfg.img_size,
            self.cfg.patch_size,
            self.cfg.in_chans,
            self.stack.dim,
            mask_token=True,
            cls_token=True,
        )

    def image_positions(self) -> LearnedPositions:
        """A vector for each patch and for the class token."""
        num_tokens = (self.cfg.img_size // self.cfg.patch_size) ** 2 + 1
        return LearnedPositions(num_tokens, self.stack.dim, init=self.weights.positions)

    def absolute_position(self) -> MultiwayPositions:
        return MultiwayPositions(self.image_positions(), self.learned_positions())


@register_model(MODEL, BEiT3Config)
class BEiT3(TransformerEncoder):
    """Encodes images, text, or an image followed by text; see :meth:`encode`."""

    parts_class = BEiT3Parts

    def __init__(self, parts: BEiT3Parts, *, output_layer: bool = True) -> None:
        super().__init__(parts, output_layer=output_layer)
        self.vision_embedding = parts.vision_embedding()

    def encode(
        self,
        tokens_BT: Tensor | None = None,
        *,
        images_BCHW: Tensor | None = None,
        masked_BP: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
    ) -> EncoderOutput:
        """Features of the class token and the patches, if there are images, then of the text.

        Args:
            tokens_BT: (B, T) int64, the text.
            images_BCHW: (B, C, img_size, img_size).
            masked_BP: (B, P) bool, patches that the mask token replaces.
            padding_mask_BT: (B, T) bool, padding of the text, on its right.

        Raises:
            ValueError: there is neither text nor image, images have another size, or there are
                not as many images as texts.
        """
        if tokens_BT is not None and images_BCHW is not None:
            num_images, num_texts = len(images_BCHW), len(tokens_BT)
            if num_images != num_texts:
                raise ValueError(f"{num_images} images and {num_texts} texts; give a text for each")
        vectors, num_image_tokens = [], 0
        if images_BCHW is not None:
            vectors.append(self.vision_embedding(images_BCHW, masked_BP))
            num_image_tokens = vectors[0].shape[1]
        if tokens_BT is not None:
            vectors.append(self.embedding.tokens(tokens_BT))
        if not vectors:
            raise ValueError("give tokens, images, or both")
        if padding_mask_BT is not None and num_image_tokens:
            seen = padding_mask_BT.new_zeros(padding_mask_BT.shape[0], num_image_tokens)
            padding_mask_BT = torch.cat((seen, padding_mask_BT), dim=1)
        return self(
            token_embeddings_BTD=torch.cat(vectors, dim=1),
            padding_mask_BT=padding_mask_BT,
            split=num_image_tokens,
        )


@register_model_architecture(MODEL, "beit3_base")
def beit3_base() -> BEiT3Config:
    """The published base model, 12 layers of width 768."""
    return BEiT3Config()


@register_model_architecture(MODEL, "beit3_large")
def beit3_large() -> BEiT3Config:
    """The published large model, 24 layers of width 1024."""
    return BEiT3Config(
        encoder_embed_dim=1024,
        encoder_attention_heads=16,
        encoder_ffn_embed_dim=4096,
        encoder_layers=24,
    )
