"""The goals of the project for each case, and whether the results meet them.

Speed is their time divided by ours; bytes are our bytes divided by theirs. On a GPU every case has a
goal for speed or time, on a CPU only two have one. Bytes are counted, so they are the same on every machine.
"""

from typing import Any

GPU_SPEED = {1: 2.0, 2: 2.5, 3: 3.0, 4: 2.5, 6: 4.0, 7: 5.0, 8: 1.7, 9: 4.0, 10: 1.5}
CPU_SPEED = {2: 1.3, 8: 1.25}
MOST_TIME_RATIO = {5: 1.05}  # a batch in passes of one image, compared with the same number of single steps
MOST_ALL_IN_GIB = {5: 16.0}

_FAST = "ours activations / diffusers"
MOST_BYTES = {  # keys are names of ratios in the results of the case
    1: {f"{_FAST} bf16": 0.40},
    2: {f"{_FAST} bf16": 0.40, f"{_FAST} autocast": 0.25},
    3: {f"{_FAST} bf16": 0.40},
    4: {"ours blocks_encoder / diffusers bf16 checkpointing": 0.52},
    6: {f"{_FAST} bf16": 0.45},
    7: {"ours / PyTorch under CUDA's bf16 autocast": 0.34},
    8: {"ours / PyTorch bf16 channels_last": 0.26},
    9: {"16384": 1.1, "65536": 1.1},
    10: {"ours bf16 / lpips bf16": 0.65},
}


def judge(case: int, result: dict[str, Any], gpu: bool) -> list[dict[str, Any]]:
    """The goals of the case for which `result` has a figure: what, goal, found, met."""
    goals = []
    speed_goal = (GPU_SPEED if gpu else CPU_SPEED).get(case)
    speeds = result.get("speed", {})
    if not isinstance(speeds, dict):
        speeds = {"": speeds}
    if speed_goal is not None:
        for name, speed in speeds.items():
            goals.append(_goal(f"speed {name}".strip(), speed_goal, speed, speed >= speed_goal))
    bytes_found = result.get("memory") or result.get("saved") or {}
    for name, most in MOST_BYTES.get(case, {}).items():
        if name in bytes_found:
            goals.append(_goal(f"bytes {name}", most, bytes_found[name], bytes_found[name] <= most))
    for name, table in (("time_ratio", MOST_TIME_RATIO), ("all_in_gib", MOST_ALL_IN_GIB)):
        if case in table and name in result:
            goals.append(_goal(name, table[case], result[name], result[name] <= table[case]))
    return goals


def _goal(what: str, goal: float, found: float, met: bool) -> dict[str, Any]:
    return {"what": what, "goal": goal, "found": found, "met": met}
