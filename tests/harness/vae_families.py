"""Published VAE families with random weights: diffusers models and files of the research code."""

from pathlib import Path
from typing import TypeVar

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors.torch import save_file

from tests.harness.research_vae import ResearchVAE

_Model = TypeVar("_Model", bound=torch.nn.Module)

NARROW = (32, 32, 64, 64)
SMALL = ((32, 32), 1)  # channels and blocks of models that tests train

# latent channels, position of the quant convolutions, scaling, shift
FAMILIES = {
    "sd": (4, "outer", 0.18215, None),
    "sdxl": (4, "outer", 0.13025, None),
    "sd3": (16, None, 1.5305, 0.0609),
    "flux": (16, None, 0.3611, 0.1159),
    "flux2": (32, "inner", None, None),
}


def diffusers_model(
    family: str, channels: tuple[int, ...] = NARROW, blocks: int = 2
) -> AutoencoderKL | AutoencoderKLFlux2:
    """A model of the family, built by diffusers."""
    z, quant, scaling, shift = FAMILIES[family]
    torch.manual_seed(7)
    shape = {
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "layers_per_block": blocks,
        "latent_channels": z,
        "sample_size": 64,
        "use_quant_conv": quant is not None,
        "use_post_quant_conv": quant is not None,
    }
    if family == "flux2":
        return randomize_norms(AutoencoderKLFlux2(**shape))
    return randomize_norms(AutoencoderKL(**shape, scaling_factor=scaling, shift_factor=shift))


def research_model(family: str, channels: tuple[int, ...] = NARROW, blocks: int = 2) -> ResearchVAE:
    """A model of the family, built by the research code."""
    z, quant, _, _ = FAMILIES[family]
    torch.manual_seed(8)
    return randomize_norms(ResearchVAE(channels, z, quant, blocks))


def randomize_norms(model: _Model) -> _Model:
    """Change norms and statistics from their initial ones and zeros, so that swapped tensors are detected."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.add_(0.3 * torch.randn_like(value))
        if hasattr(model, "bn"):
            model.bn.running_mean.normal_()
            model.bn.running_var.uniform_(0.5, 2)
            model.bn.num_batches_tracked.fill_(123)
    return model.eval().requires_grad_(False)


def save_research(path: Path, model: ResearchVAE, prefix: str = "", more: dict | None = None) -> Path:
    """Write the model's state_dict as safetensors, with `prefix` and `more` tensors."""
    tensors = {prefix + name: value.contiguous() for name, value in model.state_dict().items()}
    save_file({**tensors, **(more or {})}, path)
    return path


def image(side: int = 64) -> torch.Tensor:
    """(1, 3, side, side) in [-1, 1], smooth and seeded."""
    generator = torch.Generator().manual_seed(5)
    coarse = torch.rand(1, 3, 7, 7, generator=generator) * 2 - 1
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(-1, 1)
