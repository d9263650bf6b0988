"""What several processes start again with after one of them ran out of memory: a file in the run's folder."""

from pathlib import Path
from typing import NamedTuple

from vae.config.options import RECOMPUTE
from vae.system.files import read_json, write_json

LOWERED_NAME = "lowered_memory.json"


class Lowered(NamedTuple):
    """The settings of a step that needs less memory, in the stage with this image size."""

    image_size: int
    micro_batch: int
    recompute: str

    def write(self, folder: Path) -> None:
        """Write them into the folder of a run; OSError if that fails."""
        write_json(folder / LOWERED_NAME, self._asdict())

    def limit(self, micro_batch: int, recompute: str) -> tuple[int, str]:
        """The smaller micro-batch, and the recompute level that needs less memory."""
        return min(micro_batch, self.micro_batch), max(recompute, self.recompute, key=RECOMPUTE.index)


def read_lowered(folder: Path, image_size: int) -> Lowered | None:
    """The settings in the folder of a run for this image size, if memory ran out with it."""
    try:
        lowered = Lowered(**read_json(folder / LOWERED_NAME))
    except FileNotFoundError:
        return None
    return lowered if lowered.image_size == image_size else None
