"""The output folder: its settings and source, the finished images in it, and its manifest.

During a run, `.prepare/ledger.sqlite` contains every result. After it, `.prepare/state.jsonl` contains them.
The bytes of that file depend only on sources and settings.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import PreprocessConfig
from vae.data.manifest import KEYS, MANIFEST_NAME, read_rows
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Ledger, Result
from vae.prepare.output_dir import check_new
from vae.prepare.parts import PARTS, Part, open_part
from vae.prepare.preprocess.naming import output_key
from vae.prepare.preprocess.resize import engine
from vae.system.errors import UserError
from vae.system.files import parse_json, read_json, replace_text, write_json

SETTINGS_NAME, REJECTED_NAME = "preprocess_settings.json", "rejected.jsonl"
HIDDEN = ".prepare"
# Flags that decide which images are accepted, and their pixels; all images of a folder have the same.
SETTINGS = (
    "target_size", "resize_mode", "format", "quality", "upscale",
    "max_pixels", "background", "first_frame", "min_size", "max_aspect",
)  # fmt: skip
OUR_KEYS = ("path", "sha256", "width", "height", "source", "flags")  # other keys of a row come from others
KEPT = "kept "  # key of a note: values that others have written into the row of a path


class OutputFolder:
    """An output folder and the settings of its images."""

    def __init__(self, config: PreprocessConfig, part: Part | None = None):
        """`part`: the one that this process converts."""
        self.config, self.part = config, part
        self.root = Path(config.output_dir)
        self.hidden = self.root / HIDDEN
        self.scratch = str(self.hidden / (f"scratch-{part.stem}" if part else "scratch"))
        self.input_dir = config.input_dir
        self.target_sizes = config.target_size
        self.settings = {**{name: getattr(config, name) for name in SETTINGS}, "engine": engine()}
        self.settings["target_size"] = list(config.target_size)

    def claim(self) -> None:
        """Write settings and source into a new folder; raises UserError if the folder has other contents."""
        source = os.path.realpath(self.input_dir)
        if not (self.root / SETTINGS_NAME).exists():
            if not self.hidden.exists():  # another part may have begun at this moment
                check_new(self.root)
            os.makedirs(self.hidden, exist_ok=True)
            write_json(self.hidden / "source.json", {"input_dir": source})
            write_json(self.root / SETTINGS_NAME, self.settings, indent=1)
            return
        theirs = _read_json(self.root / SETTINGS_NAME)
        different = [name for name, value in self.settings.items() if theirs.get(name) != value]
        if different:
            values = ", ".join(f"{name} {theirs.get(name)}" for name in different)
            raise UserError(
                f"--output_dir {self.root} was made with other settings ({values}): "
                "use those, or give another folder"
            )
        before = _read_json(self.hidden / "source.json").get("input_dir")
        if before is not None and before != source:
            raise UserError(
                f"--output_dir {self.root} was made from {before}: give another folder, "
                f"or, if that folder has moved, write its new path into {self.hidden / 'source.json'}"
            )

    @property
    def fingerprints(self) -> Path:
        """The folder of the fingerprints that this process finds."""
        return self.fingerprints_of(self.part) if self.part else self.hidden

    def fingerprints_of(self, part: Part) -> Path:
        """The folder of the fingerprints that a part has found."""
        return self.root / PARTS / part.stem

    def open_ledger(self) -> Ledger:
        """The ledger with the results of earlier runs; removes the temporary files of a killed run."""
        os.makedirs(self.hidden, exist_ok=True)
        ledger = open_part(self.config) if self.part else Ledger(self.hidden / "ledger.sqlite")
        self.clear_scratch()  # no other run uses it, because this run has the ledger
        os.makedirs(self.scratch)
        state = self.hidden / "state.jsonl"
        if ledger.noted("loaded") is None and state.exists():
            ledger.load(_read_state(state))
        ledger.note("loaded", "")
        if self.part:
            return ledger  # other parts are running
        for folder, _ in self._folders():
            for leftover in folder.glob(f".{MANIFEST_NAME}.*.tmp"):
                leftover.unlink()
        for leftover in chain(self.root.glob(".*.json*.tmp"), self.hidden.glob(".*.tmp")):
            leftover.unlink()
        return ledger

    def drop_ledger(self) -> None:
        """Remove the ledgers, which are needed only during a run."""
        shutil.rmtree(self.root / PARTS, ignore_errors=True)
        for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
            (self.hidden / name).unlink(missing_ok=True)

    def clear_scratch(self) -> None:
        """Remove temporary files."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def accept(self, ledger: Ledger, result: Result) -> None:
        """Record a new result, then move its files into place; removes its files with former names."""
        temporaries = {
            target: made.pop("temporary")
            for target, made in result.record["sizes"].items()
            if "temporary" in made
        }
        before = ledger.result(result.name)
        ledger.record(result)
        for target, temporary in temporaries.items():
            final = self._path(int(target), result.record["output"])
            try:
                os.replace(temporary, final)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(final), exist_ok=True)
                os.replace(temporary, final)
        if before is not None:
            self._remove_stale(ledger, before, result)

    def has_files(self, result: Result) -> bool:
        """Whether every image of a result exists and has its recorded number of bytes."""
        for target, made in result.record["sizes"].items():
            if "bytes" not in made:
                continue
            try:
                status = os.stat(self._path(int(target), result.record["output"]))
            except OSError:
                return False
            if status.st_size != made["bytes"]:
                return False
        return True

    def remove_files(self, result: Result) -> None:
        """Remove the images of a duplicate; the first file has the same images."""
        assert result.status == DUPLICATE
        for target in result.record["sizes"]:
            with suppress(FileNotFoundError):
                os.remove(self._path(int(target), result.record["output"]))

    def finish(self, ledger: Ledger) -> None:
        """Write the manifests, the list of rejected files and the state."""
        for folder, target in self._folders():
            _keep_foreign_values(ledger, folder / MANIFEST_NAME, target)
            os.makedirs(folder, exist_ok=True)
            replace_if_new(folder / MANIFEST_NAME, partial(_manifest_lines, ledger, target))
        replace_if_new(self.root / REJECTED_NAME, partial(_rejected_lines, ledger))
        state = self.hidden / "state.jsonl"
        replace_if_new(state, lambda: (json.dumps(result) + "\n" for result in ledger.results()))

    def _folders(self) -> Iterator[tuple[Path, int]]:
        for target in self.target_sizes:
            yield (self.root / str(target) if len(self.target_sizes) > 1 else self.root), target

    def _path(self, target: int, output: str) -> str:
        parts = (str(target), output) if len(self.target_sizes) > 1 else (output,)
        return os.path.join(self.root, *parts)

    def _remove_stale(self, ledger: Ledger, before: Result, now: Result) -> None:
        old = before.record["output"]
        if old != now.record["output"] and ledger.is_claimed(output_key(old)):
            return  # the name now belongs to another source
        for target, made in before.record["sizes"].items():
            current = old == now.record["output"] and "bytes" in now.record["sizes"].get(target, {})
            if "bytes" in made and not current:
                with suppress(FileNotFoundError):
                    os.remove(self._path(int(target), old))


def _keep_foreign_values(ledger: Ledger, manifest: Path, target: int) -> None:
    """Note groups, labels and splits that others have written into the manifest."""
    if not manifest.exists():
        return
    for row in read_rows(manifest, flag="--output_dir"):
        kept = {key: value for key, value in row.items() if key not in OUR_KEYS and value is not None}
        if kept:
            ledger.note(f"{KEPT}{target} {row['path']}", json.dumps(kept))


def _manifest_lines(ledger: Ledger, target: int) -> Iterator[str]:
    for result in ledger.results(ACCEPTED):
        made = result.record["sizes"].get(str(target), {})
        if "bytes" not in made:
            continue
        path = result.record["output"]
        row: dict[str, Any] = dict.fromkeys(KEYS)
        row.update(path=path, source=result.name)
        row.update({key: made[key] for key in ("sha256", "width", "height")})
        row["flags"] = sorted([*result.record["flags"], *(["upscaled"] if made["upscaled"] else [])])
        row.update(parse_json(ledger.noted(f"{KEPT}{target} {path}") or "{}"))
        yield json.dumps(row) + "\n"


def _rejected_lines(ledger: Ledger) -> Iterator[str]:
    """One row for each source and size without an image."""
    for result in ledger.results():
        row = {"source": result.name, "reason": result.reason, "detail": result.detail}
        if result.status in (REJECTED, DUPLICATE):
            yield json.dumps(row) + "\n"
            continue
        for target, made in result.record["sizes"].items():
            if "reason" in made:
                yield json.dumps({"source": result.name, **made, "target_size": int(target)}) + "\n"


def replace_if_new(path: Path, lines: Callable[[], Iterator[str]]) -> None:
    """Write lines to a file, unless it already contains exactly these lines."""
    with suppress(FileNotFoundError), open(path, encoding="utf-8", newline="") as file:
        if all(old == new for old, new in zip_longest(file, lines())):
            return
    replace_text(path, lines())


def _read_state(path: Path) -> Iterator[Result]:
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                yield Result(*parse_json(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: delete it, and every image is converted again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: give another folder, or delete this one")
    return values
