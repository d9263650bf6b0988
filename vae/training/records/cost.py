"""What a run costs: --hourly_cost times the hours that it has trained."""

import time
from pathlib import Path

from vae.system.files import read_json_lines


class Cost:
    """The cost of the steps of a stage, and of the records before it."""

    def __init__(self, hourly_cost: float, records: Path) -> None:
        """`hourly_cost`: of all machines, 0: nothing is recorded. `records`: the metrics.jsonl of the run."""
        self._hourly_cost = hourly_cost
        self._started = time.monotonic()
        self._before = recorded_cost(records) if hourly_cost else 0.0

    def record(self, images_per_second: float) -> dict[str, float]:
        """The cost so far, and of 1,000 images at this speed; nothing without --hourly_cost."""
        if not self._hourly_cost:
            return {}
        hours = (time.monotonic() - self._started) / 3600
        return {
            "cost": self._before + self._hourly_cost * hours,
            "cost_per_1000_images": 1000 * self._hourly_cost / 3600 / max(1e-9, images_per_second),
        }


def recorded_cost(records: Path) -> float:
    """The cost in the last record of a run that has one, also one that --hourly_cost no longer asks for."""
    if not records.is_file():
        return 0.0
    costs = [record.get("cost") for record in read_json_lines(records)]
    return next((float(cost) for cost in reversed(costs) if isinstance(cost, int | float)), 0.0)


def cost_text(cost: float, images: int) -> str:
    """The end of a line about a whole run; empty without a cost."""
    return f", cost {cost:.2f}, {1000 * cost / max(1, images):.3g} per 1,000 images" if cost else ""
