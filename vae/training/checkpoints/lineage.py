"""Which run a checkpoint belongs to, and which run was the last one in a folder.

Every command that trains is a run of its own, and so is what follows a rollback. Its parent is the run that
it continues, with the step at which it does. The line of a run is its own checkpoints and those of its
ancestors up to the steps at which they were left. Other checkpoints belong to abandoned courses.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vae.system.files import read_json
from vae.training.output.appending import write_json

RUN_NAME = "run.json"


@dataclass(frozen=True)
class Lineage:
    """A run and its ancestors."""

    id: str
    ancestors: tuple[tuple[str, int], ...] = ()  # id and the step at which it was left, oldest first
    start: str = ""  # hash of the weights before the first step of the line; "": not known

    @classmethod
    def new(cls, ancestors: tuple[tuple[str, int], ...] = ()) -> "Lineage":
        """A run with a random id."""
        return cls(secrets.token_hex(8), ancestors)

    def continued(self, step: int) -> "Lineage":
        """A new run that continues this one after `step`."""
        return replace(Lineage.new((*self.ancestors, (self.id, step))), start=self.start)

    def contains(self, run_id: str, step: int) -> bool:
        """Whether a checkpoint of this run and step is on the line."""
        return run_id == self.id or any(run_id == one and step <= left for one, left in self.ancestors)

    def plain(self) -> dict[str, Any]:
        """The form in checkpoints and in RUN_NAME."""
        ancestors = [list(ancestor) for ancestor in self.ancestors]
        return {"id": self.id, "ancestors": ancestors, "start": self.start}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Lineage":
        """The inverse of `plain`; raises KeyError, TypeError or ValueError for anything else."""
        ancestors = tuple((str(one), int(left)) for one, left in plain["ancestors"])
        return cls(str(plain["id"]), ancestors, str(plain.get("start", "")))


def saved_lineage(content: Mapping[str, Any]) -> Lineage:
    """The run that saved a checkpoint. One without an identity belongs to the run with the id ""."""
    return Lineage.from_plain(content["run"]) if "run" in content else Lineage("")


def write_last_run(folder: Path, lineage: Lineage, good: Path | None) -> None:
    """Store which run is the last one in the folder, and its checkpoint that is known to be good."""
    known = good is not None and good.parent == folder
    plain = {**lineage.plain(), "good_checkpoint": good.name if good and known else None}
    write_json(folder / RUN_NAME, plain, indent=2)


def read_last_run(folder: Path) -> Lineage | None:
    """The last run in the folder; None if it is unknown."""
    try:
        return Lineage.from_plain(read_json(folder / RUN_NAME))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_good(folder: Path) -> Path | None:
    """The checkpoint that the last run in the folder knows to be good, if there is one."""
    try:
        name = read_json(folder / RUN_NAME)["good_checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder / name if isinstance(name, str) and Path(name).name == name else None
