"""Makes, completes and repairs the Python environment: the body of setup.sh and setup_windows.bat.

Needs only the standard library.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from launchers.stamp import ROOT, build_of, read_stamp
from launchers.torch_builds import ENDED, Machine, build_for, ended, misfit, nearest, title
from launchers.torch_index import PYTORCH_INDEX
from launchers.virtual_environment import install, is_complete, python_of, runs, say
from vae.checks import nvidia_smi
from vae.checks.cuda_builds import BUILDS
from vae.config.errors import EXIT_INTERRUPTED
from vae.console import flushed_output
from vae.host import usable_cores
from vae.script import SETUP

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
CHOICES = ("auto", "cu126", "cu128", "cu130", "cu132", "rocm", "cpu", "index")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and with --test what is left for pytest."""
    parser = argparse.ArgumentParser(
        prog=SETUP,
        allow_abbrev=False,
        description="Makes the Python environment, or completes it; a complete one is left as it is. "
        "Without flags in a terminal it asks which PyTorch build to install.",
        epilog=f"VAE_TORCH_INDEX names a mirror of {PYTORCH_INDEX}.",
    )
    parser.add_argument(
        "--torch",
        metavar="NAME",
        help=f"build of PyTorch: {', '.join(CHOICES)}. auto: by the NVIDIA driver and card, cpu without one; "
        "index: whatever the general Python index gives. Where the chosen index cannot be reached the "
        "general one serves. Default: what the environment has, else auto",
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
    if known.torch in ENDED:
        parser.error(f"--torch {known.torch}: {ended(known.torch, read_machine())}")
    if known.torch not in (None, *CHOICES):
        parser.error(f"--torch {known.torch} is none of {', '.join(CHOICES)}")
    if rest and not known.test:
        parser.error(f"unknown: {' '.join(rest)} (see --help)")
    return known, rest


def read_machine() -> Machine | None:
    """Driver and cards; None where nvidia-smi is missing, fails or hangs, the last with a line."""
    smi = nvidia_smi.ask(nvidia_smi.PATIENT_SECONDS)
    if smi.status == "hanging":
        say(f"nvidia-smi gives {smi.message}: going on as on a machine without an NVIDIA card.")
    return Machine.of(smi)


def menu_line(number: str) -> str:
    """One line of the menu."""
    build = MENU[number]
    if build in ENDED:
        return f"  {number}  {ENDED[build][0]} (ended)"
    remark = f" (driver {BUILDS[build].driver} or newer)" if build in BUILDS else ""
    return f"  {number}  {title(build)}{' (RTX 5090; driver 570 or newer)' if build == 'cu128' else remark}"


def ask_build(machine: Machine | None) -> str:
    """The menu. A choice that is no more says so and offers the nearest."""
    default, reason = build_for(machine, sys.platform)
    say("Which build of PyTorch?")
    for number in MENU:
        say(menu_line(number))
    say(f"  Enter takes {title(default)}: {reason}")
    while True:
        answer = input("Choice: ").strip()
        build = MENU.get(answer) if answer else default
        if build is None:
            say(f"{answer!r} is none of {', '.join(MENU)}.")
        elif build in ENDED:
            default = nearest(machine)
            say(f"{ended(build, machine)}. Enter takes it; or another number.")
        else:
            return build


def choose_build(options: argparse.Namespace, interactive: bool, venv: Path) -> str:
    """The build to install: asked for, present, chosen in the menu, or the one that suits the machine."""
    build = options.torch or build_of(venv)
    if not (build in (None, "auto") or (options.torch and build in BUILDS)):
        return build
    machine = read_machine()
    if build is None and interactive:
        build = ask_build(machine)
    if build in (None, "auto"):
        build, reason = build_for(machine, sys.platform)
        say(f"PyTorch build: {build} ({reason}).")
    warning = misfit(build, machine)
    if warning:
        say(f"Note: {warning}.")
    return build


def check(venv: Path) -> None:
    """The quick check of the finished environment; what it finds is shown and changes nothing here."""
    code = subprocess.run([python_of(venv), "check_compatibility.py", "--quick"]).returncode
    if code != 0:
        say("The environment stands; the check found what is said above: python check_compatibility.py")


def run_tests(venv: Path, arguments: list[str]) -> int:
    """Exit code of the tests, or of ruff where the tests pass."""
    python = str(python_of(venv))
    cuda = runs(venv, "import sys, torch; sys.exit(not torch.cuda.is_available())")
    # An explicit -m takes the place of the one in pyproject.toml, which leaves out gpu and slow. Tests on a
    # card share its memory, so they take turns; the others run one beside another, a core each.
    marks, processes = ("", 0) if cuda else ("not gpu", usable_cores())
    say("ruff check .")
    lint = subprocess.run([python, "-m", "ruff", "check", "."]).returncode
    say(f"pytest, {'with' if cuda else 'without'} the tests that need a CUDA device")
    command = [python, "-m", "pytest", "-n", str(processes), "-m", marks, *arguments]
    return subprocess.run(command).returncode or lint


def main() -> int:
    """The set-up from arguments to exit code."""
    arguments = sys.argv[1:]
    options, rest = parse(arguments)
    os.chdir(ROOT)
    venv = Path(options.venv)
    interactive = not arguments and sys.stdin.isatty()
    build = choose_build(options, interactive, venv) if options.torch else None
    complete = is_complete(venv, build, options.test)
    if not complete:
        install(venv, build or choose_build(options, interactive, venv), options.test)
    if options.test:
        return run_tests(venv, rest)
    version = read_stamp(venv)["torch"]
    say(f"The environment {venv} is complete: torch {version}. --torch NAME changes the build.")
    if not complete:
        check(venv)
    return 0


if __name__ == "__main__":
    try:
        with flushed_output():
            sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"Set-up stopped: {error}")
    except (KeyboardInterrupt, EOFError):
        print(f"\nSet-up stopped; {SETUP} goes on from here when run again.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
