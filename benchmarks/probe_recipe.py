#!/usr/bin/env python3
"""--probe_profile probe-imagenet, made small: drawn pictures of known classes, three VAEs."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.harness.labelled_shards import write_labelled  # noqa: E402
from vae.config.options import ModelConfig  # noqa: E402
from vae.data.shard_images import ShardImages  # noqa: E402
from vae.data.shards import read_dataset  # noqa: E402
from vae.interop.diffusers_folder import diffusers_config, save_diffusers_folder  # noqa: E402
from vae.model.autoencoder import AutoencoderKL  # noqa: E402
from vae.model.initialization import initialize  # noqa: E402

SHAPE = ModelConfig(channels=(16, 32, 64), layers_per_block=1, norm_groups=8, z_channels=8)
TRAINING = (
    "--channels 16 32 64 --layers_per_block 1 --norm_groups 8 --z_channels 8 --image_size 32 --batch_size 16 "
    "--max_steps 300 --perceptual_weight 0 --learning_rate 1e-3 --num_workers 0 --crop center"
)
FLAGS = (
    "--probe_profile probe-imagenet --sizes 32 --device cpu --probe_widths 32 64 --probe_depths 2 2 "
    "--probe_epochs 12 --probe_batch_size 64 --probe_learning_rate 4e-3 --probe_ema_decay 0.99"
)


def write_data(folder: Path, count: int) -> list[str]:
    """Write the images and the VAEs; returns the flags that name the images."""
    for side, images, first in (("train", count, 0), ("val", count // 4, 10**6)):
        write_labelled(folder / side, images, first)
    for start in ("default", "warm"):
        model = AutoencoderKL(SHAPE)
        torch.manual_seed(0)
        initialize(model, start, 0)
        config = diffusers_config(SHAPE, 32, 1.0, 0.0)
        save_diffusers_folder(folder / start, model.state_dict(), config, {})
    train, val = (str(folder / side / "dataset.json") for side in ("train", "val"))
    return ["--data_path", train, "--val_path", val]


def time_labels(dataset: str) -> float:
    """CPU microseconds to read the label of an image from its shard."""
    images = ShardImages(read_dataset(dataset), num_streams=1)
    began = time.process_time()
    for index in range(len(images)):
        images.metadata(index)
    return (time.process_time() - began) / len(images) * 1e6


def main() -> None:
    """Train a VAE, and run the command for it and for two that are not trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--images", type=int, default=1024, help="training images; the validation has a quarter"
    )
    parser.add_argument("--views", nargs="+", default=["1", "2", "4"], help="values of --probe_views")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder, args.images)
        print(f"labels: {time_labels(data[1]):.0f} us per image", flush=True)
        training = ["train_vae.py", *data[:2], "--output_dir", str(folder / "run"), *TRAINING.split()]
        subprocess.run([sys.executable, *training], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        vaes = [str(folder / name) for name in ("default", "warm", "run/vae")]
        for views in args.views:
            command = [sys.executable, "evaluate_vae.py", "--vae", *vaes, *data, *FLAGS.split()]
            command += ["--probe_views", views, "--output_dir", str(folder / views)]
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True)
            print(f"{views} views: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
