"""The tasks of a mode: in worker processes of this machine, or with --engine ray on a Ray cluster.

On Ray, an actor on each node runs either whole parts of a mode (parts.py), or items in batches, in worker
processes with the limits of pool.py. An actor lives as long as its node. If it is lost, another one repeats
its jobs. This is safe because every job of this package gives the same files again. All nodes must see the
folders under the same paths.
"""

import os
import platform
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.prepare_flags import RulesConfig
from vae.prepare.pool import Answer, Failure, Item, Limits, Pool, count_workers, run_each
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import UserError
from vae.system.files import nearest_existing

JOBS_PER_NODE = 2  # at once: the next one is already on its way
MAX_LOST = 20  # actors with which a job was lost; then it is the job that ends them
CONNECT_SECONDS = 10.0
POLL_SECONDS = 2.0  # until the driver looks for new nodes
PATIENCE_SECONDS = 30.0  # without a node, until a warning

Job = Any
Work = Callable[[Job], Any]  # done in an actor


def run_tasks(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    config: RulesConfig,
    limits: Limits,
    *,
    items_per_task: int = 1,
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    """As pool.run_each, with the engine of `config`; Ray sends `items_per_task` for each core at a time."""
    if config.engine == "ray":
        return _run_items_on_ray(function, items, config, limits, items_per_task)
    return run_each(function, items, num_workers=count_workers(config.num_workers), limits=limits)


def _run_items_on_ray(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    config: RulesConfig,
    limits: Limits,
    items_per_task: int,
) -> Generator[tuple[Item, Answer | Failure], None, None]:
    with closing(Cluster(config, partial(_item_worker, function, limits))) as cluster:
        for results in cluster.run(_batches(iter(items), items_per_task * cluster.cores_per_node())):
            yield from results


def _item_worker(function: Callable[[Item], Answer], limits: Limits, num_workers: int) -> Work:
    """A function of a batch of items, which gives the result of each."""
    pool: Pool[Item, Answer] = Pool(function, num_workers, limits)

    def run(items: list[Item]) -> list[tuple[Item, Answer | Failure]]:
        try:
            return list(pool.run(iter(items)))
        except BaseException:
            pool.kill()
            raise

    return run


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(islice(items, size)):
        yield batch


class _NodeActor:
    """What runs on a node, as long as it lives."""

    def __init__(self, make: Callable[[int], Work], num_workers: int, folder: str, seen: list[str]):
        self._make, self._num_workers, self._folder, self._seen = make, num_workers, folder, seen
        self._work: Work | None = None

    def run(self, job: Job) -> Any:
        """The result of a job; UserError if the node lacks a path that the driver has seen."""
        if self._work is None:  # not in the constructor, whose errors Ray reports as a lost actor
            self._check_paths()
            self._work = self._make(self._num_workers)
        return self._work(job)

    def _check_paths(self) -> None:
        for path in self._seen:
            if not os.path.lexists(path):
                raise UserError(
                    f"--engine ray: node {platform.node()} does not see {path}: every node needs the input "
                    "and the output folder under the same path"
                )
        if self._folder in self._seen:
            os.chdir(self._folder)  # paths are relative to it


def _in_actor(make: Callable[[int], Work], num_workers: int) -> Work:
    """As `make`; its worker processes do not import the main module, a script of Ray that takes seconds."""
    with suppress(AttributeError):
        del sys.modules["__main__"].__file__
    return make(num_workers)


class _Node(NamedTuple):
    actor: Any
    jobs: dict[Any, Job]  # by the reference to the result


class Cluster:
    """A Ray cluster, on which jobs are done by one actor for each node."""

    def __init__(self, config: RulesConfig, make: Callable[[int], Work]):
        """Connect to it. `make` gives, on a node, a function of a job; it gets the number of processes."""
        self._ray, self.is_own = _connect(config.ray_address)
        self._config, self._make = config, make
        paths = (getattr(config, name, None) for name in ("input_dir", "output_dir"))
        folders = [path for path in paths if path and not is_remote(path)]
        self._seen = [
            *map(_probe_path, folders),
            *([] if all(map(os.path.isabs, folders)) else [os.getcwd()]),
        ]
        self._nodes: dict[str, _Node] = {}

    def cores(self) -> dict[str, int]:
        """Processes of each node that lives, by its identity."""
        found = {
            node["NodeID"]: int(node["Resources"].get("CPU", 0))
            for node in self._ray.nodes()
            if node["Alive"]
        }
        most = sys.maxsize
        if str(self._config.num_workers).strip() != "auto":
            most = count_workers(self._config.num_workers)
        return {node: min(cores, most) for node, cores in found.items() if cores}

    def cores_per_node(self) -> int:
        """Of the largest node."""
        return max(self.cores().values(), default=1)

    def run(self, jobs: Iterator[Job]) -> Iterator[Any]:
        """The results of all jobs, in the order of completion; the jobs of a lost actor are done again."""
        lost: Counter[str] = Counter()
        again: deque[Job] = deque()
        waited = 0.0
        while True:
            self._start_actors()
            self._give(again, jobs)
            pending = {reference: name for name, node in self._nodes.items() for reference in node.jobs}
            if not pending and self._nodes:
                return
            done = self._ray.wait(list(pending), timeout=POLL_SECONDS)[0] if pending else []
            waited = _wait_for_node(waited) if not self._nodes else 0.0
            for reference in done:
                name = pending[reference]
                if name not in self._nodes:
                    continue  # lost with an earlier result
                try:
                    yield self._ray.get(reference)
                    del self._nodes[name].jobs[reference]
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except self._ray.exceptions.RayError as error:
                    again += _lost_jobs(self._nodes.pop(name), lost, error)
                    time.sleep(POLL_SECONDS)  # Ray needs some seconds to notice that a node has died

    def close(self) -> None:
        """End the actors, which otherwise stay for the next jobs."""
        with suppress(Exception):  # the cluster may have ended: the error that is being raised says so
            for node in self._nodes.values():
                self._ray.kill(node.actor)

    def _start_actors(self) -> None:
        """An actor for each node that has none."""
        strategies = import_module("ray.util.scheduling_strategies")
        for name, cores in self.cores().items():
            if name not in self._nodes:
                strategy = strategies.NodeAffinitySchedulingStrategy(name, soft=False)
                actor = self._ray.remote(num_cpus=cores, scheduling_strategy=strategy)(_NodeActor)
                make = partial(_in_actor, self._make)
                self._nodes[name] = _Node(actor.remote(make, cores, os.getcwd(), self._seen), {})

    def _give(self, again: deque[Job], jobs: Iterator[Job]) -> None:
        """Give each node one job after another, first those that were lost."""
        for _ in range(JOBS_PER_NODE):
            for node in self._nodes.values():
                if len(node.jobs) < JOBS_PER_NODE:
                    try:
                        job = again.popleft() if again else next(jobs)
                    except StopIteration:
                        return
                    node.jobs[node.actor.run.remote(job)] = job


def _lost_jobs(node: _Node, lost: Counter[str], error: Exception) -> list[Job]:
    """The jobs of a lost actor; UserError if it was working on one that was lost too often."""
    jobs = list(node.jobs.values())
    lost[str(jobs[0])] += 1
    if lost[str(jobs[0])] > MAX_LOST:
        line = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"--engine ray: {line}: the same command continues from here") from error
    return jobs


def _wait_for_node(waited: float) -> float:
    """Wait, and return for how long in total; a warning says so once."""
    time.sleep(POLL_SECONDS)
    if waited < PATIENCE_SECONDS <= waited + POLL_SECONDS:
        console.warning("--engine ray: the cluster has no node with a CPU: waiting for one")
    return waited + POLL_SECONDS


def _probe_path(path: str) -> str:
    """The path of something in a folder: an empty mount point lacks it.

    A file is probed itself, and of a missing folder, that in which it will be.
    """
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        return str(nearest_existing(path))
    with os.scandir(path) as entries:
        return next((entry.path for entry in entries if not entry.name.endswith(".tmp")), path)


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


def _connect(address: str | None) -> tuple[Any, bool]:
    """The module ray, connected to a cluster, and whether that is a new one on this machine.

    There is a new one without an address if none runs here. UserError if there is none at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to others
    ray = import_module("ray")
    if ray.is_initialized():
        return ray, False
    address = address or os.environ.get("RAY_ADDRESS")
    _check_address(address or "")
    handler = signal.getsignal(signal.SIGTERM)
    start = partial(ray.init, log_to_driver=False, logging_level="ERROR")
    code = {"py_modules": [str(Path(__file__).parents[1])]}  # the nodes run this version of it
    try:
        try:
            start(address or "auto", runtime_env=code)
            is_own = False
        except ConnectionError:
            if address:
                raise
            is_own = True
            start("local", include_dashboard=False)  # its workers import what this process does
    except (OSError, RuntimeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--ray_address {address or 'none'}: {line}: give the address of a running cluster, or leave "
            "it out to start one on this machine"
        ) from error
    signal.signal(signal.SIGTERM, handler)  # Ray ends the process in its own way
    return ray, is_own
