"""Turns a launcher's choices into the trainer's command: the body of train_rtx5090.sh and train_rtx5090.bat.

Holds no numbers of its own: recipes live in vae/config, card settings in vae/gpus.
Needs only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launchers.stamp import ROOT, has_requirements
from vae.config.errors import EXIT_INTERRUPTED
from vae.console import flushed_output

WINDOWS = os.name == "nt"
LAUNCHER = "train_rtx5090.bat" if WINDOWS else "./train_rtx5090.sh"
OUTPUT_DIR = "./outputs/rtx5090_training"
DEMO_OUTPUT_DIR = "./outputs/demo"
DEMO_DATA = "./data/demo"
MENU = {"1": "ultra", "2": "high", "3": "standard", "4": "fast"}
RECOMMENDED = "3"

HELP = f"""usage: {LAUNCHER} [--demo] [any flag of train_vae.py]

Starts a training run. The environment is made first if it is missing.
Paths are relative to the folder of this script.

  (nothing)        in a terminal: asks for a profile; elsewhere: --profile standard
  --profile NAME   trains with that profile
  --demo           a small real run from nothing: draws images if ./data/train holds none, trains
                   with the demo profile into the next free folder {DEMO_OUTPUT_DIR}, {DEMO_OUTPUT_DIR}-2, ...
  --help           this text; python train_vae.py --help lists the trainer's flags

Every other flag goes to the trainer as it is. Without --profile, --config or --resume_from the profile
is standard; without --output_dir the run goes to {OUTPUT_DIR}.
The exit code is the trainer's. VAE_PYTHON names another Python than the one in .venv; otherwise .venv is
completed first where the requirements have changed since it was made.
"""


def gives(arguments: list[str], *flags: str) -> bool:
    """Whether one of the flags is among the arguments, as `--flag value` or `--flag=value`."""
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def holds_files(folder: str) -> bool:
    return any(path.is_file() for path in Path(folder).rglob("*"))


def is_free(folder: str) -> bool:
    return not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder))


def demo_output_dir(resumes: bool) -> str:
    """The first free demo folder; to resume, the last one in use."""
    number, last = 1, DEMO_OUTPUT_DIR
    while not is_free(folder := DEMO_OUTPUT_DIR if number == 1 else f"{DEMO_OUTPUT_DIR}-{number}"):
        number, last = number + 1, folder
    return last if resumes else folder


def trainer_command(arguments: list[str], has_training_data: bool) -> list[str]:
    """Arguments of train_vae.py for the arguments of a launcher."""
    demo = "--demo" in arguments
    flags = [argument for argument in arguments if argument != "--demo"]
    command = ["train_vae.py"]
    if demo:
        if gives(flags, "--profile"):
            raise ValueError("--demo has a profile of its own: leave out --demo or --profile")
        command += ["--profile", "demo"]
        if not gives(flags, "--output_dir"):
            command += ["--output_dir", demo_output_dir(gives(flags, "--resume_from"))]
        if not gives(flags, "--data_path"):
            command += ["--data_path", "./data/train" if has_training_data else DEMO_DATA]
        return command + flags
    if not gives(flags, "--profile", "--config", "--resume_from"):
        command += ["--profile", "standard"]
    if not gives(flags, "--output_dir") and not names_its_folder(flags):
        command += ["--output_dir", OUTPUT_DIR]
    return command + flags


def names_its_folder(flags: list[str]) -> bool:
    """Whether the trainer finds the output folder by itself: in a JSON file, or beside a checkpoint."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    resumed = words[words.index("--resume_from") + 1 :][:1] if "--resume_from" in words else []
    return "--config" in words or resumed not in ([], ["latest"])


def ask_profile(python: str) -> list[str]:
    """The menu: flags for the profile that was chosen."""
    command = [python, "train_vae.py", "--list_profiles"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8")
    if listed.returncode != 0:
        reason = (listed.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"train_vae.py --list_profiles failed: {reason}")
    lines = {line.split()[0]: line.strip() for line in listed.stdout.splitlines() if line.strip()}
    print("Which profile?")
    for number, name in MENU.items():
        print(f"  {number}  {lines.get(name, name)}{'  <- Enter' if number == RECOMMENDED else ''}")
    print("  5  custom: image size and batch size are asked")
    while (answer := input("Choice: ").strip() or RECOMMENDED) not in (*MENU, "5"):
        print(f"{answer!r} is none of 1, 2, 3, 4, 5.")
    if answer in MENU:
        return ["--profile", MENU[answer]]
    sizes = ["--image_size", ask_number("Image size in pixels: "), "--batch_size", ask_number("Batch size: ")]
    return ["--profile", MENU[RECOMMENDED], *sizes]


def ask_number(question: str) -> str:
    while not ((answer := input(question).strip()).isdecimal() and int(answer) > 0):
        print(f"{answer!r} is not a whole number above 0.")
    return answer


def draw_demo_data(python: str) -> int:
    """Draws the demo's images; a run that does not finish leaves none, lest a demo trains on a few."""
    drawing = subprocess.Popen([python, "prepare_data.py", "--mode", "demo", "--output_dir", DEMO_DATA])
    try:
        return drawing.wait()
    finally:
        if drawing.poll() is None:
            drawing.terminate()
            drawing.wait()
        if drawing.returncode != 0:
            shutil.rmtree(DEMO_DATA, ignore_errors=True)


def leave_tidily_on_signals() -> None:
    """Closing the terminal or SIGTERM while images are drawn ends in draw_demo_data's clean-up."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        # What nohup ignores stays ignored, also for the trainer that takes this process over.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def complete_environment() -> int:
    """Installs what the requirements ask for since the environment was made; the set-up's exit code."""
    if has_requirements(Path(".venv")):
        return 0
    print("The requirements have changed: the environment is completed first.", flush=True)
    setup = ["cmd", "/c", "setup_windows.bat"] if WINDOWS else ["./setup.sh"]
    return subprocess.run([*setup, "--yes"]).returncode


def become(command: list[str]) -> int:
    """Hands over to the command: signals reach it, and its exit code is ours."""
    sys.stdout.flush()
    if not WINDOWS:
        os.execvp(command[0], command)
    # Windows cannot replace a process. Ctrl-C reaches both; the trainer is the one to answer it.
    signal.signal(signal.SIGINT, lambda *_: None)
    return subprocess.run(command).returncode


def main() -> int:
    arguments = sys.argv[1:]
    if gives(arguments, "--help", "-h"):
        print(HELP, end="")
        return 0
    os.chdir(ROOT)
    chosen = os.environ.get("VAE_PYTHON")
    if not chosen and (code := complete_environment()) != 0:
        return code
    python = chosen or sys.executable
    if not arguments and sys.stdin.isatty():
        arguments = ask_profile(python)
    command = trainer_command(arguments, holds_files("./data/train"))
    draws = "--demo" in arguments and not gives(arguments, "--data_path") and DEMO_DATA in command
    if draws and not holds_files(DEMO_DATA):
        code = draw_demo_data(python)
        if code != 0:
            return code
    return become([python, *command])


if __name__ == "__main__":
    leave_tidily_on_signals()
    try:
        with flushed_output():
            sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"{LAUNCHER}: {error}")
    except (KeyboardInterrupt, EOFError):
        sys.exit(EXIT_INTERRUPTED)
