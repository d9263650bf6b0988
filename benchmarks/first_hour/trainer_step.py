"""The trainer's own step on random pixels: everything that train_vae.py prepares, without its loop."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vae.data.dataset import Batch
from vae.model.recompute import set_recompute
from vae.training.checkpoints.writer import CheckpointWriter
from vae.training.context import RunContext, StageContext
from vae.training.distributed import Distributed
from vae.training.loop import update_weights
from vae.training.memory.cuda_graph import WARMUP_STEPS
from vae.training.memory.stage_memory import plan_stage
from vae.training.output.logbook import Logbook
from vae.training.recovery.signals import StopSignals
from vae.training.recovery.watchdog import Watchdog
from vae.training.setup import prepare_run
from vae.training.state import TrainingState

WARMUP = WARMUP_STEPS + 2  # the step after WARMUP_STEPS becomes a CUDA graph
SMALL = {"channels": [32, 64], "layers_per_block": 1, "norm_groups": 8}


@dataclass
class TrainerStep:
    """A prepared run; each call makes one optimizer step of the same batch."""

    run: RunContext
    ctx: StageContext
    state: TrainingState
    batch: Batch

    @classmethod
    def prepare(cls, quick: bool, **options: Any) -> "TrainerStep":
        """Prepare as train_vae.py does, with LPIPS of random weights; `options` are values of its flags."""
        given = {
            **(SMALL if quick else {}),
            **{"init": "default", "perceptual_net": "random", "val_split": 0.0, "upscale": True},
            **{"batch_size": 1, "num_workers": "0", "device": "cuda", "mixed_precision": True},
            **options,
        }
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "images")
            source.mkdir()
            for index in range(given["batch_size"]):
                Image.new("RGB", (64, 64), (40 * index % 256, 90, 160)).save(source / f"{index}.png")
            given |= {"data_path": str(source), "output_dir": str(Path(folder, "run"))}
            run, state = prepare_run(given, Distributed.start("cuda"))
        stage = state.stages[0]
        plan = plan_stage(run.config, stage, run.networks.dtype, run.dist)
        settings = plan.step_settings(run.config.speed)
        set_recompute(state.autoencoder, settings.recompute)
        ctx = StageContext(
            stage,
            run.steps_of(stage),
            run.peak_of(stage),
            plan,
            settings,
            logbook=Logbook(run.output_dir, 0, active=False),
            writer=CheckpointWriter(background=False),
            signals=StopSignals(),
            watchdog=Watchdog(0, run.output_dir),
        )
        count, side = stage.batch_size, stage.image_size
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8).pin_memory()
        indices = torch.arange(count)
        return cls(run, ctx, state, Batch(images, torch.zeros_like(indices), indices, []))

    def __call__(self) -> None:
        update_weights(self.run, self.ctx, self.state, self.batch, len(self.batch.images))
        self.state.position.step += 1

    def seconds(self, most_seconds: float = 10.0) -> float:
        """Median seconds of a step, from a step's start to the end of its work on the card."""
        times: list[float] = []
        while len(times) < 3 or (sum(times) < most_seconds and len(times) < 30):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]
