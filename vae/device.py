"""The device that --device names, the precisions that --dtype names, and which of them the device has."""

import torch

from vae.config.errors import UserError
from vae.gpus import BF16_CAPABILITY

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "ALLOCATION_FAILED",  # cuDNN 9: ..._DEVICE_ALLOCATION_FAILED, ..._HOST_ALLOCATION_FAILED
    "unable to find an engine to execute this computation",  # cuDNN, where no workspace could be had
    "can't allocate memory",  # PyTorch's allocators of main memory
    "not enough memory",
)


def pick_device(name: str) -> torch.device:
    """The device of --device cuda, cpu or auto, without a card's number; UserError where there is no card."""
    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        raise UserError("--device cuda: PyTorch finds no CUDA device here; use --device cpu or auto")
    return torch.device("cuda" if here and name != "cpu" else "cpu")


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16: CPUs do, if slowly, and cards from Ampere on."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: libraries that allocate for themselves have words of their own for it."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY))
