"""The gradients of all processes become their mean: buckets are summed while backward computes the next ones.

In place of DistributedDataParallel, for two reasons. A process whose memory runs out repeats its pass alone,
while the sums of DistributedDataParallel are part of the pass, so that all processes would have to repeat it.
A pass with its sums can be captured in a CUDA graph, but NCCL wants captured sums on all processes or none.
Here, one process may replay a graph while another does not: the host begins the sums between two parts of it.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from vae.model.backward_order import backward_order
from vae.system.errors import UserError
from vae.training.distributed import Distributed

BUCKET_BYTES = 25 * 2**20  # of fp32: the default of DistributedDataParallel
ALIGNMENT = 64  # elements: kernels read and write whole 128-byte lines

GRADIENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # --gradient_dtype

_Time = float | torch.cuda.Event


@dataclass
class _Bucket:
    """Parameters whose gradients are summed together; `views` have their shapes and strides in `buffer`."""

    parameters: list[nn.Parameter]
    buffer: torch.Tensor
    views: list[torch.Tensor]
    missing: int = 0  # gradients that the last pass has not computed yet
    work: dist.Work | None = None  # of this step


@dataclass
class _Network:
    """The buckets of a network, in the order in which backward completes them."""

    buckets: list[_Bucket] = field(default_factory=list)
    overlaps: bool = False  # within the last pass
    begun: int = 0  # buckets of this step that are being summed


class GradientSum:
    """Means of gradients over all processes; nothing for one process.

    Every process sums the buckets in the same order, each once per step: those of the first network, then
    those of the next one. If memory runs out in the last pass, the gradients of buckets that are being summed
    are complete, so this process alone repeats the step: it computes them again, and the sum replaces them.
    """

    def __init__(self, networks: Sequence[nn.Module], world_size: int, dtype: torch.dtype = torch.float32):
        """`dtype`: of the sums between processes."""
        self._share = 1 / world_size
        self._dtype = dtype
        self._networks = {network: _Network() for network in networks} if world_size > 1 else {}
        self._waits: list[tuple[_Time, _Time]] = []  # of the last step
        self._record: Callable[[Callable[[], None]], None] | None = None
        for network, state in self._networks.items():
            state.buckets = [_bucket(parameters, dtype) for parameters in _grouped(backward_order(network))]
            for bucket in state.buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _parameter, state=state, bucket=bucket: self._accumulated(state, bucket)
                    )

    @contextmanager
    def last_pass(self, network: nn.Module) -> Iterator[None]:
        """Within this context, gradients of the network that backward accumulates are complete."""
        state = self._networks.get(network)
        if state is None:
            yield
            return
        for bucket in state.buckets:
            bucket.missing = len(bucket.parameters)
        state.overlaps = True
        try:
            yield
        finally:
            state.overlaps = False

    def finish(self, networks: Sequence[nn.Module]) -> None:
        """Replace the gradients of these networks by their means. All processes call this together.

        They are the first ones of all networks, in their order.
        """
        self._waits = []
        assert not self._networks or list(networks) == list(self._networks)[: len(networks)]
        states = [self._networks[network] for network in networks if network in self._networks]
        for state in states:
            while state.begun < len(state.buckets):
                self._begin(state)
        for state in states:
            state.begun = 0
            self._wait(state.buckets)

    def exposed_seconds(self) -> float:
        """How long the last step waited for sums. On a GPU, after its work is done."""
        return sum(_seconds(*wait) for wait in self._waits)

    def _accumulated(self, state: _Network, bucket: _Bucket) -> None:
        if not state.overlaps:
            return
        bucket.missing -= 1
        for earlier in self._networks.values():
            if earlier is state:
                break
            if earlier.begun < len(earlier.buckets):  # it may be complete elsewhere only: `finish` sums both
                return
        while state.begun < len(state.buckets) and state.buckets[state.begun].missing <= 0:
            self._begin(state)

    @torch.no_grad()
    def _begin(self, state: _Network) -> None:
        """Begin to sum the next bucket."""
        bucket = state.buckets[state.begun]
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = _gradients(bucket)
        # NCCL multiplies by the share itself. In bf16, it would round the share: 1 / 3 by 0.2 %.
        averages = bucket.buffer.is_cuda and self._dtype == torch.float32
        if not averages:
            torch._foreach_mul_(gradients, self._share)
        torch._foreach_copy_(bucket.views, gradients)
        begin = partial(self._all_reduce, state, state.begun, averages)
        index = state.begun
        if self._record is None:
            begin()
        else:
            self._record(begin)
        state.begun = index + 1
        self._replace(bucket)

    def _all_reduce(self, state: _Network, index: int, averages: bool) -> None:
        bucket = state.buckets[index]
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        bucket.work = dist.all_reduce(bucket.buffer, operation, async_op=True)
        state.begun = index + 1

    @contextmanager
    def recorded(self, record: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Within this context no sum begins: `record` gets what begins it, for each replay."""
        self._record = record
        try:
            yield
        finally:
            self._record = None
            for state in self._networks.values():
                state.begun = 0

    @torch.no_grad()
    def _wait(self, buckets: list[_Bucket]) -> None:
        started = _now(buckets[0].buffer.is_cuda)
        for bucket in buckets:
            assert bucket.work is not None
            bucket.work.wait()
        self._waits.append((started, _now(buckets[0].buffer.is_cuda)))
        for bucket in buckets:
            self._replace(bucket)
            if self._dtype != torch.float32:
                torch._foreach_copy_(_gradients(bucket), bucket.views)
            bucket.work = None

    def _replace(self, bucket: _Bucket) -> None:
        """Sums in fp32 are the gradients themselves, so that the others are freed."""
        if self._dtype == torch.float32:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view


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
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


def check_same_networks(networks: Sequence[nn.Module], dist: Distributed) -> None:
    """Raise UserError on all processes if the trained parameters of one have other names or shapes.

    Their sums would wait for ever, or add what does not belong together.
    """
    own = hashlib.sha256()
    for network in networks:
        lines = (f"{name} {tuple(p.shape)} {p.requires_grad}" for name, p in network.named_parameters())
        own.update("\n".join([type(network).__name__, *lines, ""]).encode())
    found = dict(dist.all_gather_set({(dist.rank, own.hexdigest())}))
    others = [str(rank) for rank, digest in sorted(found.items()) if digest != found[0]]
    if others:
        raise UserError(
            f"the networks of the processes {', '.join(others)} are not those of process 0: start all with "
            "the same flags, files and version of this code"
        )


def _grouped(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in groups of at least BUCKET_BYTES."""
    group: list[nn.Parameter] = []
    for parameter in parameters:
        group.append(parameter)
        if sum(p.nbytes for p in group) >= BUCKET_BYTES:
            yield group
            group = []
    if group:
        yield group


def _bucket(parameters: list[nn.Parameter], dtype: torch.dtype) -> _Bucket:
    sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters]
    buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
    parts = zip(parameters, buffer.split(sizes), strict=True)
    return _Bucket(parameters, buffer, [part.as_strided(p.shape, p.stride()) for p, part in parts])


def _gradients(bucket: _Bucket) -> list[torch.Tensor]:
    return [p.grad for p in bucket.parameters if p.grad is not None]
