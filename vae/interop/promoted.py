"""The file with which an evaluation marks a checkpoint of a run as the best one, in the folder of the run."""

from pathlib import Path
from typing import Any

from vae.system.files import read_json

_TYPES = {"checkpoint": str, "sha256": str, "metrics": dict, "evaluation": dict}
PROMOTED_NAME = "promoted.json"


def read_promoted(folder: Path) -> dict[str, Any]:
    """The content of `promoted.json`: `checkpoint` (a file name) and more; empty without a file of ours."""
    try:
        content = read_json(folder / PROMOTED_NAME)
    except (OSError, ValueError):  # it is replaced atomically, so one that is not valid is not ours
        return {}
    is_ours = isinstance(content, dict) and {name: type(content.get(name)) for name in _TYPES} == _TYPES
    return content if is_ours and type(content["metrics"].get("psnr")) is float else {}
