"""The KL divergence of the posterior from the standard normal distribution."""

import torch
from torch import Tensor


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL(N(mean, exp(logvar)) || N(0, 1)) of each image in nats, summed over its latent: -> (B,).

    Kingma and Welling 2014, appendix B. At least fp32 inside.
    """
    assert mean.shape == logvar.shape, f"{tuple(mean.shape)} is not {tuple(logvar.shape)}"
    dtype = torch.promote_types(mean.dtype, torch.float32)  # exp() overflows fp16 above logvar 11
    mean, logvar = mean.to(dtype), logvar.to(dtype)
    # expm1(v) - v, because exp(v) - 1 - v loses its digits near v = 0, where unused channels stay
    return 0.5 * (mean.square() + torch.expm1(logvar) - logvar).flatten(1).sum(1)
