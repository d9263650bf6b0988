"""PatchGAN discriminator (Isola et al. 2017) without batch statistics."""

import torch.nn.functional as F
from torch import nn

from vae.model.layers import Conv2d, GroupNorm
from vae.ops.shapes import Images, Logits

MAX_WIDTH_FACTOR = 8  # as in pix2pix: each layer doubles the width, up to eight times the first


class Discriminator(nn.Module):
    """Logits per patch, (B, 1, h, w), of images (B, 3, H, W).

    It uses GroupNorm instead of pix2pix's BatchNorm. Batch statistics would couple the images of a batch, so
    the gradient would depend on micro-batches and processes.
    """

    def __init__(self, channels: int, layers: int):
        super().__init__()
        widths = [channels * min(2**i, MAX_WIDTH_FACTOR) for i in range(layers + 1)]
        self.convs = nn.ModuleList([Conv2d(3, widths[0], 4, stride=2, padding=1)])
        self.norms = nn.ModuleList()
        for layer in range(1, layers + 1):
            stride = 2 if layer < layers else 1
            self.convs.append(
                Conv2d(widths[layer - 1], widths[layer], 4, stride=stride, padding=1, bias=False)
            )
            self.norms.append(GroupNorm(min(32, widths[layer]), widths[layer]))
        self.conv_out = Conv2d(widths[-1], 1, 4, padding=1)
        for conv in [*self.convs, self.conv_out]:
            nn.init.normal_(conv.weight, 0.0, 0.02)  # as in pix2pix

    def forward(self, images: Images) -> Logits:
        h = F.leaky_relu(self.convs[0](images), 0.2)
        for conv, norm in zip(self.convs[1:], self.norms, strict=True):
            h = F.leaky_relu(norm(conv(h)), 0.2)
        return self.conv_out(h)
