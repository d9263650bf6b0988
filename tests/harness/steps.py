"""Watch the steps of a training run in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from vae.data.dataset import Batch
from vae.training.loop import NoBatch, StageEnd, TrainingLoop


@contextmanager
def before_steps(hook: Callable[[TrainingLoop, Batch | NoBatch], object]) -> Iterator[None]:
    """Within this context, `hook` is called with the loop and the batch before each step."""
    take_step = TrainingLoop.take_step

    def watched_step(self: TrainingLoop, batch: Batch | NoBatch) -> StageEnd | None:
        hook(self, batch)
        return take_step(self, batch)

    with patch.object(TrainingLoop, "take_step", watched_step):
        yield
