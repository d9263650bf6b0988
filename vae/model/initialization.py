"""Initial weights of an autoencoder: PyTorch's defaults with less noise of the posterior, or a linear codec.

The codec is fitted to natural spectra.

From PyTorch's default weights an AutoencoderKL learns slowly, because nothing carries the image through the
changes of resolution. DC-AE (Chen et al. 2025) trains fast because parameter-free shortcuts carry it. In an
AutoencoderKL, the identities of the residual blocks, the 1x1 shortcuts and the resampling convolutions
already form a path without a norm. The warm start sets the weights of this path to a transform codec, so the
architecture and the file format stay the same.

- Encoder: each stride-2 convolution reads 2x2 pixels and keeps their principal components. So the latent
  contains the strongest of the C*f*f numbers of a block, at unit variance.
- Decoder: each convolution predicts the components of blocks half as large, by least squares from the values
  that the decoder really has. (After nearest-neighbor upsampling, both pixels of a pair look the same, so no
  kernel reaches the highest frequency. Therefore this is a fit, not an inverse.)
- Norms before the last convolutions: two constant channels per group, the carriers, are larger than the
  signals and make the scale nearly the same for every image. SiLU gets its inputs around its inflection
  point, where it is nearly linear.
- Residual branches start with PyTorch's defaults, and write only to channels without a signal.

The fits use Gaussian images with the spectrum and the colors of photographs, the same for every seed. They
run in fp64: in fp32, a different rounding in one operation changed the weights by a thousandth.

Shapes: N images, C image channels, K signals, T targets, f downsampling, Z latent channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vae.config.model_options import ModelConfig
from vae.images.channels import FROM_RGB, OPAQUE
from vae.model.autoencoder import AutoencoderKL, Decoder, Encoder
from vae.model.layers import Attention, Conv2d, NormSiLU, ResnetBlock, RMSNormSiLU, weight_and_bias

IMAGES = 24  # 6,144 blocks of 8x8 pixels: 42 per unknown with 16 latent channels
POWER_EXPONENT = 2.2  # power ~ 1 / frequency ** 2.2: between Field (1987), 2, and 17 Kodak images, 2.3
RGB_COVARIANCE = ((0.162, 0.148, 0.120), (0.148, 0.199, 0.172), (0.120, 0.172, 0.171))  # 17 Kodak images
MAX_IMAGE_CHANNELS = 4
MAX_SIGNALS = 64  # limits the largest fit to 577 unknowns; latents may be more
FIT_POSITIONS = 40_000  # approximate number used by a fit; the warm start takes 1.8 to 3 s of one core
RIDGE = 1e-6  # times the power of each input; keeps the system of nearly dependent inputs solvable
STREAM_GAIN = 32.0  # see initialize
CARRIER = 24.0  # times the joint deviation of the signals: their power then changes the scale by 0.1 %
BORDER_WEIGHT = 2.0  # of the outermost positions in a fit: zero padding darkens them, see initialize
SILU_INFLECTION = 2.3994  # SiLU'' = 0: linear within 0.1 % up to a distance of 0.25 and 2 % up to 1
LINEAR_STD = 0.25  # deviation of the signals at SiLU; a smaller one loses more to the rounding of bf16
LOGVAR_START = -6.0  # noise of 0.05 on unit-variance latents
LOGVAR_READ = 0.1  # fraction of PyTorch's weights kept for the log-variance


@dataclass
class Signals:
    """Signals at one point of the path: their channels, and their values (N, K, h, w) for the images."""

    channels: list[int]
    values: torch.Tensor


def initialize(model: AutoencoderKL, init: str, seed: int) -> None:
    """Set all weights of `model`, which is on the CPU, in place from `seed`; `init` as in ModelConfig.

    The path carries images at STREAM_GAIN times their own scale. Adam's first steps change each weight of
    the branches by about the learning rate, and larger signals make the effect of these changes smaller.
    Measured on Kodak crops (32 64 64 64, 64 px crops, batch 4, bf16), dB after 100 and 900 steps at 1e-3:
    gain 1 16.0 (stopped there), gain 8 22.9 and 25.5, gain 32 20.4 and 24.9 (its mean from 150 steps on is
    1.3 higher); after 250 steps at 1e-4: gain 8 25.9, gain 32 26.2.

    The decoder's 3x3 convolutions pad with zeros, so the outermost positions of each level are too dark. A
    linear path cannot correct this; BORDER_WEIGHT balances it against the interior (benchmarks/LOG.md).
    """
    assert init in ("default", "warm"), init
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm):
                module.reset_parameters()
    with torch.no_grad():
        if not isinstance(model.encoder, Encoder):
            return  # a tiny one has no noise, and those of diffusers begin with trained weights
        if init == "default":
            lower_noise(model.quant_conv or model.encoder.conv_out)
        else:
            images = _images_for(model.config).double()
            components, latents = fit_encoder(model, images)
            fit_decoder(model, components, latents)
            for conv in (model.quant_conv, model.post_quant_conv):
                if conv is not None:
                    weight, bias = weight_and_bias(conv)
                    nn.init.dirac_(weight)
                    nn.init.zeros_(bias)


def initialize_decoder(model: AutoencoderKL) -> None:
    """Make the decoder a linear codec of the latents of the encoder, which is trained; in place, on the CPU.

    It predicts the components of the warm start by least squares, so the encoder need not be linear.
    """
    with torch.no_grad():
        images = _images_for(model.config)
        latents = torch.cat([model.encode(image[None]).mode() for image in images])
        if model.post_quant_conv is not None:
            latents = model.post_quant_conv(latents)
        values = STREAM_GAIN * images.double()
        components = [values]
        for _ in model.config.channels[1:]:
            values = F.conv2d(values, principal_components(values, MAX_SIGNALS), stride=2)
            components.append(values)
        fit_decoder(model, components, latents.double())


def lower_noise(conv: Conv2d) -> None:
    """Let the log-variances, the second half of what `conv` writes, begin near LOGVAR_START.

    With PyTorch's weights, the noise is 1.07 and the deviation of the latents 0.28 (small network).
    """
    weight, bias = weight_and_bias(conv)
    z_channels = len(weight) // 2
    weight[z_channels:] *= LOGVAR_READ
    bias[z_channels:] = LOGVAR_START


def _images_for(config: ModelConfig) -> torch.Tensor:
    """The images of the fits."""
    return natural_images(IMAGES, max(128, 8 * config.downsampling), config.image_channels)


def natural_images(count: int, side: int, channels: int = 3) -> torch.Tensor:
    """Gaussian images (count, C, side, side) with the power spectrum and RGB covariance of photographs.

    Alpha is independent of the colors, and as strong as one of them.
    """
    generator = torch.Generator().manual_seed(0)
    down, across = torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None]
    amplitude = (down**2 + across**2).clamp_min((0.5 / side) ** 2) ** (-POWER_EXPONENT / 4)
    noise = torch.randn(count, channels, side, side, generator=generator)
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(side, side))
    of_rgb = torch.tensor(RGB_COVARIANCE)
    from_rgb, of_alpha = (torch.tensor(table[channels]).float() for table in (FROM_RGB, OPAQUE))
    covariance = from_rgb @ of_rgb @ from_rgb.T + of_rgb.diagonal().mean() * torch.diag(of_alpha)
    mixing = torch.linalg.cholesky(covariance)
    return torch.einsum("dc,nchw->ndhw", mixing, fields / fields.std())


def fit_encoder(model: AutoencoderKL, images: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Fit the encoder's path; return the components (N, K, h, w) at each resolution, and the latents."""
    encoder, widths, groups = model.encoder, model.config.channels, model.config.norm_groups
    assert isinstance(encoder, Encoder)
    count = model.config.image_channels
    signals = Signals(signal_channels(widths[0], groups)[:count], STREAM_GAIN * images)
    identity = STREAM_GAIN * torch.eye(count)[:, :, None, None]
    write(encoder.conv_in, list(range(count)), signals.channels, F.pad(identity, (1, 1, 1, 1)))
    components = [signals.values]
    for level, block in enumerate(encoder.down_blocks[:-1]):
        signals.channels = follow_shortcut(block.resnets[0], signals.channels, groups)
        silence(block, signals.channels)
        last = level == len(widths) - 2
        most = max(MAX_SIGNALS, model.config.z_channels) if last else MAX_SIGNALS
        kernel = principal_components(signals.values, most)  # (K', K, 2, 2), strongest first
        components.append(F.conv2d(signals.values, kernel, stride=2))
        kept = min(len(kernel), *(len(signal_channels(width, groups)) for width in widths[level : level + 2]))
        if last:
            kept = min(kept, model.config.z_channels)
            kernel = kernel / (components[-1].std(dim=(0, 2, 3)) / STREAM_GAIN)[:, None, None, None]
        into = signal_channels(widths[level], groups)[:kept]
        quiet = whole_groups(into, widths[level], groups) if last else into
        kernel = kernel[:kept]
        write(block.downsamplers[0].conv, signals.channels, into, F.pad(kernel, (0, 1, 0, 1)), silent=quiet)
        signals = Signals(into, F.conv2d(signals.values, kernel, stride=2))
    block = encoder.down_blocks[-1]
    signals.channels = follow_shortcut(block.resnets[0], signals.channels, groups)
    for module in (block, encoder.mid_block):
        silence(module, whole_groups(signals.channels, widths[-1], groups))
    z = model.config.z_channels
    repeated = [channel % len(signals.channels) for channel in range(z)]  # narrow networks have fewer than Z
    targets = signals.values[:, repeated] / STREAM_GAIN
    last_conv = encoder.mid_block.resnets[-1].conv2
    lower_noise(encoder.conv_out)
    return components, fit_readout(encoder.conv_norm_out, last_conv, encoder.conv_out, signals, targets)


def fit_decoder(model: AutoencoderKL, components: list[torch.Tensor], latents: torch.Tensor) -> None:
    """Fit the decoder's path: predict the components at each resolution from the latents (N, Z, h, w)."""
    decoder, widths, groups = model.decoder, model.config.up_channels[::-1], model.config.norm_groups
    assert isinstance(decoder, Decoder)
    convs = [decoder.conv_in, *(block.upsamplers[0].conv for block in decoder.up_blocks[:-1])]
    outputs = [widths[0], *widths[:-1]]  # output width of each of convs
    signals = Signals(list(range(latents.shape[1])), latents)
    for level, block in enumerate(decoder.up_blocks):
        inputs = signals.values if level == 0 else F.interpolate(signals.values, scale_factor=2.0)
        available = min(len(signal_channels(width, groups)) for width in (outputs[level], widths[level]))
        weight, bias = least_squares(inputs, components[-1 - level][:, : min(available, MAX_SIGNALS)], size=3)
        into = signal_channels(outputs[level], groups)[: len(weight)]
        last = level == len(widths) - 1
        quiet = whole_groups(into, outputs[level], groups) if last else into
        write(convs[level], signals.channels, into, weight, bias, silent=quiet)
        signals = Signals(into, F.conv2d(inputs, weight, bias, padding=1))
        if level == 0:
            silence(decoder.mid_block, into)
        signals.channels = follow_shortcut(block.resnets[0], into, groups)
        quiet = whole_groups(signals.channels, widths[level], groups) if last else signals.channels
        silence(block, quiet)
    last_conv = decoder.up_blocks[-1].resnets[-1].conv2
    images = components[0] / STREAM_GAIN
    # All pixels of a position: nearest enlargement.
    images = images.repeat_interleave(decoder.scale**2, dim=1)
    fit_readout(decoder.conv_norm_out, last_conv, decoder.conv_out, signals, images)


def fit_readout(
    norm: NormSiLU | RMSNormSiLU, before: Conv2d, conv: Conv2d, signals: Signals, targets: torch.Tensor
) -> torch.Tensor:
    """Set `norm` to pass the signals and `conv` to predict the targets from them; return the prediction.

    `before` is the last convolution added to the path; its biases create the carriers.
    """
    assert isinstance(norm, NormSiLU), "a family with RMS norms has no warm start"
    values, channels, count = signals.values, signals.channels, targets.shape[1]
    full = values.new_zeros(values.shape[0], norm.num_channels, *values.shape[2:])
    full[:, channels] = values
    size = norm.num_channels // norm.num_groups
    _, carrier_bias = weight_and_bias(before)
    read = list(channels)
    for first in range(0, norm.num_channels, size):
        inside = [channel for channel in channels if first <= channel < first + size]
        reserved = carriers_per_group(norm.num_channels, norm.num_groups) if inside else 0
        carriers = list(range(first + size - reserved, first + size))
        joint = full[:, first : first + size].pow(2).mean(dim=(0, 2, 3)).sum().sqrt()
        for channel, sign in zip(carriers, (1, -1), strict=False):
            carrier_bias[channel] = sign * CARRIER * joint
            full[:, channel] = carrier_bias[channel].to(full.dtype)
        scale = full[:, first : first + size].flatten(1).std(dim=1).mean()
        for channel in inside + carriers:
            constant = channel in carriers
            norm.weight[channel] = LINEAR_STD * scale / (joint if constant else full[:, channel].std())
            offset = norm.weight[channel] * carrier_bias[channel] / scale if constant else 0.0
            norm.bias[channel] = SILU_INFLECTION - offset
        read += carriers
    features = norm(full)[:, read]
    weight, bias = least_squares(features, targets, size=1)
    conv_weight, conv_bias = weight_and_bias(conv)
    conv_weight[:count] = 0  # other channels contain no signal yet, only the noise of random branches
    conv_weight[:count, read] = F.pad(weight, (1, 1, 1, 1)).to(conv_weight.dtype)
    conv_bias[:count] = bias.to(conv_bias.dtype)
    return F.conv2d(features, weight, bias)


def signal_channels(width: int, groups: int) -> list[int]:
    """Channels that may carry signals: all except the last ones of each group, reserved for carriers."""
    size, carriers = width // groups, carriers_per_group(width, groups)
    return [channel for channel in range(width) if channel % size < size - carriers]


def carriers_per_group(width: int, groups: int) -> int:
    """Two, or none if two would leave too few channels for an image; the norm then removes its mean."""
    return 2 if width - 2 * groups >= MAX_IMAGE_CHANNELS else 0


def whole_groups(channels: list[int], width: int, groups: int) -> list[int]:
    """All channels of the groups that contain `channels`."""
    size = width // groups
    touched = {channel // size for channel in channels}
    return [channel for channel in range(width) if channel // size in touched]


def write(
    conv: Conv2d,
    sources: list[int],
    into: list[int],
    kernel: torch.Tensor,
    bias: torch.Tensor | None = None,
    silent: Sequence[int] = (),
) -> None:
    """Make `conv` write `kernel` (T, K, ., .) of `sources` to channels `into`, and nothing to `silent`."""
    conv_weight, conv_bias = weight_and_bias(conv)
    for channel in (*silent, *into):
        conv_weight[channel] = 0
        conv_bias[channel] = 0
    rows = conv_weight[into]
    rows[:, sources] = kernel.to(rows.dtype)
    conv_weight[into] = rows
    if bias is not None:
        conv_bias[into] = bias.to(conv_bias.dtype)


def follow_shortcut(block: ResnetBlock, channels: list[int], groups: int) -> list[int]:
    """Channels in which the signals leave `block`; a 1x1 shortcut is set to copy them."""
    shortcut = block.conv_shortcut
    if shortcut is None:
        return channels
    into = signal_channels(shortcut.out_channels, groups)[: len(channels)]
    silent = whole_groups(into, shortcut.out_channels, groups)
    write(shortcut, channels, into, torch.eye(len(into))[:, :, None, None], silent=silent)
    return into


def silence(module: nn.Module, channels: list[int]) -> None:
    """Make the residual branches inside `module` write nothing to `channels`."""
    for part in module.modules():
        if isinstance(part, ResnetBlock | Attention):
            last = part.conv2 if isinstance(part, ResnetBlock) else part.to_out[0]
            for parameter in weight_and_bias(last):
                parameter[channels] = 0


def principal_components(values: torch.Tensor, most: int) -> torch.Tensor:
    """Kernels (T, K, 2, 2) of at most `most` components of 2x2 blocks, strongest first.

    A constant image keeps its scale.
    """
    patches = F.unfold(values, 2, stride=2)  # (N, 4K, L)
    power = torch.einsum("nal,nbl->ab", patches, patches)
    vectors = torch.linalg.eigh(power).eigenvectors.flip(1)[:, :most].T
    vectors = vectors * torch.where(vectors.sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
    return vectors.reshape(-1, values.shape[1], 2, 2) / 2


def least_squares(
    inputs: torch.Tensor, targets: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight (T, K, size, size) and bias (T,) of the convolution of `inputs` that best fits `targets`."""
    unknowns = inputs.shape[1] * size**2 + 1
    power = torch.zeros(unknowns, unknowns, dtype=torch.float64)
    product = torch.zeros(unknowns, targets.shape[1], dtype=torch.float64)
    positions = targets.numel() // targets.shape[1]
    step = max(1, positions // FIT_POSITIONS) | 1  # odd, to sample both pixels of each pair
    importance = _border_importance(targets).flatten()[::step]
    for image, target in zip(inputs, targets, strict=True):
        patches = F.unfold(image[None], size, padding=size // 2)[0, :, ::step]
        rows = F.pad(patches, (0, 0, 0, 1), value=1.0)  # the last row is for the bias
        weighted = rows * importance
        power += weighted @ rows.T
        product += weighted @ target.flatten(1)[:, ::step].T
    ridge = RIDGE * power.diagonal()
    ridge[-1] = 0
    solution = torch.linalg.solve(power + torch.diag(ridge), product).T
    return solution[:, :-1].reshape(-1, inputs.shape[1], size, size), solution[:, -1]


def _border_importance(values: torch.Tensor) -> torch.Tensor:
    """The weight (h, w) of each position of values (N, T, h, w) in a fit."""
    importance = values.new_full(values.shape[2:], BORDER_WEIGHT)
    importance[1:-1, 1:-1] = 1
    return importance
