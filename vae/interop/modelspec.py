"""Metadata of exports as in ModelSpec 1.0.1 (Stability-AI/ModelSpec on GitHub), which other programs show."""

from collections.abc import Mapping
from pathlib import Path

from vae.interop.families import class_of
from vae.model.autoencoder import AutoencoderKL

PREFIX = "modelspec."
# Of the file that was trained or converted: what stays true of the result.
_INHERITED = ("architecture", "author", "license", "usage_hint", "category", "description")
COMPVIS = "https://github.com/CompVis/latent-diffusion"  # whose parameter names single files have


def modelspec(
    model: AutoencoderKL,
    output: Path,
    sample_size: int,
    source: Mapping[str, str] | None = None,
    *,
    implementation: str = "diffusers",
    license: str | None = None,
) -> dict[str, str]:
    """The keys of an export to `output`, trained at `sample_size` px; `source`: the metadata of its file."""
    values = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{class_of(model.config)}-z{model.config.z_channels}-f{model.downsampling}",
        "implementation": implementation,
        "title": output.stem,
        "resolution": f"{sample_size}x{sample_size}",
    }
    for name in _INHERITED:
        if PREFIX + name in (source or {}):
            values[name] = (source or {})[PREFIX + name]
    if license:
        values["license"] = license
    return {PREFIX + name: value for name, value in values.items()}
