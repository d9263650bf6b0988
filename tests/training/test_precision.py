"""Compiled networks keep what the rung of the ladder keeps, and have its gradients."""

import pytest
import torch

from tests.harness.toy_networks import gradients, relative_difference, toy_networks
from vae.config.options import RECOMPUTE, ModelConfig
from vae.model.recompute import set_recompute
from vae.training.precision import compile_in_place

MODEL = ModelConfig(channels=(8, 16), layers_per_block=2, norm_groups=4, z_channels=4)


@pytest.fixture(autouse=True)
def fresh_compiler():
    config = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit", "optimize_ddp")
    with config.patch({name: getattr(config, name) for name in names}):  # put back afterwards
        yield
    torch._dynamo.reset()


def kept_and_gradients(rung: str, compiled: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that the network's forward leaves for its backward, and the gradients of one."""
    network = toy_networks(torch.float32, perceptual=False, discriminator=False, model=MODEL).autoencoder
    set_recompute(network, rung)
    if compiled:  # partitions forward and backward as inductor has it, without its code generation
        compile_in_place(network, backend="aot_eager_decomp_partition")
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(1, c, s, s, generator=generator) for c, s in ((3, 32), (4, 16)))
    given = {t.untyped_storage().data_ptr() for t in [images, noise, *network.parameters()]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        recon, mean, logvar = network(images, noise)
        loss = recon.abs().mean() + mean.square().mean() + logvar.square().mean()
    loss.backward()
    return sum(kept.values()), gradients(network)


@pytest.mark.slow
@pytest.mark.parametrize("rung", RECOMPUTE)
def test_a_compiled_network_keeps_what_the_rung_keeps(rung):
    kept, expected = kept_and_gradients(rung, compiled=False)
    kept_compiled, found = kept_and_gradients(rung, compiled=True)
    assert kept_compiled <= 1.02 * kept
    assert relative_difference(found, expected) < 1e-5
