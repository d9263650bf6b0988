"""Project folders with stubs for the scripts, so that the launchers run for real, and their arguments."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.harness.runs import ROOT

RUN = ["--output_dir", "./outputs/rtx5090_training"]
DEMO = ["--profile", "demo", "--output_dir", "./outputs/demo"]

# arguments of the launcher, arguments of train_vae.py
CHOICES = [
    ([], ["--profile", "standard", *RUN]),
    (["--profile", "ultra"], [*RUN, "--profile", "ultra"]),
    (["--profile=fast", "--no-use_torch_compile"], [*RUN, "--profile=fast", "--no-use_torch_compile"]),
    (["--max_steps", "5"], ["--profile", "standard", *RUN, "--max_steps", "5"]),
    (["--config", "my file.json"], ["--config", "my file.json"]),  # the trainer finds the folder
    (["--resume_from", "a/b.pt"], ["--resume_from", "a/b.pt"]),
    (["--resume_from=a/b.pt"], ["--resume_from=a/b.pt"]),
    (["--resume_from", "latest"], [*RUN, "--resume_from", "latest"]),
    (["--output_dir", "./o ü'x"], ["--profile", "standard", "--output_dir", "./o ü'x"]),
    (["--demo"], [*DEMO, "--data_path", "./data/demo"]),
    (["--demo", "--data_path", "p"], [*DEMO, "--data_path", "p"]),
    (
        ["--demo", "--output_dir=o", "--seed", "1"],
        ["--profile", "demo", "--data_path", "./data/demo", "--output_dir=o", "--seed", "1"],
    ),
]

# The stub of the trainer: lists profiles, records its arguments, waits for a signal, exits with STUB_CODE.
TRAINER = """
import json, os, signal, sys, time
if "--list_profiles" in sys.argv:
    print("standard  1024 px  batch 16  recommended\\nultra  2048 px  batch 4  the largest crops")
    sys.exit(0)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if os.environ.get("STUB_WAITS"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ.get("STUB_CODE_OF_SIGNAL", "75"))))
    print("waiting", flush=True)
    time.sleep(30)
sys.exit(int(os.environ.get("STUB_CODE", "0")))
"""
PREPARE = """
import json, os, signal, sys, time
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
folder = sys.argv[sys.argv.index("--output_dir") + 1]
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "1.png"), "w").close()
if os.environ.get("STUB_WAITS"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("waiting", flush=True)
    time.sleep(30)
sys.exit(int(os.environ.get("STUB_PREPARE_CODE", "0")))
"""
CHECK = """
import os, sys
print(os.path.basename(sys.argv[0]), *sys.argv[1:], flush=True)
sys.exit(int(os.environ.get("STUB_CHECK_CODE", "0")))
"""


class Project:
    """A copy of the launchers and what they import, in a folder with a space, a quote and an umlaut."""

    def __init__(self, folder: Path):
        self.folder = folder
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "launchers", folder / "launchers", ignore=caches)
        for package in ("checks", "config", "system"):
            shutil.copytree(ROOT / "vae" / package, folder / "vae" / package, ignore=caches)
        for path in (ROOT / "vae").glob("*.py"):
            shutil.copy(path, folder / "vae")
        for pattern in ("*.sh", "*.bat", "requirements*.txt"):
            for path in ROOT.glob(pattern):
                shutil.copy(path, folder)
        (folder / "train_vae.py").write_text(TRAINER)
        (folder / "prepare_data.py").write_text(PREPARE)
        (folder / "check_compatibility.py").write_text(CHECK)

    def environ(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "VAE_PYTHON": sys.executable, **more}

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess:
        """Run a command outside the project folder, without a terminal."""
        return subprocess.run(
            [str(part) for part in command],
            cwd="/",
            env=self.environ(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    def train(self, *arguments: str, **more: str) -> subprocess.CompletedProcess:
        """Run train_rtx5090.sh."""
        return self.run(self.folder / "train_rtx5090.sh", *arguments, **more)

    def type_into(self, script: str, typed: str) -> tuple[int, str]:
        """Run a script without arguments in a terminal with this input; returns exit code and screen."""
        import pty  # absent on Windows

        child, terminal = pty.fork()
        if child == 0:
            os.chdir("/")
            os.execve(self.folder / script, [script], self.environ())
        os.write(terminal, typed.encode())
        screen = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # Linux reports the closed end like this
                break
            if not part:
                break
            screen += part
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), screen.decode()

    def calls(self) -> list[list[str]]:
        """The arguments of all stub calls since the last call of this method."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


def make_wheel(folder: Path, name: str, version: str, code: str, needs: str = "") -> None:
    """Write a wheel with a package of one line; run as a program, it prints its arguments."""
    info = f"{name}-{version}.dist-info"
    program = (
        f"import os, sys; print('{name}', *sys.argv[1:]); sys.exit(int(os.environ.get('{name}_code', 0)))"
    )
    files = {
        f"{name}/__init__.py": code,
        f"{name}/__main__.py": program,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def make_pair(folder: Path, torch: str, torchvision: str) -> None:
    """Write wheels of torch and of a torchvision that requires it."""
    make_wheel(folder, "torch", torch, f"__version__ = '{torch}'")
    needs = f"Requires-Dist: torch=={torch}\n"
    make_wheel(folder, "torchvision", torchvision, "import torch", needs)
