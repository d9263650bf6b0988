"""Means of gradients over gloo processes, in buckets that are summed within the last backward pass."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.harness.toy_networks import (
    MODEL,
    NO_LPIPS,
    gradients,
    relative_difference,
    toy_inputs,
    toy_networks,
)
from tests.training.test_cuda_graph import Recorder
from vae.model.backward_order import backward_order
from vae.model.discriminator import Discriminator
from vae.step import Networks, StepInputs, clear_gradients, compute_gradients, trained_networks
from vae.system.errors import UserError
from vae.training import gradient_sum
from vae.training.distributed import Distributed, wait_until
from vae.training.gradient_sum import GradientSum, check_same_networks
from vae.training.memory import cuda_graph
from vae.training.memory.cuda_graph import WARMUP_STEPS, StepGraph
from vae.training.memory.oom_retry import OomRetry, StepSettings
from vae.training.recovery.signals import LoadingStoppedError, StopSignals
from vae.training.recovery.watchdog import Liveness, Watchdog

CPU = torch.device("cpu")


def on_processes(test: Callable[[int], None], folder: Path, count: int = 2) -> None:
    """Run `test` with the rank as its argument in forked processes."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=count)
        try:
            test(rank)
        except BaseException:
            (folder / f"error_{rank}").write_text(traceback.format_exc())
            raise

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
    errors = [path.read_text() for path in folder.glob("error_*")]
    assert not errors, errors[0]
    assert [process.exitcode for process in started] == [0] * count


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


def retry_of(
    networks: Networks, rank: int, dtype: torch.dtype = torch.float32, world_size: int = 2, **settings
) -> OomRetry:
    total = GradientSum(trained_networks(networks), world_size, dtype)
    settings = StepSettings(**{"micro_batch": 3, "recompute": "none", "may_recompute_more": True} | settings)
    return OomRetry(networks, Distributed(rank, world_size, CPU), settings, "resume", total)


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

    on_processes(test, tmp_path)


def test_gradients_equal_those_of_distributed_data_parallel(tmp_path):
    def test(rank: int) -> None:
        mine, theirs, inputs = networks_fp32(), networks_fp32(), inputs_of(rank)
        inputs.adversarial_factor = None
        step(retry_of(mine, rank, micro_batch=4), inputs)
        wrapped = replace(theirs, autoencoder=DistributedDataParallel(theirs.autoencoder))
        compute_gradients(wrapped, inputs, [4])
        found = [gradients(network.autoencoder) for network in (mine, theirs)]
        assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())

    on_processes(test, tmp_path)


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

    on_processes(test, tmp_path)


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

    on_processes(test, tmp_path)


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

    on_processes(test, tmp_path)


QUANT = replace(MODEL, use_quant_conv=True)  # as SD 1.x, SDXL and FLUX.2
BUCKETS = 13  # about what BUCKET_BYTES gives for the default network


@pytest.mark.parametrize("model", [MODEL, QUANT], ids=["plain", "quant"])
def test_buckets_are_complete_in_the_order_of_backward(model, monkeypatch):
    """When the last gradient of a bucket is computed, few are of later buckets."""
    networks = toy_networks(torch.float32, loss=NO_LPIPS, model=model)
    total = sum(p.nbytes for p in networks.autoencoder.parameters())
    monkeypatch.setattr(gradient_sum, "BUCKET_BYTES", total / BUCKETS)
    done, shares = [], []
    for parameter in networks.autoencoder.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: done.append(p.nbytes / total))
    counted = GradientSum([networks.autoencoder], 2)
    monkeypatch.setattr(counted, "_begin", lambda state: begin(state))
    (state,) = counted._networks.values()
    before = [0.0, *accumulate(sum(p.nbytes for p in b.parameters) / total for b in state.buckets)]

    def begin(state) -> None:
        shares.append(sum(done) - before[state.begun + 1])
        state.begun += 1

    compute_gradients(networks, toy_inputs(2, model=model, factor=None), [2], counted.last_pass)
    assert len(shares) == len(state.buckets) > 8
    assert 0 <= shares[0] < 0.03  # 0.59 if the convolutions beside the latents are in this bucket
    assert max(shares) < 0.08  # a residual block's weights are complete in another order than its norms'


def test_buckets_of_the_discriminator_are_complete_in_the_order_of_backward():
    network, found = Discriminator(8, 3), []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(found.append)
    network(torch.rand(1, 3, 32, 32)).sum().backward()
    order = {id(parameter): place for place, parameter in enumerate(backward_order(network))}
    assert len(order) == len(list(network.parameters()))
    places = [order[id(parameter)] for parameter in found]
    assert all(abs(place - later) <= 1 for place, later in enumerate(places))  # weight and bias of a layer


def test_a_network_waits_for_the_ones_before_it(tmp_path):
    """Where a gradient is missing, its bucket is summed at the end, and so are all others after it."""

    def test(rank: int) -> None:
        networks, inputs = networks_fp32(), inputs_of(rank)
        retry = retry_of(networks, rank)
        autoencoder, discriminator = retry.gradient_sum._networks.values()
        if rank == 0:  # an autoencoder of this process alone does without a weight
            networks.autoencoder.encoder.conv_in.bias.requires_grad_(False)
        retry.gradients(inputs)
        missing = autoencoder.begun < len(autoencoder.buckets)
        assert missing == (rank == 0)
        assert (discriminator.begun == 0) == missing
        with pytest.raises(AssertionError):
            retry.gradient_sum.finish(trained_networks(networks)[::-1])
        retry.sum_gradients(adversarial=True)

    on_processes(test, tmp_path)


def test_processes_with_other_networks_are_refused(tmp_path):
    def test(rank: int) -> None:
        own, dist = networks_fp32(), Distributed(rank, 2, CPU)
        check_same_networks(trained_networks(own), dist)
        other = toy_networks(torch.float32, loss=NO_LPIPS, model=QUANT if rank else MODEL)
        with pytest.raises(UserError, match="the networks of the processes 1 are not those of process 0"):
            check_same_networks(trained_networks(other), dist)

    on_processes(test, tmp_path)


@pytest.mark.parametrize("processes", [2, 4])
def test_norms_and_moments_are_those_of_one_process(tmp_path, processes):
    """The same passes, divided among processes: only their sums are in another order."""

    def steps(networks: Networks, inputs: StepInputs, retry: OomRetry) -> tuple[torch.Tensor, list]:
        norms, found = [], []
        optimizers = [torch.optim.Adam(n.parameters(), lr=1e-12) for n in trained_networks(networks)]
        for _ in range(3):
            clear_gradients(networks)
            step(retry, inputs)
            for network in trained_networks(networks):
                norms.append(torch.stack([p.grad.norm() for p in network.parameters()]).norm())
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            moments = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
            for name in ("exp_avg", "exp_avg_sq"):
                found.append({str(number): values[name] for number, values in enumerate(moments)})
        return torch.stack(norms), found

    def test(rank: int) -> None:
        whole, results = toy_inputs(8, factor=0.3), []
        whole.noise, whole.adversarial_factor = whole.noise.float(), torch.tensor(0.3)
        for world_size in (1, processes):
            networks = networks_fp32()
            share = whole if world_size == 1 else whole.split([8 // processes] * processes)[rank]
            share.image_share = world_size / 8
            retry = retry_of(networks, rank, world_size=world_size, micro_batch=8 // processes)
            results.append(steps(networks, share, retry))
        (one, expected), (several, found) = results
        assert ((several - one).abs() / one).max() < 3e-7
        for moments, reference in zip(found, expected, strict=True):
            assert relative_difference(moments, reference) < 3e-7

    on_processes(test, tmp_path, processes)


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
