"""The Python environment: made, completed and repaired.

The stamp is written last, so a run that was interrupted is taken up again.
"""

import os
import subprocess
import sys
from pathlib import Path

from launchers.stamp import (
    BEGUN,
    STAMP,
    build_of,
    digest,
    has_requirements,
    read_stamp,
    wanted,
    write_stamp,
)
from launchers.torch_index import torch_source
from vae.checks.cuda_builds import BUILDS, triton_for_windows
from vae.script import SETUP

WINDOWS = os.name == "nt"


def say(line: str) -> None:
    """One line, at once, also into a pipe."""
    print(line, flush=True)


def python_of(venv: Path) -> Path:
    """The environment's Python."""
    return venv / ("Scripts/python.exe" if WINDOWS else "bin/python")


def runs(venv: Path, code: str) -> bool:
    """Whether the environment's Python runs the code without an error."""
    try:
        return subprocess.run([python_of(venv), "-c", code], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_complete(venv: Path, build: str | None, test: bool) -> bool:
    """Whether nothing is left to install; None stands for any build."""
    return has_requirements(venv, test) and build in (None, build_of(venv)) and runs(venv, "")


def create(venv: Path) -> None:
    """Makes the environment, or makes it anew where it is damaged; refuses a folder that is none."""
    if runs(venv, "import pip._internal.cli.main"):
        return
    # One that was interrupted early has no pyvenv.cfg yet, but the name this project keeps for them.
    ours = venv.name.startswith(".venv") or (venv / "pyvenv.cfg").exists()
    if venv.exists() and not ours and (not venv.is_dir() or any(venv.iterdir())):
        raise ValueError(f"--venv {venv} is something else already: name a new folder")
    say(f"Making the environment {venv} with Python {sys.version.split()[0]}.")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], stdout=subprocess.DEVNULL)
    if made.returncode != 0:
        raise ValueError(f"Python could not make the environment {venv}; its message stands above")


def pip(venv: Path, verb: str, *arguments: str) -> None:
    """Run the environment's pip; raises ValueError where it fails, after its own message."""
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    # Someone who watches sees the downloads. Into a pipe: errors only (twice quiet), for warnings about a
    # machine's own pip settings are not ours to repeat.
    quiet = [] if sys.stdout.isatty() else ["--quiet", "--quiet"]
    command = [str(python_of(venv)), "-m", "pip", verb, *quiet, *arguments]
    if subprocess.run(command, env=environ).returncode != 0:
        raise ValueError(f"pip stopped (its message stands above); {SETUP} goes on from here when run again")


def torch_version(venv: Path) -> str:
    """Version of torch, after torch and torchvision were really loaded together."""
    code = "import torch, torchvision; print(torch.__version__)"
    answer = subprocess.run([python_of(venv), "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = f"delete the folder {venv} and run {SETUP} --torch index"
        raise ValueError(f"torch and torchvision do not load together ({reason}): {remedy}")
    return answer.stdout.split()[-1]


def install(venv: Path, build: str, test: bool) -> None:
    """Makes the environment complete, from whatever state it is in."""
    create(venv)
    before = read_stamp(venv) or read_stamp(venv, BEGUN)
    pair = {"torch_pair": digest("requirements-torch.txt")}
    has_pair = before.get("build") == build and before.items() >= pair.items()
    write_stamp(venv, BEGUN, {"build": before.get("build", build), **(pair if has_pair else {})})
    (venv / STAMP).unlink(missing_ok=True)
    if before.get("build", build) != build:
        say(f"Removing the {before['build']} build of torch and torchvision.")
        pip(venv, "uninstall", "--yes", "torch", "torchvision")
        write_stamp(venv, BEGUN, {"build": build})
    if not has_pair:
        source, name, remark = torch_source(build)
        if remark:
            say(remark)
        say(f"Installing torch and torchvision from {name}; a CUDA build is a download of some gigabytes.")
        pip(venv, "install", *source, "-r", "requirements-torch.txt")
        write_stamp(venv, BEGUN, {"build": build, **pair})
    say("Installing the other requirements.")
    pip(venv, "install", "-r", "requirements-test.txt" if test else "requirements.txt")
    version = torch_version(venv)
    if WINDOWS and build in BUILDS:
        install_triton_windows(venv, version)
    write_stamp(venv, STAMP, {"build": build, "torch": version, **wanted(test)})
    (venv / BEGUN).unlink()


def install_triton_windows(venv: Path, torch: str) -> None:
    """Triton, which torch brings along on Linux only; without it training works, uncompiled."""
    triton = triton_for_windows(torch)
    if triton is None:
        say(f"There is no Triton for Windows that suits torch {torch}: training will not be compiled.")
        return
    try:
        pip(venv, "install", f"triton-windows=={triton}.*")
    except ValueError:
        say("Triton for Windows was not installed (the message stands above): training will not be compiled.")
