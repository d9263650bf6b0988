"""The memory of the process does not grow with the number of steps."""

import ctypes
import gc
import os
from pathlib import Path

import pytest

from tests.harness.steps import before_steps
from vae.training.run import train

# The smallest network, and no files between the first and the last step
FEW_FILES = {"val_split": 0.0, "checkpoint_freq": 10_000, "log_freq": 100}
SMALLEST = {
    "channels": [4],
    "norm_groups": 1,
    "z_channels": 1,
    "image_size": 16,
    "batch_size": 1,
    "init": "default",
}
# Enough to see a leak; benchmarks/LOG.md, "Memory of the process", has 5,000 steps.
FIRST, LAST = 100, 300
STATM = Path("/proc/self/statm")


def resident_mib() -> float:
    """The main memory of this process, after everything unused was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="reads the size of the process from Linux")
def test_memory_of_the_process_is_flat(tiny, record_property):
    sizes = {}

    def measure(loop, _batch):
        if loop.state.position.step in (FIRST, LAST):
            sizes[loop.state.position.step] = resident_mib()

    with before_steps(measure):
        assert train({**tiny, **FEW_FILES, **SMALLEST, "num_epochs": 400, "max_steps": LAST + 1}) == 0
    record_property("MiB", sizes)
    assert sizes[LAST] - sizes[FIRST] < 2
