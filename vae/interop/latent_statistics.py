"""Mean and standard deviation of latents over a data set, in fp64, and the resulting constants of a VAE.

A program with fixed constants reads latents as (z - shift) * scaling. With folded weights the encoder gives
z' = z * multiply + add, which matches these constants, and the decoder inverts it: images are unchanged.

Shapes: B latents of C channels, h x w; `multiply` and `add` are (C,) fp64.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vae.model.autoencoder import AutoencoderKL, Decoder, Encoder, LatentNorm, Posterior
from vae.system.errors import UserError

MIN_VARIANCE = 1e-12


class LatentConstants(NamedTuple):
    """Constants that normalize latents z: (z - shift) * scaling, or for each channel (z - mean) / std."""

    scaling: float | None = None  # None: not known
    shift: float = 0.0
    mean: tuple[float, ...] = ()  # of each channel; empty: not known
    std: tuple[float, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether there are any."""
        return self.scaling is not None or bool(self.mean)

    @property
    def channels(self) -> dict[str, list[float]]:
        """`latents_mean` and `latents_std` of config.json; empty if they are not known."""
        return {"latents_mean": list(self.mean), "latents_std": list(self.std)} if self.mean else {}


@dataclass
class LatentStatistics:
    """Statistics of sampled latents over all images and positions; mean and std are (C,) fp64."""

    mean: torch.Tensor
    std: torch.Tensor
    count: int  # values per channel

    @property
    def shift(self) -> float:
        """Mean over all channels."""
        return self.mean.mean().item()

    @property
    def scaling(self) -> float:
        """The factor for which (z - shift) * scaling has variance 1 over all channels together."""
        variance = (self.std.square() + self.mean.square()).mean() - self.mean.mean().square()
        return variance.clamp(min=MIN_VARIANCE).item() ** -0.5

    @property
    def constants(self) -> LatentConstants:
        """All constants."""
        return LatentConstants(self.scaling, self.shift, tuple(self.mean.tolist()), tuple(self.std.tolist()))

    def folded(self, multiply: torch.Tensor, add: torch.Tensor) -> "LatentStatistics":
        """The statistics of the latents z * multiply + add; both are (C,)."""
        return LatentStatistics(self.mean * multiply + add, self.std * multiply, self.count)


class LatentSums:
    """Sums per channel, from which LatentStatistics are computed."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = torch.zeros((), dtype=torch.float64)
        self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        """Add posteriors (B, C, h, w); the mean square of their samples is mean^2 + variance."""
        mean, variance = mean.double(), logvar.double().exp()
        self.count += mean.numel() // mean.shape[1]
        self._sum = self._sum + mean.sum((0, 2, 3))
        self._squares = self._squares + (mean.square() + variance).sum((0, 2, 3))

    def statistics(self) -> LatentStatistics:
        """Statistics of all added latents; at least one is required."""
        assert self.count, "no latents were added"
        mean = (self._sum / self.count).cpu()
        variance = (self._squares / self.count).cpu() - mean.square()
        return LatentStatistics(mean, variance.clamp(min=MIN_VARIANCE).sqrt(), self.count)


def sums_of(posteriors: Iterable[Posterior], norm: LatentNorm | None) -> tuple[LatentSums, LatentSums]:
    """The sums of latents, and those of the patches that `norm` normalizes, if there is one.

    A last row or column beyond the patches is excluded.
    """
    latents = LatentSums()
    patches = LatentSums()
    for posterior in posteriors:
        latents.add(posterior.mean, posterior.logvar)
        if norm is not None:
            height, width = (side // norm.patch * norm.patch for side in posterior.mean.shape[-2:])
            mean, logvar = (part[..., :height, :width] for part in (posterior.mean, posterior.logvar))
            patches.add(F.pixel_unshuffle(mean, norm.patch), F.pixel_unshuffle(logvar, norm.patch))
    return latents, patches


def is_unmeasured(norm: LatentNorm, encoder_trained: bool = False) -> bool:
    """Whether a latent norm is still the identity of a new network.

    `encoder_trained`: the latents have changed. Statistics of single positions are then those of other
    latents; FLUX.2's are a fixed part of its network.
    """
    if encoder_trained and norm.patch == 1:
        return True
    return not norm.running_mean.any() and bool((norm.running_var == 1).all())


def norm_constants(norm: LatentNorm | None) -> LatentConstants:
    """The constants of the channels in a latent norm; FLUX.2's has those of patches."""
    if norm is None or norm.patch != 1:
        return LatentConstants()
    values = norm.running_mean.tolist(), norm.running_var.sqrt().tolist()
    mean, std = (tuple(float(f"{number:.6g}") for number in v) for v in values)  # fp32 has no more digits
    return LatentConstants(mean=mean, std=std)


def set_latent_norm(model: AutoencoderKL, patches: LatentStatistics) -> None:
    """Copy measured statistics of patches into the model's latent norm."""
    assert model.bn is not None
    model.bn.running_mean.copy_(patches.mean)
    model.bn.running_var.copy_(patches.std.square() - model.bn.eps)  # normalize() adds it again


# ---- Folding ---------------------------------------------------------------------------------------------


def folding_for(
    statistics: LatentStatistics, scaling: float, shift: float, *, per_channel: bool, with_shift: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiply, add) such that (z' - shift) * scaling has standard deviation 1 and, `with_shift`, mean 0."""
    if per_channel:
        std, mean = statistics.std, statistics.mean
    else:
        std = torch.full_like(statistics.std, 1 / statistics.scaling)
        mean = torch.full_like(statistics.mean, statistics.shift)
    multiply = 1 / (std * scaling)
    add = shift - mean * multiply if with_shift else torch.zeros_like(multiply)
    return multiply, add


@torch.no_grad()
def fold(model: AutoencoderKL, multiply: torch.Tensor, add: torch.Tensor) -> None:
    """Change the weights of `model` so that it encodes to z * multiply + add and decodes from it.

    Without quant convolutions `add` must be 0: the decoder's first convolution pads latents with zeros, which
    would then represent another latent at the border.
    """
    has_quant_conv = model.quant_conv is not None
    assert has_quant_conv or not add.any(), "a shift cannot be folded without quant convolutions"
    z = len(multiply)
    assert isinstance(model.encoder, Encoder)
    last = model.encoder.conv_out if model.quant_conv is None else model.quant_conv
    assert isinstance(model.decoder, Decoder)
    first = model.decoder.conv_in if model.post_quant_conv is None else model.post_quant_conv
    assert last.bias is not None
    assert first.bias is not None
    weight, bias = last.weight.double(), last.bias.double()
    weight[:z] *= multiply[:, None, None, None]
    bias[:z] = bias[:z] * multiply + add
    bias[z:] += 2 * multiply.log()  # log-variances
    last.weight.copy_(weight)
    last.bias.copy_(bias)
    weight = first.weight.double() / multiply[None, :, None, None]  # reads (z' - add) / multiply
    if has_quant_conv:
        first.bias.copy_(first.bias.double() - weight.sum((2, 3)) @ add)
    first.weight.copy_(weight)


def with_quant_conv(model: AutoencoderKL) -> AutoencoderKL:
    """The same VAE with identity 1x1 convolutions before and after its latents."""
    if model.quant_conv is not None:
        raise UserError("--add_quant_conv: the VAE already has quant convolutions: omit the flag")
    wider = AutoencoderKL(dataclasses.replace(model.config, use_quant_conv=True))
    wider.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for conv in (wider.quant_conv, wider.post_quant_conv):
            assert conv is not None
            assert conv.bias is not None
            torch.nn.init.dirac_(conv.weight)
            conv.bias.zero_()
    return wider.eval().requires_grad_(False)
