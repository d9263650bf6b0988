"""Two probes that no metric of reconstructions replaces: equivariance, and patterns of the sampling grid.

Shapes: B images of H x W px in [-1, 1], f the downsampling.
"""

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F

from vae.evaluation.metrics import PEAK, psnr
from vae.evaluation.results import Equivariance, GridArtefact
from vae.evaluation.sums import MAX_PSNR_DB
from vae.inference.codec import decode_latents, encode_images
from vae.model.autoencoder import AutoencoderKL

TURNS = {"turn_90": 1, "turn_180": 2, "turn_270": 3}  # quarter turns
SCALES = {"scale_0.75": 0.75, "scale_0.5": 0.5}
COLOURS = {
    "black": (-1.0, -1.0, -1.0),
    "grey": (0.0, 0.0, 0.0),
    "white": (1.0, 1.0, 1.0),
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
}
GRID_CELLS = 32  # latent pixels along a side of the constant image; the middle half is looked at


@torch.no_grad()
def equivariance(
    model: AutoencoderKL, batches: Iterable[torch.Tensor], dtype: torch.dtype
) -> dict[str, Equivariance]:
    """Mean PSNR over the images (B, 3, H, W) of `batches` after a transform of their latents.

    What EQ-VAE (Kouzelis et al. 2025) trains for: decode(transform(encode(x))) against transform(x), of the
    posterior's mode. Turns are exact; scaling is bicubic with averaging over areas, the same for latents and
    images, to whole latent pixels. Images are first cut to multiples of f; smaller ones are passed over.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    f = model.downsampling
    for batch in batches:
        height, width = (side // f * f for side in batch.shape[2:])
        if min(height, width) == 0:
            continue
        images = batch[:, :, :height, :width]
        latents = encode_images(model, images, dtype=dtype).mode()
        for name, transform in _transforms(height // f, width // f).items():
            truth = transform(images, f).clamp(-1, 1)
            by_latents = decode_latents(model, transform(latents, 1), dtype=dtype)
            by_images = decode_latents(model, encode_images(model, truth, dtype=dtype).mode(), dtype=dtype)
            values = [psnr(recon, truth).clamp(max=MAX_PSNR_DB) for recon in (by_latents, by_images)]
            found.setdefault(name, []).extend(zip(*(value.tolist() for value in values), strict=True))
    return {
        name: Equivariance(*(sum(column) / len(column) for column in zip(*pairs, strict=True)))
        for name, pairs in found.items()
    }


def _transforms(rows: int, columns: int) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """By name: (B, C, H, W) and its pixels per latent pixel to the transformed (B, C, H', W')."""
    found: dict[str, Callable] = {
        name: lambda values, _, turns=turns: values.rot90(turns, (2, 3)) for name, turns in TURNS.items()
    }
    for name, scale in SCALES.items():
        sides = tuple(round(side * scale) for side in (rows, columns))
        if min(sides) >= 1 and sides != (rows, columns):
            found[name] = lambda values, unit, sides=sides: F.interpolate(
                values, size=tuple(side * unit for side in sides), mode="bicubic", antialias=True
            )
    return found


@torch.no_grad()
def grid_artefacts(model: AutoencoderKL, dtype: torch.dtype) -> dict[str, GridArtefact]:
    """What reconstructions of constant images hold at the frequencies of the sampling grid, by colour.

    Only the middle half of the image counts: at the border every network pads.
    """
    f = model.downsampling
    device = next(model.parameters()).device
    side = GRID_CELLS * f
    start, stop = side // 4, side // 4 + side // 2
    found = {}
    for name, colour in COLOURS.items():
        image = torch.tensor(colour, device=device).view(1, 3, 1, 1).expand(1, 3, side, side)
        recon = decode_latents(model, encode_images(model, image, dtype=dtype).mode(), dtype=dtype)
        found[name] = periodic_part(recon[0, :, start:stop, start:stop], f)
    return found


def periodic_part(recon: torch.Tensor, period: int) -> GridArtefact:
    """The pattern of (3, S, S) values in [-1, 1] that repeats every `period` px, which divides S.

    It lies at the frequencies (i / period, j / period) cycles per px of the spectrum; (0, 0) is the colour.
    """
    side = recon.shape[-1]
    assert side % period == 0, f"{side} px by {period}"
    levels = recon.double() * (PEAK / 2)
    levels = levels - levels.mean((1, 2), keepdim=True)
    power = torch.fft.fft2(levels, norm="forward").abs().square().mean(0)  # (S, S); sums to the mean square
    total = power.sum().item()
    step = side // period
    periodic = power[::step, ::step].sum().item()
    # below a millionth of a level there is only rounding, whose shares mean nothing
    share = periodic / total if total > 1e-12 else None
    return GridArtefact(levels=periodic**0.5, share=share)
