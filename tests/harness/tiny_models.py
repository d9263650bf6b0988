"""TAEF2 and taesana in plain PyTorch with random weights: the published layers, numbered as in files."""

import torch
from torch import nn

# A letter per layer. c: convolution; s, d: of stride 2, with bias or without; w: without bias; r: ReLU;
# u: enlargement; B, P: block, with a norm; -: what limits the latents. The widths follow of all but blocks.
LAYERS = {
    ("taef2", "encoder"): ("cBdBBBdBBBdPPPc", (64, 64, 64, 64, 32)),
    ("taef2", "decoder"): ("-crPPPuwBBBuwBBBuwBc", (64, 64, 64, 64, 3)),
    ("taesana", "encoder"): ("srsrBdBBBdBBBdBBBc", (32, 64, 64, 64, 64, 32)),
    ("taesana", "decoder"): ("-crBBBuwBBBuwBBBuwBBBuwBBBuwBc", (256, 128, 64, 64, 64, 64, 3)),
}


class Block(nn.Module):
    def __init__(self, width: int, has_norm: bool):
        super().__init__()
        convs = [nn.Conv2d(width, width, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        self.pool = nn.Sequential()
        if has_norm:
            wide = 4 * width
            widen, narrow = nn.Conv2d(width, wide, 1, bias=False), nn.Conv2d(wide, width, 1, bias=False)
            self.pool.extend([widen, nn.GroupNorm(4, wide), nn.ReLU(), narrow])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pool(x) if len(self.pool) else x
        return (x + self.conv(x)).relu()


class Limit(nn.Module):
    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return 3 * (latents / 3).tanh()


def published(family: str, part: str) -> nn.Sequential:
    """A part of the family with random weights; it reads and returns images in [0, 1]."""
    letters, widths = LAYERS[family, part]
    width = 3 if part == "encoder" else 32
    remaining = list(widths)
    layers: list[nn.Module] = []
    torch.manual_seed(11)
    for letter in letters:
        if letter in "csdw":
            before, width = width, remaining.pop(0)
            how = {"stride": 2 if letter in "sd" else 1, "bias": letter in "cs"}
            layers.append(nn.Conv2d(before, width, 3, padding=1, **how))
        elif letter in "BP":
            layers.append(Block(width, letter == "P"))
        else:
            layers.append({"-": Limit, "r": nn.ReLU, "u": lambda: nn.Upsample(scale_factor=2)}[letter]())
    return nn.Sequential(*layers).eval().requires_grad_(False)
