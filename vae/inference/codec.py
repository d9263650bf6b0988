"""Encode, decode and reconstruct images of any size, in any dtype, whole or in blended tiles.

Shapes: B images of C channels, H x W pixels of any size from 8 px on, f the downsampling, Z latent channels;
the latent has h = ceil(H/f) rows and w = ceil(W/f) columns. Results are on the device of the input, in fp32
or wider; the network computes on the device of its weights. Padding is added at the right and at the
bottom, so that latents stay aligned with the image's own grid.

Blended tiles are for images that do not fit into memory, which is then that of one tile and of the result.
The result is approximate. A tile does not see the rest of the image: its outer pixels see padding instead, so
they are left out where another tile has them, and the next ones fade from one tile into the next. Attention
is that of the tile. GroupNorms with the statistics of one tile would change the contrast from tile to tile;
they have those of samples from the whole image.
"""

import copy
import itertools
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.model.layers import Attention, NormSiLU
from vae.model.tiny import TinyDecoder, TinyEncoder
from vae.ops.attention import attention, attention_blocks
from vae.system.host import GIB, free_memory

OnStep = Callable[[int, int], None]  # called with the number of steps done, and of all
MIN_SIDE = 8  # px: a smaller image is smaller than one latent pixel of this model family
MIN_LATENTS = 16  # of a tile's side: half of it overlaps others on both sides
OVERLAP = 4  # tiles overlap by 1/OVERLAP of their side
LEFT_OUT = 4  # 1/LEFT_OUT of the overlap at either side is not used
SAMPLES = 8  # samples from the image along each side, of half the side of a tile
SAMPLE_BORDER = 8  # 1/SAMPLE_BORDER of a sample's side is not measured, because it sees padding


def padded_side(side: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `side`."""
    return -(-side // multiple) * multiple


def pad_to_multiple(images: torch.Tensor, multiple: int) -> torch.Tensor:
    """Images (B, C, H, W) of any dtype, their last column and row repeated up to multiples of `multiple`.

    The border is repeated, not mirrored, so that border latents spend less on pixels that are cropped off.
    With the warm start's linear codec, the outer 8 px gain 0.18 dB over mirroring on the Kodak set, 0.24 dB
    on the demo's images, and 0.9 to 1.1 dB over zeros. Raises ValueError below MIN_SIDE.
    """
    for dim in (2, 3):
        side = images.shape[dim]
        if side < MIN_SIDE:
            raise ValueError(f"a side of {side} px is smaller than {MIN_SIDE} px")
        padded = padded_side(side, multiple)
        if padded != side:
            index = torch.arange(padded, device=images.device).clamp(max=side - 1)
            images = images.index_select(dim, index)
    return images


def crop_back(images: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The first (height, width) pixels of images (B, C, H, W), without what pad_to_multiple added."""
    return images[:, :, : size[0], : size[1]]


# At least so many bytes are alive at once in main memory, per pixel, channel of the first level and byte of
# the dtype (vae.memory.live_bytes counts them). A level keeps its input until its last block ends: one more
# map if it has several blocks.
_MAPS = {"encode": 3.0, "decode": 5.5}
_ATTENTION_MAPS = 7  # maps of the last level alive within attention, beside its scores; also counted
LEAST_SHARE = 0.7  # of the peak is counted so at least


def check_main_memory(
    model: AutoencoderKL,
    operation: str,
    pixels: int,
    dtype: torch.dtype,
    tile: int | None,
    share: float = 1.0,
    images: int = 1,
) -> None:
    """Raise MemoryError if an operation on that many pixels needs more than `share` of the free main memory.

    `operation` is "encode" or "decode"; `pixels` are those of the encoder's input, of all `images`. Without
    this check, Linux ends the process without a message. Memory of a GPU needs no check: PyTorch reports it.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    f = model.encoder_downsampling
    if tile is not None:  # each is computed as a whole image
        pixels, images = min(pixels // images, (latents_per_tile(tile, f) * f) ** 2), 1
    config, factor = model.config, _MAPS[operation]
    if isinstance(getattr(model, f"{operation}r"), TinyEncoder | TinyDecoder):
        begins_at_half = config.family == "taesana" and operation == "encode"
        factor = 0.5 if begins_at_half else 3.0
    elif operation == "encode" and config.layers_per_block > 1:
        factor += 1
    widths = config.channels if operation == "encode" else config.up_channels
    needed = int(factor * pixels * widths[0] * dtype.itemsize)
    if any(isinstance(module, Attention) for module in getattr(model, f"{operation}r").modules()):
        tokens = max(pixels // images // f**2, 1)
        at_once, queries = attention_blocks(images, tokens, widths[-1], "cpu", has_gradient=False)
        score_bytes = 4 if dtype == torch.float32 else 8  # half precision has two copies beside fp32
        maps = _ATTENTION_MAPS * images * tokens * widths[-1] * dtype.itemsize
        needed = max(needed, maps + at_once * queries * tokens * score_bytes)
    free = free_memory()
    if needed > share * free:
        raise MemoryError(f"{operation} needs at least {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free")


TIMED_TOKENS = 2048  # whose attention takes long enough to be timed, and a part of a second


@torch.no_grad()
def attention_seconds(model: AutoencoderKL, operation: str, pixels: int, dtype: torch.dtype) -> float:
    """About the time of attention over that many pixels on a CPU, from that over a few; 0 on a GPU.

    It grows with the square of the pixels, all other time with the pixels.
    """
    layers = [layer for layer in getattr(model, f"{operation}r").modules() if isinstance(layer, Attention)]
    tokens = pixels // model.encoder_downsampling**2
    if next(model.parameters()).device.type != "cpu" or not layers or tokens < 4 * TIMED_TOKENS:
        return 0.0
    timed = torch.ones(1, TIMED_TOKENS, len(layers[0].to_q.weight), dtype=dtype)
    attention(timed[:, :64], timed[:, :64], timed[:, :64])  # loads what the first call loads
    began = time.perf_counter()
    attention(timed, timed, timed)
    return len(layers) * (time.perf_counter() - began) * (tokens / TIMED_TOKENS) ** 2


@torch.no_grad()
def encode_images(
    model: AutoencoderKL,
    images: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    on_step: OnStep | None = None,
    at_full_size: bool = False,
) -> Posterior:
    """Posterior (B, Z, h, w) of images (B, C, H, W) in [-1, 1], padded to multiples of f.

    `at_full_size`: the encoder reads all pixels, so the decoded image is larger by the decoder's scale.
    `tile` is the side of the tiles in px, which are approximate and need memory for one of them only; None
    computes the whole image at once. `on_step(done, total)` is called after each tile. Raises MemoryError if
    the main memory is too small.
    """
    if at_full_size:
        padded = pad_to_multiple(images, model.encoder_downsampling)
    else:
        padded = model.encoder_input(pad_to_multiple(images, model.downsampling))
    check_main_memory(model, "encode", padded[:, 0].numel(), dtype, tile, images=len(padded))
    device = next(model.parameters()).device
    if tile is None:
        posterior = model.encode(_to_network(padded, device, dtype))
    else:
        posterior = Posterior.from_moments(run_blended(model, "encode", padded, dtype, tile, on_step))
    return Posterior(posterior.mean.to(images.device), posterior.logvar.to(images.device))


@torch.no_grad()
def decode_latents(
    model: AutoencoderKL,
    latents: torch.Tensor,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: int | None = None,
    on_step: OnStep | None = None,
) -> torch.Tensor:
    """Images (B, C, H, W) in about [-1, 1], not clamped, from the encoder's latents (B, Z, h, w).

    `size` is the (H, W) before padding; None returns all (h f, w f) pixels. For `tile` and `on_step`,
    see `encode_images`. Raises MemoryError if the main memory is too small.
    """
    pixels = latents[:, 0].numel() * model.encoder_downsampling**2
    check_main_memory(model, "decode", pixels, dtype, tile, images=len(latents))
    device = next(model.parameters()).device
    if tile is None:
        images = model.decode(_to_network(latents, device, dtype))
    else:
        images = run_blended(model, "decode", latents, dtype, tile, on_step)
    images = images if size is None else crop_back(images, size)
    return images.to(latents.device, images.dtype if images.dtype == torch.float64 else torch.float32)


def _to_network(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return values.to(device, dtype, memory_format=torch.channels_last)


# ---- Blended tiles ---------------------------------------------------------------------------------------


class Moments:
    """Mean and variance of each of the G channel groups of each image, accumulated part by part.

    Sums are kept per channel, in fp64, until `statistics` merges the channels of a group, because sums over
    the pixels of one channel are fast. Parts are merged by Chan, Golub & LeVeque 1979, eq. 2.1, which avoids
    cancellation.
    """

    def __init__(self, groups: int):
        self._groups = groups
        self._count = 0  # pixels so far
        # (B, C); squares: sum of squared distances from the mean
        self._mean = self._squares = torch.zeros(())

    def add(self, h: torch.Tensor) -> None:
        """Add a part (B, C, rows, columns)."""
        wide = torch.promote_types(h.dtype, torch.float32)
        pixels = h.permute(0, 2, 3, 1).to(wide, copy=True, memory_format=torch.contiguous_format)
        pixels = pixels.flatten(1, 2)  # (B, rows * columns, C)
        mean = pixels.mean(dim=1)
        squares = pixels.sub_(mean[:, None]).square_().sum(dim=1).double()
        mean, count = mean.double(), pixels.shape[1]
        if self._count == 0:
            self._mean, self._squares = mean, squares
        else:
            distance = mean - self._mean
            together = self._count + count
            self._mean = self._mean + distance * (count / together)
            self._squares += squares + distance.square() * (self._count * count / together)
        self._count += count

    def statistics(self, eps: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and 1/sqrt(variance + eps), (B, G), in fp32, or in fp64 if `like` is fp64."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        means = self._mean.unflatten(1, (self._groups, -1))  # (B, G, C/G)
        mean = means.mean(dim=2)
        within = self._squares.unflatten(1, (self._groups, -1)).mean(dim=2) / self._count
        variance = within + (means - mean[:, :, None]).square().mean(dim=2)
        return mean.to(dtype), (variance + eps).rsqrt().to(dtype)


class SampledNorm(nn.Module):
    """A GroupNorm with the statistics of samples from the whole image instead of those of its input."""

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.norm = norm
        self.moments = Moments(norm.num_groups)
        self.is_measuring = True  # each input is a batch of samples, and its statistics are added first

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        if self.is_measuring:
            top, left = (side // SAMPLE_BORDER for side in h.shape[2:])
            for features in h.split(1):
                self.moments.add(features[:, :, top : h.shape[2] - top, left : h.shape[3] - left])
        mean, rstd = (
            value.repeat_interleave(norm.num_channels // norm.num_groups, dim=1)[:, :, None, None]
            for value in self.moments.statistics(norm.eps, h)  # (B, G) -> (B, C, 1, 1)
        )
        scale = rstd * norm.weight[:, None, None]
        normalized = (h - mean).mul_(scale).add_(norm.bias[:, None, None])
        return (F.silu(normalized, inplace=True) if isinstance(norm, NormSiLU) else normalized).to(h.dtype)


def with_sampled_norms(network: AutoencoderKL) -> AutoencoderKL:
    """The network with the same parameters, and SampledNorms instead of its GroupNorms."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    network = copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})
    for module in list(network.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, nn.GroupNorm):
                setattr(module, name, SampledNorm(norm))
    return network


def latents_per_tile(tile: int, downsampling: int) -> int:
    """The side, in latent pixels, of tiles of about `tile` px."""
    return max(tile // downsampling, MIN_LATENTS)


def run_blended(
    model: AutoencoderKL,
    operation: str,
    values: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: OnStep | None,
) -> torch.Tensor:
    """Encode images (B, C, H, W), whose sides are multiples of f, or decode latents (B, Z, h, w).

    "encode" returns mean and log-variance (B, 2Z, H/f, W/f), "decode" images (B, C, h f, w f), both on the
    host. `tile` is in px. `on_step(done, total)` counts batches of samples and tiles.
    """
    return torch.cat(
        [_run_one_image(model, operation, image, dtype, tile, on_step) for image in values.split(1)]
    )


def _run_one_image(
    model: AutoencoderKL,
    operation: str,
    image: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: OnStep | None,
) -> torch.Tensor:
    """Measure the statistics of samples of the image, then compute its tiles."""
    f = model.encoder_downsampling
    unit, unit_out = (f, 1) if operation == "encode" else (1, model.downsampling)
    side = latents_per_tile(tile, f)
    device = next(model.parameters()).device
    network = with_sampled_norms(model)
    part = network.encoder if operation == "encode" else network.decoder
    norms = [module for module in part.modules() if isinstance(module, SampledNorm)]
    samples = _samples(image, unit, side) if norms else []
    numbers = itertools.count(1)
    total = len(samples) + count_tiles(image.shape, unit, side)

    def run(values: torch.Tensor) -> torch.Tensor:
        values = _to_network(values, device, dtype)
        if operation == "decode":
            result = network.decode(values)
        else:
            posterior = network.encode(values)
            result = torch.cat([posterior.mean, posterior.logvar], dim=1)
        if on_step is not None:
            on_step(next(numbers), total)
        return result

    for sample in samples:
        run(sample)
    for norm in norms:
        norm.is_measuring = False
    return blend(run, image, units=(unit, unit_out), side=side)


def _samples(image: torch.Tensor, unit: int, side: int) -> list[torch.Tensor]:
    """Batches of samples from the whole image, each batch with the pixels of a tile."""
    half = side // 2
    grid = []
    for length in (image.shape[2] // unit, image.shape[3] // unit):
        size = min(half, length)
        number = min(-(-length // half), SAMPLES)
        firsts = [round(n * (length - size) / max(number - 1, 1)) for n in range(number)]
        grid.append([slice(first * unit, (first + size) * unit) for first in firsts])
    parts = [image[:, :, rows, columns] for rows, columns in itertools.product(*grid)]
    batches = -(-len(parts) // 4)
    return [torch.cat(parts[number::batches]) for number in range(batches)]


def blend(
    function: Callable[[torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    *,
    units: tuple[int, int],
    side: int,
) -> torch.Tensor:
    """`function` of tiles of values (B, C, h units[0], w units[0]); (B, C', h units[1], w units[1]), host.

    Tiles have `side` units.
    """
    unit, unit_out = units
    height, width = values.shape[2] // unit, values.shape[3] // unit
    result = strip = torch.empty(0)
    bottom = 0
    for top in starts(height, side):
        rows_done, bottom = bottom, min(top + side, height)
        right = 0
        for left in starts(width, side):
            columns_done, right = right, min(left + side, width)
            tile = function(values[:, :, top * unit : bottom * unit, left * unit : right * unit]).cpu()
            if left == 0:
                strip = tile.new_empty(*tile.shape[:3], width * unit_out)
            _fade_in(strip, tile, left * unit_out, columns_done * unit_out, dim=3)
        if top == 0:
            result = strip.new_empty(*strip.shape[:2], height * unit_out, width * unit_out)
        _fade_in(result, strip, top * unit_out, rows_done * unit_out, dim=2)
    return result


def starts(length: int, side: int) -> list[int]:
    """The first units of tiles that cover `length` units; the last tile ends with the last unit."""
    step = side - side // OVERLAP
    return [*range(0, max(length - side, 0), step), max(length - side, 0)]


def count_tiles(shape: torch.Size, unit: int, side: int) -> int:
    """The number of tiles of values (B, C, h unit, w unit)."""
    return len(starts(shape[2] // unit, side)) * len(starts(shape[3] // unit, side))


def _fade_in(result: torch.Tensor, tile: torch.Tensor, start: int, written: int, dim: int) -> None:
    """Write `tile` at `start`, fading from what is in `result` up to `written` along `dim`."""
    size = tile.shape[dim]
    overlap = max(written - start, 0)
    target = result.narrow(dim, start, size)
    if overlap:
        unused = overlap // LEFT_OUT
        weight = torch.linspace(0, 1, overlap - 2 * unused + 2)[1:-1]
        weight = torch.cat([torch.zeros(unused), weight, torch.ones(unused)]).to(tile.dtype)
        old, new = target.narrow(dim, 0, overlap), tile.narrow(dim, 0, overlap)
        old.lerp_(new, weight[:, None] if dim == 2 else weight)
    target.narrow(dim, overlap, size - overlap).copy_(tile.narrow(dim, overlap, size - overlap))
