"""The update of the weights at the end of a step: clipping, skipped steps, and the loss scale of fp16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vae.config.options import OptimConfig

LOSS_SCALE_START = 2.0**16  # fp16: start, growth and backoff as in PyTorch's GradScaler
LOSS_SCALE_GROWTH_STEPS = 2000


@dataclass
class UpdateState:
    """State of the update between steps, as tensors on the device so that no step waits for the host."""

    loss_scale: torch.Tensor  # () fp32
    finite_steps: torch.Tensor  # () steps since the scale last changed
    nonfinite_streak: torch.Tensor  # () skipped steps in a row
    nonfinite_total: torch.Tensor  # () skipped steps of the run

    @classmethod
    def begin(cls, device: torch.device, fp16: bool) -> "UpdateState":
        start = LOSS_SCALE_START if fp16 else 1.0
        values = (start, 0.0, 0.0, 0.0)
        return cls(*(torch.tensor(value, dtype=torch.float32, device=device) for value in values))


def apply_update(
    optimizers: Sequence[torch.optim.Optimizer],
    state: UpdateState,
    optim: OptimConfig,
    fp16: bool,
    empty: bool,
) -> list[torch.Tensor]:
    """Clip, step and clear the gradients; return the gradient norm of each optimizer before clipping, ().

    If a gradient is not finite on any process, or the step has no image (`empty`), no weight of any network
    changes: the fused optimizers read `found_inf` on the device. Then the fp16 loss scale is adjusted.
    """
    norms = [_clip(optimizer, state.loss_scale, optim.gradient_clip, fp16) for optimizer in optimizers]
    skipped = torch.stack([~torch.isfinite(norm) for norm in norms]).any().float()
    if empty:
        skipped = torch.ones_like(skipped)
    for optimizer in optimizers:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]  # fused optimizers read it, as GradScaler's
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not empty:
        _adjust_loss_scale(state, skipped, fp16)
    return norms


def _clip(
    optimizer: torch.optim.Optimizer, loss_scale: torch.Tensor, limit: float, fp16: bool
) -> torch.Tensor:
    """Divide the gradients by the loss scale and clip them to `limit`; return their norm before clipping."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if fp16:
        torch._foreach_div_(grads, loss_scale)
    norm = torch.nn.utils.get_total_norm(grads)
    if limit > 0:
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _adjust_loss_scale(state: UpdateState, skipped: torch.Tensor, fp16: bool) -> None:
    state.nonfinite_total += skipped
    state.nonfinite_streak = (state.nonfinite_streak + skipped) * skipped
    if fp16:
        steps = (state.finite_steps + 1) * (1 - skipped)
        grow = (steps >= LOSS_SCALE_GROWTH_STEPS).float()
        state.loss_scale = state.loss_scale * torch.where(skipped > 0, 0.5, 1.0) * (1 + grow)
        state.finite_steps = steps * (1 - grow)
