"""Checks of a command of evaluate_vae.py that need no PyTorch, so that mistakes are reported at once."""

import importlib.util
from pathlib import Path

from vae.config.trained_vae_flags import EvaluateConfig
from vae.data.exclude_list import hash_of_list
from vae.images.decoding import parse_background
from vae.images.folder import check_images
from vae.interop.vae_path import WEIGHTS_NAME, locate_vae
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.shards.hub_files import is_hub_dataset
from vae.system.errors import UserError
from vae.system.files import check_folder

RFID_PACKAGES = {"torchmetrics": "torchmetrics", "torch_fidelity": "torch-fidelity"}  # module, package
COMMAND = "evaluate"  # in the marker of the output folder
RESULTS_NAME = "results.json"  # written last


def check_command(config: EvaluateConfig) -> None:
    """Raise UserError for a wrong colour, an unusable output, and what does not exist or is not installed."""
    parse_background(config.background)
    _check_output(Path(config.output_dir), config.overwrite)
    if config.promote is not None:
        _check_promoted(Path(config.promote), config.overwrite)
    for path in config.vae:
        locate_vae(Path(path), "--vae")
    if not is_hub_dataset(config.data_path):  # asking the hub takes its time
        check = read_dataset if is_dataset(config.data_path) else check_images
        check(config.data_path)
    hash_of_list(config.exclude)  # a list that cannot be read fails here
    if config.rfid:
        check_rfid_packages()


def check_rfid_packages() -> None:
    """Raise UserError if a package of --rfid is missing."""
    absent = [package for module, package in RFID_PACKAGES.items() if not importlib.util.find_spec(module)]
    if absent:
        install = f"python -m pip install {' '.join(absent)}"
        raise UserError(f"--rfid needs {' and '.join(absent)}: run {install}, or remove --rfid")


def _check_output(output_dir: Path, overwrite: bool) -> None:
    if check_folder(output_dir, COMMAND) and (output_dir / RESULTS_NAME).exists() and not overwrite:
        raise UserError(
            f"--output_dir {output_dir} contains an earlier comparison: add --overwrite, or use another"
        )


def _check_promoted(folder: Path, overwrite: bool) -> None:
    if not (folder / WEIGHTS_NAME).exists():
        check_folder(folder, "export", "--promote")
    elif not overwrite:
        raise UserError(
            f"--promote {folder} contains a VAE: add --overwrite to replace it, or use another folder"
        )
