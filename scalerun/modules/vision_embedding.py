"""From images to token vectors.

B batch, C channels, P patches, D model width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.init import Initializer, uniform, zeros


class VisionEmbedding(nn.Module):
    """Cuts an image into square patches and projects each (Dosovitskiy et al. 2020, 2010.11929).

    Args:
        image_size: side of the image, in pixels; a multiple of ``patch_size``.
        patch_size: side of a patch, in pixels.
        channels: C.
        dim: D.
        mask_token: have a vector that stands for hidden patches.
        cls_token: put a vector of its own before the patches.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        *,
        mask_token: bool = False,
        cls_token: bool = False,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image size {image_size} is not a multiple of patch {patch_size}")
        self.image_size = image_size
        self.num_patches = (image_size // patch_size) ** 2
        self.patch_size = patch_size
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(dim, channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim)) if mask_token else None
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if cls_token else None

    def initializers(self) -> dict[str, Initializer]:
        draw = uniform(1.0 / math.sqrt(self.weight[0].numel()))
        tokens = {
            name: zeros for name in ("mask_token", "cls_token") if getattr(self, name) is not None
        }
        return {"weight": draw, "bias": draw, **tokens}

    @property
    def num_tokens(self) -> int:
        """Token vectors of an image: P, and one for the class token."""
        return self.num_patches + (self.cls_token is not None)

    def forward(self, images_BCHW: Tensor, masked_BP: Tensor | None = None) -> Tensor:
        """(B, P or P + 1, D), patches in rows from the upper left.

        Args:
            images_BCHW: (B, C, image_size, image_size).
            masked_BP: (B, P) bool, patches that the mask token replaces.

        Raises:
            ValueError: the images have another size, or there is no mask token.
        """
        size = (self.channels, self.image_size, self.image_size)
        if images_BCHW.shape[1:] != size:
            raise ValueError(f"images are {tuple(images_BCHW.shape[1:])} and should be {size}")
        x_BPD = F.conv2d(images_BCHW, self.weight, self.bias, stride=self.patch_size)
        x_BPD = x_BPD.flatten(2).transpose(1, 2)
        if masked_BP is not None:
            if self.mask_token is None:
                raise ValueError("patches are masked, but the embedding has no mask token")
            x_BPD = torch.where(masked_BP.unsqueeze(-1), self.mask_token.to(x_BPD.dtype), x_BPD)
        if self.cls_token is not None:
            first_B1D = self.cls_token.to(x_BPD.dtype).expand(x_BPD.shape[0], 1, -1)
            x_BPD = torch.cat((first_B1D, x_BPD), dim=1)
        return x_BPD
