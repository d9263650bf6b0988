"""The VAE of --teacher, whose latents an AutoencoderTiny learns, as diffusion models have them.

As taesd was trained: the encoder learns these latents alone, and the decoder to decode them to the images, so
neither follows the errors of the other. The teacher is a frozen network of the loss, as LPIPS is.

Shapes: B images, Z latent channels, f downsampling.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from vae.config.model_options import ModelConfig
from vae.config.options import LossConfig, build
from vae.interop.vae_files import load_vae, read_vae
from vae.losses.terms import LossTerms, Term, build_terms
from vae.model.activation_scale import UNKNOWN, scale_activations
from vae.model.autoencoder import AutoencoderKL
from vae.model.diffusers_autoencoder import build_autoencoder
from vae.ops.shapes import Images, Latents
from vae.system.errors import UserError


@dataclass(frozen=True)
class TeacherFacts:
    """The facts about the teacher that a run needs before it loads it."""

    model: ModelConfig
    scaling: float
    shift: float


@cache  # the plan of a stage asks for every recompute level
def read_teacher(path: str) -> TeacherFacts:
    """The shape and the latent scaling of the VAE at `path`; UserError that starts with --teacher."""
    file = read_vae(Path(path), flag="--teacher")
    model = build(file.shape).model
    if model.image_channels != 3:
        raise UserError(
            f"--teacher {path} is of images with {model.image_channels} channels: give a VAE of RGB images"
        )
    if not model.latent_norm and file.constants.scaling is None:
        raise UserError(
            f"--teacher {path} does not contain the scaling of its latents, which diffusion models apply: "
            "give the folder vae/ of its model"
        )
    return TeacherFacts(model, file.constants.scaling or 1.0, file.constants.shift)


class Teacher(nn.Module):
    """Images (B, 3, H, W) in [-1, 1] to the normalized latents (B, Z, H/f, W/f) of a frozen VAE, in fp32."""

    def __init__(self, model: AutoencoderKL, facts: TeacherFacts) -> None:
        super().__init__()
        del model.decoder
        model.post_quant_conv = None
        self.model = model
        self.facts = facts
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, images: Images) -> Latents:
        mean = self.model.encode(images).mode()
        if (norm := self.model.bn) is not None:
            return F.pixel_shuffle(norm.normalize(mean), norm.patch)
        return (mean - self.facts.shift) * self.facts.scaling


def terms_of(
    loss: LossConfig, has_posterior: bool, dtype: torch.dtype, device: torch.device | str
) -> LossTerms:
    """The terms of `build_terms`, and that of the teacher. On the meta device it has no weights.

    A network without a posterior has no terms of one.
    """
    terms = build_terms(loss, dtype, device)
    if not has_posterior:
        terms = terms._replace(latent=())
    if loss.teacher is None:
        return terms
    facts = read_teacher(loss.teacher)
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            model = build_autoencoder(facts.model)
    else:
        model = load_vae(Path(loss.teacher), flag="--teacher", needs=("encoder",)).autoencoder
        model.to(device).to(memory_format=torch.channels_last)
    scale_activations(model, UNKNOWN if dtype == torch.float16 else 1.0)
    term = Term("teacher", "latents of the teacher", loss.teacher_weight, Teacher(model, facts))
    return terms._replace(teacher=(term,))
