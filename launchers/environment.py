"""The set-up: creates the Python environment and runs the tests, for setup.sh and setup_windows.bat.

Needs only the standard library.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from launchers.command import exit_code_of, run_command, stop_on_signals
from launchers.stamp import ROOT, build_of, read_stamp
from launchers.torch_builds import ENDED, Machine, build_for, ended, misfit, nearest, title
from launchers.torch_index import PYTORCH_INDEX
from launchers.virtual_environment import install, is_complete, python_of, runs
from vae.checks.cuda_builds import BUILDS
from vae.checks.machine import query_nvidia_smi
from vae.system import console
from vae.system.host import usable_cores
from vae.system.script import SETUP

MENU = {
    "1": "cu118",
    "2": "cu121",
    "3": "cu124",
    "4": "cu128",
    "5": "cu130",
    "6": "cu132",
    "7": "rocm",
    "8": "cpu",
}
TYPES_OF_TORCH = [2, 14]  # older ones lack those of Module.to(memory_format=) and of slices of Sequential
CHOICES = ("auto", "cu126", "cu128", "cu130", "cu132", "rocm", "cpu", "index")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and with --test the remaining arguments for pytest."""
    parser = argparse.ArgumentParser(
        prog=SETUP,
        allow_abbrev=False,
        description="Creates the Python environment, or completes it; a complete one is not changed. "
        "Without flags in a terminal it asks which PyTorch build to install.",
        epilog=f"Set VAE_TORCH_INDEX to use a mirror of {PYTORCH_INDEX}.",
    )
    parser.add_argument(
        "--torch",
        metavar="NAME",
        help=f"build of PyTorch: {', '.join(CHOICES)}. auto: selected by the NVIDIA driver and card, cpu "
        "without one; index: the build from the general Python index, which is also used if the selected "
        "index cannot be reached; a version such as 2.10.0: that one from the general Python index, in an "
        "environment of its own. Default: the installed build, else auto",
    )
    parser.add_argument(
        "--venv",
        metavar="DIR",
        help="folder of the environment, relative to the folder of this script (default: .venv, or "
        ".venv-VERSION with --torch VERSION)",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="also install the test requirements, then run ruff, mypy and the tests; further arguments are "
        "passed to pytest",
    )
    parser.add_argument(
        "--locked",
        action="store_true",
        help="install exactly the versions of requirements-lock.txt, and compare the SHA-256 of each file; "
        "torch and torchvision come from the index of their build, with the hashes that it lists",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask questions")
    known, rest = parser.parse_known_args(arguments)
    if known.torch in ENDED:
        parser.error(f"--torch {known.torch}: {ended(known.torch, read_machine())}")
    is_version = re.fullmatch(r"\d+\.\d+\.\d+", known.torch or "") is not None
    if known.torch not in (None, *CHOICES) and not is_version:
        parser.error(f"--torch {known.torch} is not one of {', '.join(CHOICES)}, or a version such as 2.10.0")
    known.venv = known.venv or (f".venv-{known.torch}" if is_version else ".venv")
    if known.locked and known.test:
        parser.error("--locked has no test requirements: run --test without it, with another --venv")
    if rest and not known.test:
        parser.error(f"unknown: {' '.join(rest)} (see --help)")
    return known, rest


def read_machine() -> Machine | None:
    """Driver and cards; None if nvidia-smi is missing, fails or hangs."""
    smi = query_nvidia_smi()
    if smi.status == "hanging":
        console.info(f"nvidia-smi: {smi.message}. Continuing as on a machine without an NVIDIA card.")
    return Machine.of(smi)


def menu_line(number: str) -> str:
    """One line of the menu."""
    build = MENU[number]
    if build in ENDED:
        return f"  {number}  {ENDED[build][0]} (ended)"
    remark = f" (driver {BUILDS[build].driver} or newer)" if build in BUILDS else ""
    return f"  {number}  {title(build)}{' (RTX 5090; driver 570 or newer)' if build == 'cu128' else remark}"


def ask_build(machine: Machine | None) -> str:
    """Show the menu until an available build is chosen; for an ended build, Enter selects the nearest one."""
    default, reason = build_for(machine, sys.platform)
    console.info("Which build of PyTorch?")
    for number in MENU:
        console.info(menu_line(number))
    console.info(f"  Enter selects {title(default)}: {reason}")
    while True:
        answer = input("Choice: ").strip()
        build = MENU.get(answer) if answer else default
        if build is None:
            console.info(f"{answer!r} is not one of {', '.join(MENU)}.")
        elif build in ENDED:
            default = nearest(machine)
            console.info(f"{ended(build, machine)}. Press Enter to select it, or type another number.")
        else:
            return build


def choose_build(options: argparse.Namespace, interactive: bool, venv: Path) -> str:
    """The build to install: from --torch, the installed one, from the menu, or the best for this machine."""
    build: str | None = options.torch or build_of(venv)
    if build is not None and build != "auto" and not (options.torch and build in BUILDS):
        return build
    machine = read_machine()
    if build is None and interactive:
        build = ask_build(machine)
    if build is None or build == "auto":
        build, reason = build_for(machine, sys.platform)
        console.info(f"PyTorch build: {build} ({reason}).")
    problem = misfit(build, machine)
    if problem:
        console.warning(f"{problem}.")
    return build


def check(venv: Path) -> None:
    """Run the check in the finished environment; its result does not change the set-up's exit code."""
    if run_command([str(python_of(venv)), "check_compatibility.py"]) != 0:
        console.info("The environment is complete, but the check failed: see above for the remedies.")


def run_tests(venv: Path, arguments: list[str]) -> int:
    """The exit code of the tests; if they pass, that of ruff or mypy."""
    python = str(python_of(venv))
    console.info("ruff check .")
    lint = run_command([python, "-m", "ruff", "check", "."])
    version = read_stamp(venv)["torch"]
    types = 0
    if [int(number) for number in version.split(".")[:2]] >= TYPES_OF_TORCH:
        console.info("mypy")
        types = run_command([python, "-m", "mypy"])
    else:
        console.info(f"mypy is left out: it needs the types of torch 2.14, and this is {version}")
    cuda = runs(venv, "import sys, torch; sys.exit(not torch.cuda.is_available())")
    console.info(f"pytest, {'with' if cuda else 'without'} the tests that need a CUDA device")
    # This -m replaces the one in pyproject.toml, which excludes gpu and slow. Tests on a card share its
    # memory and therefore run in one process; without a card, one process per core runs them.
    marks, processes = ("", 0) if cuda else ("not gpu", usable_cores())
    command = [python, "-m", "pytest", "-n", str(processes), "-m", marks, *arguments]
    return run_command(command) or lint or types


def main() -> int:
    """The complete set-up; returns the exit code."""
    arguments = sys.argv[1:]
    options, rest = parse(arguments)
    os.chdir(ROOT)
    venv = Path(options.venv)
    interactive = not arguments and sys.stdin.isatty()
    build = choose_build(options, interactive, venv) if options.torch else None
    complete = is_complete(venv, build, options.test, options.locked)
    if not complete:
        install(venv, build or choose_build(options, interactive, venv), options.test, options.locked)
    if options.test:
        return run_tests(venv, rest)
    version = read_stamp(venv)["torch"]
    console.info(f"The environment {venv} is complete: torch {version}. --torch NAME changes the build.")
    if not complete:
        check(venv)
    return 0


if __name__ == "__main__":
    stop_on_signals()
    try:
        with console.flushed_output():
            sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"Set-up stopped: {error}")
    except (KeyboardInterrupt, EOFError) as error:
        console.error(f"\nSet-up stopped; run {SETUP} again to continue.")
        sys.exit(exit_code_of(error))
