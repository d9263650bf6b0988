#!/usr/bin/env python3
"""Seven faults against five libraries that stream datasets, each in processes of its own with a time limit.

Each library reads the same images in its documented way: webdataset, Energon and Hugging Face datasets the
tar files of `prepare_data.py --mode shard`, litdata the chunks that its `optimize` writes. A library that is
not installed is a column that says so. Results are facts about one version on one machine:

    pip install litdata webdataset megatron-energon datasets boto3 s3fs "moto[server]"
    python benchmarks/conformance.py --out conformance.json
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.bench_remote import s3_store  # noqa: E402
from benchmarks.conformance_readers import PACKAGES, READERS  # noqa: E402
from tests.harness.http_store import http_store  # noqa: E402

IMAGES = 256
LIMIT_SECONDS = 90.0  # of one reading process
FAULTS = (
    "resume mid-epoch", "other worker count", "other world size", "flipped bit", "truncated shard",
    "unreachable store", "full cache",
)  # fmt: skip
SETUP = """
import sys; sys.path.insert(0, {root!r})
if __name__ == "__main__":
    from benchmarks.conformance_readers import write_data
    write_data({folder!r}, {images})
"""


class CellError(Exception):
    """A reading process that failed or took too long; the text is the result of the cell."""


def read(library: str, scratch: Path, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Read with one process per rank; the result of each: batches of (key, is_right), and seconds."""
    processes = []
    for rank in range(ranks):
        out = scratch / f"result_{rank}.json"
        out.unlink(missing_ok=True)
        request = json.dumps({**options, "rank": rank, "world_size": ranks, "out": str(out)})
        words = [sys.executable, "-m", "benchmarks.conformance_readers", library, request]
        with (scratch / f"log_{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        for process in processes:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise CellError(f"no end within {LIMIT_SECONDS:g} s") from None
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    results = []
    for rank, process in enumerate(processes):
        out = scratch / f"result_{rank}.json"
        if process.returncode or not out.exists():
            lines = (scratch / f"log_{rank}").read_text(errors="replace").strip().splitlines() or [
                "no output"
            ]
            raise CellError(f"error: {lines[-1][:110]}")
        results.append(json.loads(out.read_text()))
    if skipped := next((one["skipped"] for one in results if "skipped" in one), None):
        raise CellError(skipped)
    return results


def flat(results: list[dict[str, Any]]) -> list[str]:
    """The keys of all batches of all ranks."""
    return [key for result in results for batch in result["batches"] for key, _ in batch]


def by_step(results: list[dict[str, Any]]) -> list[list[str]]:
    """For each step, the sorted keys of all ranks."""
    steps = zip(*(result["batches"] for result in results), strict=False)
    return [sorted(key for batch in step for key, _ in batch) for step in steps]


def compare(found: list[list[str]], whole: list[list[str]]) -> str:
    """How the steps before and after a resume differ from those of an undisturbed run."""
    if found == whole:
        return "exact"
    keys, expected = list(chain(*found)), set(chain(*whole))
    lost, twice = len(expected - set(keys)), len(keys) - len(set(keys))
    if not lost and not twice:
        return "each sample once, in other batches"
    return f"{lost} of {len(expected)} lost, {twice} repeated"


def resume(library: str, data: Path, scratch: Path, before: dict[str, int], after: dict[str, int]) -> str:
    """Read half an epoch with some workers and ranks, and the rest with others."""
    state = str(scratch / "state")
    common = {"data": str(data), "state": state}
    whole = by_step(read(library, scratch, after["ranks"], **common, workers=after["workers"]))
    first = read(library, scratch, before["ranks"], **common, workers=before["workers"], stop=len(whole) // 2)
    rest = read(library, scratch, after["ranks"], **common, workers=after["workers"], resume=True)
    return compare(by_step(first) + by_step(rest), whole)


def damage(library: str, data: Path, scratch: Path, how: Callable[[Path], None]) -> str:
    """Read a damaged copy of the data."""
    copy = scratch / "damaged"
    shutil.copytree(data, copy)
    how(copy)
    (result,) = read(library, scratch, data=str(copy), workers=1)
    keys = flat([result])
    wrong = sum(not right for batch in result["batches"] for _, right in batch)
    lost = IMAGES - len(set(keys))
    named = f", {result['named']} named" if "named" in result else ""
    if wrong:
        return f"{wrong} wrong image delivered{named}" + (f", {lost} lost" if lost else "")
    return f"{lost} lost{named or ', no error'}"


def flip(folder: Path) -> None:
    """Flip a bit in the middle of an image file, in whichever file of the data has it."""
    wanted = json.loads((folder / "victim.json").read_text())
    data = bytes.fromhex(wanted["bytes"])
    for path in sorted([*folder.rglob("*.tar"), *folder.rglob("*.bin")]):
        content = bytearray(path.read_bytes())
        at = content.find(data)
        if at >= 0:
            content[at + wanted["at"]] ^= wanted["bit"]
            path.write_bytes(content)


def truncate(folder: Path) -> None:
    """Cut the second shard or chunk to half of its size."""
    for pattern in ("*.tar", "*.bin"):
        paths = sorted(folder.rglob(pattern))
        os.truncate(paths[1], paths[1].stat().st_size // 2)


def unreachable(library: str, _data: Path, scratch: Path) -> str:
    """Read from a port where nothing listens."""
    began = time.monotonic()
    try:
        (result,) = read(library, scratch, url="http://127.0.0.1:9", cache=str(scratch / "cache"), workers=1)
    except CellError as error:
        if "no end" in str(error) or "error" not in str(error):
            raise
        return f"{error} ({time.monotonic() - began:.0f} s, with the start)"
    return f"no error, {len(flat([result]))} images"


def full_cache(library: str, data: Path, scratch: Path) -> str:
    """Read everything through a cache that has room for two of the shards; 1 MB for Energon, its least."""
    cache = scratch / "cache"
    room = 2 * max(path.stat().st_size for path in (data / "set").glob("*.tar"))
    room = 10**6 if library == "energon" else room
    with ExitStack() as stack:
        if library == "energon":
            _, env = stack.enter_context(s3_store(data / "set"))
            url = env["AWS_ENDPOINT_URL"]
        else:
            url = stack.enter_context(http_store(data / "set")).url("").rstrip("/")
        options = {"data": str(data), "url": url, "cache": str(cache), "room": room}
        (result,) = read(library, scratch, **options, workers=1)
    keys = flat([result])
    return f"{len(set(keys))} of {IMAGES} images; at most {result['cache_bytes'] / room:.1f} of the limit"


def cell(library: str, fault: str, data: Path) -> str:
    """The result of one fault for one library."""
    two, one = {"ranks": 1, "workers": 2}, {"ranks": 1, "workers": 1}
    tests: dict[str, Callable[[Path], str]] = {
        # datasets alone streams in one process
        "resume mid-epoch": lambda s: resume(
            library, data, s, *([one] if library == "datasets" else [two]) * 2
        ),
        "other worker count": lambda s: resume(library, data, s, two, one),
        "other world size": lambda s: resume(library, data, s, {"ranks": 2, "workers": 1}, one),
        "flipped bit": lambda s: damage(library, data, s, flip),
        "truncated shard": lambda s: damage(library, data, s, truncate),
        "unreachable store": lambda s: unreachable(library, data, s),
        "full cache": lambda s: full_cache(library, data, s),
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return tests[fault](Path(scratch))
        except CellError as error:
            return str(error)


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="conformance.json")
    parser.add_argument("--libraries", nargs="+", default=list(READERS), choices=list(READERS))
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    options = parser.parse_args()
    table: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "setup.py"
        data = Path(scratch) / "data"
        script.write_text(SETUP.format(root=str(ROOT), folder=str(data), images=IMAGES))
        subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.DEVNULL)
        for library in options.libraries:
            try:
                name = (
                    f"{library} {importlib.metadata.version(PACKAGES[library])}"
                    if library != "ours"
                    else library
                )
            except importlib.metadata.PackageNotFoundError:
                table[library] = dict.fromkeys(options.faults, "not installed")
                continue
            table[name] = {}
            for fault in options.faults:
                table[name][fault] = cell(library, fault, data)
                print(f"{name} | {fault} | {table[name][fault]}", flush=True)
    Path(options.out).write_text(json.dumps(table, indent=1) + "\n")
    print("\n| fault | " + " | ".join(table) + " |\n|---|" + "---|" * len(table))
    for fault in options.faults:
        print(f"| {fault} | " + " | ".join(row[fault] for row in table.values()) + " |")


if __name__ == "__main__":
    main()
