"""Makes, completes and repairs the Python environment: the body of setup.sh and setup_windows.bat.

Needs only the standard library. A stamp in the environment is written last, so a run that was
interrupted is taken up again, and a complete environment is left alone.
"""

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = os.name == "nt"
SETUP = "setup_windows.bat" if WINDOWS else "./setup.sh"
STAMP = ".setup-stamp.json"  # the launchers look for it
BEGUN = ".setup-begun.json"  # in its place while an installation is under way
PYTORCH_INDEX = "https://download.pytorch.org/whl"  # VAE_TORCH_INDEX names a mirror of it
INDEX_TIMEOUT_SECONDS = 5
NVIDIA_SMI_TIMEOUT_SECONDS = 15  # it may take seconds to wake a card

# Driver branch from which a CUDA runtime works: the table "CUDA Toolkit and Minimum Required Driver
# Version for CUDA Minor Version Compatibility" (CUDA release notes: 13.x needs 580, 12.x needs 525).
# 12.8 asks for 570 here because that is the first branch that knows the RTX 50 cards.
CUDA_BY_DRIVER = ((580, "cu130"), (570, "cu128"), (525, "cu126"))

# The general index carries one CUDA build per torch version on Linux: 12.8 for 2.10, 13.0 for
# 2.11 to 2.13, 13.2 from 2.14. Standing in for a CUDA index, it may serve only versions below this one.
GENERAL_INDEX_BELOW = {"cu126": "2.11", "cu128": "2.11", "cu130": "2.14"}

# number in the menu: (what it is, choice, what is said when it is chosen)
MENU = {
    "1": ("CUDA 11.8", "cu126", "CUDA 11.8 builds ended with torch 2.7; the nearest there is: CUDA 12.6."),
    "2": ("CUDA 12.1", "cu126", "CUDA 12.1 builds ended with torch 2.5; the nearest there is: CUDA 12.6."),
    "3": ("CUDA 12.4", "cu126", "CUDA 12.4 builds ended with torch 2.6; the nearest there is: CUDA 12.6."),
    "4": ("CUDA 12.8 (RTX 5090; driver 570 or newer)", "cu128", ""),
    "5": ("CUDA 13.0 (driver 580 or newer)", "cu130", ""),
    "6": ("CUDA 13.2 (driver 580 or newer)", "cu132", ""),
    "7": ("ROCm (AMD, Linux)", "rocm", ""),
    "8": ("CPU", "cpu", ""),
}
CHOICES = ("auto", "cu126", "cu128", "cu130", "cu132", "rocm", "cpu", "index")


def say(line: str) -> None:
    print(line, flush=True)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog=SETUP,
        allow_abbrev=False,
        description="Makes the Python environment, or completes it; a complete one is left as it is. "
        "Without flags in a terminal it asks which PyTorch build to install.",
        epilog=f"VAE_TORCH_INDEX names a mirror of {PYTORCH_INDEX}.",
    )
    parser.add_argument(
        "--torch",
        choices=CHOICES,
        help="build of PyTorch; auto: by the NVIDIA driver (580 or newer cu130, 570 or newer cu128, older "
        "cu126, no card cpu); index: whatever the general Python index gives. Where the chosen index cannot "
        "be reached the general one serves. Default: what the environment has, else auto",
    )
    parser.add_argument(
        "--venv",
        default=".venv",
        metavar="DIR",
        help="folder of the environment, relative to this one (%(default)s)",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="also install what the tests need, and run them; further arguments go to pytest",
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.test:
        parser.error(f"unknown: {' '.join(rest)} (see --help)")
    return known, rest


# --- which build ---------------------------------------------------------------------------------


def nvidia_driver() -> int | None:
    """Branch of the NVIDIA driver, such as 580, or None without one."""
    # Under WSL the program lies where PATH does not always lead.
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/lib/wsl/lib")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        say("nvidia-smi gives no answer: going on as on a machine without an NVIDIA card.")
        return None
    branch = re.match(r"(\d+)\.", answer.stdout)
    return int(branch.group(1)) if answer.returncode == 0 and branch else None


def build_for(driver: int | None, platform: str) -> tuple[str, str]:
    """The build `auto` stands for, and the reason in words."""
    if platform == "darwin":
        return "index", "macOS"
    if driver is None:
        return "cpu", "no NVIDIA driver found"
    for branch, build in CUDA_BY_DRIVER:
        if driver >= branch:
            remark = "" if driver >= 570 else "; RTX 50 cards need driver 570 or newer"
            return build, f"NVIDIA driver {driver}{remark}"
    return "cpu", f"NVIDIA driver {driver} is too old for every CUDA build: update it to 580 or newer"


def ask_build() -> str:
    driver = nvidia_driver()
    default = "8" if driver is None else "4"
    say("Which build of PyTorch?")
    for number, (title, _, _) in MENU.items():
        say(f"  {number}  {title}{'  <- Enter' if number == default else ''}")
    while True:
        answer = input("Choice: ").strip() or default
        if answer in MENU:
            _, build, remark = MENU[answer]
            if remark:
                say(remark)
            return build
        say(f"{answer!r} is none of {', '.join(MENU)}.")


def torch_index() -> str:
    return os.environ.get("VAE_TORCH_INDEX", PYTORCH_INDEX).rstrip("/")


def read_index(build: str, timeout: float = INDEX_TIMEOUT_SECONDS) -> str | None:
    """PyTorch's page of torch wheels for a build ("" for all), or None when it cannot be had."""
    address = "/".join(part for part in (torch_index(), build, "torch/") if part)
    try:
        with urllib.request.urlopen(address, timeout=timeout) as page:
            return page.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):  # no connection, time-out, TLS, 404; a page cut short
        return None


def newest(versions: list[str]) -> str | None:
    return max(versions, key=lambda version: [int(number) for number in version.split(".")], default=None)


def newest_torch(page: str) -> str | None:
    """Newest torch on a page of wheels, without its build: 2.11.0 for torch-2.11.0+cu128."""
    return newest(re.findall(r"\btorch-(\d+(?:\.\d+)+)(?:%2B|\+|-)", page))


def newest_rocm(page: str) -> str | None:
    """Newest ROCm build of torch on PyTorch's page of all wheels, such as rocm7.1."""
    version = newest(re.findall(r"\btorch-[\d.]+(?:%2B|\+)rocm(\d+(?:\.\d+)+)-", page))
    return version and f"rocm{version}"


def torch_source(build: str) -> tuple[list[str], str]:
    """Arguments for pip that lead to the build, and where it comes from in words."""
    base = torch_index()
    if build == "index":
        return [], "the general Python index"
    if build == "rocm":
        found = newest_rocm(read_index("") or "")
        if not found:
            raise ValueError(f"--torch rocm: {base} lists no ROCm build, or cannot be reached from here")
        build = found
    address = f"{base}/{build}"
    version = newest_torch(read_index(build) or "")
    if version:
        # The bound keeps pip from a newer build that a machine's own settings (find-links) may offer.
        return ["--index-url", address, f"torch<={version}"], address
    cost = " (on Windows its builds are without CUDA)" if WINDOWS and build != "cpu" else ""
    say(f"{address} cannot be reached: the general Python index serves instead{cost}.")
    below = GENERAL_INDEX_BELOW.get(build)
    return [f"torch<{below}"] if below else [], "the general Python index"


# --- the environment -----------------------------------------------------------------------------


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if WINDOWS else "bin/python")


def digest(name: str) -> str:
    # Line ends differ between checkouts; what is asked for does not.
    return hashlib.sha256((ROOT / name).read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def wanted(test: bool) -> dict[str, str]:
    wants = {"torch_pair": digest("requirements-torch.txt"), "training": digest("requirements.txt")}
    return wants | {"tests": digest("requirements-test.txt")} if test else wants


def read_stamp(venv: Path, name: str = STAMP) -> dict:
    try:
        stamp = json.loads((venv / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, name: str, stamp: dict) -> None:
    new = venv / (name + ".new")
    new.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    new.replace(venv / name)


def build_of(venv: Path) -> str | None:
    """The build the environment has, or was to get when an installation was interrupted."""
    return read_stamp(venv).get("build") or read_stamp(venv, BEGUN).get("build")


def runs(venv: Path, code: str) -> bool:
    try:
        return subprocess.run([python_of(venv), "-c", code], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_complete(venv: Path, build: str | None, test: bool) -> bool:
    stamp = read_stamp(venv)
    return (
        all(stamp.get(part) == want for part, want in wanted(test).items())
        and build in (None, stamp.get("build"))
        and runs(venv, "")
    )


def create(venv: Path) -> None:
    """Makes the environment, or makes it anew where it is damaged; refuses a folder that is none."""
    if runs(venv, "import pip._internal.cli.main"):
        return
    # One that was interrupted early has no pyvenv.cfg yet, but the name this project keeps for them.
    ours = venv.name.startswith(".venv") or (venv / "pyvenv.cfg").exists()
    if venv.exists() and not ours and any(venv.iterdir()):
        raise ValueError(f"--venv {venv}: the folder holds something else; name a new one")
    say(f"Making the environment {venv} with Python {sys.version.split()[0]}.")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], stdout=subprocess.DEVNULL)
    if made.returncode != 0:
        raise ValueError(f"Python could not make the environment {venv}; its message stands above")


def pip(venv: Path, verb: str, *arguments: str) -> None:
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    # Twice quiet: errors only; warnings about a machine's own pip settings are not ours to repeat.
    command = [str(python_of(venv)), "-m", "pip", verb, "--quiet", "--quiet", *arguments]
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
        source, name = torch_source(build)
        say(f"Installing torch and torchvision from {name}; a CUDA build is a download of some gigabytes.")
        pip(venv, "install", *source, "-r", "requirements-torch.txt")
        write_stamp(venv, BEGUN, {"build": build, **pair})
    say("Installing the other requirements.")
    pip(venv, "install", "-r", "requirements-test.txt" if test else "requirements.txt")
    write_stamp(venv, STAMP, {"build": build, "torch": torch_version(venv), **wanted(test)})
    (venv / BEGUN).unlink()


def run_tests(venv: Path, arguments: list[str]) -> int:
    """Exit code of the tests, or of ruff where the tests pass."""
    python = str(python_of(venv))
    cuda = runs(venv, "import sys, torch; sys.exit(not torch.cuda.is_available())")
    # An explicit -m takes the place of the one in pyproject.toml, which leaves out gpu and slow.
    marks = "" if cuda else "not gpu"
    say("ruff check .")
    lint = subprocess.run([python, "-m", "ruff", "check", "."]).returncode
    say(f"pytest, {'with' if cuda else 'without'} the tests that need a CUDA device")
    return subprocess.run([python, "-m", "pytest", "-m", marks, *arguments]).returncode or lint


def main() -> int:
    arguments = sys.argv[1:]
    options, rest = parse(arguments)
    os.chdir(ROOT)
    venv, build, asked = Path(options.venv), options.torch, False
    if build == "auto":
        build, reason = build_for(nvidia_driver(), sys.platform)
        say(f"--torch auto: {build} ({reason}).")
    if not is_complete(venv, build, options.test):
        if build is None:
            build = build_of(venv)
        if build is None and not arguments and sys.stdin.isatty():
            build, asked = ask_build(), True
        if build is None:
            build, reason = build_for(nvidia_driver(), sys.platform)
            say(f"PyTorch build: {build} ({reason}).")
        install(venv, build, options.test)
        say(f"The environment {venv} is complete: torch {read_stamp(venv)['torch']}.")
    elif not options.test:
        version = read_stamp(venv)["torch"]
        say(f"The environment {venv} is complete: torch {version}. --torch NAME changes the build.")
    if asked and WINDOWS:
        input("Enter closes this window. ")
    return run_tests(venv, rest) if options.test else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"Set-up stopped: {error}")
    except (KeyboardInterrupt, EOFError):
        sys.exit(f"\nSet-up stopped; {SETUP} goes on from here when run again.")
