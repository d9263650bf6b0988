"""What reconstruction metrics do not show: equivariance, and artefacts of the sampling grid.

Shapes: B images of H x W px in [-1, 1], f the downsampling.
"""

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F

from vae.evaluation.results import Equivariance, GridArtefact
from vae.images.psnr import MAX_PSNR_DB, PEAK, psnr
from vae.inference.codec import decode_latents, encode_images
from vae.model.autoencoder import AutoencoderKL

TURNS = {"turn_90": 1, "turn_180": 2, "turn_270": 3}  # number of quarter turns
SCALES = {"scale_0.75": 0.75, "scale_0.5": 0.5}
COLOURS = {
    "black": (-1.0, -1.0, -1.0),
    "grey": (0.0, 0.0, 0.0),
    "white": (1.0, 1.0, 1.0),
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
}
GRID_CELLS = 32  # latent pixels along a side of the constant image; only the middle half is evaluated


@torch.no_grad()
def equivariance(
    model: AutoencoderKL, batches: Iterable[torch.Tensor], dtype: torch.dtype
) -> dict[str, Equivariance]:
    """Mean PSNR over the images (B, 3, H, W) of `batches` for each transform of their latents.

    As in EQ-VAE (Kouzelis et al. 2025), decode(transform(encode(x))) is compared with transform(x), for the
    posterior's mode. Turns are exact. Scaling is area-averaged bicubic, the same for latents and images, to
    whole latent pixels. Images are first cropped to multiples of f; images smaller than f are skipped.
    """
    pairs_of: dict[str, list[tuple[float, float]]] = {}
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
            pairs_of.setdefault(name, []).extend(zip(*(value.tolist() for value in values), strict=True))
    return {
        name: Equivariance(*(sum(column) / len(column) for column in zip(*pairs, strict=True)))
        for name, pairs in pairs_of.items()
    }


def _transforms(rows: int, columns: int) -> dict[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """Functions by name: (B, C, H, W) and its pixels per latent pixel -> the transformed (B, C, H', W')."""
    transforms: dict[str, Callable] = {
        name: lambda values, _, turns=turns: values.rot90(turns, (2, 3)) for name, turns in TURNS.items()
    }
    for name, scale in SCALES.items():
        sides = tuple(round(side * scale) for side in (rows, columns))
        if min(sides) >= 1 and sides != (rows, columns):
            transforms[name] = lambda values, unit, sides=sides: F.interpolate(
                values, size=tuple(side * unit for side in sides), mode="bicubic", antialias=True
            )
    return transforms


@torch.no_grad()
def grid_artefacts(model: AutoencoderKL, dtype: torch.dtype) -> dict[str, GridArtefact]:
    """The content of reconstructed constant images at the frequencies of the sampling grid, by colour.

    Only the middle half of the image counts, because the border shows the padding of every network.
    """
    f = model.downsampling
    device = next(model.parameters()).device
    side = GRID_CELLS * f
    start = side // 4
    stop = side // 4 + side // 2
    artefacts = {}
    for name, colour in COLOURS.items():
        image = torch.tensor(colour, device=device).view(1, 3, 1, 1).expand(1, 3, side, side)
        recon = decode_latents(model, encode_images(model, image, dtype=dtype).mode(), dtype=dtype)
        artefacts[name] = periodic_part(recon[0, :, start:stop, start:stop], f)
    return artefacts


def periodic_part(recon: torch.Tensor, period: int) -> GridArtefact:
    """The pattern in (3, S, S) values in [-1, 1] that repeats every `period` px; `period` divides S.

    Its frequencies in the spectrum are (i / period, j / period) cycles per px; (0, 0) is the colour.
    """
    side = recon.shape[-1]
    assert side % period == 0, f"{side} px by {period}"
    levels = recon.double() * (PEAK / 2)
    levels = levels - levels.mean((1, 2), keepdim=True)
    # (S, S); its sum is the mean square
    power = torch.fft.fft2(levels, norm="forward").abs().square().mean(0)
    total = power.sum().item()
    step = side // period
    periodic = power[::step, ::step].sum().item()
    # below a millionth of a level there is only rounding noise, whose share has no meaning
    share = periodic / total if total > 1e-12 else None
    return GridArtefact(levels=periodic**0.5, share=share)
