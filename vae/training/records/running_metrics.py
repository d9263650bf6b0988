"""The record of the training steps since the last one: means of losses, speed and memory."""

import math
import time
from dataclasses import dataclass, field

import torch

from vae.losses.terms import LossTerms
from vae.training.distributed import Distributed
from vae.training.records.health import Health

SQUARED_RANGE = 4.0  # of values in [-1, 1], for PSNR from the mean squared error


@dataclass
class RunningMetrics:
    """Sums over the steps since the last record. Tensors stay on the device until the record is written."""

    started: float = field(default_factory=time.perf_counter)
    step_ended: float = field(default_factory=time.perf_counter)
    wait_seconds: float = 0.0  # for batches
    pause_seconds: float = 0.0  # for validations, samples and checkpoints
    images: float = 0.0  # of all processes
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # over the images of this process
    norms: list[torch.Tensor] = field(default_factory=list)  # gradient norms of the last step
    health: Health = field(default_factory=Health)

    def add(self, sums: dict[str, torch.Tensor], images: float, norms: list[torch.Tensor]) -> None:
        """Add one step's sums over images."""
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.images += images
        self.norms = norms
        self.step_ended = time.perf_counter()

    def exclude_pause(self) -> None:
        """Exclude the time since the last step from the training time."""
        self.pause_seconds += time.perf_counter() - self.step_ended

    def all_reduced_means(self, dist: Distributed) -> dict[str, float]:
        """The mean of each sum over the images of all processes. This synchronizes the device."""
        names = sorted(self.sums)
        stacked = dist.all_reduce(torch.stack([self.sums[name] for name in names]))
        return dict(zip(names, (stacked / max(1.0, self.images)).tolist(), strict=True))

    def seconds(self) -> float:
        """The seconds of training since the last record."""
        return max(1e-9, time.perf_counter() - self.started - self.pause_seconds)

    def speed(self) -> dict[str, float]:
        """images_per_second of all processes, and the share of the time spent waiting for data."""
        seconds = self.seconds()
        return {"images_per_second": self.images / seconds, "data_wait_share": self.wait_seconds / seconds}


def loss_record(means: dict[str, float], terms: LossTerms) -> dict[str, float]:
    """The weighted loss, its terms and the PSNR of the mean squared error, from the means of the steps."""
    mse = means["mse"]
    psnr = 10 * math.log10(SQUARED_RANGE / mse) if 0 < mse < math.inf else math.nan
    shown = {name: value for name, value in means.items() if name != "mse"}
    return {"loss": terms.weighted_sum(means), **shown, "psnr": psnr}
