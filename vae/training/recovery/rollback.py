"""A run that diverges goes back to its last good checkpoint with half the learning rate, or stops."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vae.config.options import Config
from vae.interop.vae_files import read_vae
from vae.system import console
from vae.system.errors import NonFiniteError
from vae.training.checkpoints.saver import Saver
from vae.training.checkpoints.store import (
    abandon_newer,
    list_checkpoints,
    load_on_all,
    position_name,
    saved_step,
    valid_checkpoints,
)
from vae.training.output.logbook import Logbook
from vae.training.provenance import ROLLBACK, Resume
from vae.training.stages import current_stage
from vae.training.state import begin_state, restore, snapshot


def begin_run(saver: Saver, logbook: Logbook, resume: Resume) -> None:
    """Record that the run begins or goes on here."""
    saver.note_good()
    identity = saver.state.identity
    logbook.record("run", saver.state.position.step, saver.provenance.run_record(identity, resume))


@dataclass(frozen=True)
class Rollback:
    """The way back from a divergence."""

    config: Config
    saver: Saver
    logbook: Logbook

    def go_back(self, reason: str, peak: float) -> None:
        """Restore the last good checkpoint, which `latest` then continues, and halve the learning rate.

        If steps in fp16 were not finite, the precision changes instead: each of them halved the loss scale,
        so the activations overflow. `peak` is that of the stage that diverged. Raises NonFiniteError if it
        has used its --rollbacks.
        """
        state = self.saver.state
        saver = self.saver
        allowed = self.config.optim.rollbacks
        overflows = state.fp16 and self.saver.stability.nonfinite_streak > 0
        diverged_at, first_epoch = state.position.step, state.stage.first_epoch
        learning_rate = state.optimizers[0].param_groups[0]["lr"]
        saver.writer.finish()  # before files are read
        source, content = self._last_good(reason)
        state.is_changing = True
        self._restore(content)
        state.is_changing = False
        caps, step = state.rollbacks.setdefault(first_epoch, []), state.position.step
        good, is_allowed = saver.folder / position_name(state.position), overflows or len(caps) < allowed
        if overflows:
            state.leave_fp16()
        elif is_allowed:
            caps.append(0.5 * learning_rate / peak if peak else 0.5)
        if saver.dist.is_main:
            abandon_newer(saver.folder, step)
        if is_allowed or source != good:  # so that a resumed run knows of the rollback
            saver.replace(good)
        self.saver.stability.begin(step, None)
        self.saver.stability.good = good
        self.logbook.go_back(step)
        begin_run(saver, self.logbook, Resume(ROLLBACK, reason))
        values: dict[str, float | int | str | None] = {"diverged_at": diverged_at, "reason": reason}
        values |= {"checkpoint": good.name, "learning_rate": learning_rate}
        self.logbook.record("rollback", step, values)
        divergence = f"step {diverged_at}, learning rate {learning_rate:g}: {reason}"
        if not is_allowed:
            raise NonFiniteError(
                f"{divergence}; this stage has used its --rollbacks {allowed}: lower --learning_rate (now "
                f"{peak:g}), and resume from {good.name}, the last good checkpoint, with: "
                f"{saver.resume_command}"
            )
        change = f"with half the learning rate (rollback {len(caps)} of {allowed} in this stage)"
        change = "with the same learning rate, and leaves fp16" if overflows else change
        console.warning(f"{divergence}; training goes back to step {step} ({good.name}) {change}")

    def _last_good(self, reason: str) -> tuple[Path | None, dict[str, Any]]:
        """The last good checkpoint and its content; or else the run's start."""
        good = load_on_all(lambda: next(valid_checkpoints(self._candidates()), None), self.saver.dist)
        if good is not None:
            return good
        if self.saver.provenance.resumed_from is not None:
            raise NonFiniteError(f"{reason}; no checkpoint in {self.saver.folder} can be read to go back to")
        return None, self._initial_content()

    def _candidates(self) -> list[Path]:
        """The good checkpoint, then older ones; or else what the run continued."""
        good, saver = self.saver.stability.good, self.saver
        limit = saved_step(good) if good else self.saver.state.begun_at.step
        older = [path for path in list_checkpoints(saver.folder) if 0 <= saved_step(path) <= limit]
        return [*dict.fromkeys(filter(None, [good, *older, saver.provenance.resumed_from]))]

    def _restore(self, content: dict[str, Any]) -> None:
        """Load the content of a checkpoint, but keep the number of rollbacks; a new run begins after it."""
        state, rollbacks = self.saver.state, self.saver.state.rollbacks
        if state.discriminator is not None and content["discriminator"] is None:
            restore(state, self._initial_content())
        restore(state, content)
        if state.position.step == state.begun_at.step:  # a new stage may begin here
            state.position = replace(state.begun_at)
        state.identity = state.identity.continued()
        state.rollbacks = rollbacks
        stage = current_stage(state.stages, state.position.epoch)
        assert stage is not None  # a step followed the checkpoint
        state.stage = stage

    def _initial_content(self) -> dict[str, Any]:
        """The snapshot before the first step, on the CPU."""
        resumed = self.saver.provenance.resumed_from is not None
        init_from = None if resumed else self.config.model.init_from
        source = read_vae(Path(init_from)) if init_from else None
        if source is not None:
            source.drop_other_decoder(self.config.model)
        state = begin_state(self.config, torch.device("cpu"), self.saver.state.fp16, source)
        return snapshot(state)
