"""The dtype that networks compute in, backend settings for speed, and compilation."""

import os
import shutil

import torch

from vae.config.options import SpeedConfig
from vae.config.precision import choose_dtype, precision_remark
from vae.device import precision_support
from vae.model.layers import Attention, Downsample, ResnetBlock, Upsample
from vae.ops.library import compile_cache_tag
from vae.system import console

COMPILED_BLOCKS = (ResnetBlock, Attention, Downsample, Upsample)


def compute_dtype(speed: SpeedConfig, device: torch.device) -> torch.dtype:
    """fp32, bf16 or fp16, from --mixed_precision, --use_bf16 and what the device computes well."""
    support = precision_support(device)
    remark = precision_remark(speed, support)
    if remark:
        console.info(remark)
    return getattr(torch, choose_dtype(speed, support))


def set_backends(speed: SpeedConfig) -> None:
    """Set TF32 and cuDNN's algorithm search for the whole process."""
    # Not the newer fp32_precision settings: compiled code of PyTorch 2.10 and 2.11 still reads these, and
    # PyTorch refuses a mix of both.
    torch.set_float32_matmul_precision("high" if speed.enable_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = speed.enable_tf32
    torch.backends.cudnn.benchmark = True  # shapes are constant within a stage


def why_not_compile(device: torch.device, kernels: str = "auto") -> str | None:
    """The reason why torch.compile cannot work here, or None if it can; `kernels`: the value of --kernels."""
    if device.type == "cuda":
        if kernels == "torch":
            return "on a GPU it needs Triton, which --kernels torch excludes"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        if os.name != "nt" and not any(map(shutil.which, (os.environ.get("CC", "gcc"), "cc", "clang"))):
            return "Triton needs a C compiler, and none is installed (Debian, Ubuntu: apt install gcc)"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # without a compiler, each PyTorch version raises a different type
        return str(error).splitlines()[0] or "no C++ compiler is installed"
    return None


def compile_in_place(network: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile a network's forward; parameter names do not change.

    LPIPS is not compiled: its first step would take minutes, and its convolutions stay the same.

    The autoencoder is compiled block by block. Compiled as a whole, its backward would return the gradients
    of all weights at once, in addition to those of earlier micro-batches; and blocks of equal shape share
    their compiled code. Operations that the compiler does not trace decide what a block saves for backward,
    and larger parts are checkpointed outside of compiled code: at each recompute level a compiled network
    saves what the memory plan counts.
    """
    # About twelve block shapes, times two micro-batch sizes, with and without gradients, for each stage and
    # recompute level: more than the default limit of 8. DistributedDataParallel wraps the network outside of
    # compiled code, so nothing needs to be split.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.optimize_ddp = False
    torch.compiler.config.cache_key_tag = compile_cache_tag()
    parts: list[torch.nn.Module] = [part for part in network.modules() if isinstance(part, COMPILED_BLOCKS)]
    for part in parts or [network]:
        part.compile(dynamic=False, backend=backend)
