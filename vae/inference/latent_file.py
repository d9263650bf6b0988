"""Latents of one image as a safetensors file, with the encoder's fingerprint and scaling in its metadata.

Tensors: `latents`, the posterior's mean, and `logvar`, its log-variance, both fp32 (Z, h, w), as the network
returns them. Diffusion models read (latents - shift_factor) * scaling_factor; the metadata contains both
factors if the VAE's file does.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vae.inference.codec import padded_side
from vae.interop.averaging import hash_of_weights
from vae.interop.latent_statistics import LatentConstants
from vae.interop.writing import write_safetensors
from vae.model.autoencoder import AutoencoderKL, Posterior
from vae.system.files import utf8_path

FORMAT = "vae-latents-2"  # 1: the fingerprint was another hash
_SHOWN_DIGITS = 12  # digits of a fingerprint in messages


class BadLatentsError(Exception):
    """Latents that cannot be used: a short stable `reason` code and a `detail` for people."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class LatentSource:
    """The encoder that made the latents, as recorded in their files."""

    fingerprint: str  # "" of a file with only a decoder: any encoder may have made the latents
    z_channels: int
    downsampling: int
    constants: LatentConstants  # as far as the VAE's file contains them


@dataclass(frozen=True)
class Latents:
    """The posterior of one image, (1, Z, h, w), and the image's (height, width) before padding."""

    posterior: Posterior
    size: tuple[int, int]


def encoder_fingerprint(model: AutoencoderKL) -> str:
    """SHA-256 over names and fp32 values of the encoder and its quant convolution.

    It stays the same if only the decoder is trained further, because the latents stay the same. It differs
    for a copy rounded to fp16 or bf16.
    """
    encoder = {
        n: v.float() for n, v in model.state_dict().items() if n.startswith(("encoder.", "quant_conv."))
    }
    return hash_of_weights(encoder)


def save_latents(path: Path, latents: Latents, source: LatentSource, image: str) -> None:
    """Write the file atomically. `image` is the name of the encoded image. Raises OSError."""
    posterior = latents.posterior
    mean, logvar = (value[0].float().cpu().contiguous() for value in (posterior.mean, posterior.logvar))
    metadata = {
        "format": FORMAT,
        "source": image,
        "height": str(latents.size[0]),
        "width": str(latents.size[1]),
        "downsampling": str(source.downsampling),
        "encoder_fingerprint": source.fingerprint,
        "channel_mean": json.dumps(_per_channel(mean.double().mean(dim=(1, 2)))),
        "channel_std": json.dumps(_per_channel(mean.double().std(dim=(1, 2), correction=0))),
    }
    scaling, shift, *_ = source.constants
    if scaling is not None:
        metadata |= {"scaling_factor": repr(float(scaling)), "shift_factor": repr(float(shift))}
    metadata |= {name: json.dumps(values) for name, values in source.constants.channels.items()}
    write_safetensors(path, {"latents": mean, "logvar": logvar}, metadata)


def load_latents(path: Path, source: LatentSource, any_vae: bool = False) -> Latents:
    """Latents that the encoder `source` made, or any encoder with `any_vae`. Raises BadLatentsError."""
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            metadata = file.metadata() or {}
            names = sorted(file.keys())
            version = metadata.get("format")
            if "latents" not in names or not (any_vae or version == FORMAT):
                content = f"format {version}, not {FORMAT}, and tensors {', '.join(names[:3])}"
                remedy = "give files written by --mode encode, or add --any_vae if these are latents"
                raise BadLatentsError("not_latents", f"has {content}: {remedy}")
            mean = file.get_tensor("latents").float()
            logvar = file.get_tensor("logvar").float() if "logvar" in names else torch.full_like(mean, -30.0)
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"truncated, or not a safetensors file ({error}): encode again"
        raise BadLatentsError("damaged", problem) from None
    theirs = metadata.get("encoder_fingerprint", "")
    if source.fingerprint not in ("", theirs) and not any_vae:
        raise BadLatentsError(
            "latents_of_another_vae",
            f"made by encoder {theirs[:_SHOWN_DIGITS]}, but --vae is {source.fingerprint[:_SHOWN_DIGITS]}: "
            "give the VAE that encoded them, or add --any_vae",
        )
    return Latents(*_checked(mean, logvar, metadata, source))


def _checked(
    mean: torch.Tensor, logvar: torch.Tensor, metadata: dict[str, str], source: LatentSource
) -> tuple[Posterior, tuple[int, int]]:
    """Posterior and image size, if the tensors, the metadata and the VAE are consistent."""
    if mean.dim() == 3:
        mean, logvar = mean[None], logvar[None]
    if mean.dim() != 4 or mean.shape[:2] != (1, source.z_channels) or logvar.shape != mean.shape:
        shape = "x".join(map(str, mean.shape))
        raise BadLatentsError("wrong_shape", f"{shape}, but --vae has {source.z_channels} latent channels")
    if not (torch.isfinite(mean).all() and torch.isfinite(logvar).all()):
        raise BadLatentsError("not_finite", "contains NaN or infinity: encode again")
    sides = [side * source.downsampling for side in mean.shape[2:]]
    try:
        height = int(metadata.get("height", sides[0]))
        width = int(metadata.get("width", sides[1]))
    except ValueError:
        problem = "width or height in its metadata is not a number: encode again"
        raise BadLatentsError("damaged", problem) from None
    if [padded_side(side, source.downsampling) for side in (height, width)] != sides:
        shape = f"{mean.shape[3]}x{mean.shape[2]} latents do not match an image of {width}x{height} px"
        raise BadLatentsError("wrong_shape", f"{shape} with the downsampling {source.downsampling} of --vae")
    return Posterior(mean, logvar), (height, width)


def _per_channel(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
