#!/usr/bin/env python3
"""Measure this project on one card within a number of seconds, the most valuable questions first.

  python benchmarks/card.py                                    nine minutes, results in card-results/
  python benchmarks/card.py --images PHOTOGRAPHS               train on photographs, not on drawings
  python benchmarks/card.py --seconds 130 --only tests where   some cases, in this order
  python benchmarks/card.py --seconds 300 --small              small sizes, to try the program

A case that fails or hangs is ended and named, and the next one starts. After each case --out is up to date:
results.json has all figures. benchmarks/README.md describes files, cases and verdicts.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.on_card import result  # noqa: E402
from benchmarks.on_card.result import Found  # noqa: E402
from vae.images.folder import list_images  # noqa: E402
from vae.system.files import claim_folder, replace_text, write_json  # noqa: E402
from vae.system.script import run_script  # noqa: E402

PYTHON = sys.executable
FILES = ("results.json", "summary.txt", "logs.txt", "samples.jpg", "trace.json.gz")
STOPPED = "stopped: --out has the results of the cases before"  # after Ctrl-C or SIGTERM
KILL_SECONDS = 3.0  # from SIGTERM to SIGKILL
LOG_BYTES = 40_000  # of each case
SUMMARY_CHARACTERS = 9_400
RTX_5090_GIB = 30.1  # that a run may use: docs/results.md
DRAWINGS, IMAGES = 24, 320  # an epoch of more than nine steps of 32, the largest batch of a profile here
# A kernel that fails is an error and not replaced
TRAINER = """--output_dir {folder}/run --upscale --perceptual_net random --mixed_precision --kernels triton
--num_epochs 1000 --checkpoint_freq 1000 --val_freq 1000 """
COMPARISON = "--rounds 3 --out {folder}/result.json --cases "
SMALL = "--image_size 64 --batch_size 2 --channels 32 64 --layers_per_block 1 --norm_groups 8"
PROBE = """
import json, torch
if not torch.cuda.is_available():
    raise SystemExit("PyTorch finds no CUDA device")
computes = torch.arange(5.0, device="cuda").square().sum().item() == 30
free_gib = torch.cuda.mem_get_info()[0] / 2**30
print(json.dumps({"card": torch.cuda.get_device_name(), "free_gib": free_gib, "computes": computes}))
"""


@dataclass(frozen=True)
class Case:
    """A command, and a function of its folder and output that returns line, verdict and figures."""

    name: str
    question: str
    words: list[str]  # with {folder} and {seconds}
    limit: float  # seconds
    least: float  # seconds that must be left to start it
    read: Callable[[Path, str], Found] = result.read_result
    codes: tuple[int, ...] = (0,)  # exit codes with results


def read_options(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything; default: 540")
    parser.add_argument("--out", type=Path, default=Path("card-results"), metavar="FOLDER")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="photographs; default: drawn images")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help="only these cases, in this order; they share all the time"
    )
    parser.add_argument("--small", action="store_true", help="small networks and images, to try the program")
    options = parser.parse_args(words)
    if options.out.is_file():
        parser.error(f"--out {options.out} is a file: give a folder")
    if options.images and not options.images.is_dir():
        parser.error(f"--images {options.images} is not a folder")
    return options


def build_cases(machine: Found, images: Path, small: bool) -> list[Case]:
    """All cases, the most valuable first."""
    # on a larger card, as much memory as an RTX 5090 has
    margin = f"--vram_margin {min(0.98, RTX_5090_GIB / machine['free_gib']):.4f}"
    steps = f"--max_steps {4 if small else 9} --val_split 0 --save_samples_freq 0 --log_freq 1"
    learn = "--val_split 0.2 --save_samples_freq 100 "
    learn += "--max_steps 32 --log_freq 2" if small else "--max_steps 200 --image_size 256 --batch_size 8"

    def own(name: str, question: str, limit: float, least: float) -> Case:
        command = [PYTHON, "-m", f"benchmarks.on_card.{name}", *["--small"] * small]
        command += ["--out", "{folder}/result.json", "--seconds", "{seconds}"]
        return Case(name, question, command, limit, least)

    def compare(name: str, question: str, limit: float, least: float, flags: str) -> Case:
        command = [PYTHON, "benchmarks/run.py", *shlex.split(COMPARISON + flags), *["--small"] * small]
        return Case(name, question, command, limit, least, result.read_comparison)

    def train(name: str, question: str, limit: float, least: float, flags: str) -> Case:
        words = [PYTHON, "train_vae.py", "--data_path", str(images), *shlex.split(TRAINER + flags)]
        words += shlex.split(SMALL) * small
        read = result.read_learning if name == "learns" else result.read_profile
        return Case(name, question, words, limit, least, read)

    fits = "Does the profile reserve the predicted memory, and how fast is it?"
    tests = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider", *card_tests()]
    found = [
        own("facts", "Which card and versions, and what does the card reach?", 40, 5),
        own("kernels", "Is each Triton kernel right, in each dtype?", 90, 20),
        own("steps", "Are losses and gradients those of a CPU in fp64?", 90, 20),
        train("standard", fits, 75, 30, f"--profile standard {steps} {margin}"),
        train("learns", "Do 200 steps learn?", 75, 30, learn),
        compare("speed", "How fast beside diffusers?", 90, 30, "2 --no-compile"),
        own("where", "Where does the time of a step go?", 60, 20),
        compare("compiled", "How fast, both compiled?", 130, 60, "2 --compile --minutes 1.5"),
        train("ultra", fits, 75, 40, f"--profile ultra {steps} {margin}"),
        train("small", fits, 60, 30, f"--profile small {steps} {margin}"),
        Case("tests", "Do the tests pass that need a card?", tests, 90, 30, result.read_tests, (0, 1)),
        compare("parts", "How fast at 512 px, and which part is slow?", 90, 30, "1,7,8,9 --no-compile"),
    ]
    if machine["free_gib"] > 1.1 * RTX_5090_GIB:
        found.append(train("whole-card", fits, 60, 30, f"--profile standard {steps}"))
    return found


def card_tests() -> list[str]:
    """The files with tests for a card: to collect all files takes longer than those tests."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in path.read_text("utf-8")]
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def prepare_images(options: argparse.Namespace, folder: Path) -> None:
    """Fill the folder with copies of the images, so that no epoch ends within the steps of a profile."""
    source = options.images or folder.with_name("drawings")
    if not options.images:
        words = [PYTHON, "prepare_data.py", "--mode", "demo", "--output_dir", str(source), "--count"]
        words += [str(DRAWINGS), "--target_size", "96" if options.small else "512"]
        subprocess.run(words, cwd=ROOT, check=True)
    paths = [source / name for name in list_images(source, flag="--images")]
    folder.mkdir()
    for number in range(IMAGES):
        path = paths[number % len(paths)]
        shutil.copy(path, folder / f"{number:04d}{path.suffix}")


def run(case: Case, folder: Path, seconds: float) -> Found:
    """Run a case for at most `seconds`, and read what it leaves."""
    folder.mkdir()
    values = {"{folder}": str(folder), "{seconds}": f"{max(1.0, seconds - 2):.0f}"}
    words = [re.sub("{folder}|{seconds}", lambda match: values[match[0]], word) for word in case.words]
    began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    facts = {"question": case.question, "seconds": time.monotonic() - began, "command": shlex.join(words)}
    return judge(case, folder, code) | facts


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    if os.name == "nt":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True)
        process.wait()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(KILL_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def judge(case: Case, folder: Path, code: int | None) -> Found:
    """Line, verdict and figures of a case with this exit code; None: it was ended at its limit."""
    printed = (folder / "log.txt").read_text("utf-8", "replace")
    try:
        found = case.read(folder, printed)
    except (ValueError, LookupError, TypeError, OSError) as error:  # it wrote or printed something else
        found = {"line": f"{type(error).__name__}: {error}", "verdict": "FAILED"}
    if code is not None and code not in case.codes:
        found["verdict"] = "FAILED"
    if found["verdict"] == "FAILED":
        found["line"] = f"exit code {code}: {last_line(printed)} | {found['line']}"
    if code is None and "limit" not in found["verdict"]:
        found["verdict"] += ", ended at its limit"
    return found


def last_line(text: str) -> str:
    """The last line that is not empty, at most 300 characters."""
    return (text.strip() or "it printed nothing").splitlines()[-1].strip()[:300]


def keep(case: Case, folder: Path, out: Path) -> None:
    """Copy the end of the log, the last grid of samples and the trace; then delete the folder of the case."""
    with (out / "logs.txt").open("ab") as logs:
        logs.write(f"\n######## {case.name}\n".encode() + (folder / "log.txt").read_bytes()[-LOG_BYTES:])
    if grids := sorted(folder.glob("run/samples/*.png"), key=lambda path: path.stat().st_mtime):
        with Image.open(grids[-1]) as image:
            image.convert("RGB").save(out / "samples.jpg", quality=88)
    if (folder / "trace.json.gz").exists():
        shutil.copy(folder / "trace.json.gz", out)
    shutil.rmtree(folder, ignore_errors=True)


def summary(results: dict[str, Found], head: str) -> str:
    """A block for each case, in at most SUMMARY_CHARACTERS: long lines are cut before cases are."""
    for width in (2_500, 1_200, 800, 500, 300, 150):
        text = head
        for name, found in results.items():
            text += f"\n{name} [{found['verdict']}] {found['seconds']:.0f} s: {found['line'][:width]}"
        if len(text) <= SUMMARY_CHARACTERS:
            break
    return text[:SUMMARY_CHARACTERS]


def choose(cases: list[Case], only: list[str] | None) -> list[Case]:
    """The cases of --only, in its order."""
    by_name = {case.name: case for case in cases}
    if unknown := [name for name in only or [] if name not in by_name]:
        sys.exit(f"--only {unknown[0]}: the cases here are {', '.join(by_name)}")
    return [by_name[name] for name in only or by_name]


def run_all(options: argparse.Namespace, scratch: Path) -> int:
    """Run the cases until the budget is used; returns the exit code."""
    began = time.monotonic()
    done = subprocess.run([PYTHON, "-c", PROBE], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{last_line(done.stderr)}: see python check_compatibility.py")
    machine = json.loads(done.stdout)
    cases = choose(build_cases(machine, scratch / "images", options.small), options.only)
    prepare_images(options, scratch / "images")
    head = f"{machine['card']}, {time.strftime('%Y-%m-%d')}" + ", small" * options.small
    head += "" if machine["computes"] else "; THIS DEVICE COMPUTES NOTHING"
    results: dict[str, Found] = {}
    for case in cases:
        left = options.seconds - (time.monotonic() - began) - 2 * KILL_SECONDS
        if left < case.least:
            results[case.name] = {"line": case.question, "verdict": "not reached", "seconds": 0.0}
        else:
            later = sum(one.least for one in cases[cases.index(case) + 1 :])
            most = max(case.limit, left - later) if options.only else case.limit
            found = run(case, scratch / case.name, min(most, left))
            if not machine["computes"]:
                found["verdict"] = re.sub("^(ok|WRONG)", "no arithmetic", found["verdict"])
            results[case.name] = found
            keep(case, scratch / case.name, options.out)
        write_json(options.out / "results.json", {**machine, "about": head, "cases": results}, indent=1)
        used = f"{head}; {time.monotonic() - began:.0f} of {options.seconds:.0f} s used"
        replace_text(options.out / "summary.txt", [summary(results, used) + "\n"])
        print(f"{time.monotonic() - began:.0f} s: {case.name} [{results[case.name]['verdict']}]", flush=True)
    print(summary(results, used), flush=True)
    return int(any(found["verdict"].startswith(("WRONG", "FAILED")) for found in results.values()))


def main(words: list[str]) -> int:
    """Delete the results of an earlier run, then run the cases."""
    options = read_options(words)
    os.environ["PYTHONUNBUFFERED"] = "1"
    with tempfile.TemporaryDirectory(prefix="card-", ignore_cleanup_errors=True) as scratch:
        claim_folder(options.out, "card", "--out")
        for name in FILES:
            (options.out / name).unlink(missing_ok=True)
        return run_all(options, Path(scratch))


if __name__ == "__main__":
    run_script("card.py", main, STOPPED)
