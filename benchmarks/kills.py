#!/usr/bin/env python3
"""Kill training inside saves and at random; each chain of resumed commands must equal an undisturbed run.

The same command continues after an interruption: --out contains what is done.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.harness.faults import SAVE_POINTS, Fault, start_forked, wait_for  # noqa: E402
from tests.harness.image_kinds import write_noise  # noqa: E402
from tests.harness.runs import TINY  # noqa: E402
from tests.harness.training_runs import assert_same, trained_result  # noqa: E402

# 24 steps with a save after each: a chain of commands makes progress however often it is killed.
RECIPE = {"num_epochs": 4, "checkpoint_steps": 1, "keep_checkpoints": 2, "log_freq": 1, "val_freq": 4}
WRITES = 250  # of one checkpoint of this model, roughly
LONGEST_CHAIN = 12  # kills, so that also runs that end are compared
KINDS = [
    (where, way, processes)
    for where in ("inside a save", "at random")
    for way in ("blocking", "background")
    for processes in (1, 2)
]


class Campaign:
    """Chains of killed and resumed commands in one folder, and the undisturbed runs that they must equal."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log.txt"
        self.expected: dict[int, list[Any]] = {}  # by the number of processes
        self.seconds: dict[int, float] = {}
        write_noise(root / "images", 16, 40, 48)

    def options(self, processes: int, way: str, folder: str) -> dict[str, Any]:
        """The options of a run; several processes divide the same batch."""
        given = {**TINY, **RECIPE, "batch_size": 2 // processes, "data_path": str(self.root / "images")}
        given |= {"background_save": way == "background", "resume_from": "latest"}
        return {**given, "output_dir": str(self.root / folder)}

    def finish(self, given: dict[str, Any], processes: int) -> list[Any]:
        """Run to the end; returns the result."""
        codes = wait_for(start_forked(given, processes=processes, log=self.log))
        assert not any(codes), f"{codes}: {self.log.read_text()[-3000:]}"
        return trained_result(Path(given["output_dir"]), apart=["background_save"])

    def undisturbed(self, processes: int) -> list[Any]:
        """The result of a run with blocking saves that nothing kills."""
        if processes not in self.expected:
            began = time.monotonic()
            self.expected[processes] = self.finish(
                self.options(processes, "blocking", f"undisturbed_{processes}"), processes
            )
            self.seconds[processes] = time.monotonic() - began
        return self.expected[processes]

    def chain(self, kind: tuple[str, str, int], kills: int, draw: random.Random) -> Counter[str]:
        """Kill and resume up to `kills` times, run to the end and compare; returns what was killed where."""
        where, way, processes = kind
        expected, folder = self.undisturbed(processes), self.root / "run"
        shutil.rmtree(folder, ignore_errors=True)
        given, found = self.options(processes, way, "run"), Counter[str]()
        self.log.write_text("")
        for _ in range(kills):
            point = self._kill(given, processes, where, draw)
            if point is None:  # it ended before
                break
            found[point] += 1
            found["left a temporary file"] += bool([*folder.glob(".vae-scratch-*")])
        assert_same(self.finish(given, processes), expected, f"result of {given}")
        assert not [*folder.glob(".vae-scratch-*")], [*folder.glob(".vae-scratch-*")]
        return found

    def _kill(self, given: dict[str, Any], processes: int, where: str, draw: random.Random) -> str | None:
        """Run until a process is killed; returns at which point, or None if the run ended before."""
        if where == "at random":
            started = start_forked(given, processes=processes, log=self.log)
            # A resumed run is shorter, and a run that ends before the kill ends its chain.
            time.sleep(draw.uniform(0.0, 0.5 * self.seconds[processes]))
            for process in draw.sample(started, len(started)):
                process.kill()
            return where if any(code == -signal.SIGKILL for code in wait_for(started)) else None
        point = draw.choice(SAVE_POINTS)
        nth = draw.randrange(1, 3 * WRITES) if point == "save.write" else draw.randrange(1, 4)
        fault = Fault("kill", point, nth, rank=0)
        codes = wait_for(start_forked(given, fault, processes=processes, log=self.log))
        return point if codes[0] == -signal.SIGKILL else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="kills of each of the eight kinds")
    parser.add_argument("--minutes", type=float, default=60.0, help="no chain begins after this time")
    parser.add_argument("--out", type=Path, default=Path("kills.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(given.out.read_text()) if given.out.exists() else {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name))
        while time.monotonic() - began < 60 * given.minutes:
            counts = {kind: done.setdefault(" ".join(map(str, kind)), {"kills": 0}) for kind in KINDS}
            kind = min(KINDS, key=lambda one: counts[one]["kills"])
            entry, left = counts[kind], given.kills - counts[kind]["kills"]
            if left <= 0:
                break
            chain_began, number = time.monotonic(), entry.get("chains", 0)
            found = campaign.chain(kind, min(left, LONGEST_CHAIN), random.Random(f"{kind} {number}"))
            entry["chains"] = number + 1
            entry["kills"] += sum(found.values()) - found["left a temporary file"]
            entry["seconds"] = round(entry.get("seconds", 0) + time.monotonic() - chain_began, 1)
            entry["points"] = dict(Counter(entry.get("points", {})) + found)
            given.out.write_text(json.dumps(done, indent=1) + "\n")
            print(f"{' '.join(map(str, kind))}: {entry['kills']} kills, {entry['chains']} chains", flush=True)


if __name__ == "__main__":
    main()
