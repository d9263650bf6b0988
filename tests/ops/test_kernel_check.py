"""A broken Triton kernel is found at the start, replaced and reported; all processes decide the same."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vae.losses import feature_distance
from vae.ops import attention, kernel_check, library, norm
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, Outcome, choose_kernels, run_tests
from vae.ops.library import KERNEL_KEYS, REPLACED, KernelKey
from vae.system.errors import UserError
from vae.training.precision import why_not_compile

CPU = torch.device("cpu")
FP32 = torch.float32
NORM = KernelKey("norm", FP32)


def module_of(**functions) -> ModuleType:
    """A module with these functions, which a test may replace."""
    module = ModuleType("kernels")
    module.__dict__.update(functions)
    return module


@pytest.fixture
def kernels(monkeypatch):
    """Modules in the place of the Triton kernels, which tests break; nothing is replaced or tested yet."""
    norms = {
        "normalize": norm._normalize,
        "normalize_with_statistics": norm._normalize_with_statistics,
        "normalize_backward": norm._normalize_backward,
        "add_with_bias": norm._add_with_bias,
    }
    found = {
        "ops.norm": module_of(**norms),
        "ops.rms_norm": module_of(**norms),
        "ops.attention": module_of(**vars(attention)),
        "losses.feature_distance": module_of(**vars(feature_distance)),
    }
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, f"vae.{name}_triton", module)
    monkeypatch.setattr(library, "runs_kernels", lambda device: True)
    monkeypatch.setattr(kernel_check, "_tested", set())
    monkeypatch.setattr(kernel_check, "_broken", set())
    monkeypatch.setattr(kernel_check, "NOTE_SECONDS", math.inf)  # a CPU is slow
    small: list[kernel_check.Shape] = [AttentionShape(50, 32), FeatureShape(8, 4, 4)]
    for use in (True, False):
        small += [NormShape(32, 5, 6, 32, use, use), NormShape(12, 5, 6, 0, use, use)]
    monkeypatch.setattr(kernel_check.run_tests, "__defaults__", (tuple(small),))
    REPLACED.clear()
    yield SimpleNamespace(**{name.partition(".")[2]: module for name, module in found.items()})
    REPLACED.clear()


def flip_bias(module):
    """One wrong sign in `normalize`."""
    right = module.normalize
    module.normalize = lambda *given: right(*given[:2], given[2]._replace(bias=-given[2].bias))


def test_working_kernels_are_used(kernels, capsys):
    choose_kernels("auto", CPU, [torch.bfloat16])
    h = torch.zeros(1, 8, 4, 4).to(memory_format=torch.channels_last)
    assert norm.backend(h) is kernels.norm
    assert attention.backend(h[0]) is kernels.attention
    assert feature_distance.backend(h) is kernels.feature_distance
    assert norm.backend(h.double()) is None
    assert norm.backend(h.contiguous()) is None  # --no-channels_last
    assert feature_distance.backend(h.contiguous()) is feature_distance
    assert capsys.readouterr().out == ""


def test_wrong_kernel_is_replaced_and_reported_once(kernels, capsys):
    flip_bias(kernels.norm)
    for _ in range(2):  # a later command in the same process
        choose_kernels("auto", CPU, [FP32])
        assert {key.operation for key in REPLACED} == {"norm"}
    h = torch.zeros(1, 8, 4, 4).to(memory_format=torch.channels_last)
    assert norm.backend(h) is None
    assert attention.backend(h[0]) is kernels.attention
    (line,) = capsys.readouterr().out.splitlines()
    for token in ("WARNING", "norm", "the CPU", "normalize", "fp32", "differs", "slower"):
        assert token in line


def test_one_line_while_kernels_are_compiled(kernels, capsys, monkeypatch):
    monkeypatch.setattr(kernel_check, "NOTE_SECONDS", -1.0)
    choose_kernels("auto", CPU, [torch.bfloat16])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "testing Triton kernels for bf16: up to a minute if they are not compiled yet"


@pytest.mark.parametrize("error", [RuntimeError("ptxas failed\nwith a long log"), KeyError("sm_200")])
def test_raising_kernel_is_replaced_and_reported(kernels, capsys, error):
    def softmax_step(*_):
        raise error

    kernels.attention.softmax_step = softmax_step
    choose_kernels("auto", CPU, [FP32])
    assert {KernelKey("attention", FP32)} == REPLACED
    (line,) = capsys.readouterr().out.splitlines()
    assert f"softmax_step (fp32) raised {type(error).__name__}" in line
    assert "long log" not in line


def test_only_the_failing_dtype_is_replaced(kernels):
    right = kernels.norm.normalize_backward

    def wrong_in_bf16(grad, h, *rest, **options):
        grads = right(grad, h, *rest, **options)
        return (grads[0] * (-1 if h.dtype == torch.bfloat16 else 1), *grads[1:])

    kernels.norm.normalize_backward = wrong_in_bf16
    choose_kernels("auto", CPU, [torch.bfloat16, torch.float16])
    assert {KernelKey("norm", torch.bfloat16)} == REPLACED


def test_one_wrong_element_and_nan_are_found(kernels):
    right = kernels.norm.normalize
    for value in (100.0, math.nan):

        def one_wrong(*args, value=value):
            out = right(*args)
            out[0, 31, 4, 5] = value
            return out

        kernels.norm.normalize = one_wrong
        assert [o.kernel for o in run_tests(CPU, [FP32]) if o.is_broken] == ["normalize"]


OWN = [
    NormShape(8, 3, 5, 4, False, False),
    AttentionShape(7, 8),
    FeatureShape(4, 2, 2),
    NormShape(8, 3, 5, 0, True, True),
]


@pytest.mark.parametrize("own", OWN)
def test_kernel_that_fails_with_a_shape_of_the_run_only_is_replaced(kernels, capsys, own):
    function, argument, size = {
        NormShape: ("normalize", 0, (1, 8, 3, 5)),
        AttentionShape: ("softmax_step", 1, (1, 16, 7)),
        FeatureShape: ("distance", 0, (2, 4, 2, 2)),
    }[type(own)]
    name = own.operation
    module = getattr(kernels, name)
    right = getattr(module, function)

    def wrong_for_this_shape(*args):
        result = right(*args)
        if args[argument].shape == size:
            (args[1] if result is None else result).mul_(1.5)
        return result

    setattr(module, function, wrong_for_this_shape)
    choose_kernels("auto", CPU, [torch.bfloat16])
    assert not REPLACED
    choose_kernels("auto", CPU, [torch.bfloat16], shapes=lambda: OWN)
    assert {KernelKey(name, torch.bfloat16)} == REPLACED
    assert f"{function} (bf16) differs" in (line := capsys.readouterr().out)
    assert str(own) in line


def test_large_tensors_are_tested_in_part(kernels, monkeypatch):
    monkeypatch.setattr(kernel_check, "MAX_ELEMENTS", 1000)
    sizes, right = [], kernels.norm.normalize

    def normalize(h, *rest):
        sizes.append(tuple(h.shape))
        return right(h, *rest)

    kernels.norm.normalize = normalize
    assert not any(o.is_broken for o in run_tests(CPU, [FP32], [NormShape(8, 99, 40, 4, True, True)]))
    assert set(sizes) == {(1, 8, 3, 40)}


def test_triton_refuses_a_broken_kernel(kernels):
    flip_bias(kernels.norm)
    for _ in range(2):
        with pytest.raises(UserError, match=r"--kernels triton: .*normalize.*use --kernels auto"):
            choose_kernels("triton", CPU, [FP32])
    choose_kernels("auto", CPU, [FP32])
    assert NORM in REPLACED


def test_nothing_happens_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(kernel_check, "run_tests", None)
    choose_kernels("auto", CPU, [FP32])
    assert not REPLACED
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"--kernels triton: .*cpu.*--kernels auto"):
        choose_kernels("triton", CPU, [FP32])


def test_missing_triton_on_a_card_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(library, "triton_is_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")  # there is no driver here
    choose_kernels("auto", torch.device("cuda"), [FP32])
    (line,) = capsys.readouterr().out.splitlines()
    assert "Triton is not installed" in line
    assert "slower" in line
    with pytest.raises(UserError, match=r"--kernels triton: Triton is not installed.*--kernels auto"):
        choose_kernels("triton", torch.device("cuda"), [FP32])


def test_lost_card_is_one_line_with_a_remedy(kernels, monkeypatch):
    def normalize(*_, **__):
        monkeypatch.setattr(torch, "ones", normalize)  # every later operation on the card fails as well
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernels.norm.normalize = normalize
    with pytest.raises(UserError, match=r"normalize .*illegal memory access.*--kernels torch"):
        choose_kernels("auto", CPU, [FP32])


def test_finding_of_another_process_is_shared(kernels, capsys):
    other = Outcome(NORM, "normalize", math.inf, "RuntimeError: no")
    choose_kernels("auto", CPU, [FP32], lambda own: own | {other})
    assert {NORM} == REPLACED
    assert "normalize (fp32) raised RuntimeError: no" in capsys.readouterr().out


def test_torch_never_uses_triton(kernels, monkeypatch):
    monkeypatch.setattr(kernel_check, "run_tests", None)  # nothing is tested
    choose_kernels("torch", CPU, [FP32])
    assert set(KERNEL_KEYS) == REPLACED
    h = torch.zeros(1, 8, 4, 4).to(memory_format=torch.channels_last)
    assert norm.backend(h) is None
    assert attention.backend(h[0]) is attention
    assert feature_distance.backend(h) is feature_distance
    assert "--kernels torch" in why_not_compile(torch.device("cuda"), "torch")
