"""Finds everything out: the one place where the checks touch the machine."""

import importlib.util
from pathlib import Path

from vae.checks import folders as places
from vae.checks import machine, nvidia_smi, packages, torch_process
from vae.checks.facts import Facts, LoadedTorch
from vae.config.options import Config

SMI_SECONDS_QUICK = 3.0
TORCH_SECONDS = 300.0  # a first load from a cold disk under a virus scanner, and one compilation
TORCH_SECONDS_QUICK = 60.0


def gather(project: Path, quick: bool, output_dir: str, data_path: str | None) -> Facts:
    """All facts; PyTorch is loaded in a process of its own while the rest is looked at.

    `data_path` None stands for the trainer's own default, which need not exist.
    """
    images = Config().data.data_path if data_path is None else data_path
    child, loaded = None, None
    if _is_there("torch"):
        try:
            child = torch_process.start(project, quick)
        except OSError as error:
            loaded = LoadedTorch(error=f"a second Python cannot be started: {error.strerror or error}")
    facts = Facts(
        project=str(project),
        quick=quick,
        python=machine.gather_python(project),
        requirements=packages.gather_requirements(project),
        torch_files=packages.gather_torch_files(),
        loaded=None,
        smi=nvidia_smi.ask(SMI_SECONDS_QUICK if quick else nvidia_smi.PATIENT_SECONDS),
        host=machine.gather_host(),
        folders=(
            places.gather_folder("the runs", "--output_dir", output_dir, True, writes=True),
            places.gather_folder("the images", "--data_path", images, data_path is not None, writes=False),
            places.gather_folder("this project", "", str(project), True, writes=False),
        ),
        vgg=places.gather_vgg(),
    )
    if child is not None:
        outcome = child.finish(TORCH_SECONDS_QUICK if quick else TORCH_SECONDS)
        loaded = torch_process.read(outcome)
    return Facts(**{**vars(facts), "loaded": loaded})


def _is_there(package: str) -> bool:
    """Whether a package can be found, without loading it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
