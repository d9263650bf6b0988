"""PatchGAN discriminator (Isola et al. 2017) that keeps the images of a batch apart."""

import torch
import torch.nn.functional as F
from torch import nn

from vae.model.autoencoder import IMAGE_CHANNELS
from vae.model.layers import Conv2d, GroupNorm

MAX_WIDTH_FACTOR = 8  # pix2pix: widths double per layer up to eight times the first


class Discriminator(nn.Module):
    """Logits per patch, (B, 1, h, w), of images (B, 3, H, W).

    GroupNorm stands where pix2pix has BatchNorm: batch statistics would couple the images of a batch, and
    then micro-batches and processes would change the gradient.
    """

    def __init__(self, channels: int, layers: int):
        super().__init__()
        widths = [channels * min(2**i, MAX_WIDTH_FACTOR) for i in range(layers + 1)]
        self.convs = nn.ModuleList([Conv2d(IMAGE_CHANNELS, widths[0], 4, stride=2, padding=1)])
        self.norms = nn.ModuleList()
        for layer in range(1, layers + 1):
            stride = 2 if layer < layers else 1
            self.convs.append(
                Conv2d(widths[layer - 1], widths[layer], 4, stride=stride, padding=1, bias=False)
            )
            self.norms.append(GroupNorm(min(32, widths[layer]), widths[layer]))
        self.conv_out = Conv2d(widths[-1], 1, 4, padding=1)
        for conv in [*self.convs, self.conv_out]:
            nn.init.normal_(conv.weight, 0.0, 0.02)  # pix2pix

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h = F.leaky_relu(self.convs[0](images), 0.2)
        for conv, norm in zip(self.convs[1:], self.norms, strict=True):
            h = F.leaky_relu(norm(conv(h)), 0.2)
        return self.conv_out(h)
