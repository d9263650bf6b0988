"""The training of a classifier: AdamW, linear warm-up, cosine, label smoothing, EMA; a checkpoint per epoch.

Shapes: B latents, N validation images, K classes.
"""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from vae.classifier.batches import CachedSet, batches_in_order, training_batches
from vae.classifier.network import LatentClassifier, parameter_groups
from vae.progress import Progress
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import atomic_path
from vae.training.schedule import ema_decay, learning_rate_factor, warmup_steps

BETAS = (0.9, 0.999)
MOST_GRADIENT = 5.0  # norm at which gradients are clipped, as for Swin (Liu et al. 2021)

# What PyTorch raises for files that are torn or hold other things.
_DAMAGE = (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)

Forward = Callable[[Tensor], Tensor]  # latents (B, Z, h, w) -> logits fp32 (B, K)


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained."""

    epochs: int
    learning_rate: float  # after the warm-up
    batch_size: int  # images per optimizer step
    warmup_epochs: float
    weight_decay: float
    label_smoothing: float
    ema_decay: float  # 0: none
    seed: int


@dataclass
class TrainingState:
    """What training changes."""

    model: LatentClassifier
    ema: LatentClassifier | None
    optimizer: torch.optim.Optimizer
    micro_batch: int
    history: list[dict[str, float]] = field(default_factory=list)  # a record of each epoch

    @property
    def measured(self) -> LatentClassifier:
        """The network that is measured."""
        return self.model if self.ema is None else self.ema


def forward_of(model: LatentClassifier, dtype: torch.dtype, is_compiled: bool = False) -> Forward:
    """The network with its fp32 weights cast to `dtype` in each call; gradients are fp32."""

    def forward(latents: Tensor) -> Tensor:
        weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
        return functional_call(model, weights, (latents, dtype))

    if not is_compiled:
        return forward
    # Each VAE needs code for its weights and its EMA weights, at two sizes of a pass: PyTorch's limit is 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(forward, dynamic=False)


def add_gradients(
    forward: Forward, latents: Tensor, targets: Tensor, *, smoothing: float, batch: int
) -> Tensor:
    """Add a micro-batch's share of the gradients of a batch; returns its share of the loss."""
    latents = latents.contiguous(memory_format=torch.channels_last)
    loss = F.cross_entropy(forward(latents), targets, label_smoothing=smoothing, reduction="sum") / batch
    loss.backward()
    return loss.detach()


def begin(model: LatentClassifier, recipe: Recipe, micro_batch: int) -> TrainingState:
    """The state before the first epoch; `model` is on its device."""
    ema = copy.deepcopy(model).requires_grad_(False).eval() if recipe.ema_decay > 0 else None
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = torch.optim.AdamW(groups, recipe.learning_rate, betas=BETAS)
    return TrainingState(model, ema, optimizer, micro_batch)


def train_epoch(state: TrainingState, forward: Forward, data: CachedSet, recipe: Recipe, title: str) -> None:
    """The next epoch; adds its record to the history. NonFiniteError if the loss is."""
    epoch, batch = len(state.history), min(recipe.batch_size, len(data))
    device = state.model.mean.device
    steps = len(data) // batch
    warmup = warmup_steps(recipe.warmup_epochs, steps, steps * recipe.epochs)
    total, rate = torch.zeros((), device=device), 0.0
    state.model.train()
    with torch.random.fork_rng(), Progress(title, steps, "step", keep=False) as bar:
        torch.manual_seed(recipe.seed + epoch)  # dropout of the MLP
        for number, (latents, targets) in enumerate(training_batches(data, batch, recipe.seed, epoch)):
            step = epoch * steps + number
            rate = recipe.learning_rate * learning_rate_factor("cosine", step, steps * recipe.epochs, warmup)
            for group in state.optimizer.param_groups:
                group["lr"] = rate
            for part, labels in zip(
                latents.split(state.micro_batch), targets.split(state.micro_batch), strict=True
            ):
                on_device = part.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                total += add_gradients(forward, *on_device, smoothing=recipe.label_smoothing, batch=batch)
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), MOST_GRADIENT)
            state.optimizer.step()
            state.optimizer.zero_grad()
            _update_ema(state, ema_decay(recipe.ema_decay, step))
            bar.update()
    loss = total.item() / steps
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"--probe_learning_rate {recipe.learning_rate:g}: the loss of epoch {epoch + 1} is {loss}: give "
            "a smaller rate"
        )
    state.history.append({"epoch": epoch + 1, "loss": loss, "learning_rate": rate})


def _update_ema(state: TrainingState, decay: float) -> None:
    if state.ema is not None:
        with torch.no_grad():
            torch._foreach_lerp_(list(state.ema.parameters()), list(state.model.parameters()), 1 - decay)


@torch.no_grad()
def predict(model: LatentClassifier, forward: Forward, data: CachedSet, batch_size: int) -> np.ndarray:
    """Probabilities (N, K) of the usable images, never zero."""
    model.eval()
    parts = []
    for latents in batches_in_order(data, batch_size):
        on_device = latents.to(model.mean.device).contiguous(memory_format=torch.channels_last)
        parts.append(forward(on_device).double().softmax(1).clamp(min=1e-7).cpu())
    return torch.cat(parts).numpy()


def save_state(path: Path, state: TrainingState, identity: dict[str, Any]) -> None:
    """Write the state of the end of an epoch, atomically."""
    content = {
        "identity": identity,
        "model": state.model.state_dict(),
        "ema": None if state.ema is None else state.ema.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "micro_batch": state.micro_batch,
        "history": state.history,
    }
    with atomic_path(path) as temporary:
        torch.save(content, temporary)


def load_state(path: Path, state: TrainingState, identity: dict[str, Any]) -> None:
    """Continue from a saved state; UserError if it is damaged, or of other settings."""
    where = f"--output_dir {path.parent}"
    try:
        content = torch.load(path, map_location=state.model.mean.device, weights_only=True)
        found = content["identity"]
        changed = next((name for name in identity if found.get(name) != identity[name]), None)
        if changed is None:
            state.model.load_state_dict(content["model"])
            if state.ema is not None:
                state.ema.load_state_dict(content["ema"])
            state.optimizer.load_state_dict(content["optimizer"])
            state.history = content["history"]
            state.micro_batch = min(content["micro_batch"], state.micro_batch)  # fits now, too
    except _DAMAGE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{where}: {path.name} is damaged ({reason}): add --overwrite to begin again"
        ) from None
    if changed is not None:
        raise UserError(
            f"{where} has a stopped run with {changed} {found.get(changed)}, and now it is "
            f"{identity[changed]}: repeat its flags, add --overwrite, or give another folder"
        )


def identity_of(recipe: Recipe, **others: Any) -> dict[str, Any]:
    """What a stopped run and the run that continues it have in common."""
    return {**asdict(recipe), **others}
