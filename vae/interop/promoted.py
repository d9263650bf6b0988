"""The file with which an evaluation marks a checkpoint of a run as the best one, in the folder of the run."""

from pathlib import Path
from typing import Any

from vae.system.files import read_json

PROMOTED_NAME = "promoted.json"


def read_promoted(folder: Path) -> dict[str, Any]:
    """The content of `promoted.json`, at least `checkpoint` (a file name); empty if there is no such file."""
    try:
        content = read_json(folder / PROMOTED_NAME)
    except (OSError, ValueError):  # it is replaced atomically, so one that is not valid is not ours
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("checkpoint"), str) else {}
