"""prepare_data.py in this process and without worker processes, which tests/prepare/test_pool.py tests."""

import json
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness.runs import run_here
from vae.prepare import demo, rows
from vae.prepare import shard as shard_mode


@contextmanager
def without_workers() -> Iterator[None]:
    """Within this context, tasks of prepare_data.py are worked on here, one after another."""
    with ExitStack() as stack:
        for module in (demo, rows, shard_mode):
            stack.enter_context(patch.object(module, "run_tasks", _each_here))
        yield


def _each_here(
    function: Callable[[Any], Any], tasks: Iterable[Any], *_limits: Any
) -> Generator[tuple[Any, Any], None, None]:
    for task in tasks:
        yield task, function(task)


def write_manifest(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a manifest."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(*words: object, code: int | None = None, says: str = "") -> subprocess.CompletedProcess[str]:
    """Run prepare_data.py with these words: the exit code, if it is given, and a text that is printed."""
    with without_workers():
        done = run_here("prepare_data.py", *words)
    assert code in (None, done.returncode), done.stdout + done.stderr
    assert says in done.stdout + done.stderr
    return done


def shard(
    source: object, output: object, *flags: object, code: int | None = None, says: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run --mode shard."""
    words = ("--mode", "shard", "--input_dir", source, "--output_dir", output, *flags)
    return prepare(*words, code=code, says=says)


def tree(folder: Path) -> dict[str, bytes]:
    """The files that a command has written below a folder, without what it needs to continue."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {".prepare", ".vae_folder.json"} & set(path.parts)
    }
