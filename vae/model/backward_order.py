"""The parameters of a network in the order in which backward completes their gradients.

Registration does not give it: it follows the files of diffusers, and optimizers number parameters by it.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import nn

from vae.model.autoencoder import AutoencoderKL, MidBlock
from vae.model.discriminator import Discriminator


def backward_order(network: nn.Module) -> list[nn.Parameter]:
    """The trained parameters, the ones that forward uses last first."""
    return [parameter for parameter in reversed(list(_in_forward(network))) if parameter.requires_grad]


def _in_forward(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for part in _parts(module):
        yield from _in_forward(part)


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    """The modules in this one, in the order of its forward pass."""
    if isinstance(module, AutoencoderKL):
        parts = (module.encoder, module.quant_conv, module.post_quant_conv, module.decoder)
        return (part for part in parts if part is not None)
    if isinstance(module, MidBlock):
        return module.resnets[0], *module.attentions, module.resnets[1]
    if isinstance(module, Discriminator):
        pairs = zip(module.convs[1:], module.norms, strict=True)
        return module.convs[0], *chain.from_iterable(pairs), module.conv_out
    return module.children()
