"""A record of the samples of each step of a run on a dataset of shards."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from tests.harness.steps import before_steps
from vae.shards.dataset_json import read_dataset
from vae.shards.shard_images import ShardImages
from vae.training.loop import TrainingLoop

VARIABLE = "VAE_TEST_SAMPLES"  # the file of record_samples, in the environment of a process


@contextmanager
def record_samples(path: Path | None = None) -> Iterator[None]:
    """Within this context, each step of this process and its forks adds a line to a file.

    Without `path`, to the file in the environment, if any.
    """
    file = path or os.environ.get(VARIABLE)
    if file is None:
        yield
        return

    def record(loop: TrainingLoop, batch: Any) -> None:
        step, dist = loop.state.position.step + 1, loop.stepper.dist
        line = {"step": step, "rank": dist.rank, "world_size": dist.world_size}
        line["indices"] = batch.indices.tolist()
        with open(file, "a") as log:
            log.write(json.dumps(line) + "\n")

    with before_steps(record):
        yield


def samples_of_steps(path: Path, dataset: Path | None) -> dict[int, list[Any]]:
    """The sorted keys of the samples of each step; of a step that was repeated, those of the last time.

    Without a dataset, their numbers.
    """
    key: Callable[[int], Any] = ShardImages([read_dataset(dataset)], 1).key if dataset else int
    steps: dict[int, dict[tuple[int, int], list[Any]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        ranks = steps.setdefault(line["step"], {})
        if any(world_size != line["world_size"] for world_size, _ in ranks):
            ranks.clear()
        ranks[line["world_size"], line["rank"]] = list(map(key, line["indices"]))
    for step, ranks in steps.items():
        assert len(ranks) == next(iter(ranks))[0], f"step {step} lacks processes"
    return {step: sorted(chain(*ranks.values())) for step, ranks in sorted(steps.items())}


def samples_in_order(dataset: Path, steps: int, batch: int) -> dict[int, list[str]]:
    """The sorted keys of each step of an undisturbed run with seed 0 and this number of images in a step."""
    images = ShardImages([read_dataset(dataset)], 64)
    order, found = images.order(0), {}
    per_epoch = len(order) // batch
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        found[step + 1] = sorted(map(images.key, order.samples(epoch, within * batch, batch)))
    return found
