"""Part 2: results on the card against references in fp64."""

import shutil
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.ours import Ours
from benchmarks.comparison.work import Work
from benchmarks.first_hour.case import (
    DEVICE,
    Case,
    Settings,
    computes,
    in_a_process,
    last_line,
    markdown,
    rounded,
    run_words,
    verdict,
)
from vae.config.options import RECOMPUTE, ModelConfig
from vae.ops.conv_gradients import conv_backward
from vae.ops.kernel_check import DTYPE_NAMES, choose_kernels, run_tests
from vae.system.script import end_process

TITLE = "Correct results: kernels, products over NaN, gradients of whole steps, memory access"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Relative difference of all gradients of a step from fp64. fp32: without TF32. bf16 and fp16: about twenty
# rounded layers in each direction, as in vae/checks/kernels.py; fp16 rounds eight times as finely.
TOLERANCE = {"fp32": 1e-3, "bf16": 2**-3, "fp16": 2**-5}
MODEL = ModelConfig(channels=(64, 128, 256, 256), norm_groups=32, init="default")
TINY = ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4, init="default")
SANITIZER = Path("/usr/local/cuda/bin/compute-sanitizer")


def cases(settings: Settings) -> list[Case]:
    levels = RECOMPUTE[:2] if settings.quick else RECOMPUTE
    return [
        Case("triton kernels", 20, triton_kernels),
        Case("baddbmm over NaN", 10, products_over_nan),
        Case("convolution of 2^31 elements", 10, large_convolution),
        *(Case(f"gradients, {level}", 15, partial(gradients, level=level)) for level in levels),
        Case("pytest -m gpu", 120, gpu_tests),
        Case("memcheck", 60, memcheck),
    ]


def triton_kernels(settings: Settings) -> dict[str, Any]:
    """The largest difference of each kernel from its PyTorch reference; RuntimeError if a kernel raises."""
    found: dict[str, float] = {}
    broken, raised = [], []
    for outcome in run_tests(DEVICE, DTYPES.values()):
        name = f"{outcome.key.operation} {DTYPE_NAMES[outcome.key.dtype]}"
        found[name] = rounded(max(found.get(name, 0.0), outcome.difference))
        broken += [str(outcome)] * outcome.is_broken
        raised += [str(outcome)] * (outcome.error is not None)
    if raised:
        raise RuntimeError("; ".join(raised))
    return {"differences": found, "broken": broken, "verdict": verdict(not broken)}


def products_over_nan(settings: Settings) -> dict[str, Any]:
    """torch.baddbmm with fp32 output, as attention uses it: beta 0 must not read the output, which is NaN."""
    found = {}
    shape = (64, 48, 32) if settings.quick else (1024, 768, 512)
    for name in ("bf16", "fp16"):
        dtype = DTYPES[name]
        a, b = (torch.randn(2, *size, device=DEVICE).to(dtype) for size in (shape[::2], (shape[2], shape[1])))
        exact = torch.bmm(a.double(), b.double())
        out = torch.full(exact.shape, float("nan"), device=DEVICE)
        torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=0, alpha=0.5, out=out)
        first = _difference(out, exact * 0.5)
        torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=1, alpha=1.0, out=out)
        found[name] = {"over NaN": first, "accumulated": _difference(out, exact * 1.5)}
    right = all(value < 1e-4 for row in found.values() for value in row.values())
    return {"differences": found, "verdict": verdict(right)}


def large_convolution(settings: Settings) -> dict[str, Any]:
    """The last rows of a convolution of more than 2^31 elements, as at 4096 px, and of both gradients."""
    side = 64 if settings.quick else 4100
    h = torch.randn(1, side, side, 128, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    weight = torch.randn(8, 128, 3, 3, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.zeros(1, side, side, 8, device=DEVICE, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    grad[:, :, -8:] = torch.randn(1, 8, 8, side, device=DEVICE)

    def results(first: int) -> list[torch.Tensor]:
        """Of the rows from `first` on; the rows before the last 8 differ."""
        part, grad_part = h[:, :, first:], grad[:, :, first:]
        out = torch.nn.functional.conv2d(part, weight, padding=1)
        grad_h, grad_weight = conv_backward(grad_part, part, weight, (True, True, False))
        return [out[:, :, -8:], grad_h[:, :, -8:], grad_weight]

    whole, rows = results(0), results(side - 10)
    names = ("forward", "input gradient", "weight gradient")
    found = {name: _difference(a, b) for name, a, b in zip(names, whole, rows, strict=True)}
    return {"differences": found, "verdict": verdict(all(value < 2**-6 for value in found.values()))}


def gradients(settings: Settings, level: str) -> dict[str, Any]:
    """All gradients of one step, in both layouts and three dtypes, against fp64 on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    work = _work(settings.quick)
    expected = _reference(settings.quick) if computes() else None
    found = {}
    for channels_last, (name, dtype) in product((True, False), DTYPES.items()):
        side = Ours(work, DEVICE, dtype, recompute=level, channels_last=channels_last, micro_batch=1)
        difference = _difference(_gradients(side), expected) if expected is not None else float("nan")
        found[f"{name}{' channels_last' * channels_last}"] = difference
    right = all(value < TOLERANCE[name.split()[0]] for name, value in found.items())
    return {"differences": found, "verdict": verdict(right)}


def _work(quick: bool) -> Work:
    return Work(32, batch=2, model=TINY) if quick else Work(64, batch=2, model=MODEL)


@cache
def _reference(quick: bool) -> torch.Tensor:
    return _gradients(Ours(_work(quick), torch.device("cpu"), torch.float64))


def _gradients(side: Ours) -> torch.Tensor:
    side.gradients()
    parameters = side.networks.autoencoder.parameters()
    return torch.cat([p.grad.double().flatten().cpu() for p in parameters])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double().cpu() - expected.cpu()).norm() / expected.cpu().norm()
    return rounded(difference.item())


def gpu_tests(settings: Settings) -> dict[str, Any]:
    """The tests with the marker `gpu`, in their own process."""
    report = settings.out / "pytest_gpu.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
    words += ["tests/checks", "tests/test_device.py"] if settings.quick else []
    done = run_words(words, min(300, settings.seconds_left))
    if not report.exists():
        raise RuntimeError(last_line(done.stderr) or last_line(done.stdout))
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {last_line(case.find(kind).get('message') or '')}"
        for case in suite.iter("testcase")
        for kind in ("failure", "error")
        if case.find(kind) is not None
    ]
    if raised := [line for line in failed if ": AssertionError" not in line and ": assert " not in line]:
        raise RuntimeError("; ".join(raised))  # whatever the device computes
    return {**counts, "failed": failed, "verdict": verdict(not failed and done.returncode == 0)}


def memcheck(settings: Settings) -> dict[str, Any]:
    """Every kernel of a small step under compute-sanitizer, which checks each memory access."""
    program = shutil.which("compute-sanitizer") or (str(SANITIZER) if SANITIZER.exists() else None)
    argument = {"quick": True}
    if program is None:
        in_a_process("benchmarks.first_hour.correctness", argument, settings.seconds_left)
        return {"skipped": "compute-sanitizer is not installed; the step alone ran", "verdict": "skipped"}
    code = "from benchmarks.first_hour.correctness import small_step; small_step()"
    words = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    done = run_words(words, settings.seconds_left)
    summary = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR SUMMARY" in line]
    if done.returncode != 0:
        raise RuntimeError("; ".join(summary[-1:]) or last_line(done.stderr))
    return {"summary": summary[-1:], "verdict": "ok"}


def small_step() -> None:
    """The test of the Triton kernels, and two steps at a recompute level that runs every operation."""
    choose_kernels("triton", DEVICE, [torch.bfloat16])
    side = Ours(Work(64, batch=2, model=TINY, adversarial=True), DEVICE, recompute="all", micro_batch=1)
    for _ in range(2):
        side.step()
    torch.cuda.synchronize()


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, found in results.items():
        differences = found.get("differences", {})
        flat = {
            f"{key} {part}".strip(): number
            for key, value in differences.items()
            for part, number in (value.items() if isinstance(value, dict) else [("", value)])
        }
        detail = "; ".join(
            f"{key} {'not finite' if number is None else f'{number:.1e}'}" for key, number in flat.items()
        )
        if "tests" in found:
            detail = f"{found['tests']} tests, {found['failures'] + found['errors']} failed"
        detail = detail or str(found.get("skipped") or found.get("summary") or "")
        rows.append([name, found["verdict"], detail])
    return ["Relative differences from fp64:", "", *markdown(["case", "verdict", "figures"], rows)]


if __name__ == "__main__":
    small_step()
    print("{}")
    end_process(0)
