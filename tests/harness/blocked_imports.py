"""Scripts in a process without third-party libraries, or without PyTorch alone."""

import json
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
"""
ONE_SCRIPT = "runpy.run_path(sys.argv[0], run_name='__main__')"
EACH_COMMAND = """
import contextlib, importlib, io, json
from vae.system.script import exit_code
found = []
for script, *words in json.load(sys.stdin):
    sys.argv = [script, *words]
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = exit_code(script, importlib.import_module(script.removesuffix(".py")).main, words)
    found.append((code, error.getvalue()))
print(json.dumps(found))
"""


def without_libraries(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project in a process that cannot import any third-party library."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK_IMPORTS + ONE_SCRIPT, " ".join(LIBRARIES), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def each_without_pytorch(commands: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and stderr of each command, in one process that cannot import torch or torchvision."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_IMPORTS + EACH_COMMAND, "torch torchvision"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=json.dumps(commands),
    )
    assert done.returncode == 0, done.stderr
    return [(code, error) for code, error in json.loads(done.stdout)]
