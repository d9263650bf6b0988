"""The grid of sample reconstructions that a run saves and shows in TensorBoard."""

import numpy as np
import torch

from vae.evaluation.baselines import bicubic_baseline
from vae.model.autoencoder import IMAGE_CHANNELS, AutoencoderKL
from vae.pixels import to_float, to_uint8
from vae.step import Networks
from vae.training.validation import mode_reconstruction

GRID_IMAGES = 4
GRID_SIDE = 512  # px: of larger crops, the grid shows the centre
ERROR_GAIN = 8


def sample_grid(model: AutoencoderKL, networks: Networks, images: torch.Tensor) -> np.ndarray:
    """uint8 pixels (rows, columns, 3) from uint8 images (B, 3, S, S), one row per image.

    The columns are the input, its reconstruction, the error times ERROR_GAIN and the bicubic baseline.
    """
    images = images[:GRID_IMAGES]
    reconstruct = mode_reconstruction(model, networks)
    inputs = to_float(images)
    recon = torch.cat([reconstruct(one[None]).float() for one in inputs]).clamp(-1, 1)
    error = ((recon - inputs).abs() / 2 * ERROR_GAIN).clamp(0, 1) * 2 - 1
    bicubic = bicubic_baseline(inputs, model.downsampling)
    columns = torch.stack([inputs, recon, error, bicubic], dim=1)  # (N, 4, 3, S, S)
    start = max(0, (columns.shape[-1] - GRID_SIDE) // 2)
    columns = columns[..., start : start + GRID_SIDE, start : start + GRID_SIDE]
    count, kinds, _, height, width = columns.shape
    grid = to_uint8(columns).permute(0, 3, 1, 4, 2).reshape(count * height, kinds * width, IMAGE_CHANNELS)
    return grid.cpu().numpy()
