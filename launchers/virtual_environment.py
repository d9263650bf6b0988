"""Creates, completes and repairs the Python environment.

The stamp is written last, so an interrupted run continues with the missing steps.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launchers.command import run_command
from launchers.stamp import (
    BEGUN,
    LOCK,
    ROOT,
    STAMP,
    build_of,
    file_digest,
    is_locked,
    is_moved,
    read_stamp,
    torch_pair_digest,
    torch_requirements,
    wanted,
    why_incomplete,
)
from launchers.torch_index import torch_source
from vae.checks.cuda_builds import BUILDS, triton_for_windows
from vae.system import console
from vae.system.files import claim_folder, read_text, replace_text, write_json
from vae.system.script import SETUP, missing_runtime

WINDOWS = os.name == "nt"
# What venv and pip write into an environment, in every version of Python and on every system.
PARTS = {"bin", "etc", "include", "lib", "lib64", "share", "Include", "Lib", "Scripts", "pyvenv.cfg"}

# Whether torch finds the DLLs: it searches this folder of the environment too, but not Scripts.
LOADS_RUNTIME = r"""
import ctypes, os, sys
folder = sys.prefix + r"\Library\bin"
if os.path.isdir(folder):
    os.add_dll_directory(folder)
for name in ("vcruntime140_threads.dll", "msvcp140.dll"):
    ctypes.WinDLL(name)
"""

# Writes the activation, and the programs of packages, such as tensorboard, as venv and pip do.
WRITES_PROGRAMS = """
import importlib.metadata, os, sys, venv
from pip._vendor.distlib.scripts import ScriptMaker
builder = venv.EnvBuilder()
builder.setup_scripts(builder.ensure_directories(sys.prefix))
maker = ScriptMaker(None, os.path.dirname(sys.executable))
maker.clobber = maker.set_mode = True
maker.variants = {""}
for package in importlib.metadata.distributions():
    for kind in ("console_scripts", "gui_scripts"):
        for entry in package.entry_points.select(group=kind):
            maker.make(f"{entry.name} = {entry.value}", {"gui": kind == "gui_scripts"})
"""


def python_of(venv: Path) -> Path:
    """The environment's Python."""
    return venv / ("Scripts/python.exe" if WINDOWS else "bin/python")


def runs(venv: Path, code: str) -> bool:
    """Whether the environment's Python runs the code without an error."""
    try:
        return subprocess.run([python_of(venv), "-c", code], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_complete(venv: Path, build: str | None, test: bool, locked: bool = False) -> bool:
    """Whether everything is installed; `build` None accepts any build."""
    code = LOADS_RUNTIME if WINDOWS else ""
    return not why_incomplete(venv, test, locked) and build in (None, build_of(venv)) and runs(venv, code)


def create(venv: Path) -> None:
    """Create the environment, or recreate a damaged one; raises ValueError if the folder is not ours."""
    claim_folder(venv, "setup", "--venv")
    # without that file, its Python would use the pip of the system
    if (venv / "pyvenv.cfg").is_file() and runs(venv, "import pip._internal.cli.main"):
        if read_stamp(venv) and is_moved(venv):
            console.info(
                f"The environment {venv} was made in another folder: its programs are written again."
            )
            if run_command([str(python_of(venv.resolve())), "-c", WRITES_PROGRAMS]) != 0:
                raise ValueError(f"they cannot be written (see the message above): delete the folder {venv}")
        return
    console.info(f"Creating the environment {venv} with Python {sys.version.split()[0]}.")
    for path in venv.iterdir():  # not with --clear, which would also remove the marker and the user's files
        if path.name in PARTS | {STAMP, BEGUN}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    # As `-m venv`, but Ctrl-C ends it without a traceback.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "runpy.run_module('venv', run_name='__main__')"
    )
    # Resolved: venv refuses a link to a folder, such as one on another disk.
    # The base: this Python may be the environment's own, which the set-up has just removed.
    base = getattr(sys, "_base_executable", sys.executable)
    if run_command([base, "-c", code, str(venv.resolve())], stdout=subprocess.DEVNULL) != 0:
        raise ValueError(f"Python could not create the environment {venv} (see its message above)")


def pip(venv: Path, verb: str, *arguments: str) -> None:
    """Run the environment's pip; raises ValueError if it fails, after pip printed its own message."""
    # A terminal shows the downloads. A pipe gets errors only (quiet twice), without warnings about the user's
    # own pip settings.
    quiet = [] if sys.stdout.isatty() else ["--quiet", "--quiet"]
    command = [str(python_of(venv)), "-m", "pip", verb, *quiet, *arguments]
    # A pip that a signal ends leaves its downloads, which are gigabytes, in its temporary folder.
    with tempfile.TemporaryDirectory(prefix="set-up-") as folder:
        environ = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
        environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
        code = run_command(command, env=environ)
    if code != 0:
        raise ValueError(f"pip failed (see its message above); run {SETUP} again to continue")


def torch_version(venv: Path) -> str:
    """The version of torch; raises ValueError if torch and torchvision cannot be imported together."""
    code = "import torch, torchvision; print(torch.__version__)"
    answer = subprocess.run([python_of(venv), "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        if missing := missing_runtime(reason):
            raise ValueError(missing)
        remedy = f"delete the folder {venv} and run {SETUP} --torch index"
        raise ValueError(f"torch and torchvision cannot be imported together ({reason}): {remedy}")
    return answer.stdout.split()[-1]


def install(venv: Path, build: str, test: bool, locked: bool = False) -> None:
    """Complete the environment, whatever state it is in. A locked one stays locked."""
    locked = locked or is_locked(venv)
    if locked and test:
        raise ValueError(f"{LOCK} has no test requirements: run --test without --locked, in another --venv")
    create(venv)
    before = read_stamp(venv) or read_stamp(venv, BEGUN)
    pair = {"torch_pair": torch_pair_digest()}
    lock = {"locked": file_digest(LOCK)} if locked else {}
    has_pair = before.get("build") == build and before.items() >= pair.items()
    write_json(venv / BEGUN, {"build": before.get("build", build), **lock, **(pair if has_pair else {})})
    (venv / STAMP).unlink(missing_ok=True)
    if before.get("build", build) != build:
        console.info(f"Removing the {before['build']} build of torch and torchvision.")
        pip(venv, "uninstall", "--yes", "torch", "torchvision")
        write_json(venv / BEGUN, {"build": build, **lock})
    if locked:  # first, so that torch finds what it needs
        console.info(f"Installing the versions of {LOCK}; the SHA-256 of each file is compared.")
        pip(venv, "install", "--no-deps", "--require-hashes", "-r", LOCK)
    if not has_pair:
        source, name, remark = torch_source(build)
        if remark:
            console.info(remark)
        console.info(f"Installing torch and torchvision from {name}; a CUDA build is several gigabytes.")
        kept = ["--constraint", str(_locked_versions(venv))] if locked else []
        pip(venv, "install", *kept, *source, *torch_requirements())
        write_json(venv / BEGUN, {"build": build, **lock, **pair})
    if not locked:
        console.info("Installing the other requirements.")
        files = ["requirements.txt", *(["requirements-test.txt"] if test else [])]
        pip(venv, "install", *(word for file in files for word in ("-r", file)))
        if test and runs(venv, "import sys, triton; sys.exit(triton.__version__ >= '3.7')"):
            console.info("Installing numpy before 2.4, which the interpreter of this Triton needs.")
            pip(venv, "install", "numpy<2.4")
    if WINDOWS:
        install_runtime(venv)
    version = torch_version(venv)
    if WINDOWS and build in BUILDS:
        install_triton_windows(venv, version)
    write_json(
        venv / STAMP,
        {"build": build, "torch": version, "folder": str(venv.resolve()), **wanted(test, locked)},
    )
    (venv / BEGUN).unlink()


def _locked_versions(venv: Path) -> Path:
    """Write the lock file without its hashes, which pip would then also demand for torch.

    As constraints, they make pip fail if a build of torch needs another version, instead of exchanging it.
    """
    lines = read_text(ROOT / LOCK).splitlines()
    pinned = [line.partition(" --hash=")[0].removesuffix(" \\") for line in lines if line[:1].isalnum()]
    path = venv / "locked-versions.txt"
    replace_text(path, "\n".join(pinned) + "\n")
    return path


def install_runtime(venv: Path) -> None:
    """Install Microsoft's Visual C++ runtime in the environment, if Windows lacks it.

    If that fails, the import of torch tells: not every version of torch needs all of it.
    """
    if runs(venv, LOADS_RUNTIME):
        return
    console.info("Installing Microsoft's Visual C++ runtime, which torch needs.")
    try:
        pip(venv, "install", "msvc-runtime")
    except ValueError:
        return
    folder = venv / "Library" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for path in python_of(venv).parent.glob("*.dll"):  # where the package puts them
        shutil.copyfile(path, folder / path.name)


def install_triton_windows(venv: Path, torch: str) -> None:
    """Install Triton, which torch includes only on Linux; training works without it, only slower."""
    triton = triton_for_windows(torch)
    if triton is None:
        console.info(f"There is no Triton for Windows for torch {torch}: training will be slower.")
        return
    try:
        pip(venv, "install", f"triton-windows=={triton}.*")
    except ValueError:
        console.info("Triton for Windows could not be installed (see above): training will be slower.")
