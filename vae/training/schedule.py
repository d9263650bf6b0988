"""Learning-rate and EMA schedules: pure functions of the position in the run."""

import math
from dataclasses import dataclass

from vae.config.options import LossConfig, OptimConfig
from vae.losses.adversarial import ramp
from vae.optimizers import WARM_ENDS_SHARE
from vae.training.stages import Position, StageSteps

RANDOM, WARM, TRAINED = "random weights", "warm start", "trained VAE"  # what a stage begins with
REFERENCE_PEAK, REFERENCE_WIDTH = 1e-4, 512  # VA-VAE's rate for these widths (its configuration files)
MAX_PEAK = 1e-3  # narrower networks than 51 channels were not measured at more
MAX_RANDOM_PEAK = 3e-4  # from random weights: 1e-3 ended 0.6 dB lower (benchmarks/LOG.md)
# Optimizer steps from which a stage gets the whole rate, and the share of it for a trained VAE: measured with
# benchmarks/short_runs.py (benchmarks/LOG.md). In a shorter stage, larger rates end below its start.
FULL_RATE_STEPS = 400
TRAINED_SHARE = 0.5

# Of the EMA weights from a warm start: benchmarks/LOG.md.
START_STEPS, WINDOWS = 100, 4

WARMUP_SHARE = 0.2  # short stages still spend four fifths of their steps at the full rate


def warmup_steps(warmup_epochs: float, steps_per_epoch: int, total_steps: int) -> int:
    """Return the optimizer steps of linear warm-up in a stage of `total_steps`."""
    return min(round(warmup_epochs * steps_per_epoch), int(total_steps * WARMUP_SHARE))


def peak_learning_rate(width: int, start: str, total_steps: int) -> float:
    """Return the peak learning rate of a stage of `total_steps`; `width`: channels of the widest level.

    With Adam, the rate of hidden layers is inverse to their width (Yang et al. 2022, table 3).
    Adam's first steps change every weight by about the rate, whatever its gradient, so a warm start loses
    before it gains: the rate is proportional to the length of a short stage, and to its square for a trained
    VAE, which has more to lose.
    """
    peak = min(MAX_PEAK, REFERENCE_PEAK * REFERENCE_WIDTH / width)
    if start == RANDOM:
        return min(peak, MAX_RANDOM_PEAK)
    share = min(1.0, total_steps / FULL_RATE_STEPS)
    return peak * (share if start == WARM else TRAINED_SHARE * share**2)


def learning_rate_factor(schedule: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate at optimizer step `step` (from 0) of a stage, as a share of its peak.

    cosine: linear warm-up, then half a cosine to 0. constant: warm-up, then 1. onecycle: half a cosine up
    from 1/25 over the warm-up, then half a cosine down to 1e-4 of the initial rate (Smith & Topin 2018, with
    PyTorch's defaults).
    """
    progress = min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
    rise = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if schedule == "constant":
        return rise
    if schedule == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * progress))
    assert schedule == "onecycle"
    if step < warmup_steps:
        return 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - math.cos(math.pi * rise))
    last = 1 / 25 * 1e-4
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


def discriminator_steps(first_step: int, step: int, done: int, total_steps: int) -> tuple[int, int]:
    """Return how many steps of the discriminator within a stage are done, and how many there are.

    They begin at `first_step`, or with the stage if that is later. `step` is the optimizer step of the run,
    `done` that of the stage, which has `total_steps`.
    """
    own = max(0, min(done, step - first_step))
    return own, total_steps - done + own


def ema_decay(decay: float, step: int, begun_from: str = RANDOM, remaining: int | None = None) -> float:
    """Return the EMA's decay after optimizer step `step` (from 0) of a run, in a stage from `begun_from`.

    From random weights it is small in the first steps, so that the EMA forgets them (as TensorFlow's
    ExponentialMovingAverage does). A warm start is better than the weights of the first steps at the full
    rate: it counts as START_STEPS steps, and the mean reaches over a WINDOWS-th of all. If the rate falls to
    0 in the `remaining` steps of the stage, with this one, the mean reaches over at most a WINDOWS-th of
    these, so it ends at the last weights. A trained VAE is worth remembering: in a short run, Adam adds
    noise whatever their rate, and the mean with the start is better than both (benchmarks/LOG.md).
    """
    if begun_from == TRAINED:
        return decay
    if begun_from == RANDOM:
        return min(decay, (1 + step) / (10 + step))
    reach = START_STEPS + step if remaining is None else min(START_STEPS + step, remaining)
    return min(decay, max(0.0, 1 - WINDOWS / reach))


@dataclass(frozen=True)
class StageSchedule:
    """The steps of a stage, and the learning rates and loss weights at each of them."""

    steps: StageSteps
    begun_from: str  # RANDOM, WARM or TRAINED: what the run began with
    width: int  # channels of the widest level
    optim: OptimConfig
    loss: LossConfig
    disc_begun_at: int | None = None  # optimizer step of the run, if the discriminator has begun
    divergences: int = 0  # of the stage; each halves its learning rates

    @property
    def disc_first_step(self) -> int:
        """Optimizer step of the run at which the discriminator begins: --disc_start.

        A share counts in the stage in which it begins; later stages go on with it.
        """
        start = self.loss.disc_start
        if start >= 1:
            return int(start)
        if self.disc_begun_at is not None:
            return self.disc_begun_at
        return self.steps.stage.first_step + round(start * self.steps.total)

    @property
    def adversarial_first_step(self) -> int:
        """Optimizer step of the run at which the adversarial loss begins to rise to its weight."""
        return self.disc_first_step + self.loss.disc_warmup

    @property
    def start(self) -> str:
        """The weights that the stage begins with: later stages continue a trained VAE."""
        return TRAINED if self.steps.stage.first_epoch > 0 else self.begun_from

    @property
    def ruled_peak(self) -> float:
        """The peak learning rate of the autoencoder by the rule.

        A VAE of others gets no more than one of REFERENCE_WIDTH, because its training has ended: at 4e-4,
        TAEF2's decoder became worse for a hundred steps, at 5e-5 better from the first (benchmarks/LOG.md).
        """
        width = max(self.width, REFERENCE_WIDTH) if self.begun_from == TRAINED else self.width
        return peak_learning_rate(width, self.start, self.steps.total)

    @property
    def peak(self) -> float:
        """The peak learning rate of the autoencoder: --learning_rate, or the rule; halved by divergences."""
        given = self.optim.learning_rate
        return (self.ruled_peak if given is None else given) * 0.5**self.divergences

    @property
    def remedy(self) -> str:
        """The remedy if the loss stays above the stage's start: the rate of the rule is low enough."""
        lower = f"lower --learning_rate (now {self.peak:.3g}), or " if self.peak > self.ruled_peak else ""
        return f"{lower}train for more epochs"

    @property
    def ends_share(self) -> float:
        """The share of the learning rate for the last norm and convolution of encoder and decoder."""
        return WARM_ENDS_SHARE if self.begun_from == WARM else 1.0

    def learning_rates(self, position: Position) -> tuple[float, float]:
        """Return the rates of the autoencoder and of the discriminator in the next step."""
        done = self.steps.done(position)
        total = self.steps.total
        own = discriminator_steps(self.disc_first_step, position.step, done, total)
        disc_peak = self.loss.disc_learning_rate * 0.5**self.divergences
        return self.peak * self._factor(done, total), disc_peak * self._factor(*own)

    def _factor(self, done: int, total: int) -> float:
        """Return the share of the peak learning rate after `done` of `total` steps, warm-up included."""
        warm_up = warmup_steps(self.optim.warmup_epochs, self.steps.per_epoch, total)
        return learning_rate_factor(self.optim.lr_schedule, done, total, warm_up)

    def adversarial_weight(self, step: int) -> float | None:
        """Return the weight of the adversarial term after `step` steps of the run; None before --disc_start.

        It is 0 during --disc_warmup: the discriminator learns, and the autoencoder does not see it.
        """
        loss = self.loss
        if loss.adversarial_weight == 0 or step < self.disc_first_step:
            return None
        return loss.adversarial_weight * ramp(step, self.adversarial_first_step, loss.disc_ramp)

    def is_adversarial(self, step: int) -> bool:
        """Whether the adversarial term has a weight after `step` steps of the run: the phase has begun."""
        return bool(self.adversarial_weight(step))

    def adversarial_share(self, step: int) -> float:
        """Return the share of the adversarial weight in the last of `step` steps: 1 after the ramp."""
        return (self.adversarial_weight(step - 1) or 0.0) / (self.loss.adversarial_weight or 1.0)

    def may_stop_early(self, position: Position) -> bool:
        """Whether validations count for --early_stopping.

        A stage with an adversarial phase does not end before it, nor within the ramp.
        """
        last = position.step - self.steps.done(position) + self.steps.total
        return self.adversarial_share(position.step) == 1 or self.adversarial_share(last) == 0

    def ema_decay(self, position: Position) -> float:
        """Return the decay of the EMA weights after the optimizer step that begins at `position`."""
        falls = self.optim.lr_schedule != "constant"
        remaining = max(1, self.steps.total - self.steps.done(position)) if falls else None
        return ema_decay(self.optim.ema_decay, position.step, self.start, remaining)
