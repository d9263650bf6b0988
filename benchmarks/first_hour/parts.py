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

PARTS = {
    1: context,
    2: correctness,
    3: synchronization,
    4: memory,
    5: host_bound,
    6: operations,
    7: comparison,
    8: training,
}
