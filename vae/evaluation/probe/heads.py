"""Classifiers on latents or pixels, and their training on one fold.

Shapes: N images, C channels of h x w, K classes.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLED = 8  # side of the map that linear heads and MLPs see: larger ones would have more weights than images
WIDTH = 48  # channels of the convolutional heads: small, because a probe must not learn what latents lack


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022: depthwise 7x7, norm, 1x1 to four times the width, GELU, 1x1 back."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.wide, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(self.depthwise(x)))))


class ResidualBlock(nn.Module):
    """He et al. 2016, pre-activation, with GroupNorm: batches of a probe are small."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.relu(self.norms[0](x)))
        return x + self.second(F.relu(self.norms[1](h)))


def _flat(channels: int, side: int) -> tuple[nn.Module, int]:
    """A pooled and flattened map, and its number of values."""
    side = min(side, POOLED)
    return nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten()), channels * side**2


def _linear(channels: int, side: int, classes: int) -> nn.Module:
    flat, values = _flat(channels, side)
    return nn.Sequential(flat, nn.Linear(values, classes))


def _mlp(channels: int, side: int, classes: int) -> nn.Module:
    flat, values = _flat(channels, side)
    return nn.Sequential(flat, nn.Linear(values, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, classes))


def _convolutional(block: Callable[[int], nn.Module]) -> Callable[[int, int, int], nn.Module]:
    def build(channels: int, _side: int, classes: int) -> nn.Module:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(2 * POOLED),
            nn.Conv2d(channels, WIDTH, 2, stride=2),  # (N, WIDTH, 8, 8)
            block(WIDTH),
            block(WIDTH),
            nn.GroupNorm(1, WIDTH),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * WIDTH, classes),
        )

    return build


# Functions of the width.
BLOCKS: dict[str, Callable[[int], nn.Module]] = {"convnext": ConvNeXtBlock, "resnet": ResidualBlock}
# Functions of channels, side of the map, and classes.
HEADS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "convnext": _convolutional(BLOCKS["convnext"]),
    "resnet": _convolutional(BLOCKS["resnet"]),
}


@dataclass(frozen=True)
class Schedule:
    """How a head is trained."""

    epochs: int = 30
    learning_rate: float = 3e-3  # peak of the one-cycle schedule
    batch_size: int = 64
    label_smoothing: float = 0.1
    patience: int = 8  # epochs without a lower log loss on the stopping fold
    seed: int = 0


def new_head(head: str, features: Tensor, train: Tensor, num_classes: int) -> nn.Module:
    """A head with random weights, for features standardized by the statistics of the images at `train`."""
    build = HEADS[head](features.shape[1], features.shape[2], num_classes)
    return nn.Sequential(_Standardize(features[train]), build).to(features.device)


def new_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """The optimizer of a head."""
    return torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.05)


def loss_of(model: nn.Module, features: Tensor, targets: Tensor, schedule: Schedule) -> Tensor:
    """The training loss of a batch: ()."""
    with torch.autocast(features.device.type, torch.bfloat16, enabled=features.is_cuda):
        logits = model(features)
    return F.cross_entropy(logits.float(), targets, label_smoothing=schedule.label_smoothing)


def train_head(
    head: str,
    features: Tensor,
    targets: Tensor,
    train: Tensor,
    stop: Tensor,
    num_classes: int,
    schedule: Schedule,
) -> tuple[nn.Module, float]:
    """A head trained on the images at `train`, and its log loss at `stop`, where that is lowest.

    features: (N, C, h, w) on the device, standardized by the statistics of `train`; bf16 on a GPU.
    """
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        model = new_head(head, features, train, num_classes)
        steps = -(-len(train) // schedule.batch_size)
        optimizer = new_optimizer(model, schedule.learning_rate)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, schedule.learning_rate, total_steps=steps * schedule.epochs
        )
        best, best_loss, since = copy.deepcopy(model.state_dict()), float("inf"), 0
        for _ in range(schedule.epochs):
            model.train()
            for chosen in train[torch.randperm(len(train))].split(schedule.batch_size):
                loss = loss_of(model, features[chosen], targets[chosen], schedule)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                cycle.step()
            found = F.nll_loss(predict(model, features[stop]).log(), targets[stop]).item()
            if found < best_loss:
                best, best_loss, since = copy.deepcopy(model.state_dict()), found, 0
            else:
                since += 1
                if since >= schedule.patience:
                    break
    model.load_state_dict(best)
    return model, best_loss


@torch.no_grad()
def predict(model: nn.Module, features: Tensor) -> Tensor:
    """Probabilities (N, K) in fp32, never zero."""
    model.eval()
    logits = torch.cat([model(part).float() for part in features.split(256)])
    return logits.softmax(1).clamp(min=1e-7)


class _Standardize(nn.Module):
    """Subtract the mean and divide by the standard deviation of each channel of the training images."""

    mean: Tensor
    std: Tensor

    def __init__(self, features: Tensor):
        super().__init__()
        std, mean = torch.std_mean(features.float(), dim=(0, 2, 3), keepdim=True)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std.clamp(min=1e-6))

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std
