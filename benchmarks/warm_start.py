"""PSNR of an untrained network with the warm start, against the bicubic baseline, by kind of image.

python benchmarks/warm_start.py --data_path DIR [--channels 32 64 64 64 --layers_per_block 1 --norm_groups 8]
python benchmarks/warm_start.py --data_path DIR --vae FOLDER     # the same of a trained VAE
python benchmarks/warm_start.py --data_path DIR --center_px 256  # one crop per image, of all kinds together

Four 128 px crops per image file are sorted by their detail inside of 8x8 blocks: the 16 with the least (or a
third of all) are "smooth", as many with the most "busy". "gradient" are 12 generated linear gradients. The
border is the outer 16 px.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vae.api import load_vae
from vae.config.options import ModelConfig
from vae.evaluation.baselines import bicubic_baseline
from vae.images.decoding import decode_image
from vae.images.folder import list_images
from vae.images.pixels import to_float
from vae.model.autoencoder import AutoencoderKL
from vae.model.initialization import initialize

SIDE, BORDER, CROPS = 128, 16, 16  # px, px, crops of each kind


def crops_of(folder: str, side: int = SIDE, per_image: int = 4) -> torch.Tensor:
    """fp32 (N, 3, side, side) in [-1, 1]: center, two corners and the lower edge of each image file."""
    crops = []
    for name in list_images(folder):
        pixels = torch.from_numpy(decode_image(Path(folder, name))).permute(2, 0, 1)
        height, width = (length - side for length in pixels.shape[1:])
        positions = ((height // 2, width // 2), (0, 0), (0, width), (height, width // 3))
        crops += [pixels[:, top : top + side, left : left + side] for top, left in positions[:per_image]]
    return to_float(torch.stack(crops))


def gradients(count: int = 12) -> torch.Tensor:
    """fp32 (count, 3, SIDE, SIDE) 8-bit linear gradients between random colors in random directions."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, SIDE)
    images = []
    for _ in range(count):
        first, second = (torch.rand(3, 1, 1, generator=generator) * 2 - 1 for _ in range(2))
        angle = torch.rand(1, generator=generator) * 6.28
        position = torch.cos(angle) * ramp[None] + torch.sin(angle) * ramp[:, None]
        position = (position - position.min()) / (position.max() - position.min())
        images.append(first * (1 - position) + second * position)
    return ((torch.stack(images) + 1) * 127.5).round() / 127.5 - 1


def by_region(recon: torch.Tensor, images: torch.Tensor) -> str:
    """Mean PSNR in dB of whole images, of their interior and of their border."""
    error = (recon.clamp(-1, 1) - images).pow(2).mean(1)  # (N, H, W)
    inside = torch.zeros(error.shape[1:], dtype=torch.bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    parts = (error.flatten(1), error[:, inside], error[:, ~inside])
    return " ".join(f"{(10 * torch.log10(4 / part.mean(1))).mean():6.2f}" for part in parts)


def new_network(options: argparse.Namespace) -> AutoencoderKL:
    """A network of the given shape with the warm start."""
    names = ("channels", "layers_per_block", "norm_groups", "z_channels")
    model = AutoencoderKL(ModelConfig(**{name: getattr(options, name) for name in names}))
    initialize(model, "warm", seed=0)
    return model


def kinds_of(folder: str) -> dict[str, torch.Tensor]:
    """Crops (N, 3, SIDE, SIDE) by kind, see above."""
    crops = crops_of(folder)
    blocks = F.interpolate(F.avg_pool2d(crops, 8), scale_factor=8.0)
    order = (crops - blocks).pow(2).mean((1, 2, 3)).argsort()
    count = min(CROPS, len(crops) // 3)
    return {"smooth": crops[order[:count]], "busy": crops[order[-count:]], "gradient": gradients()}


def main() -> None:
    """Print one line per kind of image: whole, interior and border of the network and of the baseline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_path", required=True, metavar="DIR")
    parser.add_argument("--channels", type=int, nargs="+", default=list(ModelConfig().channels))
    parser.add_argument("--layers_per_block", type=int, default=ModelConfig().layers_per_block)
    parser.add_argument("--norm_groups", type=int, default=ModelConfig().norm_groups)
    parser.add_argument("--z_channels", type=int, default=ModelConfig().z_channels)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vae", metavar="PATH", help="a trained VAE instead of a new one")
    parser.add_argument(
        "--center_px", type=int, metavar="SIDE", help="the center of each image instead of kinds"
    )
    options = parser.parse_args()
    model = load_vae(options.vae).autoencoder if options.vae else new_network(options)
    side = options.center_px
    kinds = (
        {"center": crops_of(options.data_path, side, per_image=1)} if side else kinds_of(options.data_path)
    )
    print("kind       VAE: whole, interior, border   bicubic: whole, interior, border")
    for kind, images in kinds.items():
        with torch.no_grad():
            dtype = getattr(torch, options.dtype)
            recon = torch.cat([model(part.to(dtype))[0].float() for part in images.split(8)])
        baseline = bicubic_baseline(images, model.downsampling)
        print(f"{kind:10} {by_region(recon, images)}           {by_region(baseline, images)}", flush=True)


if __name__ == "__main__":
    main()
