"""The ratio of gradient norms at the decoder's last layer: exact, and without a trace in training."""

import os
from dataclasses import replace

import pytest
import torch

from tests.harness.faults import Fault, injected, run_forked
from tests.harness.toy_networks import gradients, toy_inputs, toy_networks
from tests.harness.training_runs import assert_same, records, train_short
from vae.config.options import RECOMPUTE, LossConfig, ModelConfig
from vae.images.pixels import to_float
from vae.losses.adversarial import generator_loss
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan import META, StepSpec, meta_networks, step_memory, zero_inputs
from vae.model.recompute import set_recompute
from vae.step import compute_gradients
from vae.training.records.adversarial_ratio import last_layer_sq_norms

ADVERSARIAL = {"adversarial_weight": 0.5, "disc_start": 2, "disc_channels": 8, "disc_layers": 2}
RATIOS = {"adversarial_ratio", "adversarial_ratio_last_layer"}


def ratio(sq_norms: torch.Tensor) -> float:
    return float((sq_norms[0] / sq_norms[1]).sqrt())


@pytest.mark.parametrize("level", ["none", "activations", "all"])
def test_norms_equal_those_of_one_graph(level):
    nets, inputs = toy_networks(), toy_inputs(3)
    set_recompute(nets.autoencoder, level)
    found = last_layer_sq_norms(nets, inputs)
    images, weight = to_float(inputs.images), nets.autoencoder.decoder.conv_out.weight
    recon, _, _ = nets.autoencoder(images.double(), inputs.noise)
    pixels = (recon - images).abs().mean(dim=(1, 2, 3))
    others = pixels.mean()
    for term in nets.terms.image[1:]:
        others = others + term.weight * term.function(recon, images).mean()
    adversarial = generator_loss(nets.discriminator(recon)).mean()
    norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in (others, adversarial)]
    # the pixel loss of the step is fp32
    torch.testing.assert_close(found, torch.stack(norms).square().double(), rtol=1e-5, atol=0)


def test_measuring_changes_nothing_and_a_loss_scale_cancels():
    nets, inputs = toy_networks(), toy_inputs()
    compute_gradients(nets, inputs, [4])
    before = [gradients(network) for network in (nets.autoencoder, nets.discriminator)]
    found = last_layer_sq_norms(nets, inputs)
    assert_same([gradients(network) for network in (nets.autoencoder, nets.discriminator)], before, "grad")
    assert not any(module._forward_hooks for module in nets.autoencoder.modules())
    scaled = last_layer_sq_norms(nets, replace(inputs, loss_scale=torch.tensor(2.0**10)))
    assert ratio(scaled) == pytest.approx(ratio(found), rel=1e-6)
    without_images = replace(inputs, image_share=0.0)  # a process whose images were all unusable
    assert last_layer_sq_norms(nets, without_images).tolist() == [0, 0]
    assert ratio(last_layer_sq_norms(toy_networks(torch.bfloat16), inputs)) == pytest.approx(
        ratio(found),
        rel=0.05,  # bf16 has 8 bits, and the norms are sums of many rounded values
    )


@pytest.mark.slow
@pytest.mark.parametrize(("level", "size"), [*((level, 512) for level in RECOMPUTE), ("all", 2048)])
def test_measuring_needs_less_memory_than_a_step_of_one_image(level, size):
    loss = LossConfig(adversarial_weight=0.5)
    spec = StepSpec(
        ModelConfig(), loss, size, 1, torch.bfloat16, channels_last=True, ema=True, recompute=level
    )
    networks, inputs = meta_networks(spec), zero_inputs(spec, 1, META)
    with LiveBytes() as counter:
        last_layer_sq_norms(networks, inputs)
    assert counter.peak < step_memory(spec, 1).working


@pytest.mark.slow
def test_records_have_the_ratios_and_training_is_the_same(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "rare", **ADVERSARIAL, log_freq=100)
    found = train_short(tiny, tmp_path / "often", **ADVERSARIAL)
    for name in ("model", "discriminator", "running_sq_norms"):
        assert_same(found[name], expected[name], name)
    logged = records(tmp_path / "often", "train")
    assert [record.keys() >= RATIOS for record in logged] == [False, False, True, True]
    assert not any(RATIOS & record.keys() for record in logged[:2])
    last = logged[-1]  # the weight of its step followed the ratio before it
    used = logged[2]["adversarial_ratio"] * 0.5 * 2 / 1000
    assert last["adversarial_factor"] == pytest.approx(used, rel=1e-5)
    assert last["adversarial_ratio_last_layer"] > 0


def test_measurement_that_runs_out_of_memory_is_left_out(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "expected", **ADVERSARIAL)
    with injected(Fault("fail", "eval_pass")):
        found = train_short(tiny, tmp_path / "run", **ADVERSARIAL)
    assert_same(found["model"], expected["model"], "model")
    logged = records(tmp_path / "run", "train")
    assert [len(RATIOS & record.keys()) for record in logged] == [0, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are forks")
def test_two_processes_measure_together(tiny, tmp_path):
    """The first images of both; if one process runs out of memory, the other's alone, and no one waits."""
    given = {**tiny, **ADVERSARIAL, "init": "default", "val_split": 0.0, "log_freq": 1, "batch_size": 2}
    given |= {"num_epochs": 1}
    found = []
    without_memory = Fault("fail", "eval_pass", times=1000, rank=1)
    for name, faults in (("both", ()), ("one", (without_memory,))):
        folder = tmp_path / name
        assert run_forked({**given, "output_dir": str(folder)}, *faults, processes=2) == [0, 0]
        found.append([record.get("adversarial_ratio_last_layer") for record in records(folder, "train")])
    both, one = found
    assert [value is not None for value in both] == [value is not None for value in one]
    assert both[:2] == [None, None]
    assert all(a != b for a, b in zip(both[2:], one[2:], strict=True))
