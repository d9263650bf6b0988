"""Sample images for the page: original, reconstruction, error and latent channels as PNG files.

Shapes: images are uint8 (C, H, W), latents (Z, h, w).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from vae.evaluation.image_set import ImageSet
from vae.evaluation.measure import Reconstruct, VaeCodec
from vae.evaluation.results import ERROR_GAIN, LatentFacts, Sample, SizeResult, mean_psnr
from vae.images.composites import difference
from vae.images.pixels import as_uint8, to_float, to_uint8
from vae.inference.infer import write_image

LATENT_SPREAD = 3  # black is this many standard deviations below a channel's mean, white above
MAX_LATENT_IMAGES = 64


@dataclass(frozen=True)
class Chosen:
    """A sample image."""

    index: int  # in the image set
    name: str
    why: str  # worst, typical or best


def choose(results: list[SizeResult], count: int) -> list[Chosen]:
    """The `count` worst, middle and best images by mean PSNR over `results`, without duplicates."""
    names = list(results[0].per_image)
    scores = [mean_psnr([result.per_image[name]["psnr"] for result in results]) for name in names]
    order = sorted(range(len(names)), key=lambda index: scores[index])
    middle = max(0, (len(order) - count) // 2)
    parts = {"worst": order[:count], "best": order[::-1][:count], "typical": order[middle : middle + count]}
    chosen: dict[int, str] = {}
    for why, indices in parts.items():
        for index in indices:
            chosen.setdefault(index, why)
    shown = [Chosen(index, names[index], why) for index, why in chosen.items()]
    return sorted(shown, key=lambda sample: ("worst", "typical", "best").index(sample.why))


def write_originals(chosen: list[Chosen], image_set: ImageSet, size: int, folder: Path) -> None:
    """Write each chosen image as NN_original.png."""
    for number, sample in enumerate(chosen):
        _write(folder / f"{number:02d}_original.png", image_set.read(sample.name, size))


def write_samples(
    reconstruct: Reconstruct,
    position: int,
    chosen: list[Chosen],
    image_set: ImageSet,
    result: SizeResult,
    latents: LatentFacts | None,
    folder: Path,
) -> list[Sample]:
    """Write the reconstructions of the chosen images by row `position`, at the size of `result`.

    File names contain only numbers, because an image's own name may contain any character. Images that cannot
    be reconstructed are skipped.
    """
    samples = []
    for number, sample in enumerate(chosen):
        image = image_set.read(sample.name, result.size)
        (recon,) = reconstruct(image[None], range(sample.index, sample.index + 1))
        if recon is None:
            continue
        recon, stem = as_uint8(recon).cpu(), f"{number:02d}_{position:02d}"
        error = to_uint8(difference(to_float(recon[None]), to_float(image[None]))[0] * ERROR_GAIN - 1)
        _write(folder / f"{stem}_recon.png", recon)
        _write(folder / f"{stem}_error.png", error)
        channels = []
        if isinstance(reconstruct, VaeCodec) and latents is not None:
            channels = _write_channels(reconstruct, image, latents, folder / f"{stem}_latent")
        samples.append(
            Sample(
                name=sample.name,
                original=folder / f"{number:02d}_original.png",
                recon=folder / f"{stem}_recon.png",
                error=folder / f"{stem}_error.png",
                latents=channels,
                metrics=result.per_image[sample.name],
                why=sample.why,
            )
        )
    return samples


def _write_channels(codec: VaeCodec, image: torch.Tensor, facts: LatentFacts, stem: Path) -> list[Path]:
    """Write one grey image for each of the first MAX_LATENT_IMAGES channels of the posterior's mode."""
    latents = codec.latents_of(image[None])[0].double().cpu()
    paths = []
    for channel, values in enumerate(latents[:MAX_LATENT_IMAGES]):
        distance = (values - facts.mean[channel]) / (LATENT_SPREAD * facts.std[channel])
        grey = to_uint8(distance)
        paths.append(stem.with_name(f"{stem.name}_{channel:02d}.png"))
        write_image(paths[-1], grey.numpy())
    return paths


def _write(path: Path, image: torch.Tensor) -> None:
    write_image(path, image.permute(1, 2, 0).contiguous().numpy())
