"""The distance of two images in the features of DINOv2 ViT-S/14 (Oquab et al. 2023, arXiv 2304.07193).

It is the squared distance of unit-length tokens, mean over all tokens and blocks, as in
https://na-vae.github.io/dino_perceptual, whose values are also means over the 384 channels: 1/384 of these.
No image is resized: larger ones are split into tiles. Tiles have fixed positions in the crop, because crops
have random positions in the image, and the decoder does not see them.

Shapes: B images; N tokens of a tile, one of the class and one for each patch; C channels.
"""

import os
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vae.losses.feature_distance import FeatureDistance
from vae.losses.trunk_weights import load_trunk_weights
from vae.ops.library import accumulation_dtype, has_no_data, once_differentiable
from vae.ops.shapes import Images, PerImage
from vae.system.errors import UserError

WIDTH, HEADS, DEPTH = 384, 6, 12
PATCH, GRID = 14, 37  # px of a patch; patches per side in the table of positions
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colors, for images in [0, 1]
# Gradients of a tile are computed before the step's own loss scale is known: this keeps them within fp16.
GRADIENT_SCALE = 2.0**12

Tile = tuple[EllipsisType, slice, slice]


class DinoDistance(nn.Module):
    """The distance of each image; frozen, and the same in training and evaluation."""

    mean: Tensor
    deviation: Tensor
    ones: Tensor

    def __init__(self, network: "VisionTransformer", dtype: torch.dtype) -> None:
        """Store `network`, whose features are computed in `dtype`."""
        super().__init__()
        self.network = network.to(dtype)
        ones = torch.ones_like(network.norm.weight, dtype=torch.promote_types(dtype, torch.float32))
        self.register_buffer("ones", ones)
        for name, colors in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, ones.new_tensor(colors).view(1, 3, 1, 1))
        self.requires_grad_(False).eval()

    def forward(self, recon: Images, images: Images) -> PerImage:
        """Distance of `recon` from `images`, both in [-1, 1], at least fp32; only `recon` gets a gradient.

        Raises UserError if the images are smaller than a patch.
        """
        assert recon.shape == images.shape, f"{tuple(recon.shape)} differs from {tuple(images.shape)}"
        height, width = recon.shape[2:]
        if min(height, width) < PATCH:
            raise UserError(
                f"images of {width} x {height} px are too small for --perceptual_net dinov2-s, which needs "
                f"at least {PATCH} px per side: increase --image_size or choose another network"
            )
        tiles: list[Tile] = [(..., rows, columns) for rows in slices(height) for columns in slices(width)]
        return _MeanOfTiles.apply(recon, images, self._distance, tiles)

    def _distance(self, recon: Tensor, images: Tensor) -> Tensor:
        """The distance of one tile, (B,)."""
        tokens = self.network.embed(self._normalized(recon))
        with torch.no_grad():
            target = self.network.embed(self._normalized(images))
        total = torch.zeros((), dtype=self.ones.dtype, device=recon.device)
        for block in self.network.blocks:
            tokens = block(tokens)  # (B, N, C)
            with torch.no_grad():
                target = block(target)
            as_maps = [features.mT.unsqueeze(3) for features in (tokens, target)]  # (B, C, N, 1)
            total = total + FeatureDistance.apply(*as_maps, self.ones)
        return total / DEPTH

    def _normalized(self, images: Tensor) -> Tensor:
        return (((images + 1) / 2 - self.mean) / self.deviation).to(self.network.cls_token.dtype)


def build_dino(
    weights_path: str | os.PathLike[str] | None, dtype: torch.dtype, device: torch.device | str
) -> DinoDistance:
    """DINOv2's distance, stored and computed in `dtype` on `device`; reads no file on the meta device.

    Raises UserError if the weights are missing, damaged or those of another network.
    """
    with torch.device("meta"):
        network = VisionTransformer()
    if torch.device(device).type != "meta":
        load_trunk_weights(network, "dinov2-s", weights_path)
    return DinoDistance(network, dtype).to(device)


def slices(side: int) -> list[slice]:
    """The tiles along one side: the fewest of at most 37 patches, all of the same size, which may overlap.

    The rest of a side of at most 518 px, less than a patch, is left out; a longer side is covered.
    """
    count = -(-side // (PATCH * GRID))
    size = PATCH * min(-(-side // (count * PATCH)), side // PATCH)
    starts = [(side - size) * index // max(1, count - 1) for index in range(count)]
    return [slice(start, start + size) for start in starts]


class _MeanOfTiles(torch.autograd.Function):
    """The mean distance of all tiles. Forward computes the gradient too, so only one tile has a graph."""

    @staticmethod
    def forward(
        ctx: Any, recon: Tensor, images: Tensor, distance: Callable[..., Tensor], tiles: list[Tile]
    ) -> Tensor:
        dtype = accumulation_dtype(recon)
        has_gradient = ctx.needs_input_grad[0]
        total = recon.new_zeros(len(recon), dtype=dtype)
        slope = torch.zeros_like(recon, dtype=dtype) if has_gradient else None
        for tile in tiles:
            part = recon[tile].detach().to(dtype).requires_grad_(has_gradient)
            with torch.set_grad_enabled(has_gradient):
                value = distance(part, images[tile])
            total += value.detach()
            if slope is not None:
                scale = torch.full_like(value, GRADIENT_SCALE)
                slope[tile] += torch.autograd.grad(value, part, scale)[0]
        ctx.save_for_backward(slope)
        ctx.scale = 1 / (len(tiles) * GRADIENT_SCALE)
        ctx.dtype = recon.dtype
        return total / len(tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * (grad * ctx.scale).view(-1, 1, 1, 1)).to(ctx.dtype), None, None, None


class VisionTransformer(nn.Module):
    """DINOv2 ViT-S/14 without registers, with the names of its official weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + GRID**2, WIDTH))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, PATCH, PATCH)})
        self.blocks = nn.ModuleList(_Block() for _ in range(DEPTH))
        # not used, but part of the file
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def embed(self, images: Tensor) -> Tensor:
        """The tokens before the first block: (B, 3, h, w), normalized -> (B, N, C)."""
        patches = self.patch_embed["proj"](images)  # (B, C, h/14, w/14)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches.flatten(2).mT], 1)
        return tokens + self._positions(*patches.shape[2:])

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The table of positions, resized as DINOv2's code does: 0.1 patches too large."""
        if rows == columns == GRID:
            return self.pos_embed
        of_class, table = self.pos_embed.split([1, GRID**2], dim=1)
        table = table.to(accumulation_dtype(table)).mT.unflatten(2, (GRID, GRID))  # (1, C, 37, 37)
        scales = [(patches + 0.1) / GRID for patches in (rows, columns)]
        resized = F.interpolate(table, scale_factor=scales, mode="bicubic").to(of_class.dtype)
        return torch.cat([of_class, resized.flatten(2).mT], 1)


class _Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})
        self.ls1, self.ls2 = (nn.ParameterDict({"gamma": torch.ones(WIDTH)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        heads = _attention(*qkv.transpose(1, 3).unbind(2))  # (B, heads, N, C/heads)
        x = x + self.ls1["gamma"] * self.attn["proj"](heads.transpose(1, 2).flatten(2))
        return x + self.ls2["gamma"] * self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each head, (B, heads, N, C/heads). On meta, PyTorch would allocate all scores."""
    if has_no_data(q):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return F.scaled_dot_product_attention(q, k, v)
