"""The test computations match their references on this machine, and wrong ones are detected."""

import pytest
import torch
import torch.nn.functional as F

from vae.checks import kernels
from vae.checks.judge.kernels import TITLES
from vae.ops.kernel_check import TOLERANCE, Outcome
from vae.ops.library import KernelKey

FAST = [name for name in kernels.KERNELS if name not in ("compile", "triton")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_every_kernel_has_a_check():
    assert list(kernels.KERNELS) == list(TITLES)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("device", DEVICES)
def test_within_tolerance(name, device):
    difference, tolerance = kernels.KERNELS[name](torch.device(device))
    assert difference <= tolerance
    if name != "step" or kernels.low_precision(torch.device(device)) != torch.float32:
        assert difference > 0  # 0 would mean that nothing was computed in low precision


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compile_within_tolerance(device):
    difference, tolerance = kernels.run_compile(torch.device(device))
    assert difference <= tolerance


def test_wrong_convolution_exceeds_the_tolerance(monkeypatch):
    right = F.conv2d

    def wrong(x, w, **kwargs):
        return right(x, w, **kwargs) * (1.1 if x.dtype != torch.float64 else 1.0)

    monkeypatch.setattr(kernels.F, "conv2d", wrong)
    for name in ("conv", "channels_last"):
        difference, tolerance = kernels.KERNELS[name](torch.device("cpu"))
        assert difference > tolerance


def test_wrong_gradient_exceeds_the_tolerance(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return v.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, grad, 2 * grad

    monkeypatch.setattr(kernels, "attention_reference", lambda q, k, v: v + 0 * (q + k))
    monkeypatch.setattr(kernels, "attention", Wrong.apply)
    difference, tolerance = kernels.run_attention(torch.device("cpu"))
    assert difference > tolerance


def test_nan_exceeds_the_tolerance(monkeypatch):
    monkeypatch.setattr(kernels, "attention", lambda q, k, v: (q + k + v) * float("nan"))
    difference, tolerance = kernels.run_attention(torch.device("cpu"))
    assert difference > tolerance


def test_lost_channels_last_layout_raises(monkeypatch):
    right = F.conv2d
    monkeypatch.setattr(kernels.F, "conv2d", lambda x, w, **k: right(x, w, **k).contiguous())
    with pytest.raises(RuntimeError, match="channels_last"):
        kernels.run_channels_last(torch.device("cpu"))


def test_broken_triton_kernel_raises_and_is_replaced_for_the_later_computations(monkeypatch):
    key = KernelKey("norm", torch.bfloat16, channels_last=True)
    outcomes = [Outcome(key, "norm_statistics", 0.001), Outcome(key, "normalize", 1.5)]
    monkeypatch.setattr(kernels, "run_tests", lambda *_: iter(outcomes))
    monkeypatch.setattr(kernels, "REPLACED", replaced := set())
    with pytest.raises(RuntimeError, match=r"^normalize \(bf16, channels_last\) differs .* 1\.5e\+00$"):
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
