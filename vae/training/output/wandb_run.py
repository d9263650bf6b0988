"""The run in Weights & Biases, for --wandb: it reads what TensorBoard gets. The package wandb is optional."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vae.system.addresses import public_text
from vae.system.errors import UserError
from vae.system.files import read_text, replace_text

ID_NAME = "wandb_run_id.txt"  # in the output folder: a resumed run continues the same run of W&B


def check_wandb_installed() -> None:
    """Raise UserError if the package is missing."""
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder `wandb` with the files of earlier runs is no package
        raise UserError("--wandb needs the package wandb: pip install wandb, or use --no-wandb")


def start_wandb(folder: Path, project: str, config: dict[str, Any]) -> Any:
    """Start the run, or continue the one of this output folder, before TensorBoard's writer is made.

    Returns W&B's run, which `finish` ends. Raises UserError if W&B refuses it.
    """
    check_wandb_installed()
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / ID_NAME
    arguments = sys.argv
    try:
        sys.argv = [public_text(word) for word in arguments]  # W&B uploads the command line
        run = import_module("wandb").init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder.resolve()),
            id=read_text(id_file).strip() if id_file.exists() else None,
            resume="allow",
            config=config,
            allow_val_change=True,
            sync_tensorboard=True,
        )
    except Exception as error:  # W&B raises many types, for example without a login
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--wandb: {reason.rstrip('.')}: run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    finally:
        sys.argv = arguments
    replace_text(id_file, f"{run.id}\n")
    return run
