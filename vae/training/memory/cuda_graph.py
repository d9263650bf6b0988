"""The gradients of a step as a CUDA graph: one launch instead of more than a thousand, for the same kernels.

Everything in a graph has a fixed address: a batch is copied to where the first one was, and the gradients
appear in the same tensors at every step. Its memory is its own, so whatever runs beside it, such as a
validation, needs more. Nothing in a step is random: the noise is an input.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vae.step import LastPass, Networks, StepInputs, clear_gradients, compute_gradients, trained_networks
from vae.system import console

WARMUP_STEPS = 3  # before a capture: they compile kernels and let cuDNN search its algorithms

Sums = dict[str, torch.Tensor]


@dataclass
class _Captured:
    """A graph with the tensors that it reads and writes."""

    key: tuple[Any, ...]
    inputs: StepInputs
    replay: Callable[[], None]
    sums: Sums
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]


class StepGraph:
    """compute_gradients of this process, from a graph once WARMUP_STEPS steps in a row have the same shapes.

    A step with other shapes, such as one with an unusable image, runs as if there were no graph. A graph
    contains no all-reduce: its gradients become complete at once, and `last_pass` is for the other steps.
    """

    def __init__(self) -> None:
        self._captured: _Captured | None = None
        self._key: tuple[Any, ...] = ()  # of the last step without a graph
        self._steps = 0  # without a graph, in a row, with this key
        self._failed = False

    def gradients(
        self, networks: Networks, inputs: StepInputs, sizes: list[int], last_pass: LastPass = nullcontext
    ) -> Sums:
        """The same as vae.step.compute_gradients."""
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
        return compute_gradients(networks, inputs, sizes, last_pass)

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph, which uses memory."""
        return self._captured is not None


def _capture(key: tuple[Any, ...], networks: Networks, inputs: StepInputs, sizes: list[int]) -> _Captured:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(inputs)}
    inputs = replace(inputs, **copies)
    replay, sums = _record(lambda: compute_gradients(networks, inputs, sizes))
    trained = [p for network in trained_networks(networks) for p in network.parameters()]
    gradients = [(p, p.grad) for p in trained if p.grad is not None]
    return _Captured(key, inputs, replay, sums, gradients)


def _record(compute: Callable[[], Sums]) -> tuple[Callable[[], None], Sums]:
    """Record the kernels of `compute`, without running them: returns what runs them, and their results."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the thread that pins batches may call CUDA at the same time
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sums = compute()
    return graph.replay, sums


def _replay(captured: _Captured, inputs: StepInputs) -> Sums:
    for (_, target), (_, tensor) in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
        target.copy_(tensor)
    captured.replay()
    for parameter, gradient in captured.gradients:
        parameter.grad = gradient
    sums = captured.sums
    values = torch.cat([value.flatten() for value in sums.values()])  # a copy: the next step overwrites them
    parts = values.split([value.numel() for value in sums.values()])
    return {name: part.view(sums[name].shape) for name, part in zip(sums, parts, strict=True)}


def _names(inputs: StepInputs) -> list[str]:
    return [name for name, _ in _tensors(inputs)]


def _tensors(inputs: StepInputs) -> list[tuple[str, torch.Tensor]]:
    """The fields that are tensors, by name."""
    values = [(field.name, getattr(inputs, field.name)) for field in fields(inputs)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
