"""A torch profiler trace of a few steps: where the time goes."""

from pathlib import Path

import torch

from vae.training.distributed import Processes
from vae.training.logbook import say

WARMUP_STEPS = 3  # compiling, algorithm search and the first allocations are not what is asked about
TABLE_ROWS = 30


class StepProfiler:
    """Profiles `steps` steps after WARMUP_STEPS others, into `folder`; call step() after each."""

    def __init__(self, steps: int, folder: Path, processes: Processes):
        self._folder = folder
        self._profiler = None
        if steps and processes.is_main:
            self._profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=WARMUP_STEPS, active=steps, repeat=1),
                on_trace_ready=self._write,
                profile_memory=True,
                record_shapes=True,
            )
            self._profiler.start()

    def step(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / "trace.json"))
        key = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=TABLE_ROWS)
        (self._folder / "table.txt").write_text(table + "\n", encoding="utf-8")
        say(f"profile written to {self._folder}")
