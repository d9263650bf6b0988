"""Encoder and decoder executed layer by layer over tiles, for images whose features no device can hold.

The result is that of the whole image up to rounding, not a blend of overlapping parts: every tile is read
with the halo its layer needs, and a GroupNorm takes its statistics over the whole feature map, gathered while
the pass in front of it produces the tiles. Features lie in host memory. The device holds the weights, a tile
and, in the middle block alone, a whole feature map, for attention looks at every position.

Two feature maps exist at a time, as a residual block asks: the trunk, and the branch that is added to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vae.inference.features import Feature, Moments
from vae.model.autoencoder import AutoencoderKL
from vae.model.layers import Downsample, NormSiLU, ResnetBlock, Upsample


@dataclass(frozen=True)
class Pass:
    """One layer over all tiles: [norm-SiLU,] the layer[, the trunk added], from trunk or branch to either."""

    layer: nn.Module  # a Conv2d, Downsample or Upsample
    norm: NormSiLU | None = None
    from_branch: bool = False  # reads the branch, and adds the trunk to what it makes of it
    to_branch: bool = False  # writes the branch, and leaves the trunk as it is
    shortcut: nn.Module | None = None  # 1x1 convolution of the trunk before it is added

    def side(self, side: int) -> int:
        """Side of the output for a side of the input."""
        if isinstance(self.layer, Upsample):
            return 2 * side
        return side // 2 if isinstance(self.layer, Downsample) else side

    def window(self, start: int, stop: int, side: int) -> tuple[int, int, int]:
        """What rows (or columns) start..stop of the output need of an input of `side` rows.

        Returns the first row, the one behind the last, and where `start` lies in what the layer makes of
        them. At the image's own border the layer pads, as it does for a whole image; what it pads at
        any other edge spoils only the halo, which is cut off.
        """
        if isinstance(self.layer, Upsample):  # nearest enlargement, then 3x3: one input row around
            first = max(start // 2 - 1, 0)
            return first, min((stop + 1) // 2 + 1, side), start - 2 * first
        if isinstance(self.layer, Downsample):  # 3x3 of stride 2 from row 2i on; an even number of rows
            return 2 * start, min(2 * stop + 2, side), 0
        halo = self.layer.kernel_size[0] // 2
        first = max(start - halo, 0)
        return first, min(stop + halo, side), start - first


@dataclass(frozen=True)
class Whole:
    """A module that sees the whole feature map at once: the middle block."""

    module: nn.Module


Plan = list[Pass | Whole]


def encoder_plan(model: AutoencoderKL) -> Plan:
    """The encoder from images to moments (B, 2Z, h, w), layer by layer."""
    encoder = model.encoder
    plan: Plan = [Pass(encoder.conv_in)]
    for level in encoder.down_blocks:
        plan += _blocks(level.resnets)
        if not level.last:
            plan.append(Pass(level.downsamplers[0]))
    plan += [Whole(encoder.mid_block), Pass(encoder.conv_out, encoder.conv_norm_out)]
    return plan if model.quant_conv is None else [*plan, Pass(model.quant_conv)]


def decoder_plan(model: AutoencoderKL) -> Plan:
    """The decoder from latents to images (B, 3, H, W), layer by layer."""
    decoder = model.decoder
    plan: Plan = [] if model.post_quant_conv is None else [Pass(model.post_quant_conv)]
    plan += [Pass(decoder.conv_in), Whole(decoder.mid_block)]
    for level in decoder.up_blocks:
        plan += _blocks(level.resnets)
        if not level.last:
            plan.append(Pass(level.upsamplers[0]))
    return [*plan, Pass(decoder.conv_out, decoder.conv_norm_out)]


def _blocks(resnets: nn.ModuleList) -> Plan:
    plan: Plan = []
    for block in resnets:
        assert isinstance(block, ResnetBlock)
        plan.append(Pass(block.conv1, block.norm1, to_branch=True))
        plan.append(Pass(block.conv2, block.norm2, from_branch=True, shortcut=block.conv_shortcut))
    return plan


@torch.no_grad()
def run_plan(
    plan: Plan,
    values: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: int,
    groups: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """What `plan` makes of `values` (B, C, H, W), in host memory; tiles are `tile` px a side at every level.

    `groups` is that of the model's norms; `on_step(done, total)` is called after each tile.
    """
    total, done = count_steps(plan, values.shape[2], values.shape[3], tile), 0
    trunk, branch = Feature.of(values.to("cpu", dtype), tile), None
    for position, step in enumerate(plan):
        after = plan[position + 1 : position + 2]
        norm_follows = bool(after) and isinstance(after[0], Pass) and after[0].norm is not None
        gather = groups if norm_follows else None
        if isinstance(step, Whole):
            whole = trunk.read(0, trunk.height, 0, trunk.width, device)
            trunk.release(trunk.height)
            trunk = Feature.of(step.module(whole), tile, gather)
            on_step(done := done + 1, total)
            continue
        source = branch if step.from_branch else trunk
        result = Feature(step.side(source.height), step.side(source.width), tile, gather)
        for rows, columns, last_of_row in _tiles(result.height, result.width, tile):
            result.write(rows[0], columns[0], _make_tile(step, source, trunk, rows, columns, device))
            if last_of_row and not step.to_branch:
                source.release(step.window(rows[1], rows[1], source.height)[0])
                trunk.release(rows[1] if step.from_branch else 0)
            on_step(done := done + 1, total)
        if step.to_branch:
            branch = result
        else:
            trunk, branch = result, None
    return trunk.joined()


def _make_tile(
    step: Pass, source: Feature, trunk: Feature, rows: tuple, columns: tuple, device: torch.device
) -> torch.Tensor:
    """One tile of a pass's result, on the device."""
    top, bottom, row = step.window(*rows, source.height)
    left, right, column = step.window(*columns, source.width)
    h = source.read(top, bottom, left, right, device)
    if step.norm is not None:
        h = _norm_silu(h, step.norm, source.moments)
    h = step.layer(h)
    h = h[:, :, row : row + rows[1] - rows[0], column : column + columns[1] - columns[0]]
    if not step.from_branch:
        return h
    x = trunk.read(*rows, *columns, device)
    return h + (x if step.shortcut is None else step.shortcut(x))


def _norm_silu(h: torch.Tensor, norm: NormSiLU, moments: Moments) -> torch.Tensor:
    """NormSiLU of a tile by the statistics of its whole feature map; one wide copy of the tile, in place."""
    mean, rstd = moments.statistics(norm.eps, h)
    per_group = norm.num_channels // norm.num_groups
    mean, rstd = (value.repeat_interleave(per_group, dim=1)[:, :, None, None] for value in (mean, rstd))
    wide = h - mean  # (B, C, rows, columns) in the dtype of the statistics
    wide.mul_(rstd * norm.weight[:, None, None]).add_(norm.bias[:, None, None])
    return F.silu(wide, inplace=True).to(h.dtype)


def _tiles(height: int, width: int, tile: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """(first, behind the last) row and column of each tile, row by row; whether it is the last of its row."""
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            rows, columns = (top, min(top + tile, height)), (left, min(left + tile, width))
            yield rows, columns, columns[1] == width


def count_steps(plan: Plan, height: int, width: int, tile: int) -> int:
    """How often run_plan calls its `on_step` for an input of `height` x `width`."""
    total = 0
    for step in plan:
        if isinstance(step, Whole):
            total += 1
            continue
        height, width = step.side(height), step.side(width)
        total += -(-height // tile) * -(-width // tile)
    return total


def encode_in_tiles(
    model: AutoencoderKL,
    images: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """Moments (B, 2Z, H/f, W/f) on the host of images (B, 3, H, W), sides multiples of f; see run_plan."""
    return _run(model, encoder_plan(model), images, dtype, tile, on_step)


def decode_in_tiles(
    model: AutoencoderKL,
    latents: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """Images (B, 3, h f, w f) on the host of latents (B, Z, h, w); see run_plan."""
    return _run(model, decoder_plan(model), latents, dtype, tile, on_step)


def _run(model, plan, values, dtype, tile, on_step) -> torch.Tensor:
    device = next(model.parameters()).device
    groups = model.config.norm_groups
    return run_plan(plan, values, device=device, dtype=dtype, tile=tile, groups=groups, on_step=on_step)
