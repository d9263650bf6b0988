"""The results of a run's validations: the best one, early stopping, and a warning if PSNR falls."""

import math

from vae.interop.checkpoint_content import Validations

SMALL_DECREASE_DB = 0.1  # below the start of a stage: no reason to change anything (docs/training.md)


class History(Validations):
    """The results, and what follows from them."""

    def begin_stage(self) -> None:
        """Forget what belongs to the previous stage."""
        self.without_gain, self.decrease_reported = 0, False
        self.start_psnr = self.last_psnr = None

    def add_start(self, metrics: dict[str, float], checkpoint: str | None) -> None:
        """Add the validation before the stage's first step, which later ones must exceed.

        `checkpoint` is the file in the output folder with the weights that the stage begins with.
        """
        self.start_psnr = metrics.get("psnr")
        self._add(metrics, is_start=True)
        if checkpoint is not None:
            self.add_checkpoint(checkpoint, metrics)

    def add_epoch(self, metrics: dict[str, float]) -> None:
        """Add the validation at the end of an epoch."""
        self.without_gain = 0 if self._add(metrics, is_start=False) else self.without_gain + 1

    def _add(self, metrics: dict[str, float], is_start: bool) -> bool:
        """Whether a validation is the best one. Only validations of one image size are compared."""
        same_size = self.best.get("image_size") == metrics["image_size"]
        if same_size and _psnr(metrics) <= _psnr(self.best):
            return False
        if not same_size:
            self.best_checkpoint_psnr = None
        self.best, self.best_is_start = metrics, is_start
        return True

    def add_checkpoint(self, name: str, metrics: dict[str, float]) -> None:
        """Add a checkpoint with the validation of its weights."""
        best = -math.inf if self.best_checkpoint_psnr is None else self.best_checkpoint_psnr
        if _psnr(metrics) > best:
            self.best_checkpoint = name
            self.best_checkpoint_psnr = metrics["psnr"]

    @property
    def is_below_start(self) -> bool:
        """Whether the last validation of the stage is worse than that of its start, as they are printed."""
        if self.start_psnr is None or self.last_psnr is None or not math.isfinite(self.start_psnr):
            return False
        return not round(self.last_psnr, 2) >= round(self.start_psnr, 2)  # also if it is NaN

    def decrease_warning(self, psnr: float, remedy: str) -> str | None:
        """The warning that training has lowered PSNR below the stage's start, once per stage."""
        start = self.start_psnr
        if start is None or self.decrease_reported or psnr >= start - SMALL_DECREASE_DB:
            return None
        self.decrease_reported = True
        return (
            f"PSNR {psnr:.2f} dB is below the {start:.2f} dB at the start of this stage: if this persists, "
            f"{remedy}"
        )

    def regression_warning(self, metrics: dict[str, float], limit: float) -> str | None:
        """Add a quick validation; the warning if its PSNR has just fallen by more than `limit` dB.

        The best one is replaced if it is of another image size or number of images.
        """
        if any(self.quick_best.get(name) != metrics[name] for name in ("image_size", "images")):
            self.quick_best, self.quick_has_fallen = metrics, False
            return None
        fell_before = self.quick_has_fallen
        best = _psnr(self.quick_best)
        self.quick_has_fallen = _psnr(metrics) < best - limit
        if _psnr(metrics) > best:
            self.quick_best = metrics
        if fell_before or not self.quick_has_fallen:
            return None
        return (
            f"PSNR of the quick validation is {_psnr(metrics):.2f} dB, more than --regression_psnr {limit:g} "
            f"below its best ({best:.2f} dB): all validation images are measured now; if they confirm it, "
            "lower --learning_rate, or resume from the best checkpoint"
        )


def _psnr(metrics: dict[str, float]) -> float:
    """The PSNR for comparisons: below all others if no image was usable or a value was not finite."""
    psnr = metrics.get("psnr", math.nan)
    return -math.inf if math.isnan(psnr) else psnr
