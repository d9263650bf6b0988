"""A project folder with stand-ins for the trainer, so that the launchers themselves really run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The trainer's stand-in: lists profiles, writes its arguments down, waits for a signal, ends as told.
TRAINER = """
import json, os, signal, sys, time
if "--list_profiles" in sys.argv:
    print("standard  1024 px  batch 16  recommended\\nultra  2048 px  batch 4  maximum quality")
    sys.exit(0)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if os.environ.get("STUB_WAITS"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("waiting", flush=True)
    time.sleep(30)
sys.exit(int(os.environ.get("STUB_CODE", "0")))
"""
PREPARE = """
import json, os, sys, time
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
folder = sys.argv[sys.argv.index("--output_dir") + 1]
os.makedirs(folder)
open(os.path.join(folder, "1.png"), "w").close()
if os.environ.get("STUB_WAITS"):
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
    """A copy of the launchers in a folder whose name has a space, a quote and an umlaut."""

    def __init__(self, folder: Path):
        self.folder = folder
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "launchers", folder / "launchers", ignore=caches)
        for room in ("checks", "config"):
            shutil.copytree(ROOT / "vae" / room, folder / "vae" / room, ignore=caches)
        scripts = ("setup.sh", "setup_windows.bat", "train_rtx5090.sh", "train_rtx5090.bat")
        for name in (*scripts, "vae/host.py"):
            shutil.copy(ROOT / name, folder / name)
        for path in ROOT.glob("requirements*.txt"):
            shutil.copy(path, folder)
        (folder / "train_vae.py").write_text(TRAINER)
        (folder / "prepare_data.py").write_text(PREPARE)
        (folder / "check_compatibility.py").write_text(CHECK)

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "VAE_PYTHON": sys.executable, **more}

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess:
        """Runs a command from another folder than the project's, without a terminal."""
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
        return self.run(self.folder / "train_rtx5090.sh", *arguments, **more)

    def type_into(self, script: str, typed: str) -> tuple[int, str]:
        """Exit code and screen of a script that runs in a terminal, without arguments, this being typed."""
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
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not part:
                break
            screen += part
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), screen.decode()

    def calls(self) -> list[list[str]]:
        """What the stand-ins were called with since the last look."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if os.name == "nt":
        pytest.skip("runs the shell scripts")
    return Project(tmp_path / "a b'ü")
