"""Choose the dtype, backend settings and compilation of networks, and the shapes for tests of kernels."""

import os
import time
from collections.abc import Iterable
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vae.config.options import SpeedConfig
from vae.config.precision import choose_dtype, dtype_without_fp16, precision_remark
from vae.device import precision_support
from vae.images.pixels import to_float
from vae.losses.dino import DinoDistance
from vae.losses.perceptual import PerceptualLoss
from vae.memory.plan import META, StepSpec, meta_networks, zero_inputs
from vae.model.activation_scale import LargestActivation, largest_activation
from vae.model.autoencoder import AutoencoderKL, Sampling
from vae.model.layers import Attention, GroupNorm, NormSiLU, ResnetBlock, RMSNorm, RMSNormSiLU
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, Shape
from vae.step import compute_gradients
from vae.system import console
from vae.system.host import find_compiler


def compute_dtype(speed: SpeedConfig, device: torch.device) -> torch.dtype:
    """Choose fp32, bf16 or fp16 from --mixed_precision, --use_bf16 and what the device computes well."""
    support = precision_support(device)
    remark = precision_remark(speed, support)
    if remark:
        console.info(remark)
    return getattr(torch, choose_dtype(speed, support))


def replacement_of_fp16(speed: SpeedConfig, device: torch.device) -> torch.dtype:
    """Choose bf16 or fp32 for a network whose activations overflow fp16."""
    return getattr(torch, dtype_without_fp16(speed, precision_support(device)))


def activations_of(model: AutoencoderKL, crops: Iterable[torch.Tensor]) -> LargestActivation:
    """Measure the largest activation for the first of `crops`, uint8 (1, 3, H, W), in fp32."""
    few = islice(crops, MEASURED_CROPS)
    parts = (to_float(crop[..., :MEASURED_SIDE, :MEASURED_SIDE]) for crop in few)
    return largest_activation(model, (part.to(memory_format=torch.channels_last) for part in parts))


# Images in which the largest activation is measured; of four warm starts it was the same for 3 to 12 images.
MEASURED_CROPS, MEASURED_SIDE = 4, 512


def set_backends(speed: SpeedConfig) -> None:
    """Set TF32 and cuDNN's algorithm search for the whole process."""
    # Not the newer fp32_precision settings: compiled code of PyTorch 2.10 and 2.11 still reads these, and
    # PyTorch refuses a mix of both.
    torch.set_float32_matmul_precision("high" if speed.enable_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = speed.enable_tf32
    torch.backends.cudnn.benchmark = True  # shapes are constant within a stage


def why_not_compile(device: torch.device, kernels: str = "auto") -> str | None:
    """Return why torch.compile cannot work here; None if it can. `kernels`: the value of --kernels.

    It compiles a small function, for seconds.
    """
    if device.type == "cuda":
        if kernels == "torch":
            return "on a GPU it needs Triton, which --kernels torch excludes"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        if os.name != "nt" and find_compiler() is None:
            return "Triton needs a C compiler, and none is installed (Debian, Ubuntu: apt install gcc)"
    number = time.time_ns() % 2**31  # new code, or a cached copy would hide what is missing here
    try:  # a compiler without headers, folders that cannot be written or whose programs cannot run
        torch.compile(lambda values: values.sin() + number, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # each cause and each PyTorch version raises a different type
        torch._dynamo.reset()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return next((line for line in lines if "error:" in line), lines[0]).rstrip(".")
    return None


# The parts of networks that compute with PyTorch itself: all others only call operations of vae.ops, which
# torch.compile does not trace into, or single convolutions, of which it makes the same launches.
COMPILED_PARTS = (Attention, Sampling)


def compile_in_place(network: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile the parts of a network with several operations of PyTorch in a row; parameter names stay.

    Each part compiles once for each shape and dtype. Compiling whole networks would end at each operation of
    vae.ops, once for each width and size, and find the same graphs (benchmarks/LOG.md). A compiled network
    stores the same tensors for backward at each recompute level.
    """
    # Widths, two micro-batch sizes, with and without gradients, for each stage: more than the default of 8
    torch._dynamo.config.recompile_limit = 1024
    # PyTorch's key of cached code lacks the instruction set, and a home may be shared by machines
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    for part in network.modules():
        if isinstance(part, Attention):  # Triton's JITFunction.warmup returns None if it is traced
            norm = part.group_norm
            forward = torch.compiler.disable(type(norm).forward)
            # A bound method: a copy of the network binds it to its own norm
            norm.forward = MethodType(forward, norm)  # type: ignore[method-assign]
            part.attend = torch.compiler.disable(part.attend)
        if isinstance(part, COMPILED_PARTS):
            part.compile(dynamic=False, backend=backend)


# ---- Shapes of kernels ---------------------------------------------------------------------------------


def kernel_shapes(specs: Iterable[StepSpec]) -> list[Shape]:
    """Collect the shapes of kernels: a step of one image of each spec runs without data.

    The images are square. With --buckets there are other widths, which run the same kernel code.
    """
    shapes: dict[Shape, None] = {}  # in the order of the steps
    for spec in specs:
        networks = meta_networks(spec)
        modules = [networks.autoencoder, networks.discriminator, *networks.terms.networks()]
        for module in (part for network in modules if network is not None for part in network.modules()):
            module.register_forward_pre_hook(lambda *call: shapes.update(dict.fromkeys(_norms(*call))))
            for features in _compared(module):
                features.register_forward_hook(lambda _, __, out: shapes.update({_features(out): None}))
        compute_gradients(networks, zero_inputs(spec, 1, META), [1])
    return [*shapes]


def _norms(module: nn.Module, inputs: tuple[Any, ...]) -> list[Shape]:
    """Return the shapes of the norms and the attention in a module, without those of its parts."""
    if isinstance(module, ResnetBlock):
        first = _norm(module.norm1, inputs[0])
        channels = module.norm2.num_channels
        return [first, first._replace(channels=channels, has_h_bias=True)]
    if isinstance(module, GroupNorm | RMSNorm):
        return [_norm(module, inputs[0])]
    if isinstance(module, Attention):
        _, channels, height, width = inputs[0].shape
        return [AttentionShape(height * width, channels)]
    return []


def _norm(norm: GroupNorm | RMSNorm, h: Tensor) -> NormShape:
    _, channels, height, width = h.shape
    silu = isinstance(norm, NormSiLU | RMSNormSiLU)
    return NormShape(channels, height, width, norm.num_groups, silu, has_h_bias=False)


def _compared(module: nn.Module) -> Iterable[nn.Module]:
    """Return the modules whose results a perceptual term compares."""
    if isinstance(module, PerceptualLoss):
        return module.slices
    return module.network.blocks if isinstance(module, DinoDistance) else ()


def _features(out: Any) -> FeatureShape:
    """Return the shape of features (B, C, h, w), or of tokens (B, N, C), compared as (B, C, N, 1)."""
    return FeatureShape(*out.shape[1:]) if out.dim() == 4 else FeatureShape(out.shape[2], out.shape[1], 1)
