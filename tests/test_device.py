"""Which device a name stands for, and what it computes in."""

import pytest
import torch

from vae.config.errors import UserError
from vae.device import has_bf16, is_out_of_memory, pick_device

NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


def test_the_cpu_can_always_be_had():
    assert pick_device("cpu") == torch.device("cpu")
    assert has_bf16(torch.device("cpu"))


@NO_CARD
def test_without_a_card_auto_is_the_cpu_and_cuda_a_mistake():
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"^--device cuda: .*--device cpu"):
        pick_device("cuda")


@pytest.mark.gpu
def test_with_a_card_auto_is_the_card():
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")
    assert has_bf16(torch.device("cuda")) == (torch.cuda.get_device_capability() >= (8, 0))


def test_memory_that_ran_out_is_known_by_any_librarys_words():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
