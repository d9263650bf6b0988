"""How an operation of ours is made known to PyTorch: one opaque call, its gradient, its memory and its FLOPs.

An operation of the namespace "vae" is a real PyTorch operator. torch.compile does not look into it, so it
cannot undo what the operation saves and what it computes again; DDP, the meta device and dispatch modes
treat it like any built-in one.

The convention for counting memory: `IMPLEMENTATIONS[torch.ops.vae.NAME.default]` is the plain Python
function behind the operation. Run on meta tensors, it allocates what the GPU path allocates, scratch
included, and frees it as early; so a counter that runs it under its own mode sees the bytes alive within
the operation. (PyTorch itself only calls `fake`, which makes the results and no scratch; on the CPU the
implementation may take temporaries that the GPU does not need.) A loop over equal blocks may be cut short
on meta to the blocks that decide the peak: FLOPs are counted by the operation's formula, not from within.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


@cache
def triton_is_installed() -> bool:
    """Whether the modules with Triton kernels can be imported."""
    return importlib.util.find_spec("triton") is not None


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the device of its first argument, a tensor, made current: Triton launches there."""

    @wraps(function)
    def run(first: torch.Tensor, *arguments, **options):
        with torch.cuda.device_of(first):  # nothing for a tensor of the CPU
            return function(first, *arguments, **options)

    return run


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to compute with: a meta tensor, or one that torch.compile traces with.

    The latter, a fake tensor, names a real device, and its sizes may be symbols.
    """
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def define_op(
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Make `implementation` the operator vae::<its name without leading underscores> and return that.

    implementation  annotated with the types of torch.library.custom_op; mutates no argument and returns new
                    tensors; one without gradients of its own where `backward` is None
    fake            the same arguments to empty results of the right shape, dtype and memory format
    backward        (ctx, *gradients of the results) to the gradients of all arguments
    setup_context   (ctx, inputs, output): saves for backward
    flops           (*shapes and numbers of the arguments, out_shape=..., **_) to floating-point operations;
                    needed by every operation that holds a matrix product or a convolution
    """
    name = implementation.__name__.lstrip("_")
    op = torch.library.custom_op(f"vae::{name}", implementation, mutates_args=())
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup_context)
    packet = getattr(torch.ops.vae, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    IMPLEMENTATIONS[packet.default] = implementation
    return packet
