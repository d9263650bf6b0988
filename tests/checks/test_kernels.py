"""The test computations match their references on this machine, and wrong ones are detected."""

import pytest
import torch

from vae.checks import kernels
from vae.checks.table import TABLE
from vae.ops.kernel_check import TOLERANCE, Outcome
from vae.ops.library import KernelKey

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_every_kernel_has_a_check():
    assert [f"kernels.{name}" for name in kernels.KERNELS] == [
        c.id for c in TABLE if c.id.startswith("kernels")
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_step_within_tolerance(device):
    difference, tolerance = kernels.run_step(torch.device(device))
    assert difference <= tolerance
    if kernels.low_precision(torch.device(device)) != torch.float32:
        assert difference > 0  # 0 would mean that nothing was computed in low precision


@pytest.mark.gpu
def test_compile_within_tolerance():
    difference, tolerance = kernels.run_compile(torch.device("cuda"))
    assert difference <= tolerance


class WrongGradient(torch.autograd.Function):
    """The identity; its gradient is twice too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    "wrong",
    [lambda x: 1.1 * x, lambda x: x * float("nan"), WrongGradient.apply],
    ids=["result", "nan", "gradient"],
)
def test_wrong_computation_exceeds_the_tolerance(wrong):
    difference, tolerance = kernels.compare(wrong, lambda x: x, ((65, 33),), torch.device("cpu"))
    assert difference > tolerance


def test_broken_triton_kernel_raises_and_is_replaced_for_the_later_computations(monkeypatch):
    key = KernelKey("norm", torch.bfloat16)
    outcomes = [Outcome(key, "norm_statistics", 0.001), Outcome(key, "normalize", 1.5)]
    monkeypatch.setattr(kernels, "run_tests", lambda *_: iter(outcomes))
    monkeypatch.setattr(kernels, "REPLACED", replaced := set())
    with pytest.raises(RuntimeError, match=r"^normalize \(bf16\) differs .* 1\.5e\+00$"):
        kernels.run_triton(torch.device("cpu"))
    assert replaced == {key}
    del outcomes[1]
    assert kernels.run_triton(torch.device("cpu")) == (0.001, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_triton_kernels_within_tolerance():
    difference, tolerance = kernels.run_triton(torch.device("cuda"))
    assert 0 < difference <= tolerance


def test_triton_kernels_do_not_apply_to_a_cpu():
    assert not kernels.applies("triton", torch.device("cpu"))
    assert kernels.applies("step", torch.device("cpu"))


def test_step_without_weight_change_raises(monkeypatch):
    monkeypatch.setattr(kernels, "apply_update", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="changed no weight"):
        kernels.run_step(torch.device("cpu"))
