"""Steps that are not part of the run, to measure something: all that they change is restored."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from vae.data.dataset import Batch
from vae.data.loading import TrainLoader
from vae.model.recompute import set_recompute
from vae.training.checkpoints.writer import HostCopy
from vae.training.context import RunContext, StageContext
from vae.training.loop import train_loader
from vae.training.recovery.signals import MEASURING
from vae.training.state import TrainingState, checkpoint_content, restore


@contextmanager
def trial_steps(
    run: RunContext, ctx: StageContext, state: TrainingState
) -> Iterator[Iterator[tuple[Batch, int]]]:
    """Yield the batches of the stage without end, each with its number of images on all processes.

    The state is restored at the end of the block. A signal to stop raises KeyboardInterrupt in the iterator.
    """
    state.is_changing = True
    before = HostCopy().of(checkpoint_content(state, {}, ""))  # the device may have no room for a second one
    set_recompute(state.autoencoder, ctx.settings.recompute)
    with ctx.signals.answering(MEASURING), train_loader(run, ctx) as loader:
        yield _batches(run, ctx, loader)
    restore(state, before)
    state.is_changing = False


def _batches(run: RunContext, ctx: StageContext, loader: TrainLoader) -> Iterator[tuple[Batch, int]]:
    for epoch in count(ctx.stage.first_epoch):
        for batch in loader.batches(epoch):
            images, stop = run.dist.all_reduce_scalars(len(batch.images), ctx.signals.stop)
            if stop:
                raise KeyboardInterrupt  # nothing has been written
            yield batch, int(images)
