"""The parts by number."""

from benchmarks.first_hour import (
    comparison,
    context,
    correctness,
    host_bound,
    memory,
    operations,
    synchronization,
    training,
)

PARTS = dict(
    enumerate(
        (context, correctness, synchronization, memory, host_bound, operations, comparison, training), start=1
    )
)
