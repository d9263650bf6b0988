"""Scripts in a process without third-party libraries."""

import subprocess
import sys

from tests.harness.runs import ROOT

BLOCK_IMPORTS = """
import builtins, runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        packages = "torch torchvision numpy PIL safetensors tqdm lpips jinja2".split()
        if name.split(".")[0] in packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without_libraries(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project in a process that cannot import any third-party library."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK_IMPORTS, *words], cwd=ROOT, capture_output=True, text=True
    )
