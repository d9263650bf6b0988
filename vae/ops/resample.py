"""Changes of resolution by two, each with its 3x3 convolution, as operations that keep their input alone.

Weights are cast to the input's dtype (and folded) within, in both directions: no cast copy is kept. Large
images are taken in bands of rows (vae.ops.bands).
"""

import torch
import torch.nn.functional as F

from vae.ops.bands import add_to, bands, parameter_sums
from vae.ops.conv_backward import conv_backward, like_parameters
from vae.ops.layout import empty_in_layout_of, layout_of
from vae.ops.library import define_op, has_no_data
from vae.ops.weight_gradient import conv_weight_gradient, upsampled_conv_weight_gradient


def downsample_conv_reference(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """3x3 convolution of stride 2 over h (B, C, H, W) padded right and below: (B, C', H/2, W/2)."""
    return F.conv2d(F.pad(h, (0, 1, 0, 1)), weight.to(h.dtype), bias.to(h.dtype), stride=2)


def downsample_conv(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """downsample_conv_reference without a padded copy of h, the largest tensor in it.

    The convolution is padded by 2 on every side instead: its outputs, two pixels apart, then are the wanted
    ones, with one row and one column in front (and for odd sides one behind) that are dropped.
    """
    return _down_op(h, weight, bias)


def upsample_conv_reference(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Nearest enlargement by two, then a 3x3 convolution: (B, C', 2H, 2W). What upsample_conv computes."""
    h = F.interpolate(h, scale_factor=2.0, mode="nearest")
    return F.conv2d(h, weight.to(h.dtype), bias.to(h.dtype), padding=1)


def upsample_conv(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """upsample_conv_reference as one transposed convolution: 4/9 of its arithmetic, only h is kept.

    An enlarged pixel meets each small pixel through a sum of taps, so the 3x3 kernel folds into a 4x4
    kernel of stride 2. The fold is made in the parameters' own dtype.
    """
    return _up_op(h, weight, bias)


def _downsample_conv(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    weight, bias, sides = weight.to(h.dtype), bias.to(h.dtype), [side // 2 for side in h.shape[2:]]
    parts = bands(h.shape[0], sides[0], h.shape)
    if not parts:
        padded = F.conv2d(h, weight, bias, stride=2, padding=2)
        # dense, as the norm that comes next wants it: a copy a quarter as large as the padding's would be
        return _wanted(padded, h.shape[2:]).clone(memory_format=layout_of(h))
    out = empty_in_layout_of((h.shape[0], len(weight), *sides), h)
    for band in parts:  # with its own row below, of zeros at the edge
        padded = F.conv2d(band.of(h, below=1, scale=2), weight, bias, stride=2, padding=(0, 2))
        band.of(out).copy_(_wanted_columns(padded, sides[1]))
    return out


def _downsample_conv_backward(
    grad_out: torch.Tensor, h: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = (side // 2 + 1 + side % 2 for side in h.shape[2:])
    parts = bands(h.shape[0], grad_out.shape[2], h.shape)
    cast = weight.to(h.dtype)
    if not parts:
        grad = empty_in_layout_of((*grad_out.shape[:2], rows, columns), h).zero_()
        _wanted(grad, h.shape[2:]).copy_(grad_out)
        if h.device.type == "cpu" and not has_no_data(h):
            # the padded copy pays here: at 256 px of 128 channels, bf16, 37 ms instead of 87 for the weight
            padded = F.pad(h, (0, 1, 0, 1))
            grads = conv_weight_gradient(grad_out, padded, weight, stride=2)
            grad_h, *_ = _conv_gradients(grad, h, cast, [2, 2], transposed=False, parameters=False)
        else:
            grad_h, *grads = _conv_gradients(grad, h, cast, [2, 2], transposed=False)
        return grad_h, *like_parameters(grads, weight)
    grad_h, sums = torch.empty_like(h), parameter_sums(weight)
    for band in parts:
        grad = empty_in_layout_of((1, grad_out.shape[1], band.last - band.first, columns), h).zero_()
        _wanted_columns(grad, grad_out.shape[3]).copy_(band.of(grad_out))
        part = band.of(h, below=1, scale=2)
        found, *grads = _conv_gradients(grad, part, cast, [0, 2], transposed=False)
        add_to(sums, grads)
        if band.first:  # two bands reach its first row
            found[:, :, :1] += grad_h[band.images, :, 2 * band.first : 2 * band.first + 1]
        target = grad_h[band.images, :, 2 * band.first : 2 * band.last + 1]
        target.copy_(found[:, :, : target.shape[2]])
    return grad_h, *like_parameters(sums, weight)


def _wanted(padded: torch.Tensor, sides: torch.Size) -> torch.Tensor:
    """The outputs, of a convolution padded by 2 over an image of `sides`, that downsample_conv has."""
    return _wanted_columns(padded[:, :, 1 : 1 + sides[0] // 2], sides[1] // 2)


def _wanted_columns(padded: torch.Tensor, columns: int) -> torch.Tensor:
    return padded[:, :, :, 1 : 1 + columns]


def _upsample_conv(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    batch, _, rows, columns = h.shape
    folded, bias, shape = _folded(weight, h), bias.to(h.dtype), (batch, len(weight), 2 * rows, 2 * columns)
    parts = bands(batch, rows, h.shape, shape)
    if not parts:
        return F.conv_transpose2d(h, folded, bias, stride=2, padding=1)
    out = empty_in_layout_of(shape, h)
    for band in parts:  # an output row meets the rows of h above and below: 3 more on each side, dropped
        found = F.conv_transpose2d(band.of(h, 1, 1), folded, bias, stride=2, padding=(3, 1))
        band.of(out, scale=2).copy_(found)
    return out


def _upsample_conv_backward(
    grad_out: torch.Tensor, h: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    folded = _folded(weight, h)
    parts = bands(h.shape[0], h.shape[2], h.shape, grad_out.shape)
    if not parts:
        grads = upsampled_conv_weight_gradient(grad_out, h, weight)
        found = _conv_gradients(grad_out, h, folded, [1, 1], transposed=True, parameters=grads is None)
        if grads is not None:
            return found[0], *like_parameters(grads, weight)
        grad_h, grad_folded, grad_bias = found
    else:
        grad_h, (_, grad_bias) = torch.empty_like(h), parameter_sums(weight)
        grad_folded = torch.zeros_like(folded, dtype=grad_bias.dtype)
        for band in parts:
            grad, part = band.of(grad_out, 1, 1, scale=2), band.of(h)
            found = _conv_gradients(grad, part, folded, [0, 1], transposed=True)
            band.of(grad_h).copy_(found[0])
            grad_folded += found[1]
            grad_bias += band.of(grad_out, scale=2).sum((0, 2, 3), dtype=grad_bias.dtype)
    grad_weight = _unfold(_unfold(grad_folded.transpose(0, 1).to(weight.dtype), 2), 3)
    return grad_h, *like_parameters((grad_weight, grad_bias), weight)


def _folded(weight: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The 3x3 kernels (C', C, 3, 3) as those of the transposed convolution (C, C', 4, 4), for h."""
    taps = weight.transpose(0, 1).contiguous(memory_format=layout_of(h))
    return _fold(_fold(taps, 2, weight.dtype), 3, h.dtype)


def _fold(taps: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Three taps on enlarged pixels as the four on small ones that the two pixels between meet."""
    shape = [*taps.shape]
    shape[dim] = 4
    folded = torch.empty(shape, dtype=dtype, device=taps.device, memory_format=layout_of(taps))
    first, middle, last = taps.unbind(dim)
    for row, values in zip(folded.unbind(dim), (last, middle + last, first + middle, first), strict=True):
        row.copy_(values)
    return folded


def _unfold(grad: torch.Tensor, dim: int) -> torch.Tensor:
    """Gradient of the argument of _fold from that of its result."""
    a, b, c, d = grad.unbind(dim)
    return torch.stack((c + d, b + c, a + b), dim)


def _conv_gradients(
    grad_out: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    transposed: bool,
    parameters: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of input and, with `parameters`, of weight and bias; stride 2, transposed or not."""
    return conv_backward(grad_out, h, weight, 2, padding, (True, parameters, parameters), transposed)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _down_gradients(ctx, grad_out):
    return _down_backward_op(grad_out, *ctx.saved_tensors)


def _up_gradients(ctx, grad_out):
    return _up_backward_op(grad_out, *ctx.saved_tensors)


def _down_flops(h_shape, weight_shape, *_, **__):
    """The convolution with its dropped row and column, which are computed all the same."""
    rows, columns = (side // 2 + 1 + side % 2 for side in h_shape[2:])
    return 2 * h_shape[0] * rows * columns * weight_shape.numel()


def _up_flops(h_shape, weight_shape, *_, **__):
    return 2 * h_shape.numel() * weight_shape[0] * 16


def _down_backward_flops(_, h_shape, weight_shape, **__):
    return 2 * _down_flops(h_shape, weight_shape)


def _up_backward_flops(_, h_shape, weight_shape, **__):
    return 2 * _up_flops(h_shape, weight_shape)


_down_backward_op = define_op(
    _downsample_conv_backward, _downsample_conv_backward, flops=_down_backward_flops
)
_down_op = define_op(
    _downsample_conv, _downsample_conv, _down_gradients, _save_for_backward, flops=_down_flops
)
_up_backward_op = define_op(_upsample_conv_backward, _upsample_conv_backward, flops=_up_backward_flops)
_up_op = define_op(_upsample_conv, _upsample_conv, _up_gradients, _save_for_backward, flops=_up_flops)
