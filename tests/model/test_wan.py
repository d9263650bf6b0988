"""The 2-D network of Wan 2.1 has the gradients of the 3-D one with one frame, at every recompute level."""

import pytest
import torch
from torch import Tensor

from tests.harness.toy_networks import relative_difference
from tests.harness.wan_models import wan_model
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE
from vae.interop.parameter_names import from_wan, our_names
from vae.model.autoencoder import AutoencoderKL, set_recompute

CONFIG = ModelConfig(
    family="wan", channels=(4, 8, 8), layers_per_block=1, z_channels=2, use_quant_conv=True, latent_norm=True
)


@pytest.fixture(scope="module")
def theirs():
    statistics = {"latents_mean": [0.0, 0.0], "latents_std": [1.0, 1.0]}
    shape = {"base_dim": 4, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}
    return wan_model(**shape, num_res_blocks=1, z_dim=2, **statistics).double()


def their_gradients(model: torch.nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Gradients of the squares of reconstructions and means, with our names."""
    model.requires_grad_(True)
    latents = model.encode(images[:, :, None]).latent_dist.mode()
    recon = model.decoder(model.post_quant_conv(latents))  # decode() also clamps
    parameters = dict(model.named_parameters())
    loss = recon.square().sum() + latents.square().sum()
    values = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    model.requires_grad_(False)
    found = {}
    for ours, grad in zip(our_names(parameters).values(), values, strict=True):
        if ours:
            grad = grad[:, :, -1] if grad.dim() == 5 else grad
            found |= zip(ours, (part.squeeze() for part in grad.chunk(len(ours))), strict=True)
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_one_frame(theirs, layout):
    images = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, tolerance = their_gradients(theirs, images), 2e-6  # diffusers upsamples in fp32
    for level in RECOMPUTE:
        model = AutoencoderKL(CONFIG).double().to(memory_format=layout)
        own = model.state_dict()
        weights = {n: v.reshape(own[n].shape) for n, v in from_wan(theirs.state_dict()).items()}
        assert model.load_state_dict(weights, strict=False).unexpected_keys == []
        set_recompute(model, level)
        recon, mean, _ = model(images.contiguous(memory_format=layout))
        (recon.square().sum() + mean.square().sum()).backward()
        found = {n: p.grad.squeeze() for n, p in model.named_parameters() if p.grad is not None}
        assert relative_difference(found, expected) < tolerance
        expected, tolerance = found, 1e-12
