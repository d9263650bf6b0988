"""Judges the test computations, from facts only."""

from vae.checks import remedies
from vae.checks.facts import Facts, KernelRun
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check

TITLES = {
    "matmul": "Matrix product",
    "conv": "Convolution",
    "channels_last": "channels_last",
    "triton": "Triton kernels",
    "attention": "Attention",
    "step": "Training step",
    "compile": "torch.compile",
}


def judge_kernels(facts: Facts) -> list[Check]:
    runs = {run.name: run for run in facts.loaded.kernels} if facts.loaded else {}
    return [_kernel(facts, name, runs) for name in TITLES]


def _kernel(facts: Facts, name: str, runs: dict[str, KernelRun]) -> Check:
    check, title, loaded = f"kernels.{name}", TITLES[name], facts.loaded
    where = "card" if loaded and loaded.devices else "CPU"
    expected = f"equals its reference, forward and backward, on the {where}"
    if loaded is None or loaded.error:
        return Check(check, title, SKIP, "PyTorch does not load")
    trouble = WARN if name in ("triton", "compile") else FAIL  # without them, training is only slower
    ended = loaded.ended or ""
    if name == "triton" and loaded.unfinished == "kernel triton":  # training would end in the same way
        return Check(check, title, FAIL, ended, expected, "start the trainer with --kernels torch")
    if loaded.unfinished == f"kernel {name}":
        return Check(check, title, trouble, ended, expected, _remedy(facts, ended))
    if name in runs:
        return _judge_run(facts, runs[name], check, title, trouble, expected)
    if "import" in runs:
        found = f"the model's code cannot be imported: {runs['import'].error}"
        return Check(check, title, trouble, found, expected, remedies.setup(facts))
    if facts.quick and name == "compile":
        return Check(check, title, SKIP, "skipped by --quick")
    if name == "triton" and (not loaded.devices or loaded.unfinished is None):
        return Check(check, title, SKIP, "they run only on a card, and if Triton is installed")
    found = f"not reached: the process ended during {loaded.unfinished or 'nothing'} ({ended})"
    status = trouble if loaded.unfinished == "loading the model" else SKIP
    return Check(check, title, status, found, expected, remedies.same_pair(facts) if status != SKIP else "")


def _judge_run(facts: Facts, run: KernelRun, check: str, title: str, trouble: str, expected: str) -> Check:
    if run.error:
        instead = "; training replaces them by PyTorch operations, slower" if run.name == "triton" else ""
        return Check(check, title, trouble, run.error + instead, expected, _remedy(facts, run.error))
    assert run.difference is not None
    assert run.tolerance is not None
    found = f"difference {run.difference:.1e} (at most {run.tolerance:.1e}) in {run.seconds:.2f} s"
    if run.difference <= run.tolerance:
        return Check(check, title, PASS, found, expected)
    return Check(check, title, trouble, f"wrong results: {found}", expected, _remedy(facts, ""))


def _remedy(facts: Facts, error: str) -> str:
    """The remedy for an error message of CUDA or the compiler."""
    if "no kernel image" in error or "not compatible with the current PyTorch" in error:
        return remedies.suitable_build(facts)
    if "out of memory" in error.lower():
        return "end the processes that use the card's memory and that you do not need: nvidia-smi lists them"
    if "compiler" in error.lower():
        return remedies.compiler(facts)
    return remedies.same_pair(facts)
