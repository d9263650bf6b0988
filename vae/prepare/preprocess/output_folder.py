"""The folder a set is written to: whose it is, what is finished in it, and its manifest.

While a run lasts, `.prepare/ledger.sqlite` holds every result; at its end `.prepare/state.jsonl` does, whose
bytes depend on sources and settings alone.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from vae.config.errors import UserError
from vae.data.manifest import KEYS, MANIFEST_NAME, format_row, read_rows, replace_text
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Ledger, Result
from vae.prepare.preprocess.convert import Recipe
from vae.prepare.preprocess.naming import output_key
from vae.prepare.preprocess.resize import engine

SETTINGS_NAME, REJECTED_NAME = "preprocess_settings.json", "rejected.jsonl"
HIDDEN = ".prepare"
OURS = ("path", "sha256", "width", "height", "source", "flags")  # other keys are for others to fill
KEPT = "kept "  # key of a note: what others have written about a path


class OutputFolder:
    """An output folder and the recipe it is filled by."""

    def __init__(self, root: str | os.PathLike, recipe: Recipe):
        self.root = Path(root)
        self.recipe = recipe
        self.hidden = self.root / HIDDEN
        self.scratch = str(self.hidden / "scratch")
        self.settings = {**asdict(recipe), "engine": engine()}
        self.settings.update(self.settings.pop("rules"))

    def check(self, input_dir: str) -> None:
        """Raise UserError where the folder is the input, or one lies in the other, or it is a file."""
        here, there = os.path.realpath(input_dir), os.path.realpath(self.root)
        if here == there:
            raise UserError(f"--output_dir {self.root} is --input_dir: give another folder")
        for inner, outer, text in (
            (here, there, f"--input_dir {input_dir} lies inside --output_dir {self.root}"),
            (there, here, f"--output_dir {self.root} lies inside --input_dir {input_dir}"),
        ):
            if inner.startswith(outer.rstrip(os.sep) + os.sep):
                raise UserError(f"{text}: give a folder beside it")
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"--output_dir {self.root} is a file: give a folder")

    def claim(self, input_dir: str) -> None:
        """Note settings and source; raises UserError where the folder holds something else."""
        source = os.path.realpath(input_dir)
        if not (self.root / SETTINGS_NAME).exists():
            if self.root.is_dir() and not all(entry.name.startswith(".") for entry in os.scandir(self.root)):
                raise UserError(
                    f"--output_dir {self.root} holds files of something else: give a new or an empty folder"
                )
            os.makedirs(self.hidden, exist_ok=True)
            replace_text(self.hidden / "source.json", [json.dumps({"input_dir": source}) + "\n"])
            replace_text(self.root / SETTINGS_NAME, [json.dumps(self.settings, indent=1) + "\n"])
            return
        theirs = _read_json(self.root / SETTINGS_NAME)
        mine = json.loads(json.dumps(self.settings))
        different = [key for key in mine if theirs.get(key) != mine[key]]
        if different:
            held = ", ".join(f"{key} {theirs.get(key)}" for key in different)
            raise UserError(
                f"--output_dir {self.root} was made with other settings ({held}): "
                "use those, or give another folder"
            )
        held = _read_json(self.hidden / "source.json").get("input_dir")
        if held is not None and held != source:
            raise UserError(
                f"--output_dir {self.root} was made from {held}: give another folder, "
                f"or, if that one has moved, its new place in {self.hidden / 'source.json'}"
            )

    def open_ledger(self) -> Ledger:
        """What earlier runs have finished."""
        os.makedirs(self.hidden, exist_ok=True)
        ledger = Ledger(self.hidden / "ledger.sqlite")
        self.clear_scratch()  # of a killed run; there is no other, for the ledger is ours
        os.makedirs(self.scratch)
        state = self.hidden / "state.jsonl"
        if ledger.noted("loaded") is None and state.exists():
            ledger.load(_read_state(state))
        ledger.note("loaded", "")
        for folder, _ in self._folders():
            for leftover in folder.glob(f".{MANIFEST_NAME}.*.tmp"):
                leftover.unlink()
        for leftover in chain(self.root.glob(".*.json*.tmp"), self.hidden.glob(".*.tmp")):
            leftover.unlink()
        return ledger

    def drop_ledger(self) -> None:
        """Take away what is needed only while a run lasts."""
        for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
            (self.hidden / name).unlink(missing_ok=True)

    def clear_scratch(self) -> None:
        """Remove temporary files."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def accept(self, ledger: Ledger, result: Result) -> None:
        """Put a new result on record, then its files in place; files it had under other names go."""
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
        """Whether every image of a result is there, with its number of bytes."""
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

    def remove_files(self, ledger: Ledger, result: Result) -> None:
        """Remove the images of a duplicate: its first has the same."""
        assert result.status == DUPLICATE
        for target in result.record["sizes"]:
            with suppress(FileNotFoundError):
                os.remove(self._path(int(target), result.record["output"]))

    def finish(self, ledger: Ledger) -> None:
        """Write manifests, the list of rejected files and the state."""
        for folder, target in self._folders():
            self._keep_others(ledger, folder / MANIFEST_NAME, target)
            os.makedirs(folder, exist_ok=True)
            _replace_if_new(folder / MANIFEST_NAME, lambda target=target: self._manifest(ledger, target))
        _replace_if_new(self.root / REJECTED_NAME, lambda: _rejected_lines(ledger))
        _replace_if_new(self.hidden / "state.jsonl", lambda: _state_lines(ledger))

    def _folders(self) -> Iterator[tuple[Path, int]]:
        several = len(self.recipe.target_sizes) > 1
        for target in self.recipe.target_sizes:
            yield (self.root / str(target) if several else self.root), target

    def _path(self, target: int, output: str) -> str:
        parts = (str(target), output) if len(self.recipe.target_sizes) > 1 else (output,)
        return os.path.join(self.root, *parts)

    def _remove_stale(self, ledger: Ledger, before: Result, now: Result) -> None:
        old = before.record["output"]
        if old != now.record["output"] and ledger.is_claimed(output_key(old)):
            return  # the name is another source's by now
        for target, made in before.record["sizes"].items():
            still = old == now.record["output"] and "bytes" in now.record["sizes"].get(target, {})
            if "bytes" in made and not still:
                with suppress(FileNotFoundError):
                    os.remove(self._path(int(target), old))

    def _keep_others(self, ledger: Ledger, manifest: Path, target: int) -> None:
        """Note what groups, labels and splits others have written into the manifest."""
        if not manifest.exists():
            return
        for row in read_rows(manifest, flag="--output_dir"):
            kept = {key: value for key, value in row.items() if key not in OURS and value is not None}
            if kept:
                ledger.note(f"{KEPT}{target} {row['path']}", json.dumps(kept))

    def _manifest(self, ledger: Ledger, target: int) -> Iterator[str]:
        for result in ledger.results(ACCEPTED):
            made = result.record["sizes"].get(str(target), {})
            if "bytes" not in made:
                continue
            path = result.record["output"]
            row: dict[str, Any] = dict.fromkeys(KEYS)
            row.update(
                path=path, source=result.name, **{key: made[key] for key in ("sha256", "width", "height")}
            )
            row["flags"] = sorted([*result.record["flags"], *(["upscaled"] if made["upscaled"] else [])])
            row.update(json.loads(ledger.noted(f"{KEPT}{target} {path}") or "{}"))
            yield format_row(row) + "\n"


def _replace_if_new(path: Path, lines: Callable[[], Iterator[str]]) -> None:
    """Write lines to a file unless it holds them already."""
    with suppress(FileNotFoundError), open(path, encoding="utf-8", newline="") as file:
        if all(old == new for old, new in zip_longest(file, lines())):
            return
    replace_text(path, lines())


def _rejected_lines(ledger: Ledger) -> Iterator[str]:
    """One row for each source and size that gave no image."""
    for result in ledger.results():
        row = {"source": result.name, "reason": result.reason, "detail": result.detail}
        if result.status in (REJECTED, DUPLICATE):
            yield json.dumps(row) + "\n"
            continue
        for target, made in result.record["sizes"].items():
            if "reason" in made:
                yield json.dumps({"source": result.name, **made, "target_size": int(target)}) + "\n"


def _state_lines(ledger: Ledger) -> Iterator[str]:
    for result in ledger.results():
        yield json.dumps(result) + "\n"


def _read_state(path: Path) -> Iterator[Result]:
    with open(path, encoding="utf-8") as file:
        try:
            for line in file:
                yield Result(*json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: delete it, and every image is made anew") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        held = None
    if not isinstance(held, dict):
        raise UserError(f"{path} is damaged: give another folder, or delete this one")
    return held
