"""Values for this card, from the results of parts 1, 4 and 6."""

import math
from typing import Any

from benchmarks.first_hour.record import Record
from vae.ops.attention import QUERIES_PER_CHANNEL

LEAST_GAIN = 0.02  # a smaller difference may be noise: the value in the code stays
MIN_TOKENS = 4096  # attention of smaller images takes too little time to decide
RESERVE_STEP_MIB = 64


def choose(records: dict[int, Record]) -> dict[str, Any]:
    """`constants` that were faster than those in the code, and the reserve that the plan needs."""
    results = {number: record.results() for number, record in records.items()}
    operations = results.get(6, {})
    constants = {**norm_constants(operations), **attention_queries(operations)}
    reserve = reserve_mib(results.get(1, {}), results.get(4, {}))
    return {"constants": constants} | ({"reserve_mib": reserve} if reserve is not None else {})


def norm_constants(operations: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The launch shape of norms with the shortest time over all shapes."""
    found = operations.get("norm, launch shapes")
    if not found:
        return {}
    times = {tuple(row["constants"].items()): row["ms"] for row in found["tried"] if "ms" in row}
    start, best = (times.get(tuple(found[key].items())) for key in ("start", "best"))
    if start is None or best is None or best > start * (1 - LEAST_GAIN):
        return {}
    return {name: value for name, value in found["best"].items() if value != found["start"][name]}


def attention_queries(operations: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The queries with the shortest time of forward and backward, summed over the numbers of tokens."""
    cases = [
        found
        for name, found in operations.items()
        if name.startswith("attention, ") and int(name.split()[1]) >= MIN_TOKENS
    ]
    if not cases:
        return {}
    sums = dict.fromkeys(cases[0], 0.0)
    for found in cases:
        shortest = min(row["both_ms"] for row in found.values())
        for kind in sums:
            sums[kind] += found[kind]["both_ms"] / shortest
    best = min(sums, key=lambda kind: sums[kind])
    if sums[best] > sums.get(f"{QUERIES_PER_CHANNEL} queries per channel", math.inf) * (1 - LEAST_GAIN):
        return {}
    return {"QUERIES_PER_CHANNEL": int(best.split()[0])}


def reserve_mib(context: dict[str, dict[str, Any]], memory: dict[str, dict[str, Any]]) -> int | None:
    """What a step needs besides its live tensors: gaps and workspaces, and libraries that are loaded late."""
    gaps = [
        row["reserved_gib"] - row["predicted_gib"]
        for name, row in memory.items()
        if name.endswith("expandable") and "reserved_gib" in row
    ]
    growths = [row["growth_after_planning_mib"] for row in context.values()]
    if not gaps or not growths:
        return None
    needed = max(gaps) * 1024 + max(growths)
    return math.ceil(max(needed, 0) / RESERVE_STEP_MIB) * RESERVE_STEP_MIB
