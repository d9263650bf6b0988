"""The processes of a run: one, or several under torchrun with one device each."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vae.config.errors import UserError
from vae.device import pick_device

TIMEOUT = datetime.timedelta(minutes=30)  # a first compile or a slow shard is no failure


@dataclass(frozen=True)
class Processes:
    """This process's place among `world`; with one process every exchange is free."""

    rank: int
    world: int
    device: torch.device
    on_this_host: int = 1  # processes that share this host's cores

    @classmethod
    def start(cls, device: str) -> "Processes":
        """Join the processes that torchrun started, or be the only one. `device`: cuda, cpu or auto."""
        kind = pick_device(device).type
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        if kind == "cuda" and local >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node starts more processes than the {torch.cuda.device_count()} cards here: "
                "lower it to that number"
            )
        chosen = torch.device(kind, local if kind == "cuda" else None)
        if kind == "cuda":
            torch.cuda.set_device(chosen)
        if world > 1:
            backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, timeout=TIMEOUT)
        return cls(rank, world, chosen, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes and prints."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over all processes in its backward."""
        if self.world == 1:
            return module
        ids = None if self.device.type == "cpu" else [self.device.index]
        return DistributedDataParallel(
            module,
            device_ids=ids,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # there are only constants
        )

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Each number summed over all processes, between hosts: no device waits for it."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def union(self, names: set[str]) -> set[str]:
        """The names that any process has."""
        if self.world == 1:
            return names
        everyone: list[set[str]] = [set() for _ in range(self.world)]
        dist.all_gather_object(everyone, names)
        return set().union(*everyone)

    def sum_tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A device tensor summed over all processes, without waiting for the device."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the others."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
