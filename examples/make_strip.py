"""Make a strip of enlarged details: a column per image file, the original above the images of each VAE.

    python examples/make_strip.py --vae sdxl.safetensors outputs/decoder/vae --input photos --output strip.jpg

Each image is reconstructed in full. Its detail is the square in which the first VAE is worst: nobody chooses
it. The script prints every PSNR.
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
    parser.add_argument("--vae", required=True, nargs="+", help="checkpoints, folders or .safetensors files")
    parser.add_argument("--labels", nargs="+", help="a label for each VAE (default: its path)")
    parser.add_argument("--input", required=True, type=Path, help="folder of image files, a column each")
    parser.add_argument("--output", required=True, type=Path, help="JPEG file to write")
    parser.add_argument("--side", type=int, default=80, help="side of the details, px (default: 80)")
    parser.add_argument("--zoom", type=int, default=3, help="enlargement of the details (default: 3)")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 95 (default: 90)")
    arguments = parser.parse_args()
    if len(arguments.labels or arguments.vae) != len(arguments.vae):
        parser.error(f"--labels has {len(arguments.labels)} labels for {len(arguments.vae)} VAEs")
    return arguments


def squared_error(original: Image.Image, reconstruction: Image.Image) -> np.ndarray:
    """The mean over the channels of each pixel, (H, W), of values from 0 to 255."""
    return np.mean((np.asarray(original, np.float64) - np.asarray(reconstruction)) ** 2, axis=2)


def worst_square(error: np.ndarray, side: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the square of `side` px, or less, with the largest error (H, W)."""
    side = min(side, *error.shape)
    sums = np.pad(error, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    squares = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    top, left = divmod(int(squares.argmax()), squares.shape[1])
    return left, top, left + side, top + side


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
    models = {
        label: vae.load_vae(path)
        for label, path in zip(arguments.labels or arguments.vae, arguments.vae, strict=True)
    }
    rows: dict[str, list[Image.Image]] = {label: [] for label in ("original", *models)}
    side = arguments.side * arguments.zoom
    for path in paths:
        (original,) = vae.to_pil(vae.load_images(path))
        images = {"original": original}
        for label, model in models.items():
            (images[label],) = vae.to_pil(vae.reconstruct(model, original))
        errors = {label: squared_error(original, images[label]) for label in models}
        for label, error in errors.items():
            value = 10 * np.log10(255**2 / np.mean(error))
            print(f"{path.name}: {original.width}x{original.height} px, {label}: PSNR {value:.2f} dB")
        square = worst_square(next(iter(errors.values())), arguments.side)
        for label, image in images.items():
            rows[label].append(image.crop(square).resize((side, side), Image.Resampling.NEAREST))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw_strip(rows, side).save(arguments.output, quality=arguments.quality, optimize=True)
    print(f"written: {arguments.output}, {arguments.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    try:
        main()
    except vae.UserError as error:
        sys.exit(str(error))
