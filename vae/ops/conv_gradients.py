"""Gradients of convolutions with respect to the input, the weight and the bias.

Large images are processed in bands of rows (vae.ops.bands). On the CPU, weight gradients are also summed over
smaller bands that stay in a cache, because PyTorch's kernel for weights slows down on large maps. Measured on
one core of an AMD EPYC with AVX-512, channels last, GFLOP/s whole and in bands: 3x3 of 128 channels at 256
px, bf16, 146 and 184; 3x3 of stride 2 at 256 px 88 and 164. Smaller maps and 1x1 kernels are slower in bands
(bf16 at 128 px 197 and 182). For a convolution after upsampling by two, one 4x4 kernel of stride 2 gave 85
(512 channels at 64 px) and 101 (256 at 128 px), four 2x2 kernels give 198 and 195. The whole backward of 512
channels at 8, 16 and 32 px takes 51, 66 and 131 ms with the former, 50, 52 and 115 with the latter.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.ops.bands import Activation, add_to, bands, parameter_sums, write
from vae.ops.library import accumulation_dtype, empty_in_layout_of, has_no_data, layout_of

WHOLE_PLANE_BYTES = 2**15  # bands do not help if a channel of the larger map is at most this large
BAND_BYTES = 2**22  # of both maps together: 2**21 to 2**23 are within 10 % on that core (L2: 1 MiB)

# Output masks of conv_backward: the gradients of input, weight and bias that are wanted.
INPUT, WEIGHT, PARAMETERS = (True, False, False), (False, True, False), (False, True, True)
ALL = (True, True, True)


def conv_backward(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: int,
    padding: tuple[int, int],
    output_mask: tuple[bool, bool, bool],
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """PyTorch's backward of a convolution: the gradients of h, weight and bias that `output_mask` selects.

    `padding`: rows and columns. Only the weight's shape matters if the gradient of h is not selected.
    """
    grads: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
        grad_out,
        h,
        weight,
        [grad_out.shape[1]],
        [stride, stride],
        list(padding),
        [1, 1],
        transposed,
        [0, 0],
        1,
        list(output_mask),
    )
    return tuple(grad for grad in grads if grad is not None)


def cast_parameter_gradients(grads: Iterable[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias in the weight's dtype; the weight's in its layout, as compilers expect."""
    grad_weight, grad_bias = grads
    return grad_weight.to(weight.dtype, memory_format=layout_of(weight)), grad_bias.to(weight.dtype)


def same_conv_input_gradient(
    grad_out: Tensor, like: Tensor, weight: Tensor, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """Gradient with respect to the input of a stride-1 convolution with "same" padding.

    `like` has the input's shape. Bands are written in the order of their rows. A band is written only after
    the rows of grad_out up to its last row are read.
    """
    parts = bands(like.shape[0], like.shape[2], grad_out.shape, like.shape)
    size, padding = weight.shape[2], weight.shape[2] // 2
    if not parts:
        grad = _input_gradient(grad_out, like, weight, padding)
        return grad if out is None else write(out, grad, accumulate)
    grad = empty_in_layout_of(like.shape, like) if out is None else out
    for band in parts:
        rows = _input_gradient(band.of(grad_out, padding, padding), band.of(like), weight, size - 1)
        write(band.of(grad), rows, accumulate)
    return grad


def _input_gradient(grad_out: Tensor, like: Tensor, weight: Tensor, padding_rows: int) -> Tensor:
    padding = (padding_rows, weight.shape[3] // 2)
    (grad,) = conv_backward(grad_out, like, weight.to(like.dtype), 1, padding, INPUT)
    return grad


def same_conv_parameter_gradients(
    grad_out: Tensor, h: Tensor, weight: Tensor, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias of a stride-1 convolution of activation(h) with "same" padding.

    They have the weight's dtype and layout. Gradients of bands are summed in at least fp32.
    """
    parts, padding = bands(h.shape[0], h.shape[2], grad_out.shape, h.shape), weight.shape[2] // 2
    if not parts:
        grads = conv_parameter_gradients(
            grad_out, h, weight, padding=(padding, padding), activation=activation
        )
        return cast_parameter_gradients(grads, weight)
    sums = parameter_sums(weight)
    for band in parts:
        part = band.of(h, padding, padding, activation=activation)
        add_to(sums, conv_parameter_gradients(band.of(grad_out), part, weight, padding=(0, padding)))
    return cast_parameter_gradients(sums, weight)


def conv_parameter_gradients(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of weight (C', C, k, k) and bias (C') of a convolution of activation(h), not yet cast.

    `padding`: rows and columns. `weight` gives shape and layout; its values are not read. Bands are summed in
    fp32, and each band is activated while it is in a cache.
    """
    if not _cache_bands_help(grad_out, h, weight.shape[2]):
        part = h if activation is None else activation(h, slice(None))
        grad_weight, grad_bias = _parameter_backward(grad_out, part, weight, stride, padding, PARAMETERS)
        return grad_weight, grad_bias
    return _weight_gradient_in_bands(grad_out, h, weight, stride, padding, activation), _bias_gradient(
        grad_out
    )


def upsampled_conv_parameter_gradients(
    grad_out: Tensor, h: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Gradients of weight (C', C, 3, 3) and bias (C') of a 3x3 convolution of h upsampled by two.

    None if this method was not measured to be faster: not on a CPU, or not in channels_last layout. Output
    rows of one parity read two rows of h: one tap reads one of them, the other two taps read the other. The
    outputs of one parity of rows and columns are therefore a 2x2 convolution of h, whose four weights are
    sums of the nine. Together the four parities have four sums along each side.
    """
    if not _is_channels_last_on_cpu(grad_out, h):
        return None
    (rows, columns), padded = h.shape[2:], F.pad(h, (1, 1, 1, 1))
    kernel = weight[:, :, :2, :2]  # only its shape is read
    of_sums = torch.empty((*weight.shape[:2], 4, 4), dtype=weight.dtype, memory_format=torch.channels_last)
    for row in (0, 1):
        for column in (0, 1):
            grad = grad_out[:, :, row::2, column::2].contiguous(memory_format=torch.channels_last)
            part = padded[:, :, row : row + rows + 1, column : column + columns + 1]
            (grad_kernel,) = _parameter_backward(grad, part, kernel, 1, (0, 0), WEIGHT)
            of_sums[:, :, row::2, column::2] = grad_kernel
    of_rows = of_sums[:, :, :3] + of_sums[:, :, 1:]  # a tap is part of two sums and gets both gradients
    return of_rows[..., :3] + of_rows[..., 1:], _bias_gradient(grad_out)


def _cache_bands_help(grad_out: Tensor, h: Tensor, size: int) -> bool:
    """Whether bands are faster: on the CPU, in channels_last layout, for large maps."""
    if size == 1 or not _is_channels_last_on_cpu(grad_out, h):
        return False
    plane = max(grad_out[0, 0].numel(), h[0, 0].numel()) * h.element_size()
    return plane > WHOLE_PLANE_BYTES


def _is_channels_last_on_cpu(grad_out: Tensor, h: Tensor) -> bool:
    on_cpu = h.device.type == "cpu" and not has_no_data(h)
    return on_cpu and not (h.is_contiguous() or grad_out.is_contiguous())


def _weight_gradient_in_bands(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: int,
    padding: tuple[int, int],
    activation: Activation | None,
) -> Tensor:
    """The sum over bands of rows of each image."""
    rows, size = grad_out.shape[2], weight.shape[2]
    step = max(1, rows * BAND_BYTES // (grad_out[0].nbytes + h[0].nbytes))
    total = torch.zeros_like(weight, dtype=accumulation_dtype(h))
    for image in range(len(h)):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            top, bottom = first * stride - padding[0], (last - 1) * stride - padding[0] + size
            images = slice(image, image + 1)
            part = h[images, :, max(top, 0) : bottom]
            part = part if activation is None else activation(part, images)
            missing = (max(-top, 0), max(bottom - h.shape[2], 0))
            part = F.pad(part, (0, 0, *missing)) if any(missing) else part
            grad = grad_out[images, :, first:last]
            (grad_weight,) = _parameter_backward(grad, part, weight, stride, (0, padding[1]), WEIGHT)
            total += grad_weight
    return total


def _bias_gradient(grad_out: Tensor) -> Tensor:
    return grad_out.sum((0, 2, 3))


def _parameter_backward(
    grad_out: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: int,
    padding: tuple[int, int],
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    """conv_backward of parameters; `weight` gives shape and layout only and may have another dtype than h."""
    weight = torch.empty_like(weight, dtype=h.dtype)
    return conv_backward(grad_out, h, weight, stride, padding, output_mask)
