"""README.md in the folder of an exported VAE."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vae.interop.families import OWN_CLASS
from vae.interop.vae_path import METRICS_NAME
from vae.system.files import read_json_lines

_FIGURES = {"psnr": ("PSNR", "{:.2f} dB"), "ssim": ("SSIM", "{:.4f}"), "lpips": ("LPIPS", "{:.4f}")}
_CONSTANTS = ("scaling_factor", "shift_factor")
_Z_CHANNELS = ("latent_channels", "z_dim", "z_channels")  # the names of several classes
README_NAME = "README.md"


def readme(folder: Path, content: Mapping[str, Any], license: str | None, measured: str) -> str:
    """The text for a VAE with `content` as its config.json, and with what `measured_by_run` returned."""
    name = content["_class_name"]
    z_channels = next(content[key] for key in _Z_CHANNELS if key in content)
    shape = f"{content.get('in_channels', 3)} image channels, {z_channels} latent channels"
    constants = [f"{key} {content[key]:.6g}" for key in _CONSTANTS if content.get(key) is not None]
    use = f'from diffusers import {name}\n\nvae = {name}.from_pretrained("{folder.name}")'
    if name == OWN_CLASS:  # the class of no other program
        use = f'import vae\n\nmodel = vae.load_vae("{folder.name}")'
    header = ["---", f"license: {license}", "tags: [vae]", "---", ""] if license else []
    lines = [*header, f"# {folder.name}", "", f"{', '.join([name, shape, *constants])}."]
    lines += ["", measured] if measured else []
    return "\n".join([*lines, "", "```python", use, "```", ""])


def measured_by_run(vae: Path, step: int | None) -> str:
    """One line with the last validation of the run that wrote `vae`, or that at `step`; "" without a run.

    `vae` is a checkpoint, the folder vae/ of the run, or its folder.
    """
    metrics = next((path for f in (vae, vae.parent) if (path := f / METRICS_NAME).is_file()), None)
    validation: dict[str, Any] = {}
    for record in () if metrics is None else read_json_lines(metrics):
        if record.get("kind") == "validation" and step in (None, record.get("step")):
            validation = record
    shown = _FIGURES.items()
    figures = [f"{name} {text.format(validation[key])}" for key, (name, text) in shown if key in validation]
    if not figures:
        return ""
    images, size = validation.get("images"), validation.get("image_size")
    return f"Its run measured {', '.join(figures)}: means of {images} validation images at {size} px."
