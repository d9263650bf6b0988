"""Scripts in a process without third-party libraries, or without PyTorch alone."""

import subprocess
import sys

from tests.harness.runs import ROOT

LIBRARIES = ("torch", "torchvision", "numpy", "PIL", "safetensors", "tqdm", "lpips", "jinja2")
BLOCK_IMPORTS = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
block = Block()
sys.meta_path.insert(0, block)
block.packages = sys.argv[1].split()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without_libraries(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project in a process that cannot import any third-party library."""
    return _without(LIBRARIES, words)


def without_pytorch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project in a process that cannot import torch or torchvision."""
    return _without(("torch", "torchvision"), words)


def _without(packages: tuple[str, ...], words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK_IMPORTS, " ".join(packages), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
