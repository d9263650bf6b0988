"""First weights of an autoencoder: PyTorch's own, or those of a linear codec fitted to natural spectra.

From PyTorch's weights an AutoencoderKL learns slowly: nothing carries the image through its changes of
resolution. DC-AE (Chen et al. 2025) trains fast because parameter-free shortcuts do. Here the identities
of the residual blocks, the 1x1 shortcuts and the resampling convolutions form a path without a norm
already; the warm start gives it the weights of a transform codec, so architecture and file stay as they are.

- Down: each stride-2 convolution gathers 2x2 pixels and keeps their principal components, so the latent
  holds the strongest of the 3*f*f numbers of a block, at unit variance.
- Up: each convolution predicts the components of the blocks half as large, by least squares from the states
  the decoder really has. (Nearest enlargement cannot say which pixel of a pair it is at: no kernel behind it
  reaches the highest frequency. So this is a fit, not an inverse.)
- The norms before the last convolutions: two constant channels per group, the carriers, outweigh the signals
  and make the scale nearly the same for every image; SiLU is met at its inflection, where it is straight.
- The residual branches start as PyTorch's, and write only to channels that carry no signal.

The fits see Gaussian images with the spectrum and the colours of photographs, the same for every seed. They
are in fp64: fitted in fp32, a change of rounding in an operation moved the weights by a thousandth.

Shapes: N images, K signals, T targets, f downsampling, Z latent channels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL, downsampling
from vae.model.layers import Attention, NormSiLU, ResnetBlock

IMAGES = 24  # 6,144 blocks of 8x8 pixels: 42 for each unknown behind 16 latent channels
POWER_EXPONENT = 2.2  # power ~ 1 / frequency ** 2.2: between Field (1987), 2, and 17 Kodak images, 2.3
RGB_COVARIANCE = ((0.162, 0.148, 0.120), (0.148, 0.199, 0.172), (0.120, 0.172, 0.171))  # 17 Kodak images
MAX_SIGNALS = 64  # bounds the largest fit to 577 unknowns
FIT_POSITIONS = 40_000  # looked at in a fit, about; the whole start takes 1.8 to 3 s of one core
RIDGE = 1e-4  # of each input's power; keeps nearly dependent inputs from cancelling in bf16
STREAM_GAIN = 32.0  # see initialize
CARRIER = 6.0  # times the signals' joint deviation: their power then moves the scale by about 1 %
SILU_INFLECTION = 2.3994  # SiLU'' = 0: straight within 2 % for 1 to both sides
STRAIGHT_STD = 0.5  # deviation of signals where they meet SiLU, so that two deviations stay straight
FREE_READ = 0.1  # share of PyTorch's weights kept where the last convolutions read free channels
LOGVAR_START = -6.0  # noise of 0.05 on unit-variance latents
LOGVAR_READ = 0.1  # share of PyTorch's weights kept for the log-variance


@dataclass
class Signals:
    """What the path carries at one point: the channels it is in, its values (N, K, h, w) on the images."""

    channels: list[int]
    values: torch.Tensor


def initialize(model: AutoencoderKL, init: str, seed: int) -> None:
    """Draw all weights of `model`, which is on the CPU, from `seed`, in place; `init` as in ModelConfig.

    The path carries images at STREAM_GAIN times their own scale: Adam's first steps move every weight of
    the branches by about the learning rate, and what that adds is small beside larger signals. Measured on
    Kodak crops (32 64 64 64, 64 px crops, batch 4, bf16), dB after 100 and 900 steps at 1e-3: gain 1 16.0
    and not run on, gain 8 22.9 and 25.5, gain 32 20.4 and 24.9 (its mean from 150 steps on is 1.3 higher);
    after 250 steps at 1e-4: gain 8 25.9, gain 32 26.2.
    """
    assert init in ("default", "warm"), init
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    if init == "warm":
        with torch.no_grad():
            images = natural_images(IMAGES, max(128, 8 * downsampling(model.config))).double()
            components, latents = fit_encoder(model, images)
            fit_decoder(model, components, latents)
            for conv in (model.quant_conv, model.post_quant_conv):
                if conv is not None:
                    nn.init.dirac_(conv.weight)
                    nn.init.zeros_(conv.bias)


def natural_images(count: int, side: int) -> torch.Tensor:
    """Gaussian images (count, 3, side, side) with the power spectrum and RGB covariance of photographs."""
    generator = torch.Generator().manual_seed(0)
    down, across = torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None]
    amplitude = (down**2 + across**2).clamp_min((0.5 / side) ** 2) ** (-POWER_EXPONENT / 4)
    noise = torch.randn(count, IMAGE_CHANNELS, side, side, generator=generator)
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(side, side))
    mixing = torch.linalg.cholesky(torch.tensor(RGB_COVARIANCE))
    return torch.einsum("dc,nchw->ndhw", mixing, fields / fields.std())


def fit_encoder(model: AutoencoderKL, images: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Fit the encoder's path; returns the components (N, K, h, w) of each resolution, and the latents."""
    encoder, widths, groups = model.encoder, model.config.channels, model.config.norm_groups
    signals = Signals(signal_channels(widths[0], groups)[:IMAGE_CHANNELS], STREAM_GAIN * images)
    colours = STREAM_GAIN * torch.eye(IMAGE_CHANNELS)[:, :, None, None]
    write(encoder.conv_in, list(range(IMAGE_CHANNELS)), signals.channels, F.pad(colours, (1, 1, 1, 1)))
    components = [signals.values]
    for level, block in enumerate(encoder.down_blocks[:-1]):
        signals.channels = follow_shortcut(block.resnets[0], signals.channels, groups)
        silence(block, signals.channels)
        kernel = principal_components(signals.values)  # (K', K, 2, 2), strongest first
        components.append(F.conv2d(signals.values, kernel, stride=2))
        room = min(len(signal_channels(width, groups)) for width in widths[level : level + 2])
        kept = min(len(kernel), room)
        last = level == len(widths) - 2
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
    repeated = [channel % len(signals.channels) for channel in range(z)]  # narrow widths hold fewer than Z
    targets = signals.values[:, repeated] / STREAM_GAIN
    last_conv = encoder.mid_block.resnets[-1].conv2
    encoder.conv_out.weight[z:] *= LOGVAR_READ
    encoder.conv_out.bias[z:] = LOGVAR_START
    return components, fit_readout(encoder.conv_norm_out, last_conv, encoder.conv_out, signals, targets)


def fit_decoder(model: AutoencoderKL, components: list[torch.Tensor], latents: torch.Tensor) -> None:
    """Fit the decoder's path to reach each resolution's components from the latents (N, Z, h, w)."""
    decoder, widths, groups = model.decoder, model.config.channels[::-1], model.config.norm_groups
    convs = [decoder.conv_in, *(block.upsamplers[0].conv for block in decoder.up_blocks[:-1])]
    outputs = [widths[0], *widths[:-1]]  # width behind each of convs
    signals = Signals(list(range(latents.shape[1])), latents)
    for level, block in enumerate(decoder.up_blocks):
        enlarged = signals.values if level == 0 else F.interpolate(signals.values, scale_factor=2.0)
        room = min(len(signal_channels(outputs[level], groups)), len(signal_channels(widths[level], groups)))
        weight, bias = least_squares(enlarged, components[-1 - level][:, :room], size=3)
        into = signal_channels(outputs[level], groups)[: len(weight)]
        last = level == len(widths) - 1
        quiet = whole_groups(into, outputs[level], groups) if last else into
        write(convs[level], signals.channels, into, weight, bias, silent=quiet)
        signals = Signals(into, F.conv2d(enlarged, weight, bias, padding=1))
        if level == 0:
            silence(decoder.mid_block, into)
        signals.channels = follow_shortcut(block.resnets[0], into, groups)
        quiet = whole_groups(signals.channels, widths[level], groups) if last else signals.channels
        silence(block, quiet)
    last_conv = decoder.up_blocks[-1].resnets[-1].conv2
    images = components[0][:, :IMAGE_CHANNELS] / STREAM_GAIN
    fit_readout(decoder.conv_norm_out, last_conv, decoder.conv_out, signals, images)


def fit_readout(
    norm: NormSiLU, before: nn.Conv2d, conv: nn.Conv2d, signals: Signals, targets: torch.Tensor
) -> torch.Tensor:
    """Carry signals through `norm` and let `conv` read the targets from them; returns what it reads.

    `before` is the last convolution added to the stream; its biases make the carriers.
    """
    values, channels, count = signals.values, signals.channels, targets.shape[1]
    full = values.new_zeros(values.shape[0], norm.num_channels, *values.shape[2:])
    full[:, channels] = values
    size = norm.num_channels // norm.num_groups
    read = list(channels)
    for first in range(0, norm.num_channels, size):
        inside = [channel for channel in channels if first <= channel < first + size]
        reserved = carriers_per_group(norm.num_channels, norm.num_groups) if inside else 0
        carriers = list(range(first + size - reserved, first + size))
        joint = full[:, first : first + size].pow(2).mean(dim=(0, 2, 3)).sum().sqrt()
        for channel, sign in zip(carriers, (1, -1), strict=False):
            before.bias[channel] = sign * CARRIER * joint
            full[:, channel] = before.bias[channel].to(full.dtype)
        scale = full[:, first : first + size].flatten(1).std(dim=1).mean()
        for channel in inside + carriers:
            constant = channel in carriers
            norm.weight[channel] = STRAIGHT_STD * scale / (joint if constant else full[:, channel].std())
            offset = norm.weight[channel] * before.bias[channel] / scale if constant else 0.0
            norm.bias[channel] = SILU_INFLECTION - offset
        read += carriers
    features = norm(full)[:, read]
    weight, bias = least_squares(features, targets, size=1)
    conv.weight[:count] *= FREE_READ
    conv.weight[:count, read] = F.pad(weight, (1, 1, 1, 1)).to(conv.weight.dtype)
    conv.bias[:count] = bias.to(conv.bias.dtype)
    return F.conv2d(features, weight, bias)


def signal_channels(width: int, groups: int) -> list[int]:
    """Channels that may carry signals: all but the last ones of each group, which are left for carriers."""
    size, carriers = width // groups, carriers_per_group(width, groups)
    return [channel for channel in range(width) if channel % size < size - carriers][:MAX_SIGNALS]


def carriers_per_group(width: int, groups: int) -> int:
    """Two, or none where that would leave no room for an image: the norm then takes away its mean."""
    return 2 if width - 2 * groups >= IMAGE_CHANNELS else 0


def whole_groups(channels: list[int], width: int, groups: int) -> list[int]:
    """All channels of the groups in which `channels` lie."""
    size = width // groups
    touched = {channel // size for channel in channels}
    return [channel for channel in range(width) if channel // size in touched]


def write(conv, sources, into, kernel, bias=None, silent=()) -> None:
    """Make `conv` write `kernel` (T, K, ., .) of `sources` to channels `into`, and nothing to `silent`."""
    for channel in (*silent, *into):
        conv.weight[channel] = 0
        conv.bias[channel] = 0
    rows = conv.weight[into]
    rows[:, sources] = kernel.to(rows.dtype)
    conv.weight[into] = rows
    if bias is not None:
        conv.bias[into] = bias.to(conv.bias.dtype)


def follow_shortcut(block: ResnetBlock, channels: list[int], groups: int) -> list[int]:
    """Channels in which signals leave `block`; a 1x1 shortcut copies them."""
    shortcut = block.conv_shortcut
    if shortcut is None:
        return channels
    into = signal_channels(shortcut.out_channels, groups)[: len(channels)]
    silent = whole_groups(into, shortcut.out_channels, groups)
    write(shortcut, channels, into, torch.eye(len(into))[:, :, None, None], silent=silent)
    return into


def silence(module: nn.Module, channels: list[int]) -> None:
    """Let the residual branches inside `module` write nothing to `channels`."""
    for part in module.modules():
        if isinstance(part, (ResnetBlock, Attention)):
            last = part.conv2 if isinstance(part, ResnetBlock) else part.to_out[0]
            last.weight[channels] = 0
            last.bias[channels] = 0


def principal_components(values: torch.Tensor) -> torch.Tensor:
    """Kernels (T, K, 2, 2) of the strongest components of 2x2 blocks; a constant keeps its scale."""
    patches = F.unfold(values, 2, stride=2)  # (N, 4K, L)
    power = torch.einsum("nal,nbl->ab", patches, patches)
    vectors = torch.linalg.eigh(power).eigenvectors.flip(1)[:, :MAX_SIGNALS].T
    vectors = vectors * torch.where(vectors.sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
    return vectors.reshape(-1, values.shape[1], 2, 2) / 2


def least_squares(
    inputs: torch.Tensor, targets: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight (T, K, size, size) and bias (T,) of the convolution of inputs that is nearest to targets."""
    unknowns = inputs.shape[1] * size**2 + 1
    power = torch.zeros(unknowns, unknowns, dtype=torch.float64)
    product = torch.zeros(unknowns, targets.shape[1], dtype=torch.float64)
    positions = targets.numel() // targets.shape[1]
    step = max(1, positions // FIT_POSITIONS) | 1  # odd: meets both pixels of each pair
    for image, wanted in zip(inputs, targets, strict=True):
        patches = F.unfold(image[None], size, padding=size // 2)[0, :, ::step]
        rows = F.pad(patches, (0, 0, 0, 1), value=1.0)  # the last row meets the bias
        power += rows @ rows.T
        product += rows @ wanted.flatten(1)[:, ::step].T
    ridge = RIDGE * power.diagonal()
    ridge[-1] = 0
    solution = torch.linalg.solve(power + torch.diag(ridge), product).T
    return solution[:, :-1].reshape(-1, inputs.shape[1], size, size), solution[:, -1]
