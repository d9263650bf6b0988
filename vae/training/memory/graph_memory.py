"""The memory of a CUDA graph, which other work uses between its replays.

A replay writes its intermediate values to the same addresses each time, and reads none of an earlier replay.
The allocator knows them as free blocks of a pool, so other work may use them until the next replay. What a
replay leaves to be read, its gradients and sums, is not free, because tensors refer to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


class GraphMemory:
    """A pool of memory, and the stream of its users: the allocator gives a block only to its own stream."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.MemPool(), _stream()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within this context, this thread uses the pool. The next replay overwrites what it allocates.

        The work waits for the replays before it, and those after it wait for the work.
        """
        outside, searches = torch.cuda.current_stream(), torch.backends.cudnn.benchmark
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
    """The kernels of a function as CUDA graphs, and what the host does between them."""

    def __init__(self) -> None:
        self.memory = GraphMemory()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._between: list[Callable[[], None]] = []

    def record(self, compute: Callable[[], _Result]) -> _Result:
        """Record the kernels of `compute`, without running them; returns its result, still without values."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.memory.stream):
            self._begin()
            try:
                result = compute()
            except BaseException:
                with suppress(RuntimeError):  # the cause is the first error
                    self._graphs[-1].capture_end()
                raise
            self._graphs[-1].capture_end()
        return result

    def call(self, function: Callable[[], None]) -> None:
        """While recording: a replay calls `function` when it has started the kernels so far."""
        self._graphs[-1].capture_end()
        self._between.append(function)
        self._begin()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # thread_local: the thread that pins batches may call CUDA at the same time
        pool = self.memory.pool.id  # PyTorch 2.10 does not take the pool itself
        self._graphs[-1].capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]

    def replay(self) -> None:
        """Run what was recorded."""
        for index, graph in enumerate(self._graphs):
            graph.replay()
            if index < len(self._between):
                self._between[index]()
