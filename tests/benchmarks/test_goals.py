"""The reasons beside the goals of the comparison have the right figures."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.comparison.cases import LARGE
from benchmarks.comparison.goals import (
    CONVOLUTIONS_TFLOP,
    CPU_REACHED_IF,
    CPU_SPEED,
    GPU_SPEED,
    MOST_TIME_RATIO,
    REACHED_IF,
    TIME_REACHED_IF,
    judge,
)
from benchmarks.comparison.ours import Ours
from benchmarks.comparison.theirs import BF16, Theirs
from benchmarks.comparison.work import Work

META = torch.device("meta")
NO_CONVOLUTION = ("mm", "attention")  # parts of the names of other operations with FLOPs


class Flops(TorchDispatchMode):
    """TFLOP by the name of the operation."""

    def __init__(self):
        super().__init__()
        self.tflop = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            name = func.overloadpacket.__name__
            self.tflop[name] += formula(*args, **(kwargs or {}), out_val=result) / 1e12
        return result

    @property
    def convolutions(self) -> float:
        return sum(n for name, n in self.tflop.items() if not any(other in name for other in NO_CONVOLUTION))


def test_every_goal_has_a_reason():
    assert set(REACHED_IF) == set(GPU_SPEED)
    assert set(CPU_REACHED_IF) == set(CPU_SPEED)
    assert set(TIME_REACHED_IF) == set(MOST_TIME_RATIO)
    (goal,) = judge(2, {"speed": 1.5}, gpu=True)
    assert "at most 86% of their step" in goal["reached_if"]  # 44.5 / (1.3 * 39.7)
    (goal,) = judge(8, {"speed": 1.2}, gpu=False)
    assert "56 %" in goal["reached_if"]


@pytest.mark.slow
def test_arithmetic_of_convolutions_is_the_counted_one():
    work, found = Work(LARGE[2]), []
    for side in (Ours(work, META, recompute="activations"), Theirs(work, META, BF16)):
        with Flops() as counter:
            side.gradients()
        found.append(round(counter.convolutions, 1))
    assert tuple(found) == CONVOLUTIONS_TFLOP[2]
