"""The processes of a run: a single one, or several that torchrun started, with one device each."""

import datetime
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from vae.device import pick_device
from vae.system import console
from vae.system.errors import EXIT_FAILED, HangError, LostProcessError, UserError

JOIN_MINUTES = 10.0  # until all processes have joined, or --hang_minutes if that is less
POLL_SECONDS = 5e-5  # far below the time of a step
WITHOUT_LIMIT_MINUTES = 24 * 60.0  # of a collective if --hang_minutes is 0; PyTorch has no "off"

_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")

_Item = TypeVar("_Item", bound=Hashable)


@dataclass
class HostWaits:
    """How long this process has waited for the other ones, except for gradients."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Distributed:
    """This process's rank and device among `world_size` processes; with one process, collectives are free."""

    rank: int
    world_size: int
    device: torch.device
    local_world_size: int = 1  # processes on this host, which share its cores
    waits: HostWaits = field(default_factory=HostWaits, compare=False)

    @classmethod
    def start(cls, device: str, hang_minutes: float = 0) -> "Distributed":
        """Join the processes that torchrun started, or run alone. `device`: cuda, cpu or auto.

        Collectives fail long after `hang_minutes`, because the watchdog of --hang_minutes can save first.
        """
        kind = pick_device(device).type
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
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
        return cls(rank, world_size, chosen, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which alone prints and writes files."""
        return self.rank == 0

    def broadcast(self, module: nn.Module) -> None:
        """Give all processes the weights of the main one: another CPU may round initial weights otherwise."""
        if self.world_size > 1:
            for parameter in module.parameters():
                dist.broadcast(parameter.detach(), 0)

    def begin_sum(
        self, *numbers: float, while_waiting: Callable[[], None] = lambda: None
    ) -> Callable[[], list[float]]:
        """Begin to sum each number over all processes; returns what waits for the sums and gives them.

        On a GPU, the numbers go through its network, beside the work that it does meanwhile. A wait there
        calls `while_waiting`, which may raise an exception: a lost process is not noticed otherwise.
        """
        if self.world_size == 1:
            return lambda: list(numbers)
        if self.device.type == "cpu":
            total = torch.tensor(numbers, dtype=torch.float64)
            work = dist.all_reduce(total, async_op=True)
            return self._after(work.wait, total)
        with torch.cuda.stream(self._side_stream):
            mine = torch.tensor(numbers, dtype=torch.float64, pin_memory=True)
            total = mine.to(self.device, non_blocking=True)
            dist.all_reduce(total)
            found = torch.empty_like(mine, pin_memory=True).copy_(total, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return self._after(partial(wait_until, done.query, while_waiting), found)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _after(self, wait: Callable[[], object], sums: torch.Tensor) -> Callable[[], list[float]]:
        def waited() -> list[float]:
            started = time.perf_counter()
            wait()
            self.waits.seconds += time.perf_counter() - started
            return sums.tolist()

        return waited

    def all_reduce_scalars(self, *numbers: float) -> list[float]:
        """Sum each number over all processes, on the host: no device synchronizes."""
        if self.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_gather_scalars(self, *numbers: float) -> list[list[float]]:
        """The numbers of every process by rank, on the host: no device synchronizes."""
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
        """The union of the sets of all processes."""
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

    def synchronize(self) -> None:
        """Wait until the device has done all of this process's work, so that a clock measures it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def wait_until(is_done: Callable[[], bool], while_waiting: Callable[[], None]) -> None:
    """Wait in Python, where handlers of signals run, and not in the code of CUDA."""
    while not is_done():
        while_waiting()
        time.sleep(POLL_SECONDS)


def _join(backend: str, hang_minutes: float) -> None:
    """Join the process group of this start of torchrun.

    torchrun keeps one store for all its restarts (--max_restarts). Without a prefix, restarted processes
    would find the addresses of the ended ones in it, and some would wait for ever. On several nodes, the
    numbers of restarts may differ.
    """
    minutes = 2 * hang_minutes + 20 if hang_minutes else WITHOUT_LIMIT_MINUTES
    timeout = datetime.timedelta(minutes=minutes)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
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
        raise HangError(f"{line}: {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()
