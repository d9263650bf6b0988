"""Turn a batch into an update of the weights: inputs on the device, gradients, optimizers, EMA."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vae.data.dataset import Batch
from vae.losses.adversarial import adaptive_weight, update_running
from vae.losses.variance import needs_statistics
from vae.ops.noise import image_noise
from vae.optimizers import set_learning_rate
from vae.step import StepInputs
from vae.training.distributed import Distributed
from vae.training.schedule import StageSchedule
from vae.training.stage_memory import OomRetry
from vae.training.state import TrainingState
from vae.update import apply_update


class Update(NamedTuple):
    """Measurements of a step."""

    losses: dict[str, torch.Tensor]  # () each: sums over the images of this process, by term
    norms: list[torch.Tensor]  # gradient norms of the autoencoder and, if it has started, the discriminator


@dataclass(frozen=True)
class Stepper:
    """Makes the optimizer steps of a stage."""

    state: TrainingState
    retry: OomRetry
    schedule: StageSchedule
    dist: Distributed
    seed: int  # of the noise of the posterior

    def step(self, batch: Batch, total_images: int, learning_rate: float | None = None) -> Update:
        """Update all weights with the gradients of a batch.

        `total_images` counts the images of all processes in this step. `learning_rate` replaces the
        schedule's, for the autoencoder. The position does not change, so the state is then `is_changing`.
        """
        state = self.state
        schedule = self.schedule
        # The images of all processes, before they have exchanged their numbers
        expected_images = len(batch.images) if self.dist.world_size == 1 else schedule.steps.images
        result = self.retry.gradients(self.inputs(batch, expected_images))
        if not len(batch.images):  # the placeholder of a process without images does not count
            result = result.mapped(torch.zeros_like)
        factor = self._adversarial_factor()
        state.is_changing = True
        self._set_learning_rates(learning_rate)
        optimizers = state.optimizers.all if factor is not None else [state.optimizers.autoencoder]
        scale = expected_images / max(1, total_images)
        if scale != 1:
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            torch._foreach_mul_([p.grad for params in groups for p in params if p.grad is not None], scale)
        norms = apply_update(optimizers, state.update, schedule.optim, state.fp16, total_images == 0)
        losses = result.losses
        if factor is not None:
            assert result.gradient_sq_norms is not None
            measured = self.dist.all_reduce(result.gradient_sq_norms) * scale**2
            state.running_sq_norms = update_running(state.running_sq_norms, measured)
            if state.position.disc_begun_at is None:
                state.position.disc_begun_at = state.position.step
            losses = {**losses, "adversarial_factor": factor * len(batch.images)}
        moments = result.latent_moments
        measured_moments = None if moments is None else self.dist.all_reduce(moments) / max(1, total_images)
        if total_images:
            if measured_moments is not None:
                state.running_moments = update_running(state.running_moments, measured_moments)
            state.update_ema(schedule.ema_decay(state.position))
        return Update(losses, norms)

    def inputs(self, batch: Batch, total_images: int) -> StepInputs:
        """The batch on the device with its noise; a process without images gets a placeholder of weight 0."""
        state = self.state
        model = state.autoencoder
        device = self.dist.device
        share = self.dist.world_size / max(1, total_images)
        if len(batch.images) == 0:
            batch = _placeholder(model.config.image_channels, state.stage.image_size)
            share = 0.0
        height, width = (side // model.downsampling for side in batch.images.shape[2:])
        shape = (model.config.z_channels, height, width)
        return StepInputs(
            images=batch.images.to(device, non_blocking=True),
            noise=image_noise(batch.epochs, batch.indices, shape, self.seed, device),
            image_share=share,
            loss_scale=state.update.loss_scale,
            adversarial_factor=self._adversarial_factor(),
            running_moments=state.running_moments if needs_statistics(self.schedule.loss) else None,
        )

    def _adversarial_factor(self) -> torch.Tensor | None:
        """Return the weight of the adversarial term in this step, or None before --disc_start."""
        weight = self.schedule.adversarial_weight(self.state.position.step)
        if weight is None:
            return None
        reconstruction, adversarial = self.state.running_sq_norms
        return adaptive_weight(reconstruction, adversarial, self.schedule.loss.disc_max_weight) * weight

    def _set_learning_rates(self, learning_rate: float | None) -> None:
        rate, disc_rate = self.schedule.learning_rates(self.state.position)
        optimizers = self.state.optimizers
        rate = rate if learning_rate is None else learning_rate
        set_learning_rate(optimizers.autoencoder, rate, self.schedule.ends_share)
        if optimizers.discriminator is not None:
            set_learning_rate(optimizers.discriminator, disc_rate)


def _placeholder(channels: int, image_size: int) -> Batch:
    """Return one black image, for a process without images in a step."""
    key = torch.zeros(1, dtype=torch.int64)
    return Batch(torch.zeros(1, channels, image_size, image_size, dtype=torch.uint8), key, key)
