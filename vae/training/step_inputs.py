"""The inputs of one optimizer step: its batch, noise and weights, on the device."""

import torch

from vae.data.dataset import Batch
from vae.losses.adversarial import adaptive_weight, ramp
from vae.ops.noise import posterior_noise
from vae.step import StepInputs
from vae.training.context import RunContext, StageContext
from vae.training.state import TrainingState


def step_inputs(
    run: RunContext, ctx: StageContext, state: TrainingState, batch: Batch, total_images: int
) -> StepInputs:
    """The batch on the device with its noise; a process without images gets a placeholder of weight 0."""
    device, size = run.dist.device, ctx.stage.image_size
    height, width = (side // state.autoencoder.downsampling for side in batch.images.shape[2:])
    shape = (run.config.model.z_channels, height, width)
    pixels = batch.images.to(device, non_blocking=True)
    noise = posterior_noise(batch.epochs, batch.indices, shape, run.config.run.seed, device)
    share = run.dist.world_size / max(1, total_images)
    if len(pixels) == 0:
        pixels = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=device)
        noise = torch.zeros(1, *shape, device=device)
        share = 0.0
    return StepInputs(pixels, noise, share, state.update.loss_scale, _adversarial_factor(run, state))


def _adversarial_factor(run: RunContext, state: TrainingState) -> torch.Tensor | None:
    """The weight of the adversarial term in this step, or None before --disc_start."""
    loss, step = run.config.loss, state.position.step
    if state.discriminator is None or step < loss.disc_start:
        return None
    reconstruction, adversarial = state.running_sq_norms
    adaptive = adaptive_weight(reconstruction, adversarial, loss.disc_max_weight)
    return adaptive * (loss.adversarial_weight * ramp(step, loss.disc_start, loss.disc_ramp))
