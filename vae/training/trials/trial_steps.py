"""Steps that are not part of the run, to measure something: all that they change is restored."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.model.recompute import set_recompute
from vae.training.checkpoints.writer import HostCopy
from vae.training.memory.oom_retry import OomRetry
from vae.training.parts import PreparedRun
from vae.training.recovery.signals import MEASURING
from vae.training.recovery.watchdog import Liveness
from vae.training.schedule import StageSchedule
from vae.training.state import restore, snapshot


class Trial:
    """Steps of the stage that trains, with the weights of the run."""

    def __init__(self, run: PreparedRun, schedule: StageSchedule, retry: OomRetry, alive: Liveness) -> None:
        self.stepper = run.stepper(schedule, retry)
        self.terms = run.networks.terms
        self.alive = alive
        self.dist = run.dist
        self._run = run
        self._schedule = schedule

    @contextmanager
    def batches(self) -> Iterator[Iterator[tuple[Batch, int]]]:
        """Yield the batches of the stage without end, each with its number of images on all processes.

        The state is restored at the end of the block. A signal to stop raises KeyboardInterrupt in the
        iterator.
        """
        state, signals = self.stepper.state, self.alive.signals
        state.is_changing = True
        before = HostCopy().of(snapshot(state))  # the device may have no room for another
        set_recompute(state.autoencoder, self.stepper.retry.settings.recompute)
        with signals.answering(MEASURING), self._run.loader(self._schedule, self.alive) as loader:
            yield self._batches(loader)
        self.stepper.retry.settings.graph = None  # its memory is for the run
        restore(state, before)
        state.is_changing = False

    def _batches(self, loader: TrainLoader) -> Iterator[tuple[Batch, int]]:
        for epoch in count(self.stepper.state.stage.first_epoch):
            for batch in loader.batches(epoch):
                size = len(batch.images)
                stop = self.alive.signals.stop
                images, stopping = self.dist.all_reduce_scalars(size, stop)
                if stopping:
                    raise KeyboardInterrupt  # nothing has been written
                yield batch, int(images)
