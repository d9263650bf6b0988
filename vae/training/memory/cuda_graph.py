"""The gradients of a step as a CUDA graph: one launch instead of more than a thousand, for the same kernels.

Everything in a graph has a fixed address: a batch is copied to where the first one was, and the gradients
appear in the same tensors at every step. Nothing in a step is random: the noise is an input.

A replay reads no intermediate value of an earlier one, and the allocator knows their memory as free blocks of
a pool, so other work uses it until the next replay. Gradients and sums are not free: tensors refer to them.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch

from vae.step import Networks, StepInputs, clear_gradients, compute_gradients, trained_networks
from vae.system import console

WARMUP_STEPS = 3  # before a capture: they compile kernels and let cuDNN search its algorithms

Sums = dict[str, torch.Tensor]

_Result = TypeVar("_Result")


class GraphMemory:
    """A pool of memory, and the stream of its users: the allocator gives a block only to its own stream."""

    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()
        self.stream = _stream()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within this context, this thread uses the pool. The next replay overwrites what it allocates.

        The work waits for the replays before it, and those after it wait for the work.
        """
        outside = torch.cuda.current_stream()
        searches = torch.backends.cudnn.benchmark
        torch.cuda.empty_cache()  # within a pool, the allocator cannot free unused memory of others
        torch.backends.cudnn.benchmark = False  # cuDNN's search needs GiB, which the pool would keep
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
                yield
        finally:
            outside.wait_stream(self.stream)
            torch.backends.cudnn.benchmark = searches

    def live_bytes(self) -> int:
        """The bytes of the pool that tensors refer to."""
        return sum(segment["active_size"] for segment in self.pool.snapshot())


@cache
def _stream() -> torch.cuda.Stream:
    """One for all graphs of this process: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()


class Recording:
    """The kernels of a function as a CUDA graph."""

    def __init__(self) -> None:
        self.memory = GraphMemory()
        self._graph = torch.cuda.CUDAGraph()

    def record(self, compute: Callable[[], _Result]) -> _Result:
        """Record the kernels of `compute`, without running them; returns its result, still without values."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.memory.stream):
            # thread_local: the thread that pins batches may call CUDA at the same time
            pool = self.memory.pool.id  # PyTorch 2.10 does not take the pool itself
            self._graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                result = compute()
            except BaseException:
                with suppress(RuntimeError):  # the cause is the first error
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        return result

    def replay(self) -> None:
        """Run what was recorded."""
        self._graph.replay()


@dataclass
class _Captured:
    """A graph with the tensors that it reads and writes."""

    key: tuple[Any, ...]
    inputs: StepInputs
    recording: Recording
    sums: Sums
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]


class StepGraph:
    """compute_gradients of this process, from a graph once WARMUP_STEPS steps in a row have the same shapes.

    A step with other shapes, such as one with an unusable image, runs in the memory of the graph.
    """

    def __init__(self) -> None:
        self._captured: _Captured | None = None
        self._key: tuple[Any, ...] = ()  # of the last step without a graph
        self._steps = 0  # without a graph, in a row, with this key
        self._failed = False

    def gradients(self, networks: Networks, inputs: StepInputs, sizes: list[int]) -> Sums:
        """The same as vae.step.compute_gradients."""
        # Backward in this thread: cuDNN's plans, the pool and a capture are each those of one thread.
        with torch.autograd.set_multithreading_enabled(False):
            return self._gradients(networks, inputs, sizes)

    def _gradients(self, networks: Networks, inputs: StepInputs, sizes: list[int]) -> Sums:
        key = (*sizes, inputs.image_share, *(tensor.shape for _, tensor in _tensors(inputs)))
        if self._captured is not None and self._captured.key == key:
            return _replay(self._captured, inputs)
        if self._captured is not None and _names(self._captured.inputs) != _names(inputs):
            self._captured = None  # the discriminator has started: the old graph is not needed any more
            torch.cuda.empty_cache()
        self._steps = self._steps + 1 if key == self._key else 1
        self._key = key
        if self._steps > WARMUP_STEPS and not self._failed:
            self._captured, failure = None, ""
            try:
                self._captured = _capture(key, networks, inputs, sizes)
            except RuntimeError as error:
                failure = str(error).splitlines()[0].split(". ")[0]
            if self._captured is not None:
                return _replay(self._captured, inputs)
            self._failed = True  # not in the except clause, where the exception keeps tensors alive
            clear_gradients(networks)
            gc.collect()  # frames of the exception
            torch.cuda.empty_cache()
            console.info(f"--cuda_graph: {failure}; training continues without a graph, only slower")
        if self._captured is None:
            return compute_gradients(networks, inputs, sizes)
        with self._captured.recording.memory.shared():
            sums = compute_gradients(networks, inputs, sizes)
        return _copied(sums)  # the next replay overwrites them; the gradients are used before it

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Within this context, this thread uses the memory of the graph, if there is one.

        What it allocates must not outlive it. If something does, such as a value that a library keeps, the
        graph ends: the next replay would overwrite it. The next step then captures another one.
        """
        if self._captured is None:
            yield
            return
        memory = self._captured.recording.memory
        before = memory.live_bytes()
        with memory.shared():
            yield
        if memory.live_bytes() > before:
            self._captured = None

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph, which uses memory."""
        return self._captured is not None


def _capture(key: tuple[Any, ...], networks: Networks, inputs: StepInputs, sizes: list[int]) -> _Captured:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(inputs)}
    inputs = replace(inputs, **copies)
    recording = Recording()
    sums = recording.record(lambda: compute_gradients(networks, inputs, sizes))
    trained = [p for network in trained_networks(networks) for p in network.parameters()]
    gradients = [(p, p.grad) for p in trained if p.grad is not None]
    return _Captured(key, inputs, recording, sums, gradients)


def _replay(captured: _Captured, inputs: StepInputs) -> Sums:
    for (_, target), (_, tensor) in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
        target.copy_(tensor)
    captured.recording.replay()
    for parameter, gradient in captured.gradients:
        parameter.grad = gradient
    return _copied(captured.sums)  # the next step overwrites them


def _copied(sums: Sums) -> Sums:
    values = torch.cat([value.flatten() for value in sums.values()])
    parts = values.split([value.numel() for value in sums.values()])
    return {name: part.view(sums[name].shape) for name, part in zip(sums, parts, strict=True)}


def _names(inputs: StepInputs) -> list[str]:
    return [name for name, _ in _tensors(inputs)]


def _tensors(inputs: StepInputs) -> list[tuple[str, torch.Tensor]]:
    """The fields that are tensors, by name."""
    values = [(field.name, getattr(inputs, field.name)) for field in fields(inputs)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
