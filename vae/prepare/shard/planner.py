"""The plan of the shards that parts write: --mode merge makes it, and each part reads its own file of it."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from vae.prepare.parts import PARTS, Part
from vae.prepare.shard.write import Member, Plan, read_mark
from vae.shards.index import Shard
from vae.system import console
from vae.system.files import parse_json

PLAN = "plan"  # folder of files with a shard per line


class ShardPlanner:
    """Collects the shards that are written, and plans the others in turn for all parts."""

    def __init__(self, root: Path, count: int):
        """`count`: number of parts."""
        self._root, self._count = root, count
        self._new = root / PARTS / f"{PLAN}.tmp"
        shutil.rmtree(self._new, ignore_errors=True)
        self._new.mkdir()
        self.missing = 0  # shards that are planned

    def __call__(self, plans: Iterable[Plan], _images: int) -> list[Shard]:
        """The shards of these plans that are written."""
        shards = []
        for plan in plans:
            if (shard := read_mark(self._root, plan)) is not None:
                shards.append(shard)
                continue
            part = Part(self.missing % self._count, self._count)
            with (self._new / part.stem).open("a", encoding="ascii") as file:
                file.write(json.dumps(plan) + "\n")
            self.missing += 1
        return shards

    def publish(self) -> None:
        """Give the plan to the parts, or remove it if no shard is missing."""
        shutil.rmtree(self._root / PARTS / PLAN, ignore_errors=True)
        if self.missing:
            os.replace(self._new, self._root / PARTS / PLAN)
            console.info(
                f"{console.printable(str(self._root))}: {self.missing} shards are planned: run all "
                f"{self._count} parts again, which write them, then --mode merge again"
            )
        else:
            shutil.rmtree(self._root / PARTS)


def planned_shards(root: Path, part: Part) -> Iterator[Plan]:
    """The shards that a part has to write, which may be written already."""
    path = root / PARTS / PLAN / part.stem
    if not path.exists():
        return
    with path.open(encoding="ascii") as file:
        for line in file:
            name, members = parse_json(line)
            yield Plan(name, [Member(*member)._replace(size=tuple(member[4])) for member in members])
