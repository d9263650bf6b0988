"""Means of gradients over two gloo processes, in buckets that are summed within the last backward pass."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.harness.toy_networks import NO_LPIPS, gradients, relative_difference, toy_inputs, toy_networks
from tests.training.test_cuda_graph import Recorder
from vae.step import Networks, StepInputs, clear_gradients, compute_gradients, trained_networks
from vae.training import gradient_sum
from vae.training.distributed import Distributed, wait_until
from vae.training.gradient_sum import GradientSum
from vae.training.memory import cuda_graph
from vae.training.memory.cuda_graph import WARMUP_STEPS, StepGraph
from vae.training.memory.oom_retry import OomRetry, StepSettings
from vae.training.recovery.liveness import Liveness
from vae.training.recovery.signals import LoadingStoppedError, StopSignals
from vae.training.recovery.watchdog import Watchdog

CPU = torch.device("cpu")


def on_two_processes(test: Callable[[int], None], folder: Path) -> None:
    """Run `test` with the rank as its argument in two forked processes."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
        try:
            test(rank)
        except BaseException:
            (folder / f"error_{rank}").write_text(traceback.format_exc())
            raise

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
    errors = [path.read_text() for path in folder.glob("error_*")]
    assert not errors, errors[0]
    assert [process.exitcode for process in started] == [0, 0]


def networks_fp32() -> Networks:
    return toy_networks(torch.float32, loss=NO_LPIPS, channels_last=True)


def inputs_of(rank: int, images: int = 4) -> StepInputs:
    """Other images on each process."""
    inputs = toy_inputs(images)
    inputs.images, inputs.noise = inputs.images.roll(rank + 1, dims=3), inputs.noise.float()
    inputs.adversarial_factor = torch.tensor(0.3)
    return inputs


def expected_means() -> list[dict[str, torch.Tensor]]:
    """The means that one process computes from the images of both."""
    found = []
    for rank in range(2):
        networks = networks_fp32()
        compute_gradients(networks, inputs_of(rank), [3, 1])
        found.append([gradients(network) for network in trained_networks(networks)])
    return [{name: (one[name] + other[name]) / 2 for name in one} for one, other in zip(*found, strict=True)]


def retry_of(networks: Networks, rank: int, dtype: torch.dtype = torch.float32, **settings) -> OomRetry:
    total = GradientSum(trained_networks(networks), 2, dtype)
    settings = StepSettings(**{"micro_batch": 3, "recompute": "none", "may_recompute_more": True} | settings)
    return OomRetry(networks, Distributed(rank, 2, CPU), settings, "resume", total)


def step(retry: OomRetry, inputs: StepInputs) -> None:
    """Gradients of a step, and their means."""
    retry.gradients(inputs)
    retry.sum_gradients(adversarial=inputs.adversarial_factor is not None)


def differences(networks: Networks) -> list[float]:
    found = [gradients(network) for network in trained_networks(networks)]
    return [relative_difference(*pair) for pair in zip(found, expected_means(), strict=True)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sum, "BUCKET_BYTES", 4000)


@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 0, 1e-6), ("bfloat16", 1e-4, 1e-2)])
def test_gradients_are_the_means_of_all_processes(tmp_path, dtype, low, high):
    def test(rank: int) -> None:
        networks = networks_fp32()
        retry = retry_of(networks, rank, getattr(torch, dtype))
        for _ in range(2):  # the buckets serve every step
            clear_gradients(networks)
            step(retry, inputs_of(rank))
            for found in differences(networks):
                assert low <= found < high
        for parameter in networks.autoencoder.parameters():
            assert parameter.grad.stride() == parameter.stride()  # fused optimizers need it
            assert parameter.grad.dtype == torch.float32
        assert 0 < retry.gradient_sum.exposed_seconds() < 60

    on_two_processes(test, tmp_path)


def test_gradients_equal_those_of_distributed_data_parallel(tmp_path):
    def test(rank: int) -> None:
        mine, theirs, inputs = networks_fp32(), networks_fp32(), inputs_of(rank)
        inputs.adversarial_factor = None
        step(retry_of(mine, rank, micro_batch=4), inputs)
        wrapped = Networks(
            DistributedDataParallel(theirs.autoencoder),
            None,
            theirs.terms,
            theirs.dtype,
            theirs.channels_last,
        )
        compute_gradients(wrapped, inputs, [4])
        found = [gradients(network.autoencoder) for network in (mine, theirs)]
        assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())

    on_two_processes(test, tmp_path)


def test_sums_begin_within_the_last_pass_only(tmp_path):
    def test(rank: int) -> None:
        networks, begun = networks_fp32(), []
        retry = retry_of(networks, rank)
        (state, _other) = retry.gradient_sum._networks.values()
        assert len(state.buckets) > 3
        networks.autoencoder.register_forward_pre_hook(lambda *_: begun.append(state.begun))
        networks.discriminator.register_forward_pre_hook(lambda *_: begun.append(state.begun))
        step(retry, inputs_of(rank))
        # two passes with an adversarial term each, then the discriminator's
        assert begun == [0, 0, 0, 0, len(state.buckets), len(state.buckets)]

    on_two_processes(test, tmp_path)


def test_a_process_that_runs_out_of_memory_within_the_sums_repeats_the_step_alone(tmp_path):
    def test(rank: int) -> None:
        networks, failures = networks_fp32(), []
        retry = retry_of(networks, rank)
        (state, _other) = retry.gradient_sum._networks.values()

        def fail(_gradient):
            if rank == 1 and state.overlaps and not failures:
                failures.append(state.begun)
                raise torch.OutOfMemoryError("injected")

        networks.autoencoder.encoder.conv_in.weight.register_hook(fail)  # the last one of backward
        step(retry, inputs_of(rank))
        assert [0 < begun < len(state.buckets) for begun in failures] == [True] * rank
        assert (retry.settings.micro_batch, retry.settings.out_of_memory) == ((3, 0), (1, 1))[rank]
        assert max(differences(networks)) < 1e-6

    on_two_processes(test, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_graph_are_summed_between_its_parts(tmp_path, dtype):
    """One process replays a graph, the other one computes the same step without it."""

    def test(rank: int) -> None:
        networks = networks_fp32()
        retry = retry_of(networks, rank, dtype, graph=StepGraph() if rank == 0 else None)
        recorder = Recorder(networks, retry.gradient_sum)
        cuda_graph.Recording = recorder  # in this process, which is a fork
        states = retry.gradient_sum._networks.values()
        for _ in range(WARMUP_STEPS + 2):
            clear_gradients(networks)
            retry.gradients(inputs_of(rank))
            assert [state.begun for state in states] == [len(state.buckets) for state in states]
            retry.sum_gradients(adversarial=True)
            assert max(differences(networks)) < (1e-6 if dtype == torch.float32 else 1e-2)
        assert recorder.replays == (2, 0)[rank]
        assert len(recorder.between) == (sum(len(state.buckets) for state in states), 0)[rank]

    on_two_processes(test, tmp_path)


def test_frozen_parameters_are_left_out():
    networks = networks_fp32()
    networks.autoencoder.freeze_encoder()
    state = next(iter(GradientSum([networks.autoencoder], 2)._networks.values()))
    trained = {id(p) for p in networks.autoencoder.parameters() if p.requires_grad}
    assert {id(p) for bucket in state.buckets for p in bucket.parameters} == trained


def test_a_wait_for_processes_that_are_lost_ends():
    """A GPU waits for ever; the handler of SIGTERM, which torchrun sends then, must run meanwhile."""
    signals, asked = StopSignals(), []

    def is_done() -> bool:
        asked.append(None)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    with signals, pytest.raises(LoadingStoppedError):
        wait_until(is_done, partial(Liveness(Watchdog(0, Path()), signals).check, 0.0))
    assert len(asked) == 3
