"""A step from a CUDA graph has the gradients of the step itself; what cannot be captured runs without one.

On the CPU a stand-in replays: like a graph, it reads and writes the same tensors at every step.
"""

from pathlib import Path

import pytest
import torch

from tests.harness.out_of_memory import run_out_of_memory
from tests.harness.toy_networks import NO_LPIPS, gradients, toy_inputs, toy_networks
from vae.config.options import SpeedConfig
from vae.step import Networks, StepInputs, clear_gradients, compute_gradients, trained_networks
from vae.system.errors import UserError
from vae.training import cuda_graph
from vae.training.cuda_graph import WARMUP_STEPS, StepGraph
from vae.training.distributed import Distributed
from vae.training.run import train
from vae.training.stage_memory import OomRetry, StepSettings, uses_cuda_graph

SIZES = [2, 2]


class Recorder:
    """Replaces the recording of graphs, and counts captures and replays."""

    def __init__(self, networks: Networks):
        self.networks, self.captures, self.replays = networks, 0, 0

    def __call__(self, compute):
        self.captures += 1
        result = compute()
        written = self._written(result)
        for tensor in written:
            tensor.fill_(float("nan"))  # a capture computes nothing

        def replay():
            self.replays += 1
            clear_gradients(self.networks)
            for tensor, found in zip(written, self._written(compute()), strict=True):
                tensor.copy_(found)

        return replay, result

    def _written(self, result):
        parameters = [p for network in trained_networks(self.networks) for p in network.parameters()]
        return [*result.tensors(), *(p.grad for p in parameters)]


@pytest.fixture
def networks():
    return toy_networks(loss=NO_LPIPS)


@pytest.fixture
def recorder(networks, monkeypatch):
    recorder = Recorder(networks)
    monkeypatch.setattr(cuda_graph, "record", recorder)
    return recorder


def inputs_of(step: int, batch: int = 4) -> StepInputs:
    """Other values at each step, in new tensors."""
    inputs = toy_inputs(batch, factor=0.1 * step, loss_scale=2.0**step)
    inputs.images = inputs.images.roll(step, dims=3)
    inputs.noise = inputs.noise * (1 + step)
    return inputs


def step_of(compute, networks, inputs, sizes):
    clear_gradients(networks)
    result = compute(networks, inputs, sizes)
    return result, [gradients(network) for network in trained_networks(networks)]


def assert_equal(found, expected):
    assert found[0].losses.keys() == expected[0].losses.keys()
    pairs = zip(found[0].tensors(), expected[0].tensors(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_replayed_steps_equal_the_step_itself(networks, recorder):
    graph, results = StepGraph(), []
    for step in range(WARMUP_STEPS + 3):
        results.append(step_of(graph.gradients, networks, inputs_of(step), SIZES))
    assert (recorder.captures, recorder.replays) == (1, 3)
    for step, result in enumerate(results):  # sums of earlier steps are not overwritten
        assert_equal(result, step_of(compute_gradients, networks, inputs_of(step), SIZES))


@pytest.mark.parametrize("other_work", ["a smaller batch", "a validation"])
def test_other_work_ends_the_graph_and_a_new_one_is_captured(networks, recorder, other_work):
    graph = StepGraph()
    for step in range(WARMUP_STEPS + 1):
        step_of(graph.gradients, networks, inputs_of(step), SIZES)
    if other_work == "a validation":
        graph.end()
    else:
        found = step_of(graph.gradients, networks, inputs_of(7, batch=3), [2, 1])
        assert_equal(found, step_of(compute_gradients, networks, inputs_of(7, batch=3), [2, 1]))
    assert not graph.is_captured
    for step in range(WARMUP_STEPS + 1):
        found = step_of(graph.gradients, networks, inputs_of(step), SIZES)
        assert_equal(found, step_of(compute_gradients, networks, inputs_of(step), SIZES))
    assert (recorder.captures, recorder.replays) == (2, 2)


def test_out_of_memory_beside_a_graph_only_ends_the_graph(networks, recorder, monkeypatch, capsys):
    dist = Distributed(rank=0, world_size=1, device=torch.device("cpu"))
    settings = StepSettings(2, "none", may_recompute_more=True, graph=StepGraph())

    retry = OomRetry(networks, dist, settings, Path("run"), image_size=16)

    def step(inputs):
        clear_gradients(networks)
        retry.gradients(inputs)

    for index in range(WARMUP_STEPS + 1):
        step(inputs_of(index))
    assert recorder.replays == 1
    passes = run_out_of_memory(monkeypatch, lambda _network, sizes: len(sizes) == 1)
    step(inputs_of(7))
    assert passes == [2, 2, 2]  # the failed pass, then the whole step
    assert (settings.graph, settings.micro_batch, settings.recompute) == (None, 2, "none")
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "out of memory: training continues without a CUDA graph, only slower"


def test_failed_capture_is_reported_once_and_training_continues(networks, monkeypatch, capsys):
    attempts = []

    def fails(compute):
        attempts.append(compute())  # leaves gradients behind
        raise RuntimeError("operation not permitted when stream is capturing. Long advice\nand a trace")

    monkeypatch.setattr(cuda_graph, "record", fails)
    graph = StepGraph()
    for step in range(WARMUP_STEPS + 3):
        found = step_of(graph.gradients, networks, inputs_of(step), SIZES)
        assert_equal(found, step_of(compute_gradients, networks, inputs_of(step), SIZES))
    assert len(attempts) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("--cuda_graph: operation not permitted when stream is capturing; ")


@pytest.mark.parametrize(
    ("device", "px", "options", "expected"),
    [
        ("cuda", 1016, {}, True),
        ("cuda", 1024, {}, False),
        ("cuda", 1024, {"cuda_graph": True}, True),
        ("cuda", 512, {"profile_steps": 3}, False),
        ("cuda", 512, {"cuda_graph": False}, False),
        ("cpu", 512, {}, False),
    ],
)
def test_graphs_are_used_where_the_host_is_slower(device, px, options, expected):
    dist = Distributed(0, 1, torch.device(device))
    assert uses_cuda_graph(SpeedConfig(**options), px, dist) == expected


def test_several_processes_run_without_graphs():
    dist = Distributed(0, 2, torch.device("cuda"))
    assert not uses_cuda_graph(SpeedConfig(), 512, dist)
    with pytest.raises(UserError, match="--cuda_graph is for one process, and there are 2: remove it"):
        uses_cuda_graph(SpeedConfig(cuda_graph=True), 512, dist)


def test_a_graph_without_a_card_is_an_error(tiny):
    with pytest.raises(UserError, match="--cuda_graph needs a CUDA device: remove the flag"):
        train({**tiny, "cuda_graph": True})


def on_cuda(dtype: torch.dtype) -> tuple[Networks, StepInputs]:
    """The toy networks and a step's inputs on the card."""
    networks = toy_networks(dtype, channels_last=True)
    for network in (networks.autoencoder, networks.discriminator, *networks.terms.networks()):
        network.to("cuda")
    inputs = toy_inputs()
    moved = {
        name: value.to("cuda") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)
    }
    return networks, StepInputs(**{**vars(inputs), **moved, "noise": moved["noise"].float()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_gradients_on_a_gpu(dtype):
    networks, inputs = on_cuda(dtype)
    graph = StepGraph()
    for step in range(WARMUP_STEPS + 3):
        inputs.images, inputs.noise = inputs.images.roll(1, dims=3), inputs.noise * 1.1
        found = step_of(graph.gradients, networks, inputs, SIZES)
        expected = step_of(compute_gradients, networks, inputs, SIZES)
        # the order of cuDNN's sums over pixels may differ between two runs
        for mine, theirs in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=f"step {step}")
        torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-5)
