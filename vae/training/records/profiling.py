"""A PyTorch profiler trace and table of a few training steps (--profile_steps)."""

from pathlib import Path

import torch

from vae.system import console
from vae.system.files import atomic_path, replace_text

WARMUP_STEPS = 3  # leaves out compilation, algorithm search and the first allocations
TABLE_ROWS = 30


class StepProfiler:
    """A context that profiles `steps` steps after WARMUP_STEPS others and writes the result to `folder`.

    Call `step()` after every training step. With `steps` 0 it does nothing.
    """

    def __init__(self, steps: int, folder: Path):
        self._steps, self._folder = steps, folder
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> "StepProfiler":
        if self._steps:
            self._profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=WARMUP_STEPS, active=self._steps, repeat=1),
                on_trace_ready=self._write,
                profile_memory=True,
                record_shapes=True,
            )
            self._profiler.start()
        return self

    def step(self) -> None:
        """Report one finished training step to the profiler."""
        if self._profiler is not None:
            self._profiler.step()

    def __exit__(self, *_exception: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: torch.profiler.profile) -> None:
        with atomic_path(self._folder / "trace.json") as temporary:
            profiler.export_chrome_trace(str(temporary))
        key = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
        replace_text(self._folder / "table.txt", table + "\n")
        console.info(f"profile written to {self._folder}")
