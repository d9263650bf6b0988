#!/usr/bin/env python3
"""A long run of a tiny model with every kind of event: memory, files, threads and CPU time stay flat."""

import argparse
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.harness.faults import Fault, child_processes, start_forked  # noqa: E402
from tests.harness.image_kinds import write_noise  # noqa: E402
from tests.harness.training_runs import records  # noqa: E402
from vae.config.errors import EXIT_SAVED_RESUMABLE  # noqa: E402

MODEL = {"channels": [8], "layers_per_block": 1, "norm_groups": 4, "z_channels": 4, "perceptual_weight": 0.0}
# A checkpoint every 100 steps and every 8 epochs, a validation every 8 epochs, and 5 stages.
RECIPE = {
    "learning_rate": 1e-4,
    "lr_schedule": "constant",
    "val_split": 0.25,
    "num_workers": "1",
    "device": "cpu",
    "checkpoint_steps": 100,
    "checkpoint_freq": 8,
    "val_freq": 8,
    "keep_checkpoints": 3,
    "save_samples_freq": 500,
    "rollbacks": 1000,
    "max_bad_fraction": 0.2,
}
STAGES, SIZE, BATCH = 5, 16, 1
STEPS_PER_EPOCH = 24
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def write_images(folder: Path) -> None:
    """32 images, two of them damaged."""
    for path in write_noise(folder, 32, 24, 24)[3:5]:
        path.write_bytes(path.read_bytes()[:-700])


def events(steps: int, period: int) -> list[Fault]:
    """What happens in each period of steps; memory runs out only once, at the start: it costs speed.

    A decoding process is killed once per stage: the third time, training would stop.
    """
    found = [Fault("fail", "train_pass", nth=50)]
    found += [
        Fault("kill_workers", "step", nth=round((stage + 0.45) * steps / STAGES)) for stage in range(STAGES)
    ]
    for begin in range(0, steps, period):
        at = {share: begin + round(share * period) for share in (0.1, 0.2, 0.3, 0.33, 0.5, 0.6, 0.7)}
        found += [
            Fault("nan", "step", nth=at[0.1], times=2),
            Fault("signal", "step", nth=at[0.2], value=signal.SIGUSR1),  # save and go on
            Fault("full_disk", "step", nth=at[0.3]),
            Fault("free_disk", "step", nth=at[0.33]),
            Fault("clock", "step", nth=at[0.5], value=3600.0),
            Fault("clock", "step", nth=at[0.6], value=-3600.0),
            Fault("scale_weights", "step", nth=at[0.7], value=float("inf")),  # a rollback
            Fault("fail", "save.open", nth=begin // 100 + 2),  # one save per 100 steps at least
            Fault("slow", "save.flush", nth=begin // 100 + 3, value=0.2),
        ]
    return found


def status_of(pid: int) -> dict[str, str]:
    """The status of a process, by name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}


def measure(pid: int, folder: Path) -> dict[str, float]:
    """Memory, threads, files and CPU time of a process, and the sizes of what it writes."""
    fields, workers = status_of(pid), child_processes(pid)
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    with (folder / "metrics.jsonl").open("rb") as file:
        file.seek(-min(4096, file.seek(0, 2)), 2)
        lines = [line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "step": json.loads(lines[-1])["step"],
        "cpu_seconds": (int(user) + int(system)) / TICKS,
        "rss_mib": int(fields["VmRSS"]) / 1024,
        "threads": int(fields["Threads"]),
        "workers": len(workers),
        "workers_mib": sum(int(status_of(worker)["VmRSS"]) for worker in workers) / 1024,
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "temporary": sum(path.suffix == ".tmp" for path in files),
        "checkpoints": sum(path.suffix == ".pt" for path in files),
        "metrics_bytes": (folder / "metrics.jsonl").stat().st_size,
        "events_bytes": sum(path.stat().st_size for path in files if "tfevents" in path.name),
    }


def print_table(samples: list[dict[str, float]]) -> None:
    """Ten rows: means over a tenth of the samples; CPU time and bytes per step that was made in it."""
    print(
        "| step | CPU ms per step | MiB | workers | their MiB | threads | open files | temporary "
        "| checkpoints | bytes per step |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    bounds = [round(index * (len(samples) - 1) / 10) for index in range(11)]
    for first, last in itertools.pairwise(bounds):
        part = samples[first : last + 1]
        made = sum(max(0.0, b["step"] - a["step"]) for a, b in itertools.pairwise(part))
        cpu = 1000 * (part[-1]["cpu_seconds"] - part[0]["cpu_seconds"]) / max(made, 1)
        size = [one["metrics_bytes"] + one["events_bytes"] for one in (part[0], part[-1])]
        names = ("rss_mib", "workers", "workers_mib", "threads", "open_files", "temporary", "checkpoints")
        highest = " | ".join(f"{max(one[name] for one in part):.0f}" for name in names)
        print(f"| {part[-1]['step']} | {cpu:.2f} | {highest} | {(size[1] - size[0]) / max(made, 1):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--period", type=int, default=1000, help="steps between two events of the same kind")
    parser.add_argument("--minutes", type=float, default=120.0, help="the run is stopped after this time")
    parser.add_argument("--out", type=Path, default=Path("long_run.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root, folder = Path(name), Path(name) / "run"
        write_images(root / "images")
        options: dict[str, Any] = {**MODEL, **RECIPE, "data_path": str(root / "images")}
        epochs = -(-given.steps // (STEPS_PER_EPOCH * STAGES))
        options |= {"output_dir": str(folder), "progressive": ",".join([f"{SIZE}:{epochs}:{BATCH}"] * STAGES)}
        (process,) = start_forked(options, *events(given.steps, given.period), log=root / "log.txt")
        samples: list[dict[str, float]] = []
        end = time.monotonic() + 60 * given.minutes
        while process.is_alive():
            time.sleep(1.0)
            if time.monotonic() > end:
                process.terminate()
                end = math.inf
            try:
                samples.append(measure(process.pid, folder))
            except (OSError, ValueError, IndexError, KeyError):  # before the first record, or at the end
                continue
        assert process.exitcode in (0, EXIT_SAVED_RESUMABLE), (root / "log.txt").read_text()[-3000:]
        deaths = (root / "log.txt").read_text().count("a decoding process died")
        print(f"killed decoding processes: {deaths}")
        kinds = [record["kind"] for record in records(folder)]
        print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
        given.out.write_text(json.dumps(samples))
    print_table(samples)


if __name__ == "__main__":
    main()
