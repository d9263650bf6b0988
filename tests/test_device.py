"""The device for a name, and the dtypes it supports."""

import pytest
import torch

from vae import device
from vae.device import is_out_of_memory, pick_device, precision_support, warn_of_slow_bf16
from vae.system.errors import UserError

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is available")


def test_cpu_is_always_available():
    assert pick_device("cpu") == torch.device("cpu")
    assert precision_support(torch.device("cpu")).bf16 in ("native", "slow")


@pytest.mark.parametrize(("native", "expected"), [(True, "native"), (False, "slow")])
def test_bf16_of_a_cpu_depends_on_its_instructions(monkeypatch, capsys, native, expected):
    monkeypatch.setattr(device, "cpu_has_native_bf16", lambda: native)
    support = precision_support(torch.device("cpu"))
    assert (support.bf16, support.is_gpu) == (expected, False)
    for dtype in ("fp32", "fp16", "bf16"):
        warn_of_slow_bf16(dtype, support)
    printed = capsys.readouterr().out
    assert printed.count("WARNING: --dtype bf16") == (0 if native else 1)


@NO_GPU
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_an_error():
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"^--device cuda: .*--device cpu"):
        pick_device("cuda")


@pytest.mark.gpu
def test_with_a_gpu_auto_is_the_gpu():
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert precision_support(torch.device("cuda")).bf16 == (
        "native" if torch.cuda.get_device_capability() >= (8, 0) else "none"
    )


# As PyTorch 2.15, cuDNN 9.26 and Triton 3.9 write them, most with further lines
@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.37 GiB",
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda",
        "CUDA driver error: out of memory",
        "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes",
        "Allocation on device 0 would exceed allowed memory. (out of memory)",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "FIND was unable to find an engine to execute this computation",
        "Not enough memory for workspace!",
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes",
    ],
)
def test_out_of_memory_errors_of_all_libraries_are_recognized(message):
    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(torch.OutOfMemoryError("injected"))
    assert is_out_of_memory(MemoryError())


def test_other_errors_are_not_out_of_memory():
    for message in (
        "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in",
        "Triton Error [CUDA]: misaligned address",
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    ):
        assert not is_out_of_memory(RuntimeError(message)), message


@pytest.mark.parametrize("isa", ["AVX2", "avx512_core"])
def test_a_limit_on_onednn_excludes_native_bf16(isa, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert device.cpu_has_native_bf16()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert not device.cpu_has_native_bf16()
