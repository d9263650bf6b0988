"""First weights of an autoencoder: PyTorch's, or those of a linear codec fitted to natural spectra.

A standard autoencoder starts with a decoder that has seen nothing of the picture: no path without a
norm leads through its changes of resolution. DC-AE (Chen et al. 2025) trains fast because parameter-free
shortcuts lead there. The shortcuts, 1x1 convolutions and resampling convolutions of this network are
such a path already, and linear; the warm start gives them the weights of a transform codec:

- down: each stride-2 convolution gathers 2x2 pixels and keeps their principal components, so that the
  latent holds the strongest of the numbers of an f x f block, at unit variance;
- up: each convolution predicts the components of the blocks half as large by least squares from the
  states that the decoder really has at that point;
- norms in front of the last convolutions: constant carriers in each group make the scale nearly the same
  for every image, and SiLU is used around its inflection point, where it is nearly straight.

Both fits use Gaussian pictures with the spectrum and the colours of photographs, drawn from a fixed seed.

Shapes: N pictures, C channels, K signals, T targets.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL, downsampling
from vae.model.layers import Attention, GroupNorm, NormSiLU, ResnetBlock

POWER_EXPONENT = 2.2  # power ~ 1 / frequency ** 2.2: between Field (1987), 2, and 17 Kodak pictures, 2.3
RGB_COVARIANCE = ((0.162, 0.148, 0.120), (0.148, 0.199, 0.172), (0.120, 0.172, 0.171))  # 17 Kodak pictures
SILU_INFLECTION = 2.3994  # where SiLU'' is 0: within 2 % of a straight line for 1 to both sides
RIDGE = 1e-4
POST_SCALE = 1.0
KEEP_POW = 0.0
BRANCH = 0.0
STREAM = 8.0
STREAM_Z = 8.0
BRANCH_FREE = 1.0
FREE_READ = 0.1
CARRIER = 6.0
LOGVAR_BIAS = -6.0
LOGVAR_W = 0.1
MAX_SIGNALS = 64
COUNT = 24


def initialize(model: AutoencoderKL, init: str, seed: int) -> None:
    """Draw all weights of `model` from `seed`, in place; `init` is "default" or "warm"."""
    assert init in ("default", "warm"), init
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if init == "warm":
            pictures = natural_pictures(COUNT, max(128, 8 * downsampling(model.config)))
            states, latents = encoder_codec(model, pictures)
            decoder_codec(model, states, latents)


def natural_pictures(count: int, side: int) -> torch.Tensor:
    """Gaussian pictures (count, 3, side, side) with the spectrum and colour covariance of photographs."""
    generator = torch.Generator().manual_seed(0)
    down, across = torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None]
    amplitude = (down**2 + across**2).clamp_min(0.25 / side**2) ** (-POWER_EXPONENT / 4)
    noise = torch.randn(count, IMAGE_CHANNELS, side, side, generator=generator)
    gray = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(side, side))
    gray = gray / gray.std()
    colours = torch.linalg.cholesky(torch.tensor(RGB_COVARIANCE))
    return torch.einsum("dc,nchw->ndhw", colours, gray)


def slots(width: int, groups: int, count: int) -> list[int]:
    """Channels that carry `count` signals: all but the last two of each group, which are for carriers."""
    size = width // groups
    usable = [c for c in range(width) if size < 3 or c % size < size - 2]
    return usable[:count]


def capacity(width: int, groups: int) -> int:
    return min(len(slots(width, groups, width)), MAX_SIGNALS)


def encoder_codec(model, pictures):
    """Principal components level by level; returns the wanted state of each resolution and the latents."""
    encoder, config = model.encoder, model.config
    groups, z = config.norm_groups, config.z_channels
    state = pictures * STREAM
    states = [state]
    wanted = [state]
    at = slots(config.channels[0], groups, IMAGE_CHANNELS)
    place(encoder.conv_in, list(range(IMAGE_CHANNELS)), at, centre(STREAM * torch.eye(IMAGE_CHANNELS)))
    for level, width in enumerate(config.channels):
        block = encoder.down_blocks[level]
        at = carry(block.resnets[0], at, groups)
        settle(block, protected(at, width, groups) if level == len(config.channels) - 1 else at)
        if level == len(config.channels) - 1:
            break
        kept = min(4 * len(at), capacity(width, groups))
        if level == len(config.channels) - 2:
            kept = min(kept, capacity(config.channels[-1], groups), z)
        kernel = principal_components(state, kept)  # (kept, K, 2, 2)
        state = F.conv2d(state, kernel, stride=2)
        power = 1.0 if level == len(config.channels) - 2 else KEEP_POW
        if power:
            gain = STREAM_Z * state.std(dim=(0, 2, 3)) ** -power
            kernel = kernel * gain[:, None, None, None]
            state = state * gain[:, None, None]
        wide = capacity(width, groups)
        wanted.append(
            F.conv2d(
                wanted[-1],
                principal_components(wanted[-1], min(4 * wanted[-1].shape[1], MAX_SIGNALS)),
                stride=2,
            )
        )
        into = slots(width, groups, kept)
        place(
            block.downsamplers[0].conv,
            at,
            into,
            F.pad(kernel, (0, 1, 0, 1)),
            quiet=protected(into, width, groups) if power == 1 else (),
        )
        at = into
    settle(encoder.mid_block, protected(at, width, groups))
    latents = state[:, :z] / state[:, :z].std(dim=(0, 2, 3), keepdim=True)
    full = scatter(state, at, config.channels[-1])
    last = encoder.mid_block.resnets[-1].conv2
    moments, used = straight_norm(encoder.conv_norm_out, last, full, at)
    weight, bias = least_squares(moments[:, used], latents, 1)
    conv = encoder.conv_out
    k = latents.shape[1]
    conv.weight[:k].mul_(FREE_READ)
    conv.weight[:k, used] = 0
    conv.weight[:k, used, 1, 1] = weight[:, :, 0, 0]
    conv.bias[:k] = bias
    conv.weight[z:].mul_(LOGVAR_W)
    conv.bias[z:] = LOGVAR_BIAS
    latents = F.conv2d(moments, conv.weight[:z] * used_mask(conv.weight[:z], used), conv.bias[:z], padding=1)
    if model.quant_conv is not None:
        for conv in (model.quant_conv, model.post_quant_conv):
            conv.weight.copy_(torch.eye(conv.weight.shape[0])[:, :, None, None])
            conv.bias.zero_()
    return wanted, latents


def used_mask(weight, used):
    mask = torch.zeros(weight.shape[1])
    mask[used] = 1
    return mask[:, None, None]


def decoder_codec(model, states, latents):
    decoder, config = model.decoder, model.config
    groups = config.norm_groups
    widths = config.channels[::-1]
    states = states[::-1]
    z = config.z_channels
    kept = min(states[0].shape[1], capacity(widths[0], groups))
    weight, bias = least_squares(latents, states[0][:, :kept], 3)
    state = F.conv2d(latents, weight, bias, padding=1)
    at = slots(widths[0], groups, kept)
    place(decoder.conv_in, list(range(z)), at, weight, bias)
    settle(decoder.mid_block, at)
    for level, block in enumerate(decoder.up_blocks):
        at = carry(block.resnets[0], at, groups)
        settle(block, protected(at, widths[level], groups) if level == len(widths) - 1 else at)
        if level == len(widths) - 1:
            break
        target = states[level + 1]
        kept = min(target.shape[1], capacity(widths[level], groups), capacity(widths[level + 1], groups))
        large = F.interpolate(state, scale_factor=2.0, mode="nearest")
        weight, bias = least_squares(large, target[:, :kept], 3)
        state = F.conv2d(large, weight, bias, padding=1)
        into = slots(widths[level], groups, kept)
        place(
            block.upsamplers[0].conv,
            at,
            into,
            weight,
            bias,
            quiet=protected(into, widths[level], groups) if level == len(widths) - 2 else (),
        )
        at = into
    full = scatter(state, at, widths[-1])
    last = decoder.up_blocks[-1].resnets[-1].conv2
    features, used = straight_norm(decoder.conv_norm_out, last, full, at)
    weight, bias = least_squares(features[:, used], states[-1] / STREAM, 1)
    conv = decoder.conv_out
    conv.weight.mul_(FREE_READ)
    conv.weight[:, used] = 0
    conv.weight[:, used, 1, 1] = weight[:, :, 0, 0]
    conv.bias.copy_(bias)


def straight_norm(norm: NormSiLU, last: nn.Conv2d, full: torch.Tensor, at: list[int]):
    """Make NormSiLU nearly affine in the signals; returns its output and the channels worth reading."""
    size = norm.num_channels // norm.num_groups
    used = list(at)
    power = full.pow(2).mean(dim=(0, 2, 3))
    last.weight[at] *= 1.0
    for group in range(norm.num_groups):
        first = group * size
        inside = [c for c in at if first <= c < first + size]
        if not inside:
            continue
        strongest = power[first : first + size].sum().sqrt()
        carriers = [first + size - 2, first + size - 1] if size >= 3 else []
        for c, sign in zip(carriers, (1, -1)):
            last.weight[c] = 0 if BRANCH == 0 else last.weight[c]
            last.bias[c] = sign * CARRIER * strongest
            full[:, c] += sign * CARRIER * strongest
        used += carriers
        flat = full[:, first : first + size].flatten(1)
        scale = flat.std(dim=1).mean()
        for c in inside + carriers:
            std = full[:, c].std() if c in inside else strongest
            norm.weight[c] = 0.5 * scale / std
            norm.bias[c] = SILU_INFLECTION - norm.weight[c] * (
                full[:, c].mean() / scale if c in carriers else 0
            )
    return norm(full), used


def principal_components(state, kept):
    k = state.shape[1]
    patches = F.unfold(state, 2, stride=2)  # (N, 4K, L)
    cov = torch.einsum("nal,nbl->ab", patches, patches).double()
    vectors = torch.linalg.eigh(cov).eigenvectors.flip(1)[:, :kept]
    vectors = vectors * torch.where(vectors.sum(0) < 0, -1.0, 1.0)
    return vectors.T.float().reshape(kept, k, 2, 2) / 2


def least_squares(inputs, targets, size):
    """Weight (T, K, size, size) and bias (T,) of the convolution that best predicts the targets."""
    k, t = inputs.shape[1], targets.shape[1]
    gram = torch.zeros(k * size * size + 1, k * size * size + 1, dtype=torch.float64)
    right = torch.zeros(k * size * size + 1, t, dtype=torch.float64)
    count = 0
    for x, y in zip(inputs, targets):
        rows = F.pad(F.unfold(x[None], size, padding=size // 2)[0], (0, 0, 0, 1), value=1.0)
        gram += (rows @ rows.T).double()
        right += (rows @ y.flatten(1).T).double()
        count += rows.shape[1]
    ridge = RIDGE * gram.diagonal().clone()
    ridge[-1] = 0
    solution = torch.linalg.solve(gram + torch.diag(ridge + 1e-9 * count), right).T.float()
    return solution[:, :-1].reshape(t, k, size, size), solution[:, -1]


def centre(matrix: torch.Tensor) -> torch.Tensor:
    return F.pad(matrix[:, :, None, None], (1, 1, 1, 1))


def place(conv, sources, into, kernel, bias=None, quiet=()):
    for c in quiet:
        conv.weight[c] = 0
        conv.bias[c] = 0
    rows = torch.zeros(len(into), *conv.weight.shape[1:])
    rows[:, sources] = kernel
    conv.weight[into] = rows
    conv.bias[into] = 0 if bias is None else bias


def carry(block: ResnetBlock, at, groups):
    if block.conv_shortcut is None:
        return at
    into = slots(block.conv_shortcut.weight.shape[0], groups, len(at))
    place(
        block.conv_shortcut,
        at,
        into,
        torch.eye(len(at))[:, :, None, None],
        quiet=protected(into, block.conv_shortcut.weight.shape[0], groups),
    )
    return into


def protected(at, width, groups):
    size = width // groups
    touched = {c // size for c in at}
    return [c for c in range(width) if c // size in touched]


def settle(module, at):
    for m in module.modules():
        if isinstance(m, ResnetBlock | Attention):
            last = m.conv2 if isinstance(m, ResnetBlock) else m.to_out[0]
            for p in (last.weight, last.bias):
                p.mul_(BRANCH_FREE)
                p[at] *= BRANCH / max(BRANCH_FREE, 1e-9)


def scatter(state, at, width):
    full = state.new_zeros(state.shape[0], width, *state.shape[2:])
    full[:, at] = state
    return full
