#!/usr/bin/env python3
"""Compare tiles with the whole image: difference and seconds of a narrow model, memory of the default one."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.config.options import ModelConfig  # noqa: E402
from vae.inference.codec import decode_latents, encode_images, reconstruct  # noqa: E402
from vae.memory.live_bytes import LiveBytes  # noqa: E402
from vae.model.autoencoder import AutoencoderKL  # noqa: E402

# One level more than usual: without it, most of the time on a CPU would be attention in the mid block.
NARROW = ModelConfig(channels=(16, 32, 32, 32, 32), layers_per_block=1, norm_groups=8, z_channels=16)


def peaks(config: ModelConfig, side: int, tile: int | None, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Peak bytes on "cuda" and on "cpu" to encode and to decode a square image, without computing anything.

    Counted are the tensors that operations create. On the device these are tiles or whole feature maps, and
    scratch buffers, but not the existing weights or memory that libraries allocate. On the host these are the
    feature maps and the result.
    """
    found = {}
    with FakeTensorMode():
        with torch.device("cuda"):
            model = AutoencoderKL(config)
        images = torch.empty(1, 3, side, side)
        latents = torch.empty(1, config.z_channels, side // model.downsampling, side // model.downsampling)
        for name, run in (
            ("encode", lambda: encode_images(model, images, dtype=dtype, tile=tile)),
            ("decode", lambda: decode_latents(model, latents, dtype=dtype, tile=tile)),
        ):
            with LiveBytes("cuda") as device, LiveBytes("cpu") as host:
                run()
            found[name] = {"cuda": device.peak, "cpu": host.peak}
    return found


def compare(side: int, tile: int, config: ModelConfig = NARROW) -> dict[str, float]:
    """Largest difference of the two reconstructions as a fraction of the value range, and their seconds."""
    torch.manual_seed(0)
    model = AutoencoderKL(config).eval()
    coarse = torch.rand(1, 3, 64, 64)
    images = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic") * 2 - 1
    images += 0.05 * torch.randn_like(images)
    seconds, results = [], []
    for size in (None, tile):
        start = time.perf_counter()
        results.append(reconstruct(model, images, tile=size))
        seconds.append(time.perf_counter() - start)
    difference = (results[1] - results[0]).abs().max().item() / 2  # of the range [-1, 1]
    return {
        "largest_difference": difference,
        "spread_of_result": results[0].std().item() / 2,
        "whole_seconds": round(seconds[0], 1),
        "tiled_seconds": round(seconds[1], 1),
        "time_ratio": round(seconds[1] / seconds[0], 2),
    }


def main() -> None:
    """Print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=3072, help="side of the square image, px")
    parser.add_argument("--tile", type=int, default=512, help="side of the tiles, px")
    parser.add_argument(
        "--full_width", action="store_true", help="compute with the default network instead of the narrow one"
    )
    options = parser.parse_args()
    memory = {
        f"{str(dtype).removeprefix('torch.')} {name}": {
            where: {kind: round(count / 2**20) for kind, count in peak.items()}
            for where, peak in peaks(ModelConfig(), options.side, tile, dtype).items()
        }
        for dtype in (torch.bfloat16, torch.float32)
        for name, tile in (("whole", None), ("tiled", options.tile))
    }
    config = ModelConfig() if options.full_width else NARROW
    found = {**vars(options), **compare(options.side, options.tile, config), "peak_mib": memory}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
