"""The autoencoder has the names and the numbers of diffusers' AutoencoderKL, at any aspect ratio."""

import pytest
import torch
from diffusers import AutoencoderKL as DiffusersVAE

from vae.config.model_options import ModelConfig
from vae.interop.writing import diffusers_config
from vae.model.autoencoder import LOGVAR_RANGE, AutoencoderKL, Posterior
from vae.system.errors import UserError

# The published models at a quarter of their widths; SD 1.x has quant convolutions, FLUX has none.
SD1_LIKE = ModelConfig(channels=(32, 64, 128, 128), z_channels=4, use_quant_conv=True)
FLUX_LIKE = ModelConfig(channels=(32, 64, 128, 128), z_channels=16, use_quant_conv=False)
OTHER = ModelConfig(channels=(24, 48, 40), layers_per_block=1, z_channels=3, norm_groups=8)
CONFIGS = {"SD 1": SD1_LIKE, "FLUX": FLUX_LIKE, "other": OTHER}


def diffusers_model(config: ModelConfig) -> DiffusersVAE:
    torch.manual_seed(0)
    plain = diffusers_config(config, sample_size=64, scaling_factor=1.0, shift_factor=0.0)
    plain = {name: value for name, value in plain.items() if not name.startswith("_")}
    return DiffusersVAE(**plain).eval()


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[AutoencoderKL, DiffusersVAE]:
    """Our model and diffusers' with the same weights."""
    reference = diffusers_model(CONFIGS[request.param])
    model = AutoencoderKL(CONFIGS[request.param])
    model.load_state_dict(reference.state_dict())  # strict: all names and shapes must match
    return model, reference


def outputs(model: AutoencoderKL, images: torch.Tensor, latents: torch.Tensor) -> list[torch.Tensor]:
    """Mean and log-variance of the images, decoded latents, and the reconstruction."""
    recon, mean, logvar = model(images)
    return [mean, logvar, model.decode(latents), recon]


def diffusers_outputs(model: DiffusersVAE, images: torch.Tensor, latents: torch.Tensor) -> list[torch.Tensor]:
    """The same from diffusers' model."""
    posterior = model.encode(images).latent_dist
    return [posterior.mean, posterior.logvar, model.decode(latents).sample, model(images).sample]


@pytest.mark.slow
def test_outputs_match_diffusers(pair):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, 3, 24, 72, generator=generator) * 2 - 1
    with torch.no_grad():
        latents = pair[0].float().encode(images).mean
        doubles = [network.double() for network in pair]
        exact = diffusers_outputs(doubles[1], images.double(), latents.double())
        for found, expected in zip(
            outputs(doubles[0], images.double(), latents.double()), exact, strict=True
        ):
            assert found.shape == expected.shape
            assert (found - expected).abs().max() < 1e-13 * (expected.max() - expected.min())
        model, reference = (network.float() for network in pair)
        ours, theirs = outputs(model, images, latents), diffusers_outputs(reference, images, latents)
        # Both round in another order, which depends on the CPU. Their errors were 0.58 to 1.07 of each other.
        for found, other, expected in zip(ours, theirs, exact, strict=True):
            assert rms(found - expected) < 1.25 * rms(other - expected)
        assert torch.equal(ours[0], latents)


def rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def test_gradients_match_diffusers(pair):
    model, reference = (network.double() for network in pair)
    images = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    noise = torch.randn(
        model.encode(images).mean.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    recon, mean, logvar = model(images, noise)
    ((recon - images).square().mean() + logvar.mean() + mean.square().mean()).backward()
    posterior = reference.encode(images).latent_dist
    expected = reference.decode(posterior.mean + posterior.std * noise).sample
    (
        (expected - images).square().mean() + posterior.logvar.mean() + posterior.mean.square().mean()
    ).backward()
    expected_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected_grad = expected_parameters.pop(name).grad
        torch.testing.assert_close(parameter.grad, expected_grad, rtol=1e-8, atol=1e-10, msg=name)
    assert not expected_parameters


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_each_level_after_the_first_halves_the_latent(levels):
    config = ModelConfig(channels=(8,) * levels, layers_per_block=1, norm_groups=2, z_channels=2)
    model = AutoencoderKL(config)
    side = 2 ** (levels - 1)
    assert model.downsampling == side
    with torch.no_grad():
        assert model.encode(torch.rand(1, 3, 2 * side, 3 * side)).mean.shape == (1, 2, 2, 3)


def test_posterior_sample_and_mode():
    mean, logvar, noise = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    posterior = Posterior(mean, logvar)
    assert torch.equal(posterior.mode(), mean)
    torch.testing.assert_close(posterior.sample(noise), mean + noise * logvar.exp().sqrt())
    assert torch.equal(posterior.sample(torch.zeros_like(noise)), mean)


def test_logvar_is_clamped_as_in_diffusers():
    model = AutoencoderKL(ModelConfig(channels=(8,), layers_per_block=1, norm_groups=2, z_channels=1))
    with torch.no_grad():
        model.encoder.conv_out.bias.copy_(torch.tensor([0.0, 1000.0]))
        assert model.encode(torch.rand(1, 3, 4, 4)).logvar.max() == LOGVAR_RANGE[1]
        model.encoder.conv_out.bias.copy_(torch.tensor([0.0, -1000.0]))
        assert model.encode(torch.rand(1, 3, 4, 4)).logvar.min() == LOGVAR_RANGE[0]
    assert LOGVAR_RANGE == (-30.0, 20.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_the_dtype_of_the_images_with_fp32_weights(dtype):
    model = AutoencoderKL(ModelConfig(channels=(16, 32), layers_per_block=1, norm_groups=4, z_channels=4))
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    seen = set()
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    recon, mean, logvar = model(images.to(dtype))
    assert seen == {dtype}
    assert recon.dtype == dtype
    assert mean.dtype == logvar.dtype == torch.float32
    recon.float().mean().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    exact = model(images)[0]
    # unit roundoff of the dtype through about ten residual layers
    assert (recon.float() - exact).abs().max() < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_error_names_a_width_that_is_no_multiple_of_the_groups():
    with pytest.raises(UserError, match=r"--channels 100 .* add --norm_groups 4, or use multiples of 32"):
        AutoencoderKL(ModelConfig(channels=(64, 100)))
