"""prepare_data.py in this process and without worker processes, which tests/prepare/test_pool.py tests."""

import json
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness.runs import run_here
from vae.prepare import analyze, demo, rows, shard, verify


@contextmanager
def without_workers() -> Iterator[None]:
    """Within this context, tasks of prepare_data.py are worked on here, one after another."""
    with ExitStack() as stack:
        for module in (analyze, demo, rows, shard, verify):
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


def prepare(*words: object) -> subprocess.CompletedProcess[str]:
    """Run prepare_data.py with these words; the output is text."""
    with without_workers():
        return run_here("prepare_data.py", *words)
