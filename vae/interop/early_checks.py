"""Checks of a command of export_vae.py that need no PyTorch, so that mistakes are reported at once."""

import os
from pathlib import Path

from vae.config.trained_vae_flags import ExportConfig
from vae.data.manifest import is_manifest
from vae.images.folder import check_images
from vae.interop.vae_path import WEIGHTS_NAME, locate_vae
from vae.system.errors import UserError
from vae.system.files import check_folder, why_not_writable


def check_command(config: ExportConfig) -> None:
    """Raise UserError if the output is in use, or if a VAE or the folder of images does not exist."""
    _check_output(Path(config.output), config)
    for path in config.vae:
        locate_vae(Path(path), "--vae")
    if config.into is not None:
        located = locate_vae(Path(config.into), "--into")
        if config.is_single != (located.config is None):
            kind = "a folder" if located.config else "a .safetensors file"
            raise UserError(f"--into {config.into} gives {kind}: name one with --output, not {config.output}")
    if config.data_path is not None and not is_manifest(config.data_path):
        check_images(config.data_path)


def _check_output(output: Path, config: ExportConfig) -> None:
    if config.is_single and os.path.isdir(output):
        raise UserError(f"--output {output} is a folder: give a file, or a folder without .safetensors")
    if not config.is_single and os.path.exists(output) and not os.path.isdir(output):
        raise UserError(f"--output {output} is a file: give a folder, or a file that ends in .safetensors")
    targets = [output] if config.is_single else [output / WEIGHTS_NAME, output / "config.json"]
    if any(map(os.path.lexists, targets)) and not config.overwrite:
        raise UserError(f"--output {output} exists: give another path, or add --overwrite to replace it")
    if not config.is_single and not os.path.exists(targets[0]):
        check_folder(output, "export", "--output")
        return
    folder = output.parent if config.is_single else output
    if problem := why_not_writable(folder):
        raise UserError(f"--output {output}: {folder} {problem}")
