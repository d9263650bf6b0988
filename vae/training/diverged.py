"""A run that diverges ends; its next start continues the last good checkpoint with half the learning rate."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from vae.system.errors import NonFiniteError
from vae.system.files import read_json, write_json
from vae.training.checkpoints import abandon_newer, list_checkpoints, saved_step
from vae.training.logbook import Logbook
from vae.training.saver import Saver

DIVERGED_NAME = "diverged.json"


@dataclass(frozen=True)
class Divergences:
    """What the divergences of a run change, in the file DIVERGED_NAME of its folder."""

    learning_rate: float | None  # --learning_rate of the run; another one is a new attempt
    # By the first epoch of a stage: for each divergence, a limit of the learning rate (schedule.lowered)
    caps: dict[int, list[float]] = field(default_factory=dict)
    overflows_fp16: bool = False


def read_divergences(folder: Path, learning_rate: float | None) -> Divergences:
    """Those of the run in the folder with this --learning_rate."""
    try:
        content = read_json(folder / DIVERGED_NAME)
    except FileNotFoundError:
        return Divergences(learning_rate)
    if content["learning_rate"] != learning_rate:
        return Divergences(learning_rate)
    caps = {int(first_epoch): limits for first_epoch, limits in content["caps"].items()}
    return Divergences(learning_rate, caps, content["overflows_fp16"])


def end_diverged(saver: Saver, logbook: Logbook, reason: str, peak: float) -> NoReturn:
    """Raise NonFiniteError, with the last good checkpoint as the newest one; for the main process.

    If steps in fp16 were not finite, the precision changes instead of the learning rate: each of them halved
    the loss scale, so the activations overflow. `peak` is the peak learning rate of the stage.
    """
    state = saver.state
    saver.writer.finish()  # before files are moved
    good = saver.stability.good
    step = saved_step(good) if good else state.begun_at.step
    abandon_newer(saver.folder, step)
    newest = next(iter(list_checkpoints(saver.folder)), None)
    learning_rate = state.optimizers[0].param_groups[0]["lr"]
    divergence = f"step {state.position.step}, learning rate {learning_rate:g}: {reason}"
    values = {"diverged_at": state.position.step, "reason": reason, "learning_rate": learning_rate}
    logbook.record("divergence", step, {**values, "checkpoint": newest.name if newest else None})
    remedy = f"lower --learning_rate (now {peak:g})"
    if newest is None:
        raise NonFiniteError(f"{divergence}; no checkpoint is good: {remedy}, and use a new --output_dir")
    overflows = state.fp16 and saver.stability.nonfinite_streak > 0
    caps = state.caps_by_stage
    if not overflows:
        caps.setdefault(state.stage.first_epoch, []).append(0.5 * learning_rate / peak if peak else 0.5)
    state.overflows_fp16 |= overflows
    divergences = Divergences(saver.config.optim.learning_rate, caps, state.overflows_fp16)
    write_json(saver.folder / DIVERGED_NAME, asdict(divergences))
    change = "without fp16" if overflows else "with half the learning rate"
    raise NonFiniteError(
        f"{divergence}; {newest.name} is the last good checkpoint: continue it {change}: "
        f"{saver.resume_command}, or {remedy}"
    )
