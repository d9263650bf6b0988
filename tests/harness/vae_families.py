"""Published VAE families with random weights: diffusers models and files of the research code."""

import re
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors.torch import save_file

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


# The names of CompVis latent-diffusion and Black Forest Labs' published model definitions. Levels of the
# decoder are numbered from the largest image, and projections of attention are convolutions.
RENAMED = {
    r"down_blocks\.(\d)\.resnets": r"down.\1.block",
    r"down_blocks\.(\d)\.downsamplers\.0": r"down.\1.downsample",
    r"up_blocks\.(\d)\.resnets": r"up.\1.block",
    r"up_blocks\.(\d)\.upsamplers\.0": r"up.\1.upsample",
    r"mid_block\.resnets\.0": "mid.block_1",
    r"mid_block\.resnets\.1": "mid.block_2",
    r"mid_block\.attentions\.0": "mid.attn_1",
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
    "group_norm": "norm",
    r"to_(q|k|v)": r"\1",
    r"to_out\.0": "proj_out",
}
INNER = {r"^post_quant_conv": "decoder.post_quant_conv", r"^quant_conv": "encoder.quant_conv"}


class ResearchVAE:
    """A VAE that diffusers computes, whose weights have the names and shapes of the research code."""

    def __init__(self, model: AutoencoderKL | AutoencoderKLFlux2, quant: str | None):
        self.model, self.encoder, self.decoder = model, model.encoder, model.decoder
        self.rules = {**RENAMED, **(INNER if quant == "inner" else {})}

    def name(self, name: str) -> str:
        """The name of a weight in the research code."""
        for pattern, replacement in self.rules.items():
            name = re.sub(pattern, replacement, name)
        last = len(self.decoder.up_blocks) - 1
        return re.sub(r"decoder\.up\.(\d)", lambda level: f"decoder.up.{last - int(level[1])}", name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        weights = {self.name(name): value for name, value in self.model.state_dict().items()}
        return {name: v[:, :, None, None] if v.dim() == 2 else v for name, v in weights.items()}

    def load_state_dict(self, weights: dict[str, torch.Tensor]) -> None:
        assert {n: v.shape for n, v in weights.items()} == {n: v.shape for n, v in self.state_dict().items()}
        own = self.model.state_dict()
        self.model.load_state_dict({name: weights[self.name(name)].view_as(own[name]) for name in own})

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(self.name(name), value) for name, value in self.model.named_parameters()]

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """The posterior's mean."""
        return self.model.encode(images).latent_dist.mode()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.model.decode(latents).sample


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
    """A model of the family in the research code."""
    return ResearchVAE(diffusers_model(family, channels, blocks), FAMILIES[family][1])


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
