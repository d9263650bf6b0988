"""PSNR before and after short runs of a small network, by peak learning rate, KL weight and optimizer.

    python benchmarks/short_runs.py --photos FOLDER --size 64 --steps 50 100 --peaks 1e-4 2e-4

It trains in one process on random crops, L1 and KL, and prints one line of JSON per run: PSNR in dB of the
EMA weights on crops of other photographs, the difference from the start, the quarters of the crops with the
smallest and the largest gradients, their outer 8 px, and the noise of the posterior; for each folder of
`--test`, the same as trained and computed in fp32. Half precision is a card's on any CPU: products of rounded
numbers, added in fp32. `--save` and `--start` make the last weights the start of another command.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, OptimConfig
from vae.evaluation.latents import NoiseSums
from vae.images.pixels import psnr, to_float
from vae.losses.adversarial import update_running
from vae.losses.terms import build_terms
from vae.losses.variance import needs_statistics
from vae.model.activation_scale import scale_activations
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize
from vae.ops import fused_conv
from vae.optimizers import WARM_ENDS_SHARE, build_optimizers, set_learning_rate
from vae.step import Networks, StepInputs, compute_gradients
from vae.training.schedule import TRAINED, WARM, WARMUP_SHARE, ema_decay, learning_rate_factor
from vae.update import UpdateState, apply_update

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BORDER = 8  # px
FORMATS = (".png", ".jpg", ".jpeg", ".webp")
LONGEST_SIDE = 1024  # px of a photograph in memory
VALIDATION_SHARE, VALIDATION_CROPS = 6, 24  # every sixth photograph; crops at 64 px, fewer if larger
EMA_DECAY = 0.999  # the default of the trainer


class CardArithmetic(TorchDispatchMode):
    """Products of half precision are added in fp32 and rounded, as on tensor cores."""

    PRODUCTS = ("convolution", "convolution_backward", "mm", "bmm", "addmm", "baddbmm")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation of PyTorch."""
        half = next((a.dtype for a in args if isinstance(a, torch.Tensor) and a.element_size() == 2), None)
        if half is None or func.overloadpacket.__name__ not in self.PRODUCTS or kwargs:
            return func(*args, **(kwargs or {}))
        result = func(*(a.float() if isinstance(a, torch.Tensor) else a for a in args))
        if isinstance(result, torch.Tensor):
            return result.to(half)
        return tuple(None if part is None else part.to(half) for part in result)


def read_photos(folder: Path, size: int) -> list[torch.Tensor]:
    """uint8 (3, H, W) of all photographs that contain a crop of `size`, in an order that never changes."""
    photos = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in FORMATS):
        image = Image.open(path).convert("RGB")
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
        if min(image.size) >= size:
            photos.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    random.Random(1).shuffle(photos)
    return photos


def crop_of(photo: torch.Tensor, size: int, draw: random.Random) -> torch.Tensor:
    """A random crop."""
    top, left = (draw.randrange(side - size + 1) for side in photo.shape[1:])
    return photo[:, top : top + size, left : left + size]


@torch.no_grad()
def measure(model: AutoencoderKL, crops: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """PSNR of all crops, of the smooth and the busy quarter, and facts about the noise."""
    noise = NoiseSums.begin(model.config.z_channels)
    values, borders = [], []
    for part in crops.split(4):
        images = to_float(part)
        recon, mean, logvar = model(images.to(dtype, memory_format=torch.channels_last))
        noise.add(mean, logvar)
        recon = recon.float().clamp(-1, 1)
        values.append(psnr(recon, images))
        borders.append(border_psnr(recon, images))
    found = torch.cat(values)
    pixels = crops.float()
    order = (pixels[..., 1:] - pixels[..., :-1]).abs().mean((1, 2, 3)).argsort()
    quarter = max(1, len(order) // 4)
    means = {"psnr": found, "smooth": found[order[:quarter]], "busy": found[order[-quarter:]]}
    means["border"] = torch.cat(borders)
    return {name: value.mean().item() for name, value in means.items()} | noise.facts()


def border_psnr(recon: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """PSNR (B,) of the outer pixels of recon and images (B, 3, H, W) in -1 to 1."""
    squares = (recon - images).square()
    inside = squares[..., BORDER:-BORDER, BORDER:-BORDER]
    error = (squares.sum((1, 2, 3)) - inside.sum((1, 2, 3))) / (squares[0].numel() - inside[0].numel())
    return 10 * torch.log10(4 / error.clamp(min=1e-10))


def test_crops(folder: Path, size: int) -> torch.Tensor:
    """The crops of a folder of --test: uint8 (N, 3, size, size)."""
    photos, draw = read_photos(folder, size), random.Random(7)
    each = max(1, VALIDATION_CROPS * 64 // size // len(photos))
    return torch.stack([crop_of(photo, size, draw) for photo in photos for _ in range(each)])


def measure_all(
    model: AutoencoderKL, crops: torch.Tensor, tests: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict:
    """The measures of `crops`, and those of each test as trained and in fp32."""
    measured = dict(measure(model, crops, dtype))
    for name, images in tests.items():
        measured[name] = measure(model, images, dtype)
        measured[name + ", fp32"] = measure(model, images, torch.float32)
    return measured


def train(
    start: AutoencoderKL,
    photos: list[torch.Tensor],
    given: argparse.Namespace,
    steps: int,
    peak: float,
    loss: LossConfig,
    dtype: torch.dtype,
) -> AutoencoderKL:
    """The EMA weights after `steps` with a cosine from `peak`."""
    model, ema = copy.deepcopy(start), copy.deepcopy(start).requires_grad_(False)
    networks = Networks(model, None, build_terms(loss, dtype, "cpu"), dtype, channels_last=True)
    optim = OptimConfig(optimizer=given.optimizer, learning_rate=peak)
    optimizer = build_optimizers(model, None, optim, loss).autoencoder
    fp16 = dtype == torch.float16
    update, draw = UpdateState.begin(torch.device("cpu"), fp16), random.Random(given.seed)
    generator, latent = torch.Generator().manual_seed(given.seed), given.size // model.downsampling
    shape = (given.batch, model.config.z_channels, latent, latent)
    running = torch.zeros(3, model.config.z_channels)
    for step in range(steps):
        crops = torch.stack([crop_of(draw.choice(photos), given.size, draw) for _ in range(given.batch)])
        noise = torch.randn(shape, generator=generator)
        inputs = StepInputs(crops, noise, 1 / given.batch, update.loss_scale, None)
        if needs_statistics(loss):
            inputs.running_moments = running
        factor = learning_rate_factor("cosine", step, steps, int(WARMUP_SHARE * steps))
        set_learning_rate(optimizer, peak * factor, 1.0 if given.start else WARM_ENDS_SHARE)
        result = compute_gradients(networks, inputs, [given.batch])
        if needs_statistics(loss):
            running = update_running(running, result.latent_moments / given.batch)
        apply_update([optimizer], update, optim, fp16, empty=False)
        decay = ema_decay(EMA_DECAY, step, TRAINED if given.start else WARM, steps - step)
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
    return ema


def main() -> None:
    """Read the flags, train every combination and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--size", type=int, default=64, help="px of the crops")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs="+", default=[50])
    parser.add_argument("--peaks", type=float, nargs="+", default=[1e-4, 2e-4, 4e-4])
    parser.add_argument("--kl_weights", type=float, nargs="+", default=[LossConfig().kl_weight])
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64, 64, 64])
    parser.add_argument("--norm_groups", type=int, default=8)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--activation_scale", type=float, default=1.0)
    parser.add_argument("--test", type=Path, nargs="+", default=[], help="folders of other photographs")
    parser.add_argument("--start", type=Path, help="weights of --save instead of the warm start")
    parser.add_argument("--save", type=Path, help="file for the weights of the last run")
    given = parser.parse_args()
    dtype = PRECISIONS[given.precision]
    end_dtype = fused_conv.end_dtype
    fused_conv.end_dtype = lambda h: end_dtype(h.to("meta"))  # as on a card
    photos, draw = read_photos(given.photos, given.size), random.Random(7)
    held_out, trained = photos[::VALIDATION_SHARE], [p for i, p in enumerate(photos) if i % VALIDATION_SHARE]
    each = max(1, VALIDATION_CROPS * 64 // given.size // len(held_out))
    crops = torch.stack([crop_of(photo, given.size, draw) for photo in held_out for _ in range(each)])
    config = ModelConfig(channels=tuple(given.channels), layers_per_block=1, norm_groups=given.norm_groups)
    model = AutoencoderKL(config)
    initialize(model, "warm", given.seed)
    if given.start:
        model.load_state_dict(torch.load(given.start, weights_only=True))
    model = model.to(memory_format=torch.channels_last)
    scale_activations(model, given.activation_scale)
    tests = {folder.name: test_crops(folder, given.size) for folder in given.test}
    with CardArithmetic():
        start = measure_all(model, crops, tests, dtype)
    print(json.dumps({"start": start}), flush=True)
    for kl_weight in given.kl_weights:
        for steps in given.steps:
            for peak in given.peaks:
                began = time.process_time()
                loss = LossConfig(perceptual_weight=0.0, kl_weight=kl_weight)
                with CardArithmetic():
                    ema = train(model, trained, given, steps, peak, loss, dtype)
                    found = measure_all(ema, crops, tests, dtype)
                seconds = time.process_time() - began
                record = {"steps": steps, "peak": peak, "kl_weight": kl_weight, **found}
                record |= {"gain": found["psnr"] - start["psnr"], "cpu_seconds": seconds}
                print(json.dumps(record), flush=True)
                if given.save:
                    torch.save(ema.state_dict(), given.save)


if __name__ == "__main__":
    main()
