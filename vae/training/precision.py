"""Which dtype the networks compute in, and the speed switches of the backends."""

import os
import shutil

import torch

from vae.config.options import SpeedConfig
from vae.config.resolve import precision
from vae.device import has_bf16
from vae.model.layers import Attention, Downsample, ResnetBlock, Upsample

COMPILED_BLOCKS = (ResnetBlock, Attention, Downsample, Upsample)


def compute_dtype(speed: SpeedConfig, device: torch.device) -> torch.dtype:
    """fp32, bf16 or fp16, as --mixed_precision and --use_bf16 ask and the device allows."""
    name = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return getattr(torch, precision(speed, has_bf16(device), name))


def set_backends(speed: SpeedConfig) -> None:
    """TF32 and the choice of convolution algorithms, for the whole process."""
    # Not the newer fp32_precision switches: compiled code of PyTorch 2.10 and 2.11 still reads these, and
    # refuses a mix of both.
    torch.set_float32_matmul_precision("high" if speed.enable_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = speed.enable_tf32
    torch.backends.cudnn.benchmark = True  # sizes are fixed within a stage


def can_compile(device: torch.device) -> str | None:
    """Why torch.compile cannot work here; None where it can."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        if os.name != "nt" and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "cc", "clang"))):
            return "Triton needs a C compiler, and there is none (Debian, Ubuntu: apt install gcc)"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # each version raises its own kind where there is no compiler
        return str(error).splitlines()[0] or "there is no C++ compiler"
    return None


def compile_in_place(network: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile a network's forward; its parameter names stay.

    The autoencoder is compiled block by block. In one piece its backward would return the gradients of all
    weights at once, beside those that earlier passes have left; and blocks of one shape share their code.
    What a block keeps for its backward is decided by operations that the compiler does not look into, and
    the larger parts are run again outside of it: each rung of --recompute keeps what the planner counts.
    """
    # Blocks of a dozen shapes, in passes of two sizes, with and without gradient, for each stage and rung:
    # more than the default 8 kinds of input. Our networks are wrapped for several processes outside, so
    # nothing needs splitting.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.optimize_ddp = False
    blocks = [part for part in network.modules() if isinstance(part, COMPILED_BLOCKS)]
    for part in blocks or [network]:
        part.compile(dynamic=False, backend=backend)
