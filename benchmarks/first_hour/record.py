"""The JSON file of a part: written after each case, so that an interrupted part continues where it was."""

import json
import math
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vae.system.files import write_json

EXIT_CARD_LOST = 3  # of the process of a part: the next cases need a new process
DONE, FAILED, NOT_REACHED = "done", "failed", "not reached"
NO_PROBLEM = ("ok", "skipped", "no arithmetic")  # verdicts
SAME = ("card", "versions", "quick")  # facts that all cases of a file must share


class OtherMachineError(Exception):
    """The file has results of another card, of other versions, or of other sizes."""


@dataclass
class Record:
    """The results of a part, by case."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, number: int, title: str, machine: dict[str, Any]) -> "Record":
        """The record in `folder`, or an empty one."""
        path = folder / f"part_{number}.json"
        new = {"part": number, "title": title, "machine": machine, "running": None, "cases": {}}
        if not path.exists():
            return cls(path, new)
        content = json.loads(path.read_text(encoding="utf-8"))
        for name in SAME:
            before, now = content["machine"].get(name), machine.get(name)
            if before != now:
                raise OtherMachineError(
                    f"--out {folder} has results with {name} {before}, not {now}: use another folder"
                )
        content["machine"] = machine
        return cls(path, content)

    @classmethod
    def read(cls, folder: Path, number: int) -> "Record | None":
        path = folder / f"part_{number}.json"
        return cls(path, json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        return self.content["cases"]

    @property
    def running(self) -> str | None:
        """The case that was running when the file was written."""
        return self.content["running"]

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of the cases that are done."""
        return {name: case["result"] for name, case in self.cases.items() if case["status"] == DONE}

    def forget_unfinished(self) -> None:
        """Delete what failed or was not reached, and the mark of an interrupted case: they run again."""
        self.content["cases"] = {name: case for name, case in self.cases.items() if case["status"] == DONE}
        self.content["running"] = None
        self.write()

    def begin(self, name: str) -> None:
        self.content["running"] = name
        self.write()

    def end(self, name: str, status: str, seconds: float = 0.0, **facts: Any) -> None:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        commit = self.content["machine"].get("commit")
        entry = {"status": status, "seconds": round(seconds, 1), "date": date, "commit": commit}
        entry |= _without_nan(facts)
        self.cases[name] = entry
        self.content["running"] = None
        self.write()

    def problems(self) -> list[str]:
        """The cases that are not done, and those whose verdict is neither good nor impossible."""
        found = []
        for name, case in self.cases.items():
            verdict = case["result"].get("verdict", "ok") if case["status"] == DONE else case["status"]
            found += [f"{name}: {verdict}"] * (verdict not in NO_PROBLEM)
        return found

    def write(self) -> None:
        """Replace the file at once: a program that is killed here leaves the old one."""
        self.content["written"] = time.time()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content, indent=1)


def _without_nan(value: Any) -> Any:
    """Plain data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
