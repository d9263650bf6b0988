"""A pytest plugin: PyTorch computes bf16 as on a CPU for which oneDNN has no bf16, to the bit."""

import torch


def pytest_configure() -> None:
    torch.backends.mkldnn.set_flags(False)
