"""The processes of a run: a single one, or several that torchrun started, with one device each.

DistributedDataParallel makes their gradients means over all processes.
"""

import datetime
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from vae.device import pick_device
from vae.system import console
from vae.system.errors import EXIT_FAILED, LostProcessError, UserError

JOIN_MINUTES = 10.0  # until all processes have joined, or --hang_minutes if that is less
WITHOUT_LIMIT_MINUTES = 24 * 60.0  # of a collective if --hang_minutes is 0; PyTorch has no "off"

_LEFT_GROUPS: list[dist.ProcessGroup | None] = []

_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")

_Item = TypeVar("_Item", bound=Hashable)
_Plain = TypeVar("_Plain")
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Distributed:
    """This process's rank and device among `world_size` processes; with one process, collectives are free."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1  # processes on this host, which share its cores

    @classmethod
    def start(cls, device: str, hang_minutes: float = 0) -> "Distributed":
        """Join the processes that torchrun started, or run alone. `device`: cuda, cpu or auto.

        Collectives fail long after `hang_minutes`, because the watchdog of --hang_minutes can save first.
        """
        kind = pick_device(device).type
        world_size = _number("WORLD_SIZE", "1", 1, 10**6)
        rank = _number("RANK", "0", 0, world_size - 1)
        local_rank = _number("LOCAL_RANK", "0", 0, 10**6)
        local_size = _number("LOCAL_WORLD_SIZE", "1", 1, 10**6)
        if world_size > 1:
            _check_address()
        if kind == "cuda" and local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node is above the {torch.cuda.device_count()} GPUs here: use that number"
            )
        chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(chosen)
        if world_size > 1:
            backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
            with _join_limit(hang_minutes, world_size):
                _join(backend, hang_minutes)
        return cls(rank, world_size, chosen, local_size)

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which alone prints and writes files."""
        return self.rank == 0

    def on_main(self, action: Callable[[], _Plain]) -> _Plain:
        """Call `action` on the main process; returns its result, which is plain and small, on all of them.

        If it raises a UserError there, the others end with its exit code and without a line of their own.
        """
        if self.world_size == 1:
            return action()
        result, failure = None, None
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                failure = error
        message = [result, failure and failure.exit_code]
        dist.broadcast_object_list(message, 0, device=torch.device("cpu"))
        if message[1] is not None:
            raise failure or SystemExit(message[1])
        return message[0]  # type: ignore[return-value]

    def main_first(self, read: Callable[[], _Read]) -> _Read:
        """Call `read` in every process, but in the main one first: it may download, or fail."""
        results: list[_Read] = []
        self.on_main(lambda: results.append(read()))
        return results[0] if results else read()

    def all_reduce_scalars(self, *numbers: float) -> list[float]:
        """Sum each number over all processes, on the host: no device synchronizes."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_gather_scalars(self, *numbers: float) -> list[list[float]]:
        """Return the numbers of every process by rank, on the host: no device synchronizes."""
        if self.world_size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a device tensor over all processes in place, without synchronizing the device."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def all_gather_set(self, items: set[_Item]) -> set[_Item]:
        """Return the union of the sets of all processes."""
        if self.world_size == 1:
            return items
        gathered: list[set[_Item]] = [set() for _ in range(self.world_size)]
        dist.all_gather_object(gathered, items)
        return set().union(*gathered)

    @contextmanager
    def lost_processes_named(self) -> Iterator[None]:
        """Within this context, a collective that fails because a process has ended is a LostProcessError."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if self.world_size == 1 or not any(words in text for words in _LOST):
                raise
            raise LostProcessError(
                f"another of the {self.world_size} processes of this run has ended: its own output, or the "
                "system's log if it was killed, says why"
            ) from error

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1 and dist.is_initialized():
            # Kept until the process ends: DistributedDataParallel would free the group with the GIL and join
            # gloo's thread, which may wait for the GIL to free a tensor. PyTorch 2.11 once hung so.
            _LEFT_GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()


def _number(name: str, default: str, minimum: int, maximum: int) -> int:
    """Read an environment variable of torchrun; UserError if it is no number from `minimum` to `maximum`."""
    text = os.environ.get(name) or default
    if not text.isdecimal() or not minimum <= int(text) <= maximum:
        raise UserError(
            f"the environment variable {name} is {text or 'missing'}, not a number from {minimum} to "
            f"{maximum}: start with torchrun, or unset RANK and WORLD_SIZE for a single process"
        )
    return int(text)


def _check_address() -> None:
    """Raise UserError for an address at which no processes can join: PyTorch tries it for minutes."""
    address, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", "", 0, 65535)
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"the environment variable MASTER_ADDR is {address or 'missing'}, which this machine does not "
            f"find ({error}): give the name or address of the machine of RANK 0"
        ) from None


def _join(backend: str, hang_minutes: float) -> None:
    """Join the process group of this start of torchrun.

    torchrun keeps one store for all its restarts (--max_restarts). Without a prefix, restarted processes
    would find the addresses of the ended ones in it, and some would wait for ever. On several nodes, the
    numbers of restarts may differ.
    """
    minutes = 2 * hang_minutes + 20 if hang_minutes else WITHOUT_LIMIT_MINUTES
    timeout = datetime.timedelta(minutes=minutes)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") in (None, "", "1"):
        store = dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextmanager
def _join_limit(hang_minutes: float, world_size: int) -> Iterator[None]:
    """Within this context, joining may take a limited time. PyTorch's own timeouts do not end every wait."""
    minutes = min(hang_minutes or JOIN_MINUTES, JOIN_MINUTES)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    line = f"the {world_size} processes of this run cannot join at {where}"

    def give_up() -> None:
        text = (
            f"{line} within {minutes:g} minutes: check that all of them were started and reach this address"
        )
        console.error_from_signal_handler(f"train_vae.py: {text}")
        os._exit(EXIT_FAILED)

    timer = threading.Timer(60 * minutes, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistError as error:
        raise LostProcessError(f"{line}: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()


# ---- Gradients -----------------------------------------------------------------------------------------


_Future = torch.futures.Future[torch.Tensor]
_Hook = Callable[[Any, dist.GradBucket], _Future]
_Time = float | torch.cuda.Event

HOOKS: dict[str, _Hook] = {"fp32": allreduce_hook, "bf16": bf16_compress_hook}  # of --gradient_dtype
_OTHER_SHAPES = ("expects same model", "appears not to match")  # DistributedDataParallel, of the processes


class GradientWaits:
    """Measures the waits for the sums of the last step, after this process's own gradients were complete."""

    def __init__(self) -> None:
        self._waits: dict[nn.Module, tuple[_Time, _Time]] = {}

    def seconds(self) -> float:
        """Return the seconds of all networks. On a GPU, call it after the work of the step is done."""
        return sum(_seconds(*wait) for wait in self._waits.values())

    def timed(self, network: nn.Module, hook: _Hook) -> _Hook:
        """Return the communication hook of a network, timed from the start to the end of its last bucket."""

        def timed_hook(group: Any, bucket: dist.GradBucket) -> _Future:
            is_gpu = bucket.buffer().is_cuda
            started = _now(is_gpu)
            future = hook(group, bucket)
            if not bucket.is_last():
                return future

            def ended(summed: _Future) -> torch.Tensor:
                self._waits[network] = started, _now(is_gpu)
                return summed.value()

            return future.then(ended)

        return timed_hook


def data_parallel(
    network: nn.Module, processes: Distributed, gradient_dtype: str, waits: GradientWaits
) -> nn.Module:
    """Give the network the weights of the main process; its backward passes give means over processes.

    `gradient_dtype`: a key of HOOKS. Raises UserError if the processes have different networks. With one
    process, the network itself.
    """
    if processes.world_size == 1:
        return network
    try:
        # not static_graph: its first backward fails after passes within no_sync (PyTorch 2.14)
        with warnings.catch_warnings():  # about broadcast_buffers, from PyTorch 2.14 on
            warnings.simplefilter("ignore", FutureWarning)
            parallel = DistributedDataParallel(network, broadcast_buffers=False, gradient_as_bucket_view=True)
    except RuntimeError as error:
        if not any(words in str(error) for words in _OTHER_SHAPES):
            raise
        raise UserError(
            "the networks of the processes differ: start all with the same flags, files and version of this "
            f"code ({str(error).splitlines()[0]:.200})"
        ) from None
    parallel.register_comm_hook(None, waits.timed(network, HOOKS[gradient_dtype]))
    return parallel


def _now(is_gpu: bool) -> _Time:
    """This time of the host, or of the work of the GPU."""
    if not is_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: _Time, end: _Time) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000
    assert isinstance(end, float)
    return end - start
