"""Which dtype the networks compute in, and the speed switches of the backends."""

import torch

from vae.config.errors import UserError
from vae.config.options import SpeedConfig

_BF16_CAPABILITY = (8, 0)  # Ampere, the first with bf16 tensor cores


def compute_dtype(speed: SpeedConfig, device: torch.device) -> torch.dtype:
    """fp32, bf16 or fp16, as --mixed_precision and --use_bf16 ask and the device allows."""
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY
    if speed.use_bf16:
        if not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--use_bf16: {name} has no bf16: use --mixed_precision alone, which takes fp16 there"
            )
        return torch.bfloat16
    if speed.mixed_precision:
        return torch.bfloat16 if has_bf16 else torch.float16
    return torch.float32


def set_backends(speed: SpeedConfig) -> None:
    """TF32 and the choice of convolution algorithms, for the whole process."""
    precision = "tf32" if speed.enable_tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    torch.backends.cudnn.benchmark = True  # sizes are fixed within a stage


def can_compile(device: torch.device) -> str | None:
    """Why torch.compile cannot work here; None where it can."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # each version raises its own kind where there is no compiler
        return str(error).splitlines()[0] or "there is no C++ compiler"
    return None
