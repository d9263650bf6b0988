"""Checks of the test computations in kernels.py."""

from functools import partial

from vae.checks import remedies
from vae.checks.facts import Facts
from vae.checks.table import FAIL, PASS, SKIP, WARN, Cases, Check

TITLES = {
    "matmul": "Matrix product",
    "conv": "Convolution",
    "channels_last": "channels_last",
    "triton": "Triton kernels",
    "attention": "Attention",
    "step": "Training step",
    "compile": "torch.compile",
}
SPEED_ONLY = ("triton", "compile")  # without them, training is only slower


def _cases(name: str, facts: Facts) -> Cases:
    loaded, triton = facts.loaded, name == "triton"
    yield not loaded.installed or loaded.error, SKIP, "PyTorch does not load"
    trouble, ended = WARN if name in SPEED_ONLY else FAIL, loaded.ended or ""
    runs = {run.name: run for run in loaded.kernels}
    running = loaded.unfinished == f"kernel {name}"
    # training would end in the same way
    yield triton and running, FAIL, ended, "start the trainer with --kernels torch"
    yield running, trouble, ended, _remedy(facts, ended)
    if run := runs.get(name):
        instead = (
            "; training replaces them by PyTorch operations: 5 to 19 times the launches" if triton else ""
        )
        yield run.error, trouble, f"{run.error}{instead}", _remedy(facts, run.error or "")
        found = f"difference {run.difference:.1e} (at most {run.tolerance:.1e}) in {run.seconds:.2f} s"
        yield run.difference <= run.tolerance, PASS, found
        yield True, trouble, f"wrong results: {found}", remedies.same_pair(facts)
    if damaged := runs.get("import"):
        found = f"the model's code cannot be imported: {damaged.error}"
        yield True, trouble, found, remedies.setup(facts)
    yield facts.quick and name == "compile", SKIP, "skipped by --quick"
    no_kernels = triton and not (loaded.devices and loaded.unfinished)
    yield no_kernels, SKIP, "they run only on a card, and if Triton is installed"
    unreached = f"not reached: the process ended during {loaded.unfinished or 'nothing'} ({ended})"
    yield loaded.unfinished == "loading the model", trouble, unreached, remedies.same_pair(facts)
    yield True, SKIP, unreached


def _remedy(facts: Facts, error: str) -> str:
    """The remedy for an error message of CUDA or the compiler."""
    if "no kernel image" in error or "not compatible with the current PyTorch" in error:
        return remedies.suitable_build(facts)
    if "out of memory" in error.lower():
        return "end the processes that use the card's memory and that you do not need: nvidia-smi lists them"
    return remedies.compiler(facts) if "compiler" in error.lower() else remedies.same_pair(facts)


EXPECTED = "equals its reference, forward and backward"
COMPUTATIONS = [Check(f"kernels.{name}", TITLES[name], EXPECTED, partial(_cases, name)) for name in TITLES]
