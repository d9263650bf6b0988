"""What all our operations share: registration with PyTorch, and the layout and dtype of results.

An operation of the namespace "vae" is a real PyTorch operator. torch.compile does not trace into it, so the
compiler cannot change what the operation saves and what it recomputes. The meta device and dispatch modes
treat it like a built-in operator. In eager mode it is a torch.autograd.Function, which costs the host less.

Memory is counted as follows: `IMPLEMENTATIONS[torch.ops.vae.NAME.default]` is the plain Python
function of the operation. On meta tensors it allocates what the GPU path allocates, scratch memory included,
and frees it as early. A counter that runs it under its own mode therefore sees the bytes alive within the
operation. (PyTorch itself only calls `fake`, which allocates the results but no scratch. On the CPU the
implementation may use temporaries that the GPU does not need.) On meta, a loop over equal blocks may stop
after the blocks that decide the peak: the operation's formula counts the FLOPs, not the loop.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


class KernelKey(NamedTuple):
    """The tensors that a set of Triton kernels processes."""

    operation: str
    dtype: torch.dtype
    channels_last: bool


KERNEL_KEYS = tuple(
    KernelKey(operation, dtype, channels_last)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for operation, channels_last in (
        ("norm", True),
        ("norm", False),
        ("attention", False),
        ("feature_distance", True),
        ("feature_distance", False),
    )
)
REPLACED: set[KernelKey] = set()  # by PyTorch operations, in this process: vae.ops.kernel_check decides

MAX_COMPILED_KERNELS = 10_000  # entries of about 1 KiB
_compiled_kernels: dict[tuple[Any, ...], Any] = {}  # of `launch`


@cache
def triton_is_installed() -> bool:
    """Whether the modules with Triton kernels can be imported."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels can run on the device."""
    return device.type == "cuda" and triton_is_installed()


def uses_triton(operation: str, h: torch.Tensor) -> bool:
    """Whether `operation` on h, tokens (B, N, C) or features (B, C, H, W), runs as Triton kernels."""
    if h.dtype == torch.float64 or not runs_kernels(h.device):
        return False
    channels_last = h.dim() == 4 and not h.is_contiguous()
    return not REPLACED or KernelKey(operation, h.dtype, channels_last) not in REPLACED


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int, *arguments: Any) -> None:
    """Run a Triton kernel on the device of its first argument; `arguments` include its constants.

    What was compiled for equal arguments is launched directly, as in Triton's tutorial "Fused Softmax":
    kernel[grid](...) examines each argument again. The code depends on the values of numbers, on the types of
    pointers, and on which pointers are multiples of 16.
    """
    device = arguments[0].device
    if device.type == "cpu":  # the interpreter
        return kernel[grid](*arguments, num_warps=num_warps)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, num_warps, *arguments)
    seen = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a for a in arguments]
    key = (kernel.fn, device.index, num_warps, *seen)
    compiled = _compiled_kernels.get(key)
    if compiled is None:
        if len(_compiled_kernels) == MAX_COMPILED_KERNELS:  # images of ever new sizes
            _compiled_kernels.clear()
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=num_warps)
        _compiled_kernels[key] = compiled
    return compiled[(*grid, 1, 1)[:3]](*arguments)


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a meta tensor, or a fake tensor that torch.compile traces with.

    A fake tensor has the name of a real device, and its sizes may be symbolic.
    """
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def layout_of(h: torch.Tensor) -> torch.memory_format:
    """The layout of h (B, C, H, W): contiguous_format if h is contiguous, else channels_last."""
    return torch.contiguous_format if h.is_contiguous() else torch.channels_last


def empty_in_layout_of(shape: tuple[int, ...], h: torch.Tensor) -> torch.Tensor:
    """An empty tensor of `shape` with the dtype, device and layout of h."""
    return torch.empty(shape, dtype=h.dtype, device=h.device, memory_format=layout_of(h))


def accumulation_dtype(h: torch.Tensor) -> torch.dtype:
    """The dtype of statistics and sums over h: fp32, or fp64 if h is fp64."""
    return torch.promote_types(h.dtype, torch.float32)


def cast_together(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, like: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The tensors in `dtype` and the layouts of `like`: copied with one launch, or themselves if they fit."""
    layouts = tensors if like is None else like
    pairs = list(zip(tensors, layouts, strict=True))
    results = [
        t if t.dtype == dtype and t.stride() == other.stride() else torch.empty_like(other, dtype=dtype)
        for t, other in pairs
    ]
    new = [(result, t) for result, t in zip(results, tensors, strict=True) if result is not t]
    if new:
        torch._foreach_copy_([result for result, _ in new], [t for _, t in new])
    return results


@cache
def compile_cache_tag() -> str:
    """What the key of torch.compile's disk cache lacks: the code of our operators, and the instruction set.

    Without it, compiled code calls an operator as it was before an update, or is for another CPU.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:16]} {torch.backends.cpu.get_cpu_capability()}"


def define_op(
    implementation: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., tuple[Sequence[torch.Tensor], Sequence[Any]]] | None = None,
    flops: Callable[..., int] | None = None,
    backward_flops: Callable[..., int] | None = None,
    fake: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `implementation` as the operator vae::<its name without leading underscores>; return it.

    implementation  annotated with types of torch.library.custom_op; mutates no argument and returns new
                    tensors; has no gradient if `backward` is None
    backward        an implementation, too: takes (gradient of the first result, saved tensors, *numbers);
                    returns the gradients of the first arguments; the others have none
    save            takes (ctx, inputs, output); returns the tensors and the numbers that backward takes
    flops           takes (*shapes and numbers of the arguments, out_shape=..., **_); returns floating-point
                    operations; required for operations with a matrix product or a convolution
    fake            takes the same arguments; returns empty results of the right shape, dtype and layout
                    (default: what the implementation does with tensors without data)
    """
    name = implementation.__name__.lstrip("_")
    op = torch.library.custom_op(f"vae::{name}", implementation, mutates_args=())
    op.register_fake(fake or implementation)
    eager = implementation
    if backward is not None and save is not None:
        setup_context, gradients = _with_context(save, define_op(backward, flops=backward_flops))
        op.register_autograd(gradients, setup_context=setup_context)
        eager = _eager_function(name, implementation, gradients, setup_context)
    packet = getattr(torch.ops.vae, name)
    if flops is not None:
        register_flop_formula(packet)(flops)
    IMPLEMENTATIONS[packet.default] = implementation

    @wraps(implementation)
    def run(first: torch.Tensor, *args: Any) -> Any:
        traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or has_no_data(first)
        return packet(first, *args) if traced else eager(first, *args)

    return run


def _with_context(
    save: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """What autograd calls after forward and in backward."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # None for results without a gradient, like the statistics of a norm
        saved, ctx.numbers = save(ctx, inputs, output)
        ctx.save_for_backward(*saved)

    def gradients(ctx: Any, grad_out: torch.Tensor | None, *_: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad
        if grad_out is None:
            return (None,) * len(wanted)
        grads = [*backward(grad_out, list(ctx.saved_tensors), *ctx.numbers), *(None,) * len(wanted)]
        return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=False))

    return setup_context, gradients


def _eager_function(
    name: str,
    implementation: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
) -> Callable[..., Any]:
    """The operation without the dispatcher, which costs the host as much as two kernel launches."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = implementation(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    function: Any = type(name, (torch.autograd.Function,), methods)
    return function.apply
