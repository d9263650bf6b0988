"""A search of tune_vae.py that is killed twice and joined by a second process: no trial is lost or doubled.

python benchmarks/tune_kills.py --config base.json --output_dir DIR --trials 24
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 1.0


def start(given: argparse.Namespace, name: str) -> subprocess.Popen[bytes]:
    """Start or join the search; its output goes to DIR_NAME.txt."""
    words = [sys.executable, str(ROOT / "tune_vae.py"), "--config", given.config, "--space", given.space]
    words += ["--output_dir", given.output_dir, "--trials", str(given.trials)]
    with Path(f"{given.output_dir}_{name}.txt").open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def lines(given: argparse.Namespace) -> list[dict]:
    """The lines of trials.jsonl so far."""
    path = Path(given.output_dir, "trials.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(given: argparse.Namespace, finished: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until so many trials have ended, and one more has begun to train."""
    while process.poll() is None:
        count = sum(line["state"] != "running" for line in lines(given))
        started = list(Path(given.output_dir).glob(f"trials/{count:04d}/run/metrics.jsonl"))
        if count >= finished and started:
            return
        time.sleep(POLL_SECONDS)


def kill(process: subprocess.Popen[bytes], given: argparse.Namespace) -> None:
    """kill -9."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    print(f"killed after {len(lines(given))} trials", flush=True)


def main() -> None:
    """Search, kill, join, kill, and print what trials.jsonl contains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--space", default="quick")
    parser.add_argument("--trials", type=int, default=24)
    given = parser.parse_args()
    began = time.monotonic()
    one = start(given, "first")
    wait_for(given, given.trials // 6, one)
    kill(one, given)
    two, joined = start(given, "second"), start(given, "joined")
    wait_for(given, given.trials // 2, two)
    kill(two, given)
    three = start(given, "third")
    codes = [process.wait() for process in (three, joined)]
    found = lines(given)
    states = [line["state"] for line in found]
    print(f"exit codes {codes}, {(time.monotonic() - began) / 60:.1f} minutes")
    once = [line["trial"] for line in found] == list(range(given.trials))
    print(f"numbers 0 to {given.trials - 1}, each once: {once}")
    print({state: states.count(state) for state in sorted(set(states))})


if __name__ == "__main__":
    main()
