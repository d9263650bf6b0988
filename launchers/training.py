"""Starts a training run from a launcher's arguments, for train_rtx5090.sh and train_rtx5090.bat.

Needs only the standard library. Contains no settings: recipes: vae/config, card settings: vae/system/gpus.py.
"""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from launchers.command import Stopped, exit_code_of, run_command, stop_on_signals
from launchers.menu import ask_job, contains_files
from launchers.stamp import ROOT, why_incomplete
from vae.config.flags import parse_flags
from vae.config.options import Config
from vae.system import console
from vae.system.errors import EXIT_NON_FINITE, EXIT_WORKER

WINDOWS = os.name == "nt"
LAUNCHER = "train_rtx5090.bat" if WINDOWS else "./train_rtx5090.sh"
OUTPUT_DIR = "./outputs/rtx5090_training"
DEMO_OUTPUT_DIR = "./outputs/demo"
DEMO_DATA = "./data/demo"
DRAWING = Path("data/.drawing_demo")  # exists until all of them are drawn
RESTARTS = 2
# Exit codes of runs that are started again. One that has diverged goes on with half the learning rate.
ENDS = {EXIT_NON_FINITE: "training has diverged", EXIT_WORKER: "a decoding process has failed"}

HELP = f"""usage: {LAUNCHER} [--demo] [any flag of train_vae.py]

Starts a training run. If the Python environment .venv is missing or the requirements have changed, the
launcher runs the set-up first. Paths are relative to the folder of this script.

  (no arguments)   in a terminal: asks for a job or a profile, and Enter selects the profile for this
                   machine; otherwise: --profile standard
  --profile NAME   trains with this profile
  --demo           a small real run: draws images if ./data/train contains none, and trains with the demo
                   profile for a few minutes into the first unused folder of {DEMO_OUTPUT_DIR},
                   {DEMO_OUTPUT_DIR}-2, ...; --num_epochs sets another length
  --help           this text; python train_vae.py --help lists the flags of the trainer

All other flags are passed to the trainer. Without --profile, --config or --resume_from the profile is
standard. Without --output_dir the run is written to {OUTPUT_DIR}.
If training diverges or a decoding process fails, training is started again from its last good checkpoint,
{RESTARTS} times at most.
The exit code is the trainer's. Set VAE_PYTHON to use another Python instead of the one in .venv.
"""


def gives(arguments: list[str], *flags: str) -> bool:
    """Whether the arguments contain one of the flags, as `--flag value` or `--flag=value`."""
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def is_unused(folder: str) -> bool:
    """Whether a folder does not exist or is empty."""
    return not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder))


def demo_output_dir(resumes: bool) -> str:
    """The first unused demo folder; to resume, the last used one."""
    number, last = 1, DEMO_OUTPUT_DIR
    while not is_unused(folder := DEMO_OUTPUT_DIR if number == 1 else f"{DEMO_OUTPUT_DIR}-{number}"):
        number, last = number + 1, folder
    return last if resumes else folder


def trainer_command(arguments: list[str], has_training_data: bool) -> list[str]:
    """The command for train_vae.py, without Python, for the arguments of a launcher."""
    demo = "--demo" in arguments
    flags = [argument for argument in arguments if argument != "--demo"]
    command = ["train_vae.py"]
    if demo:
        if gives(flags, "--profile"):
            raise ValueError("--demo has its own profile: remove --demo or --profile")
        command += ["--profile", "demo"]
        if not gives(flags, "--output_dir"):
            command += ["--output_dir", demo_output_dir(gives(flags, "--resume_from"))]
        if not gives(flags, "--data_path"):
            command += ["--data_path", "./data/train" if has_training_data else DEMO_DATA]
        return command + flags
    if not gives(flags, "--profile", "--config", "--resume_from"):
        command += ["--profile", "standard"]
    if not gives(flags, "--output_dir") and not trainer_finds_folder(flags):
        command += ["--output_dir", OUTPUT_DIR]
    return command + flags


def trainer_finds_folder(flags: list[str]) -> bool:
    """Whether the trainer takes the output folder from a JSON file or from a checkpoint's path."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    resumed = words[words.index("--resume_from") + 1 :][:1] if "--resume_from" in words else []
    return "--config" in words or resumed not in ([], ["latest"])


def draw_demo_data(python: str) -> int:
    """Draw the demo's images that are missing; returns the exit code."""
    DRAWING.parent.mkdir(exist_ok=True)
    DRAWING.touch()
    code = run_command([python, "prepare_data.py", "--mode", "demo", "--output_dir", DEMO_DATA])
    if code == 0:
        DRAWING.unlink()
    return code


def complete_environment() -> int:
    """Run the set-up if the environment does not fit; returns its exit code."""
    reason = why_incomplete(Path(".venv"))
    if reason is None:
        return 0
    console.info(f"Completing the environment first: {reason}.")
    setup = ["cmd", "/c", r".\setup_windows.bat"] if WINDOWS else ["sh", "./setup.sh"]
    return run_command([*setup, "--yes"])


def given_options(command: list[str]) -> dict[str, Any]:
    """The options of a command of the trainer, with those of --config."""
    return parse_flags([*itertools.dropwhile(lambda word: not word.startswith("-"), command)])


def resumed(command: list[str]) -> list[str]:
    """The command that goes on with the run that this one has begun or continued.

    A stage that began from a checkpoint's path may have no checkpoint of its own yet: --new_stage has no
    effect in one that has.
    """
    given = given_options(command)
    checkpoint = given.get("resume_from", "latest")
    begins_stage = checkpoint != "latest"
    own = (os.path.dirname(checkpoint) or ".") if begins_stage else Config().run.output_dir
    folder = given.get("output_dir", own)
    return [*command, "--output_dir", folder, "--resume_from", "latest", *["--new_stage"] * begins_stage]


def run_trainer(command: list[str]) -> int:
    """Run the trainer, and again after one of ENDS; returns its exit code."""
    sys.stdout.flush()
    for restart in range(RESTARTS + 1):
        code = run_with_signals(command)
        if code not in ENDS or restart == RESTARTS:
            break
        command = command if restart else resumed(command)
        # A run that has diverged has stored with which checkpoint it continues, if there is one.
        stored = Path(given_options(command)["output_dir"], "diverged.json")
        if code == EXIT_NON_FINITE and not stored.is_file():
            break
        console.info(f"{LAUNCHER}: {ENDS[code]}; restart {restart + 1} of {RESTARTS}")
    return code


def run_with_signals(command: list[str]) -> int:
    """Run a command, which gets the signals to this process; returns its exit code.

    After a signal that stops it, this process ends with it.
    """
    process = subprocess.Popen(command)
    stops: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number != getattr(signal, "SIGUSR1", None):  # which only saves a checkpoint
            stops.append(number)
            if process.returncode is not None:
                raise Stopped(number)
        # Ctrl-C reaches both processes: on Windows, and where this one is in the foreground of a terminal
        if not WINDOWS and (number != signal.SIGINT or not is_in_foreground()):
            process.send_signal(number)

    for number in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")):
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    code = process.wait()
    if code < 0:  # this process ends as the trainer did
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if stops:
        sys.exit(code)
    return code


def is_in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and to those that it starts."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # there is no terminal
        return False


def main() -> int:
    """Run the trainer with the launcher's arguments; returns the exit code."""
    arguments = sys.argv[1:]
    if gives(arguments, "--help", "-h"):
        console.info(HELP.rstrip("\n"))
        return 0
    os.chdir(ROOT)
    chosen = os.environ.get("VAE_PYTHON")
    if not chosen and (code := complete_environment()) != 0:
        return code
    python = chosen or sys.executable
    if not arguments and sys.stdin.isatty():
        asked = ask_job(python)
        if asked is None:
            return 0
        arguments = asked
    command = trainer_command(arguments, contains_files("./data/train"))
    draws = "--demo" in arguments and not gives(arguments, "--data_path") and DEMO_DATA in command
    if draws and (DRAWING.exists() or not contains_files(DEMO_DATA)):
        code = draw_demo_data(python)
        if code != 0:
            return code
    return run_trainer([python, *command])


if __name__ == "__main__":
    stop_on_signals()
    try:
        with console.flushed_output():
            sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"{LAUNCHER}: {error}")
    except (KeyboardInterrupt, EOFError) as error:
        sys.exit(exit_code_of(error))
