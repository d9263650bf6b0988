"""The trainer's own step on random pixels: everything that train_vae.py prepares, without its loop."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vae.data.dataset import Batch
from vae.model.recompute import set_recompute
from vae.training.distributed import Distributed
from vae.training.memory.cuda_graph import WARMUP_STEPS
from vae.training.memory.stage_memory import StagePlan
from vae.training.setup import prepare_run
from vae.training.stepper import Stepper

WARMUP = WARMUP_STEPS + 2  # the step after WARMUP_STEPS becomes a CUDA graph
SMALL = {"channels": [32, 64], "layers_per_block": 1, "norm_groups": 8}


@dataclass
class TrainerStep:
    """A prepared run; each call makes one optimizer step of the same batch."""

    stepper: Stepper
    plan: StagePlan
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
            run = prepare_run(given, Distributed.start("cuda"))
        stage = run.state.stage
        plan = run.plan(stage)
        retry = run.retry(plan)
        set_recompute(run.state.autoencoder, retry.settings.recompute)
        count, side = stage.batch_size, stage.image_size
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8).pin_memory()
        indices = torch.arange(count)
        batch = Batch(images, torch.zeros_like(indices), indices, [])
        return cls(run.stepper(run.schedule(stage), retry), plan, batch)

    def __call__(self) -> None:
        self.stepper.step(self.batch, len(self.batch.images))
        self.stepper.state.advance(len(self.batch.images))
