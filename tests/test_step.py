"""The step has the gradients of the plain formulas, for any micro-batches; and the update."""

import math
from dataclasses import replace

import pytest
import torch

from tests.harness.toy_networks import (
    ALL_LOSSES,
    MODEL,
    NO_LPIPS,
    gradients,
    plain_losses,
    relative_difference,
    toy_inputs,
    toy_networks,
)
from vae.config.options import LossConfig, OptimConfig
from vae.images.composites import as_rgb
from vae.images.pixels import to_float
from vae.ops.attention import attention_reference
from vae.ops.fused_conv import upsample_conv_reference
from vae.step import compute_gradients, micro_batch_sizes, network_input, reconstruction_gradient
from vae.update import LOSS_SCALE_GROWTH_STEPS, LOSS_SCALE_START, UpdateState, apply_update


def step_gradients(sizes, loss=ALL_LOSSES, inputs=None, **networks):
    """Gradients of the autoencoder and the discriminator, and the result, of a step with these passes."""
    nets = toy_networks(loss=loss, **networks)
    inputs = inputs or toy_inputs(sum(sizes))
    result = compute_gradients(nets, inputs, sizes)
    return gradients(nets.autoencoder), gradients(nets.discriminator), result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "pixel_loss"), [([2, 2], "l1"), ([1, 1, 1, 1], "l1"), ([3, 1], "l1"), ([2, 1, 1], "mse")]
)
def test_micro_batches_do_not_change_gradients(sizes, pixel_loss):
    loss = LossConfig(**{**vars(ALL_LOSSES), "reconstruction_loss": pixel_loss})
    whole_vae, whole_disc, whole = step_gradients([4], loss)
    vae, disc, result = step_gradients(sizes, loss)
    assert relative_difference(vae, whole_vae) < 1e-12
    assert relative_difference(disc, whole_disc) < 1e-12
    for name, value in whole.losses.items():
        rtol = 1e-5 if value.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(result.losses[name], value, rtol=rtol, atol=1e-9)
    # the adaptive weight uses these norms, so they must not depend on micro-batches either
    torch.testing.assert_close(result.gradient_sq_norms, whole.gradient_sq_norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.latent_moments, whole.latent_moments, rtol=1e-5, atol=1e-9)
    assert whole.gradient_sq_norms.min() > 0


@pytest.mark.parametrize("channels", [1, 4])
def test_micro_batches_do_not_change_gradients_of_grey_and_transparent_images(channels):
    model = replace(MODEL, image_channels=channels)
    inputs = toy_inputs(3, 32, model=model)
    whole_vae, whole_disc, whole = step_gradients([3], inputs=inputs, model=model)
    vae, disc, result = step_gradients([2, 1], inputs=inputs, model=model)
    assert relative_difference(vae, whole_vae) < 1e-12
    assert relative_difference(disc, whole_disc) < 1e-12
    assert result.losses.keys() == whole.losses.keys()
    for name, value in whole.losses.items():
        torch.testing.assert_close(result.losses[name], value, rtol=1e-5, atol=1e-9)


def test_every_term_sees_transparent_images_over_black_and_over_white():
    """The mean of the losses of both composites, and nothing else of color and alpha."""
    nets = toy_networks(model=replace(MODEL, image_channels=4))
    inputs = toy_inputs(2, model=nets.autoencoder.config)
    images = to_float(inputs.images)
    recon = nets.autoencoder(images.double(), inputs.noise)[0].detach()
    gradient, values, _ = reconstruction_gradient(nets, recon.clone(), images, inputs)
    recon.requires_grad_()
    total = 0
    for seen, target in zip(as_rgb(recon).split(2), as_rgb(images).split(2), strict=True):
        of_pair = reconstruction_gradient(nets, seen.detach().clone(), target, inputs)[0]
        total = total + (of_pair * seen).sum() / 2
    (expected,) = torch.autograd.grad(total, recon)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-12)
    assert values["mse"].shape == (2,)


def test_gradients_equal_plain_autograd_of_the_formulas(monkeypatch):
    inputs, loss = toy_inputs(4, 32), ALL_LOSSES
    vae, disc, result = step_gradients([2, 2], loss, inputs)
    monkeypatch.setattr("vae.model.layers.attention", attention_reference)
    monkeypatch.setattr("vae.model.layers.upsample_conv", upsample_conv_reference)
    nets = toy_networks(loss=loss)
    total, disc_loss = plain_losses(nets, inputs, loss)
    names = dict(nets.autoencoder.named_parameters())
    plain_vae = dict(zip(names, torch.autograd.grad(total, list(names.values())), strict=True))
    names = dict(nets.discriminator.named_parameters())
    plain_disc = dict(zip(names, torch.autograd.grad(disc_loss, list(names.values())), strict=True))
    assert relative_difference(vae, plain_vae) < 1e-10  # fp64; other kernels, other order of sums
    assert relative_difference(disc, plain_disc) < 1e-10
    assert float(result.losses["discriminator"]) / 4 == pytest.approx(float(disc_loss.detach()), rel=1e-6)


def test_sums_are_over_images():
    sums = step_gradients([4])[2].losses
    nets, inputs = toy_networks(), toy_inputs(4)
    with torch.no_grad():
        images = to_float(inputs.images).double()
        recon, mean, logvar = nets.autoencoder(images, inputs.noise)
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / images[0, 0].numel()
    assert float(sums["reconstruction"]) == pytest.approx(4 * float((recon - images).abs().mean()), rel=1e-12)
    assert float(sums["mse"]) == pytest.approx(4 * float((recon - images).square().mean()), rel=1e-12)
    assert float(sums["kl"]) == pytest.approx(float(kl), rel=1e-9)


def test_gradients_are_added_to_existing_ones():
    nets, inputs = toy_networks(), toy_inputs(2)
    compute_gradients(nets, inputs, [2])
    once = gradients(nets.autoencoder)
    compute_gradients(nets, inputs, [2])
    assert relative_difference(gradients(nets.autoencoder), {n: 2 * g for n, g in once.items()}) < 1e-12


def test_images_are_fp32_until_the_networks_read_them():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    images = to_float(levels)
    assert images.dtype == torch.float32  # bf16 cannot store 256 levels, and the losses need exact targets
    assert len(images.unique()) == 256
    assert (images.min(), images.max()) == (-1, 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert network_input(images, toy_networks(dtype, loss=NO_LPIPS)).dtype == dtype
    nets = toy_networks(torch.float32, loss=NO_LPIPS, channels_last=True)
    assert network_input(images, nets).is_contiguous(memory_format=torch.channels_last)


def test_micro_batch_sizes_cover_the_batch():
    for images in range(1, 20):
        for micro_batch in range(1, 22):
            sizes = micro_batch_sizes(images, micro_batch)
            assert sum(sizes) == images
            assert min(sizes) >= 1
            assert max(sizes) <= micro_batch


# --- the update -----------------------------------------------------------------------------------


def toy_optimizer(values=(1.0, -2.0), learning_rate=0.1):
    parameter = torch.nn.Parameter(torch.tensor(values))
    return parameter, torch.optim.AdamW([parameter], learning_rate, fused=True)


def update(parameter, optimizer, grad, state, *, clip=0.0, fp16=False, empty=False):
    parameter.grad = torch.tensor(grad)
    return apply_update([optimizer], state, OptimConfig(gradient_clip=clip), fp16, empty)


def test_update_is_adamw():
    parameter, optimizer = toy_optimizer()
    reference, plain = toy_optimizer()
    state = UpdateState.begin(torch.device("cpu"), fp16=False)
    for grad in ([0.3, -0.2], [0.1, 0.5]):
        (norm,) = update(parameter, optimizer, grad, state)
        assert float(norm) == pytest.approx(math.hypot(*grad))
        reference.grad = torch.tensor(grad)
        plain.step()
    assert torch.equal(parameter, reference)
    assert parameter.grad is None


def test_clipping_scales_the_whole_gradient():
    state = UpdateState.begin(torch.device("cpu"), fp16=False)
    parameter, optimizer = toy_optimizer()
    (norm,) = update(parameter, optimizer, [3.0, 4.0], state, clip=1.0)
    assert float(norm) == pytest.approx(5.0)
    moment = optimizer.state[parameter]["exp_avg"]
    expected = 0.1 * torch.tensor([0.6, 0.8])
    torch.testing.assert_close(moment, expected, rtol=1e-5, atol=0)  # 1e-6 is added to the norm


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_changes_no_weight_of_any_network(bad):
    state = UpdateState.begin(torch.device("cpu"), fp16=False)
    one, first = toy_optimizer()
    two, second = toy_optimizer((5.0, 6.0))
    one.grad, two.grad = torch.tensor([bad, 1.0]), torch.tensor([1.0, 1.0])
    apply_update([first, second], state, OptimConfig(), fp16=False, empty=False)
    assert one.tolist() == [1.0, -2.0]
    assert two.tolist() == [5.0, 6.0]
    assert (int(state.nonfinite_total), int(state.nonfinite_streak)) == (1, 1)
    for parameter, optimizer in ((one, first), (two, second)):
        found = optimizer.state[parameter]
        assert float(found["step"]) == 0  # the bias correction does not count the skipped step
        assert torch.equal(found["exp_avg"], torch.zeros(2))
    update(one, first, [0.1, 0.1], state)
    assert (int(state.nonfinite_total), int(state.nonfinite_streak)) == (1, 0)
    assert one.tolist() != [1.0, -2.0]


def test_empty_step_changes_nothing_and_is_not_counted_as_non_finite():
    state = UpdateState.begin(torch.device("cpu"), fp16=False)
    parameter, optimizer = toy_optimizer()
    update(parameter, optimizer, [0.0, 0.0], state, empty=True)
    assert parameter.tolist() == [1.0, -2.0]
    assert (int(state.nonfinite_total), int(state.nonfinite_streak)) == (0, 0)


def test_loss_scale_halves_on_overflow_and_grows_after_enough_finite_steps():
    state = UpdateState.begin(torch.device("cpu"), fp16=True)
    parameter, optimizer = toy_optimizer()
    assert float(state.loss_scale) == LOSS_SCALE_START
    update(parameter, optimizer, [math.inf, 0.0], state, fp16=True)
    assert float(state.loss_scale) == LOSS_SCALE_START / 2
    for _ in range(LOSS_SCALE_GROWTH_STEPS - 1):
        update(parameter, optimizer, [1.0, 0.0], state, fp16=True)
    assert float(state.loss_scale) == LOSS_SCALE_START / 2
    update(parameter, optimizer, [1.0, 0.0], state, fp16=True)
    assert float(state.loss_scale) == LOSS_SCALE_START
    assert float(state.finite_steps) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_close_to_fp32(dtype):
    scale = LOSS_SCALE_START / 64 if dtype == torch.float16 else 1.0
    found, _, _ = step_gradients([2, 2], inputs=toy_inputs(4, loss_scale=scale), dtype=dtype)
    expected, _, _ = step_gradients([2, 2], dtype=torch.float32)
    assert all(g.dtype == torch.float32 for g in found.values())
    found = {name: g / scale for name, g in found.items()}
    # rounding of 2**-11 (fp16) or 2**-8 (bf16) in about twenty layers; most of the difference is the gradient
    # of L1, whose sign changes where the error is near zero
    assert relative_difference(found, expected) < (0.05 if dtype == torch.float16 else 0.25)


def test_loss_scale_prevents_underflow_of_fp16_gradients():
    inputs = toy_inputs(2, factor=None)
    tiny = LossConfig(reconstruction_weight=1e-6, perceptual_weight=0.0, kl_weight=0.0)
    without_scale, _, _ = step_gradients([2], tiny, inputs, dtype=torch.float16)
    inputs.loss_scale = torch.tensor(LOSS_SCALE_START)
    with_scale, _, _ = step_gradients([2], tiny, inputs, dtype=torch.float16)
    assert sum(float(g.abs().sum()) for g in without_scale.values()) == 0
    assert sum(float(g.abs().sum()) for g in with_scale.values()) > 0


def test_memory_layout_changes_only_rounding():
    plain, plain_disc, _ = step_gradients([2, 2], dtype=torch.float32)
    nets, inputs = toy_networks(torch.float32, channels_last=True), toy_inputs(4)
    nets.autoencoder.to(memory_format=torch.channels_last)
    nets.discriminator.to(memory_format=torch.channels_last)
    compute_gradients(nets, inputs, [2, 2])
    assert relative_difference(gradients(nets.autoencoder), plain) < 1e-4  # fp32 sums in another order
    assert relative_difference(gradients(nets.discriminator), plain_disc) < 1e-4


def test_overflow_resets_the_count_of_finite_steps():
    state = UpdateState.begin(torch.device("cpu"), fp16=True)
    parameter, optimizer = toy_optimizer()
    state.finite_steps += LOSS_SCALE_GROWTH_STEPS - 1
    update(parameter, optimizer, [math.nan, 0.0], state, fp16=True)
    update(parameter, optimizer, [1.0, 0.0], state, fp16=True)
    assert float(state.loss_scale) == LOSS_SCALE_START / 2
