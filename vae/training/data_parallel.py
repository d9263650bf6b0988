"""Gradients become means over all processes: DistributedDataParallel, and how long a step waits for it."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from vae.system.errors import UserError
from vae.training.distributed import Distributed

_Future = torch.futures.Future[torch.Tensor]
_Hook = Callable[[Any, dist.GradBucket], _Future]
_Time = float | torch.cuda.Event

HOOKS: dict[str, _Hook] = {"fp32": allreduce_hook, "bf16": bf16_compress_hook}  # of --gradient_dtype
_OTHER_SHAPES = ("expects same model", "appears not to match")  # DistributedDataParallel, of the processes


class GradientWaits:
    """How long this process waited for the sums of the last step, after its own gradients were complete."""

    def __init__(self) -> None:
        self._waits: dict[nn.Module, tuple[_Time, _Time]] = {}

    def seconds(self) -> float:
        """The seconds of all networks. On a GPU, call it after the work of the step is done."""
        return sum(_seconds(*wait) for wait in self._waits.values())

    def timed(self, network: nn.Module, hook: _Hook) -> _Hook:
        """The communication hook of a network, timed from the start of its last bucket to its end."""

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
    """The network with the weights of the main process; a backward pass gives means over all processes.

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
