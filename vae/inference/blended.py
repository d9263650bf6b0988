"""Encode and decode overlapping tiles one by one and blend them, for images whose feature maps fit nowhere.

Memory is that of one tile and of the result. The result is approximate. A tile does not see the rest of the
image: its outer pixels see padding instead, so they are left out where another tile has them, and the next
ones fade from one tile into the next. Attention is that of the tile. GroupNorms with the statistics of one
tile would change the contrast from tile to tile; they have those of samples from the whole image.
"""

import itertools
from collections.abc import Callable

import torch

from vae.inference.feature_map import Moments
from vae.inference.tiled import Attend, Pass, Plan, group_normalized, plan_of, run_layer
from vae.model.autoencoder import AutoencoderKL
from vae.model.layers import GroupNorm

MIN_LATENTS = 16  # of a tile's side: half of it overlaps others on both sides
OVERLAP = 4  # tiles overlap by 1/OVERLAP of their side
LEFT_OUT = 4  # 1/LEFT_OUT of the overlap at either side is not used
SAMPLES = 8  # samples from the image along each side, of half the side of a tile
SAMPLE_BORDER = 8  # 1/SAMPLE_BORDER of a sample's side is not measured, because it sees padding


def latents_per_tile(tile: int, downsampling: int) -> int:
    """The side, in latent pixels, of tiles of about `tile` px."""
    return max(tile // downsampling, MIN_LATENTS)


def run_blended(
    model: AutoencoderKL,
    operation: str,
    values: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """About what `run_in_tiles` returns, on the host; `on_step` counts tiles."""
    plan = plan_of(model, operation)
    units = (model.downsampling, 1) if operation == "encode" else (1, model.downsampling)
    device = next(model.parameters()).device
    side = latents_per_tile(tile, model.downsampling)

    def to_device(part: torch.Tensor) -> torch.Tensor:
        return part.to(device, dtype, memory_format=torch.channels_last)

    return torch.cat([_one(plan, image, to_device, units, side, on_step) for image in values.split(1)])


def _one(
    plan: Plan,
    image: torch.Tensor,
    to_device: Callable[[torch.Tensor], torch.Tensor],
    units: tuple[int, int],
    side: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """`plan` for one image: the statistics of its samples, then its tiles.

    `units` are the pixels of a latent pixel before and after.
    """
    moments = _no_moments(plan)
    samples = _samples(image, units[0], side) if any(moments) else []
    numbers = itertools.count(1)
    total = len(samples) + count_tiles(image.shape, units[0], side)
    for sample in samples:
        run_with_moments(plan, to_device(sample), moments, measure=True)
        on_step(next(numbers), total)
    return blend(
        lambda part: run_with_moments(plan, to_device(part), moments),
        image,
        units=units,
        side=side,
        count=lambda: on_step(next(numbers), total),
    )


def _no_moments(plan: Plan) -> list[Moments | None]:
    """For each step, the moments of its GroupNorm before the first value; None: it has none."""
    norms = [step.module.group_norm if isinstance(step, Attend) else step.norm for step in plan]
    return [Moments(norm.num_groups) if isinstance(norm, GroupNorm) else None for norm in norms]


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


def run_with_moments(
    plan: Plan, values: torch.Tensor, moments: list[Moments | None], measure: bool = False
) -> torch.Tensor:
    """The result of `plan` for `values` (B, C, H, W), with these moments of all of them before GroupNorms.

    With `measure`, the features of `values` are added to the moments first.
    """
    trunk = branch = values
    for step, before in zip(plan, moments, strict=True):
        source = branch if isinstance(step, Pass) and step.from_branch else trunk
        if measure and before is not None:
            top, left = (side // SAMPLE_BORDER for side in source.shape[2:])
            for features in source.split(1):
                before.add(features[:, :, top : source.shape[2] - top, left : source.shape[3] - left])
        if isinstance(step, Attend):
            norm, normalized = step.module.group_norm, None
            if isinstance(norm, GroupNorm):
                normalized = group_normalized(trunk, norm, before).to(trunk.dtype)
            trunk = step.run(trunk, lambda _flops: None, normalized)
            continue
        h = run_layer(step, source, before)
        if step.from_branch:
            h = h + (trunk if step.shortcut is None else step.shortcut(trunk))
        if step.to_branch:
            branch = h
        else:
            trunk = h
    return trunk


def blend(
    function: Callable[[torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    *,
    units: tuple[int, int],
    side: int,
    count: Callable[[], None],
) -> torch.Tensor:
    """`function` of tiles of values (B, C, h units[0], w units[0]); (B, C', h units[1], w units[1]), host.

    Tiles have `side` units. `count` is called after each of them.
    """
    unit, unit_out = units
    height, width = values.shape[2] // unit, values.shape[3] // unit
    rows, columns = starts(height, side), starts(width, side)
    result = torch.empty(0)
    for top in rows:
        strip = torch.empty(0)
        bottom = min(top + side, height)
        for left in columns:
            right = min(left + side, width)
            part = values[:, :, top * unit : bottom * unit, left * unit : right * unit]
            tile = function(part).cpu()
            if left == 0:
                strip = tile.new_empty(*tile.shape[:3], width * unit_out)
            _fade_in(strip, tile, left * unit_out, _end(columns, left, side) * unit_out, dim=3)
            count()
        if top == 0:
            result = strip.new_empty(*strip.shape[:2], height * unit_out, width * unit_out)
        _fade_in(result, strip, top * unit_out, _end(rows, top, side) * unit_out, dim=2)
    return result


def starts(length: int, side: int) -> list[int]:
    """The first units of tiles that cover `length` units; the last tile ends with the last unit."""
    step = side - side // OVERLAP
    return [*range(0, max(length - side, 0), step), max(length - side, 0)]


def count_tiles(shape: torch.Size, unit: int, side: int) -> int:
    """The number of tiles of values (B, C, h unit, w unit)."""
    return len(starts(shape[2] // unit, side)) * len(starts(shape[3] // unit, side))


def _end(all_starts: list[int], start: int, side: int) -> int:
    """The end of the tile before the one at `start`; 0 for the first one."""
    number = all_starts.index(start)
    return all_starts[number - 1] + side if number else 0


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
