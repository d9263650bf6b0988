"""The tasks of a mode: in worker processes of this machine, or with --engine ray on a Ray cluster.

A Ray task runs some items in a worker process of its node, with the limits of pool.py, so both engines give
the same results. Ray repeats a task whose node dies on another node. This is safe because every task of this
package gives the same files again. All nodes must see the folders under the same paths.
"""

import os
import platform
import signal
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import RulesConfig
from vae.prepare.pool import Answer, Failure, Item, Limits, count_workers, run_each
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import UserError

TASKS_PER_CPU = 2  # at once: the next one is already on its way
MAX_RETRIES = 20  # of a task whose node died; then it is the task that ends nodes
CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 30.0  # without a result, until the cluster is checked


def run_tasks(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    config: RulesConfig,
    limits: Limits,
    *,
    items_per_task: int = 1,
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    """As pool.run_each, with the engine that `config` names; Ray gets `items_per_task` items at a time."""
    if config.engine == "ray":
        return _run_on_ray(function, items, config, limits, items_per_task)
    return run_each(function, items, num_workers=count_workers(config.num_workers), limits=limits)


def _run_on_ray(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    config: RulesConfig,
    limits: Limits,
    items_per_task: int,
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    ray = _connect(config.ray_address)
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_run_items)
    paths = (getattr(config, name, None) for name in ("input_dir", "output_dir"))
    folders = [path for path in paths if path and not is_remote(path)]
    seen = [*map(_probe_path, folders), *([] if all(map(os.path.isabs, folders)) else [os.getcwd()])]
    shared = ray.put((function, limits, os.getcwd(), seen))
    batches = _batches(iter(items), items_per_task)
    pending: list[Any] = []
    try:
        while True:
            for batch in islice(batches, max(0, _most_tasks(ray, config.num_workers) - len(pending))):
                pending.append(task.remote(shared, batch))
            if not pending:
                return
            done, pending = ray.wait(pending, timeout=PATIENCE_SECONDS)
            if not done and not ray.cluster_resources().get("CPU"):
                console.warning("--engine ray: the cluster has no node with a CPU: waiting for one")
            for reference in done:
                yield from _result(ray, reference)
    finally:
        with suppress(Exception):  # the cluster may have ended: the error that is being raised says so
            for reference in pending:
                ray.cancel(reference, force=True)


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(islice(items, size)):
        yield batch


def _run_items(
    shared: tuple[Callable[[Item], Answer], Limits, str, Sequence[str]], items: Sequence[Item]
) -> list[tuple[Item, Answer | Failure]]:
    """A Ray task: the results of some items, from one worker process."""
    function, limits, folder, seen = shared
    for path in seen:
        if not os.path.lexists(path):
            raise UserError(
                f"--engine ray: node {platform.node()} does not see {path}: every node needs the input and "
                "the output folder under the same path"
            )
    if folder in seen:
        os.chdir(folder)  # paths are relative to it
    with closing(run_each(function, items, num_workers=1, limits=limits)) as results:
        return list(results)


def _probe_path(path: str) -> str:
    """The path of something in a folder: an empty mount point lacks it. A file is probed itself."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        return path
    with os.scandir(path) as entries:
        return next((entry.path for entry in entries if not entry.name.endswith(".tmp")), path)


def _most_tasks(ray: Any, num_workers: str) -> int:
    """Tasks at once: some for each CPU that the cluster has now, but no more than --num_workers."""
    most = TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 0)))
    return most if str(num_workers).strip() == "auto" else min(most, count_workers(num_workers))


def _result(ray: Any, reference: Any) -> Iterator[Any]:
    try:
        yield from ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        line = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"--engine ray: {line}: the same command continues from here") from error


def _check_address(address: str) -> None:
    """Raise UserError if nothing answers at HOST:PORT: Ray itself tries again for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # a word such as auto
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--ray_address {address}: no cluster answers ({error}): give the address that `ray start --head`"
            " prints"
        ) from error


def _connect(address: str | None) -> Any:
    """The module ray, connected to a cluster; UserError if there is none at this address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to others
    ray = import_module("ray")
    if not ray.is_initialized():
        _check_address(address or os.environ.get("RAY_ADDRESS") or "")
        code = {"py_modules": [str(Path(__file__).parents[1])]}  # the nodes run this version of it
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, runtime_env=code, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"--ray_address {address or 'none'}: {line}: give the address of a running cluster, or leave "
                "it out to start one on this machine"
            ) from error
        signal.signal(signal.SIGTERM, handler)  # Ray ends the process in its own way
    return ray
