#!/usr/bin/env python3
"""The first hour on a card: run what needs one, and write what it says as JSON and as tables.

  python benchmarks/first_hour.py --out FOLDER                        all parts, at most eight minutes each
  python benchmarks/first_hour.py --out FOLDER --parts profiles speed only these
  python benchmarks/first_hour.py --out FOLDER --quick                small sizes, also without a card

Each case is a command of this project, in a process of its own. The file of a part is written after each
case. The same command continues after an interruption, and runs again what failed or was not reached.
benchmarks/README.md describes the parts.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison.tables import markdown  # noqa: E402
from benchmarks.first_hour_parts import NO_ARITHMETIC, PARTS, PYTHON, Case, Machine, folder_name  # noqa: E402
from vae.system.files import write_json  # noqa: E402

DONE, FAILED, NOT_REACHED = "done", "failed", "not reached"
SAME = ("card", "versions", "quick")  # facts that all results of a folder must share
STOP_SECONDS = 60  # for the trainer's checkpoint after SIGTERM
DESCRIBE = """
import json
import torch
from benchmarks.comparison.report import describe_machine
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
total = torch.arange(5.0, device=device).square().sum().item()
print(json.dumps({**describe_machine(device), "computes": total == 30}))
"""


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for all results")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="NAME",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few cases, also on a CPU")
    parser.add_argument("--data_path", type=Path, metavar="DIR", help="photographs; default: drawn images")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="limit of a part: its case is ended then; default: 8"
    )
    options = parser.parse_args()
    if options.out.is_file():
        parser.error(f"--out {options.out} is a file: give a folder")
    if options.data_path and not options.data_path.is_dir():
        parser.error(f"--data_path {options.data_path} is not a folder")
    for package in ("torch", "diffusers", "lpips", "pytest"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install -r requirements-test.txt")
    return options


def main() -> int:
    """Run the parts, then write the tables."""
    options = read_options()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = describe(options)
    print(f"{facts.get('card', facts['cpu'])}, {facts['versions']}, commit {facts['commit']}", flush=True)
    machine = Machine("card" in facts, facts["computes"], options.quick, images(options))
    problems = []
    for name in PARTS:
        if name in options.parts:
            problems += run_part(options, name, machine, facts)
    text = "\n".join(tables(options.out, facts)) + "\n"
    (options.out / "measurements.md").write_text(text, encoding="utf-8")
    print(f"written: {options.out / 'measurements.md'}")
    for problem in problems:
        print(f"to fix or to run again: {problem}")
    return 1 if problems else 0


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Card, versions, date and commit; an error if the folder has results of another machine."""
    done = subprocess.run([PYTHON, "-c", DESCRIBE], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"PyTorch does not start: {last_line(done.stderr)}: see python check_compatibility.py")
    facts = {**json.loads(done.stdout.splitlines()[-1]), "quick": options.quick}
    if "card" not in facts and not options.quick:
        sys.exit(
            "PyTorch finds no CUDA device: the first hour needs a card; --quick tries the program without"
        )
    path = options.out / "machine.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in SAME:
            if before.get(name) != facts.get(name):
                what = f"{name} {before.get(name)}, not {facts.get(name)}"
                sys.exit(f"--out {options.out} has results with {what}: use another folder")
    write_json(path, facts, indent=1)
    return facts


def images(options: argparse.Namespace) -> Path:
    """--data_path, or images that the project draws."""
    if options.data_path:
        return options.data_path.resolve()
    folder = options.out / "demo"
    count, side = ("8", "96") if options.quick else ("256", "512")
    words = [PYTHON, "prepare_data.py", "--mode", "demo", "--output_dir", str(folder)]
    done = subprocess.run(
        [*words, "--count", count, "--target_size", side], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"prepare_data.py --mode demo: {last_line(done.stderr)}")
    return folder


def run_part(options: argparse.Namespace, name: str, machine: Machine, facts: dict[str, Any]) -> list[str]:
    """Run the cases that the part's file does not have; returns what is not done, or wrong."""
    path = options.out / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cases": {}}
    kept = {case: found for case, found in record["cases"].items() if found["status"] == DONE}
    record = {"part": name, "question": PARTS[name].__doc__, "machine": facts, "cases": kept}
    print(f"{name}: {record['question']}", flush=True)
    deadline = time.monotonic() + options.minutes * 60
    problems = []
    for case in PARTS[name](machine, options.out / name):
        if case.name not in kept:
            kept[case.name] = run_case(case, options.out / name / folder_name(case.name), deadline)
            write_json(path, record, indent=1)
        found = kept[case.name]
        verdict = found.get("result", {}).get("verdict", "ok")
        if found["status"] != DONE or verdict not in ("ok", NO_ARITHMETIC):
            detail = verdict if found["status"] == DONE else f"{found['status']} {found.get('error', '')}"
            problems.append(f"{name}, {case.name}: {detail}".rstrip())
        print(f"  {found['status']:<12}{found['seconds']:>6.1f} s  {case.name}  {brief(found)}", flush=True)
    return problems


def run_case(case: Case, folder: Path, deadline: float) -> dict[str, Any]:
    """Run a command until the deadline; its output goes to `folder`."""
    started = time.monotonic()
    if started >= deadline:
        return {"status": NOT_REACHED, "seconds": 0.0}
    folder.mkdir(parents=True, exist_ok=True)
    printed, errors = folder / "stdout.txt", folder / "stderr.txt"
    with printed.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(case.words, cwd=ROOT, stdout=out, stderr=err)
        try:
            code: int | None = process.wait(deadline - started)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
    entry = {"command": " ".join(case.words), "seconds": round(time.monotonic() - started, 1)}
    if code is None:
        return {"status": FAILED, **entry, "error": "ended at the limit of its part: --minutes"}
    if code not in case.codes:
        text = last_line(errors.read_text("utf-8", "replace")) or last_line(
            printed.read_text("utf-8", "replace")
        )
        return {"status": FAILED, **entry, "error": f"exit code {code}: {text}"}
    try:
        result = case.read(folder, printed.read_text("utf-8", "replace"))
    except (ValueError, LookupError, OSError) as error:  # the command printed something else
        return {"status": FAILED, **entry, "error": f"{type(error).__name__}: {error}"}
    return {"status": DONE, **entry, "result": result}


def stop(process: subprocess.Popen) -> None:
    """End a command that still runs; the trainer saves a checkpoint first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def brief(found: dict[str, Any]) -> str:
    """The error of a case, or its plain figures, on one line."""
    if "error" in found:
        return found["error"]
    figures = found.get("result", {})
    return ", ".join(f"{key} {value}" for key, value in figures.items() if is_plain(value) and key != "plan")


def is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict) and "\n" not in str(value)


def tables(folder: Path, facts: dict[str, Any]) -> list[str]:
    """A section for each part: its plain figures as a table, then tables and lists of single cases."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    cuda = f", CUDA {facts['cuda']}, cuDNN {facts['cudnn']}" if "card" in facts else ""
    lines = [
        f"{facts.get('card', facts['cpu'])}{cuda}, {versions}, commit {facts['commit']}, {facts['date']}."
    ]
    if not facts["computes"]:
        lines += ["", "**This device computes nothing: the figures below mean nothing.**"]
    for name in PARTS:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        part = json.loads(path.read_text(encoding="utf-8"))
        results = {case: found.get("result", {}) for case, found in part["cases"].items()}
        plain = dict.fromkeys(key for row in results.values() for key in row if is_plain(row[key]))
        rows = [
            [case, found["status"], *(results[case].get(key) for key in plain), found.get("error")]
            for case, found in part["cases"].items()
        ]
        lines += ["", f"### {part['question']}", "", *markdown(["case", "", *plain, "error"], rows)]
        for case, result in results.items():
            lines += [*detail_lines(case, result)]
    return lines


def detail_lines(case: str, result: dict[str, Any]) -> list[str]:
    """Text, lists and dicts of a result."""
    lines = []
    for key, value in result.items():
        if isinstance(value, str) and "\n" in value:
            lines += ["", f"{case}:", "", "```", value.rstrip(), "```"]
        elif isinstance(value, dict):
            lines += ["", f"{case}, {key}:", "", *markdown(list(value), [list(value.values())])]
        elif isinstance(value, list) and value:
            lines += ["", f"{case}, {key}: {'; '.join(map(str, value))}"]
    return lines


def last_line(text: str) -> str:
    """The last line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
