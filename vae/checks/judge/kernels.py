"""Judges the test computations, from facts only."""

from vae.checks import remedies
from vae.checks.facts import Facts, KernelRun
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check, check

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
    return [_kernel(facts, name) for name in TITLES]


def _kernel(facts: Facts, name: str) -> Check:
    title, loaded, triton = TITLES[name], facts.loaded, name == "triton"
    if loaded is None or loaded.error:
        return check(f"kernels.{name}", title, "", [(True, SKIP, "PyTorch does not load")])
    runs = {run.name: run for run in loaded.kernels}
    run, damaged, ended = runs.get(name), runs.get("import"), loaded.ended or ""
    trouble = WARN if triton or name == "compile" else FAIL  # without them, training is only slower
    unreached = f"not reached: the process ended during {loaded.unfinished or 'nothing'} ({ended})"
    expected = f"equals its reference, forward and backward, on the {'card' if loaded.devices else 'CPU'}"
    cases = [
        # training would end in the same way
        (
            triton and loaded.unfinished == "kernel triton",
            FAIL,
            ended,
            "start the trainer with --kernels torch",
        ),
        (loaded.unfinished == f"kernel {name}", trouble, ended, _remedy(facts, ended)),
        (run, *(_result(facts, run, trouble) if run else ("", ""))),
        (
            damaged,
            trouble,
            f"the model's code cannot be imported: {damaged and damaged.error}",
            remedies.setup(facts),
        ),
        (facts.quick and name == "compile", SKIP, "skipped by --quick"),
        (
            triton and not (loaded.devices and loaded.unfinished),
            SKIP,
            "they run only on a card, and if Triton is installed",
        ),
        (loaded.unfinished == "loading the model", trouble, unreached, remedies.same_pair(facts)),
        (True, SKIP, unreached, "", expected),
    ]
    return check(f"kernels.{name}", title, expected, cases)


def _result(facts: Facts, run: KernelRun, trouble: str) -> tuple[str, str, str]:
    """Status, finding and remedy of a computation that ended."""
    if run.error:
        instead = "; training replaces them by PyTorch operations, slower" if run.name == "triton" else ""
        return trouble, run.error + instead, _remedy(facts, run.error)
    assert run.difference is not None
    assert run.tolerance is not None
    found = f"difference {run.difference:.1e} (at most {run.tolerance:.1e}) in {run.seconds:.2f} s"
    if run.difference <= run.tolerance:
        return PASS, found, ""
    return trouble, f"wrong results: {found}", _remedy(facts, "")


def _remedy(facts: Facts, error: str) -> str:
    """The remedy for an error message of CUDA or the compiler."""
    if "no kernel image" in error or "not compatible with the current PyTorch" in error:
        return remedies.suitable_build(facts)
    if "out of memory" in error.lower():
        return "end the processes that use the card's memory and that you do not need: nvidia-smi lists them"
    return remedies.compiler(facts) if "compiler" in error.lower() else remedies.same_pair(facts)
