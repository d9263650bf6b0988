"""The marker in each folder that a command creates: which command made it, and an id.

A command writes only into a new or empty folder, or into one that its own marker shows to be its own.
"""

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from vae.system.errors import UserError
from vae.system.files import open_new, read_json, why_not_writable

MARKER_NAME = ".vae_folder.json"
_OF_THE_SYSTEM = {".DS_Store", "Thumbs.db", "desktop.ini", "lost+found"}  # they belong to nobody
_MAX_BYTES = 4096
_WRITE_SECONDS = 1.0  # in which another process that has created a marker has also written it


@dataclass(frozen=True)
class FolderMarker:
    """What the marker of a folder contains."""

    command: str  # for example "train" or "shard"
    id: str  # 16 hexadecimal digits, new for each folder


def read_marker(folder: Path) -> FolderMarker | None:
    """The marker of a folder; None if it has none, or one that is not ours or is damaged."""
    path = folder / MARKER_NAME
    try:
        content = read_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    command, folder_id = content.get("command"), content.get("id")
    if not isinstance(command, str) or not isinstance(folder_id, str):
        return None
    return FolderMarker(command, folder_id)


def check_folder(folder: Path, command: str, flag: str = "--output_dir") -> FolderMarker | None:
    """The marker if the folder is this command's own, None if it is new or empty; nothing is written.

    Raises UserError for a file, a folder of another command, and a folder with files but without a marker.
    """
    if problem := why_not_writable(folder):
        raise UserError(f"{flag} {folder} {problem}")
    if not folder.exists():
        return None
    marker = read_marker(folder)
    if marker is not None and marker.command != command:
        raise UserError(
            f"{flag} {folder} is the folder of another command ({marker.command}): give a new or empty one"
        )
    if marker is not None:
        return marker
    foreign = _foreign_name(folder)
    if foreign is not None:
        raise UserError(
            f"{flag} {folder} contains files that this command did not write ({foreign}): "
            "give a new or an empty folder"
        )
    return None


def claim_folder(
    folder: Path, command: str, flag: str = "--output_dir", folder_id: str | None = None
) -> FolderMarker:
    """The marker of the folder, which is created with it if it is new or empty; its id is `folder_id`.

    Raises UserError as `check_folder` does, and OSError if the folder cannot be written.
    """
    marker = check_folder(folder, command, flag)
    if marker is not None:
        return marker
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MARKER_NAME
    marker = FolderMarker(command, folder_id or secrets.token_hex(8))
    try:
        file = open_new(path)
    except FileExistsError:  # another command is faster; or its writer was killed, or it is not ours
        time.sleep(_WRITE_SECONDS)
        if read_marker(folder) is None:
            path.unlink(missing_ok=True)
        return claim_folder(folder, command, flag, folder_id)
    with file:
        file.write(json.dumps({"command": marker.command, "id": marker.id}).encode())
        file.flush()
        os.fsync(file.fileno())
    return marker


def _foreign_name(folder: Path) -> str | None:
    """The first name, sorted, that prevents a folder without a marker from being empty.

    Folders inside it that have a marker are other results of this toolkit, such as outputs/demo.
    """
    with os.scandir(folder) as entries:
        foreign = [entry.name for entry in entries if not _belongs_to_nobody(entry)]
    return min(foreign, default=None)


def _belongs_to_nobody(entry: "os.DirEntry[str]") -> bool:
    is_result = entry.is_dir() and read_marker(Path(entry)) is not None
    return entry.name in _OF_THE_SYSTEM or entry.name == MARKER_NAME or is_result
