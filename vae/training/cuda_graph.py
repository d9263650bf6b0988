"""The gradients of a step as a CUDA graph: one launch instead of more than a thousand, for the same kernels.

Every tensor of a graph has a fixed address: a batch is copied over the first one, and the gradients appear in
the same tensors at every step. Nothing in a step is random: the noise is an input. A graph keeps its memory:
work between two steps that needs much memory ends the graph, and later steps capture another one.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from vae.step import Networks, StepInputs, StepResult, clear_gradients, compute_gradients, trained_networks
from vae.system import console

WARMUP_STEPS = 3  # before a capture: they compile kernels and let cuDNN search its algorithms

_Result = TypeVar("_Result")


def record(compute: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
    """Capture the kernels of `compute`; returns what replays them, and the result, still without values."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the thread that pins batches may call CUDA at the same time
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = compute()
    return graph.replay, result


@dataclass
class _Captured:
    """A graph with the tensors that it reads and writes."""

    key: tuple[Any, ...]
    inputs: StepInputs
    replay: Callable[[], None]
    result: StepResult
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]


class StepGraph:
    """Computes gradients, from a graph once WARMUP_STEPS steps in a row have the same shapes.

    A step with other shapes, such as one with an unusable image, ends the graph.
    """

    def __init__(self) -> None:
        self._captured: _Captured | None = None
        self._key: tuple[Any, ...] = ()  # of the last step without a graph
        self._steps = 0  # without a graph, in a row, with this key
        self._failed = False

    def gradients(self, networks: Networks, inputs: StepInputs, sizes: list[int]) -> StepResult:
        """Compute the same as vae.step.compute_gradients."""
        # Backward in this thread: cuDNN's plans and a capture are each those of one thread.
        with torch.autograd.set_multithreading_enabled(False):
            return self._gradients(networks, inputs, sizes)

    def _gradients(self, networks: Networks, inputs: StepInputs, sizes: list[int]) -> StepResult:
        key = (*sizes, inputs.image_share, *(tensor.shape for _, tensor in _tensors(inputs)))
        if self._captured is not None and self._captured.key == key:
            return _replay(self._captured, inputs)
        self.end()
        self._steps = self._steps + 1 if key == self._key else 1
        self._key = key
        if self._steps <= WARMUP_STEPS or self._failed:
            return compute_gradients(networks, inputs, sizes)
        failure = None
        try:
            self._captured = _capture(key, networks, inputs, sizes)
        except RuntimeError as error:
            failure = str(error.__context__ or error).splitlines()[0].split(". ")[0]
        if self._captured is not None:
            return _replay(self._captured, inputs)
        self._failed = True  # not in the except clause, where the exception keeps tensors alive
        clear_gradients(networks)
        gc.collect()  # frames of the exception
        torch.cuda.empty_cache()
        console.info(f"--cuda_graph: {failure}; training continues without a graph, only slower")
        return compute_gradients(networks, inputs, sizes)

    def end(self) -> None:
        """Free the memory of the graph, if there is one; after WARMUP_STEPS steps there is another one."""
        if self._captured is not None:
            self._captured, self._steps = None, 0
            torch.cuda.empty_cache()

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph, which uses memory."""
        return self._captured is not None


def _capture(key: tuple[Any, ...], networks: Networks, inputs: StepInputs, sizes: list[int]) -> _Captured:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(inputs)}
    inputs = replace(inputs, **copies)
    replay, result = record(lambda: compute_gradients(networks, inputs, sizes))
    trained = [p for network in trained_networks(networks) for p in network.parameters()]
    gradients = [(p, p.grad) for p in trained if p.grad is not None]
    return _Captured(key, inputs, replay, result, gradients)


def _replay(captured: _Captured, inputs: StepInputs) -> StepResult:
    for (_, target), (_, tensor) in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
        target.copy_(tensor)
    captured.replay()
    for parameter, gradient in captured.gradients:
        parameter.grad = gradient
    return _copied(captured.result)


def _copied(result: StepResult) -> StepResult:
    """Copy the result by one kernel: the next step overwrites the original."""
    tensors = result.tensors()
    values = torch.cat([tensor.flatten() for tensor in tensors])
    parts = iter(values.split([tensor.numel() for tensor in tensors]))
    return result.mapped(lambda tensor: next(parts).view(tensor.shape))


def _tensors(inputs: StepInputs) -> list[tuple[str, torch.Tensor]]:
    """Return the fields that are tensors, by name."""
    values = [(field.name, getattr(inputs, field.name)) for field in fields(inputs)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
