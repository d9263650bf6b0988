"""The loop that trains the network of a probe, and the augmentation of maps.

Shapes: N images, B images of a batch, Z channels of h x h, K classes.
"""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torchvision.ops import roi_align
from torchvision.transforms.v2 import MixUp

from vae.probe.maps import MapSet
from vae.probe.network import Forward, LatentClassifier, NetworkShape, forward_of, parameter_groups
from vae.progress import Progress
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import atomic_path
from vae.training.schedule import ema_decay, learning_rate_factor, warmup_steps

MAX_GRADIENT = 5.0  # norm at which gradients are clipped, as for Swin (Liu et al. 2021)
CROP_RATIO = (3 / 4, 4 / 3)  # of RandomResizedCrop (Szegedy et al. 2015)
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of RandomErasing (Zhong et al. 2020)

# What PyTorch raises for files that are torn or hold other things.
_DAMAGE = (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)


class Training:
    """A network, its averaged weights and its optimizer; `epochs` has a record of each epoch.

    All randomness is a function of (seed, epoch), so a training that continues gives the same numbers.
    """

    def __init__(
        self,
        shape: NetworkShape,
        data: MapSet,
        device: torch.device,
        dtype: torch.dtype,
        micro_batch: int,
        seed: int,
        is_compiled: bool = False,
    ):
        self.recipe, self.data, self.seed, self.micro_batch = shape.recipe, data, seed, micro_batch
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = LatentClassifier(shape, *data.statistics())
        self.model.to(device).to(memory_format=torch.channels_last)
        self.averaged = AveragedModel(self.model, multi_avg_fn=self._average).requires_grad_(False)
        groups = parameter_groups(self.model, self.recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, self.recipe.learning_rate)
        self._parts: tuple[Any, ...] = (self.model, self.averaged, self.optimizer)
        self.epochs: list[dict[str, float]] = []
        self._step, self._device = 0, device
        self._forward = forward_of(self.model, dtype, is_compiled)
        self._measure = forward_of(self.averaged, dtype, is_compiled)
        self._mixup = MixUp(alpha=self.recipe.mixup, num_classes=shape.classes)

    def _average(self, averaged: Any, weights: Any, _count: Tensor | int) -> None:  # it is on the device
        torch._foreach_lerp_(averaged, weights, 1 - ema_decay(self.recipe.ema_decay, self._step))

    @property
    def is_complete(self) -> bool:
        """Whether all epochs are done."""
        return len(self.epochs) >= self.recipe.epochs

    def train_epoch(self, name: str) -> None:
        """The next epoch; adds its record to `epochs`. NonFiniteError if the loss is."""
        recipe, epoch = self.recipe, len(self.epochs)
        batch = min(recipe.batch_size, len(self.data))
        steps = len(self.data) // batch
        warmup = warmup_steps(recipe.warmup_epochs, steps, steps * recipe.epochs)
        total, rate = torch.zeros((), device=self._device), 0.0
        self.model.train()
        with (
            torch.random.fork_rng(),
            Progress(f"{name}, epoch {epoch + 1} of {recipe.epochs}", steps, "step", keep=False) as bar,
        ):
            torch.manual_seed(self.seed + epoch)  # crops, mixtures and dropped paths
            for number, pair in enumerate(self.data.epoch(batch, self.seed, epoch)):
                self._step = epoch * steps + number
                factor = learning_rate_factor("cosine", self._step, steps * recipe.epochs, warmup)
                rate = recipe.learning_rate * factor
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                total += self._update(*pair)
                bar.update()
        loss = total.item() / steps
        self._check_finite(loss, f"the loss of epoch {epoch + 1}")
        self.epochs.append({"epoch": epoch + 1, "loss": loss, "learning_rate": rate})

    def _update(self, latents: Tensor, targets: Tensor) -> Tensor:
        """An optimizer step on a batch; returns its loss."""
        device, recipe = self._device, self.recipe
        batch = self.model.standardized(latents.to(device, non_blocking=True))
        if recipe.smallest_crop < 1:
            batch = random_crops(batch, recipe.smallest_crop)
        batch = randomly_erased(batch, recipe.erasing)
        batch, shares = self._mixup(batch, targets.to(device, non_blocking=True))
        loss = torch.zeros((), device=device)
        for part, part_shares in zip(
            batch.split(self.micro_batch), shares.split(self.micro_batch), strict=True
        ):
            loss += add_gradients(self._forward, part, part_shares, recipe.label_smoothing, len(batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.averaged.update_parameters(self.model)
        return loss

    @torch.no_grad()
    def predict(self, data: MapSet) -> np.ndarray:
        """Probabilities (N, K) by the averaged weights, never zero. NonFiniteError if they are not finite."""
        self.averaged.eval()
        parts = []
        for latents in data.in_order(self.micro_batch):
            batch = self.model.standardized(latents.to(self._device))
            logits = self._measure(batch.contiguous(memory_format=torch.channels_last))
            parts.append(logits.double().softmax(1).clamp(min=1e-7).cpu())
        probabilities = torch.cat(parts)
        self._check_finite(probabilities.sum().item(), "a sum of probabilities")
        return probabilities.numpy()

    def _check_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            rate = f"--probe_learning_rate {self.recipe.learning_rate:g}"
            raise NonFiniteError(f"{rate}: {what} is {value}: give a smaller rate")

    def save(self, path: Path) -> None:
        """Write the state of the end of an epoch, atomically."""
        content = [[part.state_dict() for part in self._parts], self.micro_batch, self.epochs]
        with atomic_path(path) as temporary:
            torch.save(content, temporary)

    def load(self, path: Path) -> None:
        """Continue from a saved state; UserError if it is damaged."""
        try:
            states, micro_batch, epochs = torch.load(path, map_location=self._device, weights_only=True)
            for part, state in zip(self._parts, states, strict=True):
                part.load_state_dict(state)
        except _DAMAGE as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{path} is damaged ({reason}): remove it to begin again") from None
        self.micro_batch, self.epochs = min(micro_batch, self.micro_batch), epochs  # fits now, too


def add_gradients(forward: Forward, latents: Tensor, shares: Tensor, smoothing: float, batch: int) -> Tensor:
    """Add a micro-batch's share of the gradients of a batch; returns its share of the loss.

    latents: standardized (B, Z, h, h); shares: of the classes in each image, (B, K).
    """
    latents = latents.contiguous(memory_format=torch.channels_last)
    loss = F.cross_entropy(forward(latents), shares, label_smoothing=smoothing, reduction="sum") / batch
    loss.backward()
    return loss.detach()


def random_crops(maps: Tensor, smallest: float) -> Tensor:
    """A random region of each map (B, Z, h, h), `smallest` to 1 of its area, at the size of the map."""
    boxes = _boxes(len(maps), maps.shape[-1], (smallest, 1.0), CROP_RATIO)
    numbered = torch.cat([torch.arange(len(maps))[:, None], boxes], dim=1).to(maps.device)
    return roi_align(maps, numbered, maps.shape[-1], aligned=True)


def randomly_erased(maps: Tensor, share: float) -> Tensor:
    """Maps (B, Z, h, h), with zeros in a random region of about `share` of them."""
    boxes = _boxes(len(maps), maps.shape[-1], ERASED_AREA, ERASED_RATIO)
    boxes = (boxes * (torch.rand(len(maps), 1) < share)).to(maps.device)[..., None]  # no area: not erased
    middles = torch.arange(maps.shape[-1], device=maps.device) + 0.5
    columns = (middles >= boxes[:, 0]) & (middles < boxes[:, 2])  # (B, h)
    rows = (middles >= boxes[:, 1]) & (middles < boxes[:, 3])
    return maps.masked_fill((rows[:, :, None] & columns[:, None])[:, None], 0.0)


def _boxes(count: int, side: int, areas: tuple[float, float], ratios: tuple[float, float]) -> Tensor:
    """Random left, top, right, bottom (B, 4): the area is uniform, and so is the logarithm of the ratio."""
    u = torch.rand(4, count)
    area = side**2 * (areas[0] + u[0] * (areas[1] - areas[0]))
    ratio = ratios[0] * (ratios[1] / ratios[0]) ** u[1]
    width, height = ((area * by).sqrt().clamp(max=side) for by in (ratio, 1 / ratio))
    left, top = u[2] * (side - width), u[3] * (side - height)
    return torch.stack([left, top, left + width, top + height], dim=1)
