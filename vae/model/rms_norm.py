"""RMS norms over the channels of each pixel, with the attributes of a GroupNorm without bias and groups."""

import torch
from torch import nn

from vae.ops.norm import group_norm, group_norm_silu
from vae.ops.norm_torch import Norm


class RMSNorm(nn.Module):
    """RMS norm in the dtype of its input, computed in at least fp32."""

    num_groups = 0
    eps = 0.0
    bias = None

    def __init__(self, channels: int):
        super().__init__()
        self.num_channels = channels
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm(h, self.weight, None, 0, 0.0)

    def norm(self, out_dtype: torch.dtype | None = None) -> Norm:
        """What vae.ops.norm computes, followed by SiLU; `out_dtype` of the result, None: h's."""
        return Norm(self.weight, None, 0, 0.0, out_dtype=out_dtype)


class RMSNormSiLU(RMSNorm):
    """RMSNorm followed by SiLU."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return group_norm_silu(h, self.weight, None, 0, 0.0)
