"""Gathers all facts: the only place where the checks read the machine."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from vae.checks import machine, nvidia_smi, packages, torch_process
from vae.checks.facts import Facts, LoadedTorch
from vae.config.options import Config

SMI_SECONDS_QUICK = 3.0
TORCH_SECONDS = 300.0  # a first import from a cold disk under a virus scanner, and one compilation
TORCH_SECONDS_QUICK = 60.0


def gather(project: Path, quick: bool, output_dir: str, data_path: str | None) -> Facts:
    """All facts; a child process imports PyTorch while this process gathers the rest.

    If `data_path` is None, the trainer's default is checked; that folder does not have to exist.
    """
    images = Config().data.data_path if data_path is None else data_path
    child, loaded = None, LoadedTorch(installed=False)
    if _is_installed("torch"):
        try:
            child = torch_process.start(project, quick)
        except OSError as error:
            loaded = LoadedTorch(error=f"a second Python cannot be started: {error.strerror or error}")
    vgg = machine.vgg_path()
    facts = Facts(
        project=str(project),
        quick=quick,
        python=machine.gather_python(project),
        requirements=packages.gather_requirements(project),
        torch_files=packages.gather_torch_files(),
        loaded=loaded,
        smi=nvidia_smi.query(SMI_SECONDS_QUICK if quick else nvidia_smi.PATIENT_SECONDS),
        host=machine.gather_host(),
        folders=(
            machine.gather_folder("--output_dir", output_dir, given=True, writes=True),
            machine.gather_folder("--data_path", images, given=data_path is not None, writes=False),
        ),
        vgg_path=str(vgg),
        vgg_bytes=vgg.stat().st_size if os.path.exists(vgg) else None,
    )
    if child is None:
        return facts
    process = child.finish(TORCH_SECONDS_QUICK if quick else TORCH_SECONDS)
    return replace(facts, loaded=torch_process.parse(process))


def _is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
