"""Run a script whose Triton kernels run in the interpreter on CPU tensors, with one change in a kernel.

TRITON_INTERPRET=1 python -m tests.harness.interpreted_kernels MODULE KERNEL OLD NEW SCRIPT [FLAGS]

In the source of vae.ops.MODULE, the first OLD after "def KERNEL(" becomes NEW. Tests of kernels have small
tensors, because the interpreter is slow.
"""

import importlib.util
import runpy
import sys
import tempfile
from pathlib import Path

from vae.ops import kernel_check, library
from vae.ops.kernel_check import AttentionShape, FeatureShape, NormShape, RmsShape

SHAPES = (
    NormShape(32, 3, 5, groups=32, silu=True, has_h_bias=True),
    AttentionShape(2100, 32),  # rows of two tiles
    FeatureShape(64, 3, 5),
    RmsShape(96, 3, 5, silu=True, has_h_bias=True),
)


def load_changed(module: str, kernel: str, old: str, new: str) -> None:
    """Import vae.ops.`module` from a changed copy of its source."""
    name = f"vae.ops.{module}"
    source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
    head, start, body = source.partition(f"def {kernel}(")
    assert old in body, f"{kernel} does not contain {old!r}"
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as copy:  # Triton reads the file
        copy.write(head + start + body.replace(old, new, 1))
    spec = importlib.util.spec_from_file_location(name, copy.name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    setattr(sys.modules["vae.ops"], module, sys.modules[name])
    Path(copy.name).unlink()


if __name__ == "__main__":
    library.runs_kernels = lambda device: True
    kernel_check.run_tests.__defaults__ = (SHAPES,)
    load_changed(*sys.argv[1:5])
    sys.argv = sys.argv[5:]
    runpy.run_path(sys.argv[0], run_name="__main__")
