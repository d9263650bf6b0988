"""The device for --device, the dtypes for --dtype, and what a device supports."""

import os
import platform
import warnings

import torch

from vae.config.precision import PrecisionSupport, slow_bf16
from vae.system import console
from vae.system.errors import UserError
from vae.system.gpus import BF16_CAPABILITY, FREED_BLOCKS, GROWING_SEGMENTS, allocator_setting

# Values of oneDNN's variable ONEDNN_MAX_CPU_ISA that exclude the instructions for bf16.
ISAS_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Parts of messages, in lower case. A library that gets no memory for its handle is not initialized; with any
# other cause, the retries end with the library's message.
_OUT_OF_MEMORY = (
    "out of memory",  # PyTorch, and CUDA through PyTorch or Triton: "Triton Error [CUDA]: out of memory"
    "cublas_status_not_initialized",
    "cublas_status_alloc_failed",
    "cudnn_status_not_initialized",
    "cudnn_status_alloc_failed",
    "allocation_failed",  # cuDNN 9: ..._DEVICE_ALLOCATION_FAILED, ..._HOST_ALLOCATION_FAILED
    "unable to find an engine to execute this computation",  # cuDNN, if it got no workspace
    "can't allocate memory",  # PyTorch's allocators of host memory
    "not enough memory",
)


def pick_device(name: str) -> torch.device:
    """The device for --device cuda, cpu or auto, without an index; UserError if cuda is not available."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device cuda: PyTorch finds no CUDA device; use --device cpu or auto")
    if not available or name == "cpu":
        return torch.device("cpu")
    if allocator_setting() == GROWING_SEGMENTS:
        _try_growing_segments()
    return torch.device("cuda")


def _try_growing_segments() -> None:
    """Allocate on this process's card; if its driver refuses growing segments, use the others and warn."""
    text = os.environ.get("LOCAL_RANK", "")
    index = int(text) if text.isdecimal() else 0  # the start of the processes reports others
    if index >= torch.cuda.device_count():
        return  # an error that the start of the processes reports
    try:
        torch.empty(1, device=torch.device("cuda", index))
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        if not message.startswith("CUDA driver error") or is_out_of_memory(error):
            raise
        with warnings.catch_warnings():  # deprecated in 2.15 for a function that older versions may lack
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings(f"expandable_segments:False,{FREED_BLOCKS}")
        console.warning(
            f"the driver refuses {GROWING_SEGMENTS} ({message}): PyTorch reserves up to a sixth more memory"
        )


def precision_support(device: torch.device) -> PrecisionSupport:
    """The precisions that the device computes well: bf16 on GPUs from Ampere on and on some CPUs."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
        return PrecisionSupport(torch.cuda.get_device_name(device), True, "native" if has_bf16 else "none")
    return PrecisionSupport("the CPU", False, "native" if cpu_has_native_bf16() else "slow")


def warn_of_slow_bf16(dtype: str, support: PrecisionSupport) -> None:
    """Print a warning if --dtype bf16 is slower than fp32 on this device."""
    if dtype == "bf16" and support.bf16 == "slow":
        console.warning(f"--dtype bf16: {slow_bf16(support)}: use --dtype fp32")


def cpu_has_native_bf16() -> bool:
    """Whether oneDNN may use instructions for bf16 on this CPU. Without them, bf16 is very slow."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in ISAS_WITHOUT_BF16:
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means out of memory; libraries with their own allocators have their own messages."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)
