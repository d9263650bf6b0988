"""Run encoder and decoder layer by layer over tiles, for images whose features do not fit into device memory.

The result equals that of the whole image up to rounding and is not blended from overlapping parts. Every tile
is read with the border pixels that its layer needs. A GroupNorm uses statistics of the whole feature map,
which the previous pass accumulates while it writes the tiles. Feature maps are in host memory. Device memory
contains the weights, one tile and, for attention, which reads every position, feature maps of the lowest
resolution.

Two feature maps exist at a time, as in a residual block: the trunk, and the branch that is added to it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vae.inference.feature_map import FeatureMap, Moments
from vae.model.autoencoder import AutoencoderKL, MidBlock
from vae.model.layers import Attention, Conv2d, Downsample, GroupNorm, NormSiLU, ResnetBlock, Upsample
from vae.model.rms_norm import RMSNormSiLU
from vae.model.tiny import RADIUS, TinyDecoder
from vae.ops.fused_conv import convolve_end, end_dtype
from vae.ops.norm import normalize

Range = tuple[int, int]  # first row or column, and the one after the last
QUERIES = 512  # of attention at a time: 0.44 GiB of fp32 scores for an image of 5120 x 2880 px


@dataclass(frozen=True)
class Pass:
    """One layer over all tiles, with an optional norm-SiLU before it, from and to trunk or branch."""

    layer: Conv2d | Downsample | Upsample | TinyDecoder
    norm: NormSiLU | RMSNormSiLU | None = None
    from_branch: bool = False  # reads the branch, and adds the trunk to its result
    to_branch: bool = False  # writes the branch, and leaves the trunk unchanged
    shortcut: Conv2d | None = None  # 1x1 convolution of the trunk before it is added
    is_end: bool = False  # of encoder or decoder: computed as in vae.ops.fused_conv.norm_silu_conv

    @property
    def enlarges(self) -> int:
        """The output's side divided by the input's, if it is not smaller."""
        if isinstance(self.layer, TinyDecoder):
            return self.layer.scale
        return 2 if isinstance(self.layer, Upsample) else 1

    def side(self, side: int) -> int:
        """The output's side for an input's side."""
        return side // 2 if isinstance(self.layer, Downsample) else side * self.enlarges

    def window(self, start: int, stop: int, side: int) -> tuple[int, int, int]:
        """The input rows (or columns) that output rows start..stop need, for an input of `side` rows.

        Returns the first row, the one after the last, and the offset of `start` in what the layer computes
        from these rows. At the image's border the layer pads, as it does for a whole image. Its padding at
        any other edge affects only extra border rows, which are cut off.
        """
        if isinstance(self.layer, Downsample):  # 3x3 with stride 2: output row i reads rows 2i to 2i + 2
            return 2 * start, min(2 * stop + 2, side), 0
        if isinstance(self.layer, Conv2d):
            border = self.layer.kernel_size[0] // 2
        else:  # nearest-neighbor, then 3x3, needs one more row on each side
            border = RADIUS if isinstance(self.layer, TinyDecoder) else 1
        factor = self.enlarges
        first = max(start // factor - border, 0)
        return first, min(-(-stop // factor) + border, side), start - factor * first

    def flops(self, pixels: int) -> int:
        """Floating-point operations for `pixels` pixels of the result of one image."""
        if isinstance(self.layer, TinyDecoder):
            return self.layer.flops(pixels)
        weights = _weights(self.layer) + (0 if self.shortcut is None else _weights(self.shortcut))
        if isinstance(self.layer, Upsample):  # 2x2 instead of 3x3 weights per pixel: vae/ops/resample.py
            weights = weights * 4 // 9
        return 2 * pixels * weights


@dataclass(frozen=True)
class Attend:
    """Attention over the whole feature map, some of its rows of queries at a time."""

    module: Attention

    def flops(self, pixels: int, queries: int | None = None) -> int:
        """Floating-point operations for some queries (all by default) of an image with `pixels` features."""
        per_query = 2 * _weights(self.module) + 4 * pixels * self.module.to_q.out_features
        return (pixels if queries is None else queries) * per_query

    def run(
        self, x: torch.Tensor, count: Callable[[int], None], normalized: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The module's result for x (B, C, H, W); calls `count` with the FLOPs of each block of queries.

        `normalized` is x after the norm of the module; None: computed here.
        """
        batch, channels, height, width = x.shape
        normalized = self.module.group_norm(x) if normalized is None else normalized
        tokens = normalized.permute(0, 2, 3, 1).reshape(batch, 1, -1, channels)
        key, value = self.module.to_k(tokens), self.module.to_v(tokens)
        h = torch.empty_like(tokens)  # (B, 1, N, C), with one head
        for block_tokens, block_h in zip(tokens.split(QUERIES, dim=2), h.split(QUERIES, dim=2), strict=True):
            query = self.module.to_q(block_tokens)
            block_h.copy_(self.module.to_out[0](F.scaled_dot_product_attention(query, key, value)))
            count(self.flops(height * width, query.shape[2]))
        return x + h.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


Plan = list[Pass | Attend]


def _weights(module: nn.Module) -> int:
    """Number of weights that multiply each pixel once, without those of norms and biases."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)


def encoder_plan(model: AutoencoderKL) -> Plan:
    """The encoder from images to moments (B, 2Z, h, w), layer by layer."""
    encoder = model.encoder
    plan: Plan = [Pass(encoder.conv_in)]
    for level in encoder.down_blocks:
        plan += _blocks(level.resnets)
        if not level.last:
            plan.append(Pass(level.downsamplers[0]))
    plan += [*_middle(encoder.mid_block), Pass(encoder.conv_out, encoder.conv_norm_out, is_end=True)]
    return plan if model.quant_conv is None else [*plan, Pass(model.quant_conv)]


def decoder_plan(model: AutoencoderKL) -> Plan:
    """The decoder from latents to images (B, 3, H, W), layer by layer."""
    decoder = model.decoder
    if isinstance(decoder, TinyDecoder):
        return [Pass(decoder)]
    plan: Plan = [] if model.post_quant_conv is None else [Pass(model.post_quant_conv)]
    plan += [Pass(decoder.conv_in), *_middle(decoder.mid_block)]
    for level in decoder.up_blocks:
        plan += _blocks(level.resnets)
        if not level.last:
            plan.append(Pass(level.upsamplers[0]))
    return [*plan, Pass(decoder.conv_out, decoder.conv_norm_out, is_end=True)]


def _middle(block: MidBlock) -> Plan:
    first, last = block.resnets
    return [*_blocks([first]), *map(Attend, block.attentions), *_blocks([last])]


def _blocks(resnets: Iterable[ResnetBlock]) -> Plan:
    plan: Plan = []
    for block in resnets:
        plan.append(Pass(block.conv1, block.norm1, to_branch=True))
        plan.append(Pass(block.conv2, block.norm2, from_branch=True, shortcut=block.conv_shortcut))
    return plan


def plan_of(model: AutoencoderKL, operation: str) -> Plan:
    """The plan to "encode" or to "decode"."""
    return encoder_plan(model) if operation == "encode" else decoder_plan(model)


@torch.no_grad()
def run_plan(
    plan: Plan,
    values: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """The result of `plan` for `values` (B, C, H, W), in host memory; each tile has `tile` px a side.

    `on_step(done, total)` is called after each tile, with the FLOPs of one image: tiles take very different
    times, and attention may take minutes.
    """
    total = count_flops(plan, values.shape[2], values.shape[3])
    done = 0

    def count(flops: int) -> None:
        nonlocal done
        done += flops
        on_step(done, total)

    trunk = FeatureMap.of(values.to("cpu", dtype), tile)
    branch: FeatureMap | None = None
    for step, following in itertools.zip_longest(plan, plan[1:]):
        norm = following.norm if isinstance(following, Pass) else None
        norm_groups = norm.num_groups if isinstance(norm, NormSiLU) else None
        if isinstance(step, Attend):
            whole = trunk.read((0, trunk.height), (0, trunk.width), device)
            trunk.release(trunk.height)
            trunk = FeatureMap.of(step.run(whole, count), tile, norm_groups)
            continue
        source = branch if step.from_branch else trunk
        assert source is not None, "a pass to the branch comes before a pass from it"
        result = FeatureMap(step.side(source.height), step.side(source.width), tile, norm_groups)
        for rows, columns in _tiles(result.height, result.width, tile):
            result.write(rows[0], columns[0], _make_tile(step, source, trunk, rows, columns, device))
            is_last_of_row = columns[1] == result.width
            if is_last_of_row and not step.to_branch:
                source.release(step.window(rows[1], rows[1], source.height)[0])
                trunk.release(rows[1] if step.from_branch else 0)
            count(step.flops((rows[1] - rows[0]) * (columns[1] - columns[0])))
        if step.to_branch:
            branch = result
        else:
            trunk, branch = result, None
    return trunk.joined()


def _make_tile(
    step: Pass, source: FeatureMap, trunk: FeatureMap, rows: Range, columns: Range, device: torch.device
) -> torch.Tensor:
    """One tile of a pass's result, on the device."""
    top, bottom, row = step.window(*rows, source.height)
    left, right, column = step.window(*columns, source.width)
    h = source.read((top, bottom), (left, right), device)
    h = run_layer(step, h, source.moments)
    h = h[:, :, row : row + rows[1] - rows[0], column : column + columns[1] - columns[0]]
    if not step.from_branch:
        return h
    x = trunk.read(rows, columns, device)
    return h + (x if step.shortcut is None else step.shortcut(x))


def run_layer(step: Pass, h: torch.Tensor, moments: Moments | None) -> torch.Tensor:
    """The norm and the layer of a pass, in h's dtype; an end computes as in norm_silu_conv of vae.ops."""
    dtype = end_dtype(h) if step.is_end else h.dtype
    normalized = h if step.norm is None else norm_silu(h, step.norm, moments, dtype)
    return convolve_end(step.layer, normalized, h.dtype)


def norm_silu(
    h: torch.Tensor, norm: NormSiLU | RMSNormSiLU, moments: Moments | None, dtype: torch.dtype
) -> torch.Tensor:
    """Norm and SiLU of a tile, in place on one copy, in the dtype of the statistics of the whole feature map.

    An RMS norm needs no statistics. The result is in `dtype`.
    """
    if isinstance(norm, RMSNormSiLU):
        return normalize(h, h.new_empty(0), norm.norm(dtype))
    return F.silu(group_normalized(h, norm, moments), inplace=True).to(dtype)


def group_normalized(h: torch.Tensor, norm: GroupNorm, moments: Moments | None) -> torch.Tensor:
    """`norm` of h with the statistics of the whole feature map, in their dtype."""
    assert moments is not None, "they are accumulated before a norm needs them"
    per_group = norm.num_channels // norm.num_groups
    mean, rstd = (
        value.repeat_interleave(per_group, dim=1)[:, :, None, None]  # (B, G) -> (B, C, 1, 1)
        for value in moments.statistics(norm.eps, h)
    )
    normalized = h - mean  # (B, C, rows, columns) in the dtype of the statistics
    return normalized.mul_(rstd * norm.weight[:, None, None]).add_(norm.bias[:, None, None])


def _tiles(height: int, width: int, tile: int) -> Iterator[tuple[Range, Range]]:
    """Rows and columns of each tile, row by row."""
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            yield (top, min(top + tile, height)), (left, min(left + tile, width))


def count_flops(plan: Plan, height: int, width: int) -> int:
    """Floating-point operations of run_plan for one image of `height` x `width`."""
    total = 0
    for step in plan:
        if isinstance(step, Pass):
            height, width = step.side(height), step.side(width)
        total += step.flops(height * width)
    return total


def run_in_tiles(
    model: AutoencoderKL,
    operation: str,
    values: torch.Tensor,
    dtype: torch.dtype,
    tile: int,
    on_step: Callable[[int, int], None],
) -> torch.Tensor:
    """Encode images (B, 3, H, W), whose sides are multiples of f, or decode latents (B, Z, h, w).

    On the host; "encode" returns moments (B, 2Z, H/f, W/f), "decode" images (B, 3, h f, w f).
    """
    device = next(model.parameters()).device
    plan = plan_of(model, operation)
    return run_plan(plan, values, device=device, dtype=dtype, tile=tile, on_step=on_step)
