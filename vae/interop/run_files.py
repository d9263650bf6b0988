"""Files in the folder of a run that other commands read, too. Needs no PyTorch."""

from pathlib import Path
from typing import Any

from vae.system.files import read_json

RUN_COMMAND = "train"  # in the marker of the folder
METRICS_NAME = "metrics.jsonl"
RUN_NAME = "run.json"  # which run is the last one; it is written first and last
PROMOTED_NAME = "promoted.json"  # with it, an evaluation marks a checkpoint as the best one
OTHER_DATA = "other data"  # in a record `run`: the run goes on with other images or transforms
_TYPES = {"checkpoint": str, "sha256": str, "metrics": dict, "evaluation": dict}


def read_promoted(folder: Path) -> dict[str, Any]:
    """The content of `promoted.json`: `checkpoint` (a file name) and more; empty without a file of ours."""
    try:
        content = read_json(folder / PROMOTED_NAME)
    except (OSError, ValueError):  # it is replaced atomically, so one that is not valid is not ours
        return {}
    is_ours = isinstance(content, dict) and {name: type(content.get(name)) for name in _TYPES} == _TYPES
    return content if is_ours and type(content["metrics"].get("psnr")) is float else {}
