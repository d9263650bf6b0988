"""Gradients of gloo processes are the means over them, and their steps are those of one process."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.harness.toy_networks import (
    MODEL,
    NO_LPIPS,
    gradients,
    relative_difference,
    toy_inputs,
    toy_networks,
)
from vae.step import Networks, StepInputs, clear_gradients, compute_gradients, unwrapped
from vae.system.errors import UserError
from vae.training import distributed
from vae.training.distributed import Distributed, GradientWaits

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forks")
CPU = torch.device("cpu")
SIZES = ([3, 1], [1, 1, 1, 1])  # by rank: processes may divide their images differently


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


def networks_fp32(**options) -> Networks:
    return toy_networks(torch.float32, loss=NO_LPIPS, channels_last=True, **options)


def inputs_of(rank: int) -> StepInputs:
    """Other images on each process."""
    inputs = toy_inputs(4)
    inputs.images, inputs.noise = inputs.images.roll(rank + 1, dims=3), inputs.noise.float()
    inputs.adversarial_factor = torch.tensor(0.3)
    return inputs


def parallel(
    networks: Networks, rank: int, dtype: str = "fp32", waits: GradientWaits | None = None
) -> Networks:
    """The networks, with means over two processes."""
    found = [
        distributed.data_parallel(network, Distributed(rank, 2, CPU), dtype, waits or GradientWaits())
        for network in (networks.autoencoder, networks.discriminator)
    ]
    networks.autoencoder, networks.discriminator = found
    return networks


def both(networks: Networks) -> list[torch.nn.Module]:
    return [unwrapped(networks.autoencoder), unwrapped(networks.discriminator)]


def expected_means() -> list[dict[str, torch.Tensor]]:
    """The means that one process computes from the images of both."""
    found = []
    for rank in range(2):
        networks = networks_fp32()
        compute_gradients(networks, inputs_of(rank), SIZES[rank])
        found.append([gradients(network) for network in both(networks)])
    return [{name: (one[name] + two[name]) / 2 for name in one} for one, two in zip(*found, strict=True)]


def differences(networks: Networks, means: list[dict[str, torch.Tensor]]) -> list[float]:
    return [relative_difference(*pair) for pair in zip(map(gradients, both(networks)), means, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "low", "high"), [("fp32", 0, 1e-6), ("bf16", 1e-4, 1e-2)])
def test_gradients_are_the_means_of_all_processes(tmp_path, dtype, low, high):
    means = expected_means()

    def test(rank: int) -> None:
        networks = parallel(networks_fp32(), rank, dtype)
        for _ in range(3):  # the second step has other buckets than the first one
            clear_gradients(networks)
            compute_gradients(networks, inputs_of(rank), SIZES[rank])
            for found in differences(networks, means):
                assert low <= found < high
        for parameter in networks.autoencoder.parameters():
            assert parameter.grad.stride() == parameter.stride()  # fused optimizers need it
            assert parameter.grad.dtype == torch.float32

    on_processes(test, tmp_path)


def test_a_step_sums_once_and_frozen_parameters_are_left_out(tmp_path, monkeypatch):
    sizes: list[int] = []

    def counted(group, bucket):
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    monkeypatch.setitem(distributed.HOOKS, "fp32", counted)

    def test(rank: int) -> None:
        networks = networks_fp32()
        networks.autoencoder.freeze_encoder()
        trained = [sum(p.numel() for p in n.parameters() if p.requires_grad) for n in both(networks)]
        compute_gradients(parallel(networks, rank), inputs_of(rank), SIZES[rank])
        assert sizes == trained  # small networks have one bucket each

    on_processes(test, tmp_path)


def test_waits_for_a_slow_process_are_measured(tmp_path):
    def test(rank: int) -> None:
        waits = GradientWaits()
        networks = parallel(networks_fp32(), rank, waits=waits)
        inputs = inputs_of(rank)
        inputs.adversarial_factor = None
        for _ in range(2):  # the second step begins with an exchange of new buckets
            compute_gradients(networks, inputs, [4])
        dist.barrier()
        time.sleep(0.5 * rank)
        compute_gradients(networks, inputs, [4])
        assert waits.seconds() > 0.3 if rank == 0 else waits.seconds() < 0.2

    on_processes(test, tmp_path)


@pytest.mark.parametrize("change", [{"use_quant_conv": True}, {"z_channels": 8}])
def test_processes_with_other_networks_are_refused(tmp_path, change):
    """If only shapes differ, the main process loses the others, which print the reason."""

    def test(rank: int) -> None:
        networks = networks_fp32(model=replace(MODEL, **(change if rank else {})))
        reason = "start all with the same flags, files and version|another of the 2 processes"
        with (
            pytest.raises(UserError, match=reason if rank == 0 else "start all with the same"),
            Distributed(rank, 2, CPU).lost_processes_named(),
        ):
            parallel(networks, rank)

    on_processes(test, tmp_path)
