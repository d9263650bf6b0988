"""Make a strip of reconstructions: a column per image file, the input above its reconstruction.

    python examples/make_strip.py --vae outputs/first/vae --input photos --output strip.jpg

Each image is reconstructed in full; the strip shows its centre crop. The script prints every PSNR.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, os.getcwd())  # the package `vae` is in the repository's root

import vae

GAP = 6  # px between columns
LABEL_HEIGHT = 24  # px above each row
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vae", required=True, help="checkpoint, diffusers folder or .safetensors file")
    parser.add_argument("--input", required=True, type=Path, help="folder of image files, a column each")
    parser.add_argument("--output", required=True, type=Path, help="JPEG file to write")
    parser.add_argument("--side", type=int, default=256, help="side of the centre crops, px (default: 256)")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 95 (default: 90)")
    return parser.parse_args()


def psnr(original: np.ndarray, reconstruction: np.ndarray) -> float:
    """PSNR in dB of two uint8 images."""
    error = np.mean((original.astype(np.float64) - reconstruction) ** 2)
    return float(10 * np.log10(255**2 / error))


def center_crop(image: Image.Image, side: int) -> Image.Image:
    """The centre of an image as a square of at most `side` px."""
    side = min(side, *image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def draw_strip(rows: dict[str, list[Image.Image]], side: int) -> Image.Image:
    """One image with a labelled row for each entry of `rows`."""
    columns = len(next(iter(rows.values())))
    row_height = LABEL_HEIGHT + side
    strip = Image.new("RGB", (columns * (side + GAP) - GAP, len(rows) * row_height), "white")
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(15)
    for row, (label, images) in enumerate(rows.items()):
        draw.text((2, row * row_height + 3), label, fill="black", font=font)
        for column, image in enumerate(images):
            strip.paste(image, (column * (side + GAP), row * row_height + LABEL_HEIGHT))
    return strip


def main() -> None:
    """Reconstruct every image of the folder and write the strip."""
    arguments = parse_arguments()
    paths = sorted(path for path in arguments.input.iterdir() if path.suffix.lower() in EXTENSIONS)
    if not paths:
        sys.exit(f"--input {arguments.input} contains no image files ({' '.join(EXTENSIONS)})")
    model = vae.load_vae(arguments.vae)
    rows: dict[str, list[Image.Image]] = {"input": [], "reconstruction": []}
    for path in paths:
        (original,) = vae.to_pil(vae.load_images(path))
        (reconstruction,) = vae.to_pil(vae.reconstruct(model, original))
        value = psnr(np.asarray(original), np.asarray(reconstruction))
        print(f"{path.name}: {original.width}x{original.height} px, PSNR {value:.2f} dB")
        rows["input"].append(center_crop(original, arguments.side))
        rows["reconstruction"].append(center_crop(reconstruction, arguments.side))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw_strip(rows, arguments.side).save(arguments.output, quality=arguments.quality, optimize=True)
    print(f"written: {arguments.output}, {arguments.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    try:
        main()
    except vae.UserError as error:
        sys.exit(str(error))
