"""Tests of numbers pass with the arithmetic of a CPU that has AVX2 but neither AVX-512 nor bf16.

Sums there have another order, and PyTorch's own convolution computes bf16.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.harness.runs import ROOT

FP32 = ("-k", "fp32 or precision or diffusers")
BF16 = ("-k", "bf16 or precision", "-p", "tests.harness.bf16_without_onednn")
PATHS = ("tests/ops", "tests/losses", "tests/model/test_autoencoder.py", "tests/model/test_recompute.py")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="only a CPU with AVX-512 can stand in for an older one; on others the suite itself is the test",
)
@pytest.mark.parametrize(("arguments", "least"), [(FP32, 75), (BF16, 60)], ids=["fp32", "bf16"])
def test_numbers_with_the_arithmetic_of_an_older_cpu(arguments, least):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *arguments, *PATHS]
    environment = os.environ | AVX2 | {"OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, child.stdout
    assert int(passed[1]) >= least  # the names still select tests
