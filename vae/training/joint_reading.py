"""What the processes of a run read of its images together: each a share, and all get the whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from vae.config.options import Config
from vae.data.dataset import FolderImages, Images
from vae.data.image_sizes import (
    ASPECTS_NAME,
    image_sizes,
    load_aspects,
    manifest_sizes,
    sampled,
    save_aspects,
)
from vae.data.manifest import is_manifest
from vae.sampling.buckets import aspects
from vae.system.errors import DataError, UserError
from vae.training.datasets import TrainingSet
from vae.training.distributed import Distributed
from vae.training.output.appending import try_to_write


def with_aspects(training_set: TrainingSet, config: Config, dist: Distributed) -> TrainingSet:
    """The training set with the aspects that --buckets needs; each process reads a share.

    A resumed run reads those that the run has stored.
    """
    images, data = training_set.images, config.data
    if not data.buckets:
        return training_set
    stored = Path(config.run.output_dir) / ASPECTS_NAME
    found = load_aspects(stored, images.fingerprint()) if dist.is_main else None
    everything = dist.all_gather_set({found.tobytes()} if found is not None else set())
    if not everything:
        everything = {_measured_aspects(images, data.data_path, dist)}
    return replace(training_set, aspects=np.frombuffer(everything.pop(), dtype=np.float32))


def store_aspects(folder: Path, training_set: TrainingSet) -> None:
    """Store the aspects in the folder of a run, so that a resumed one has the same order without reading."""
    found, fingerprint = training_set.aspects, training_set.fingerprint()
    if found is not None:
        path = folder / ASPECTS_NAME
        try_to_write(path, lambda: save_aspects(path, fingerprint, found))


def _measured_aspects(images: Images, data_path: str, dist: Distributed) -> bytes:
    indices = np.array_split(sampled(images), dist.world_size)[dist.rank]

    def measure() -> bytes:
        known = {}
        if isinstance(images, FolderImages) and is_manifest(data_path):
            known = manifest_sizes(data_path, images.names)
        return aspects(image_sizes(images, indices, known)).tobytes()

    return b"".join(results_by_rank(measure, dist))


def results_by_rank(read: Callable[[], bytes], dist: Distributed) -> list[bytes]:
    """What each process reads; DataError in all of them if one cannot."""
    own, failure = b"", None
    try:
        own = read()
    except UserError as error:
        failure = error
    if dist.all_reduce_scalars(failure is not None)[0]:
        raise failure or DataError("another process cannot read what it needs of the images: it says why")
    parts = dict(dist.all_gather_set({(dist.rank, own)}))
    return [parts[rank] for rank in range(dist.world_size)]
