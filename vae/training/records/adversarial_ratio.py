"""How much larger the gradient of the other losses is than that of the adversarial one, for the record.

The adaptive weight of a step is the ratio at the pixels (vae/losses/adversarial.py). VQGAN takes the ratio at
the decoder's last layer (Esser et al. 2021, eq. 7), which is measured here for comparison.
"""

import math
from dataclasses import replace

import torch

from vae.data.dataset import Batch
from vae.device import is_out_of_memory
from vae.images.pixels import to_float
from vae.losses.adversarial import adaptive_weight, squared_norm
from vae.model.autoencoder import AutoencoderKL
from vae.ops.conv_gradients import WEIGHT, conv_backward
from vae.step import (
    Networks,
    StepInputs,
    adversarial_gradient,
    network_input,
    reconstruction_gradient,
)
from vae.training.stepper import Stepper


def adversarial_ratios(stepper: Stepper, batch: Batch) -> dict[str, float]:
    """The ratio at the pixels that the next step uses, and that at the last layer.

    The latter is measured with one image per process, the first of `batch`, so that it adds one forward pass
    without a graph to a record, and no memory to the peak of a step. If memory runs out, it is left out.
    All processes call this together.
    """
    dist, retry = stepper.dist, stepper.retry
    parts = {name: getattr(batch, name)[:1] for name in ("images", "epochs", "indices")}
    inputs = stepper.inputs(replace(batch, **parts), total_images=dist.world_size)
    sq_norms = torch.zeros(2, device=dist.device)
    try:
        sq_norms = last_layer_sq_norms(retry.networks, inputs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if not retry.release_graph():
            retry.free_memory()
    reconstruction, adversarial = stepper.state.running_sq_norms
    used = adaptive_weight(reconstruction, adversarial, stepper.schedule.loss.disc_max_weight)
    reconstruction, adversarial = dist.all_reduce(sq_norms)
    measured = adaptive_weight(reconstruction, adversarial, math.inf)
    ratios = {"adversarial_ratio": float(used), "adversarial_ratio_last_layer": float(measured)}
    return {name: value for name, value in ratios.items() if value != 0}  # 0: not measured


def last_layer_sq_norms(networks: Networks, inputs: StepInputs) -> torch.Tensor:
    """Squared norms of two gradients of the weight of the decoder's last convolution, (2,).

    The first is that of all terms that compare images, with their weights, the second that of the unweighted
    adversarial term. No gradient of a parameter is stored. Only the last level's output is kept from the
    forward pass: the graphs of the losses are freed before the activation of the last layer is computed.
    """
    model, kept = networks.autoencoder, []
    assert isinstance(model, AutoencoderKL)
    decoder, images = model.decoder, to_float(inputs.images)
    hook = decoder.up_blocks[-1].register_forward_hook(lambda _module, _args, h: kept.append(h))
    try:
        with torch.no_grad():
            recon, _, _ = model(network_input(images, networks), inputs.noise)
    finally:
        hook.remove()
    others = replace(inputs, adversarial_factor=None)
    gradients = [
        reconstruction_gradient(networks, recon, images, others)[0],
        adversarial_gradient(networks, recon, inputs)[0],
    ]
    with torch.no_grad():
        h = decoder.conv_norm_out(kept.pop())
        weight = torch.empty_like(decoder.conv_out.weight, dtype=h.dtype)  # its values are not read
        found = [conv_backward(gradient, h, weight, WEIGHT)[0] for gradient in gradients]
        return torch.stack([squared_norm(gradient) for gradient in found])
