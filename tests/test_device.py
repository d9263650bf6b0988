"""The device for a name, and the dtypes it supports."""

import pytest
import torch

from vae import device
from vae.config.errors import UserError
from vae.device import is_out_of_memory, pick_device, precision_support, warn_of_slow_bf16

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


def test_out_of_memory_errors_of_all_libraries_are_recognized():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
