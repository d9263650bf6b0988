"""The records of a run in Weights & Biases, for --wandb. The package wandb is optional."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vae.system import console
from vae.system.addresses import public_text
from vae.system.errors import UserError
from vae.system.files import read_text, replace_text

if TYPE_CHECKING:
    import numpy as np

ID_NAME = "wandb_run_id.txt"  # in the output folder: a resumed run continues the same run of W&B


def check_wandb_installed() -> None:
    """Raise UserError if the package is missing."""
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder `wandb` with the files of earlier runs is no package
        raise UserError("--wandb needs the package wandb: pip install wandb, or use --no-wandb")


class WandbRun:
    """One run of W&B. If logging to it fails, that is reported once, and training continues without it."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        """Start the run, or continue the one of this output folder; UserError if W&B refuses it."""
        check_wandb_installed()
        self._wandb = import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / ID_NAME
        arguments = sys.argv
        try:
            sys.argv = [public_text(word) for word in arguments]  # W&B uploads the command line
            self._run = self._wandb.init(
                project=project,
                name=folder.resolve().name,
                dir=str(folder.resolve()),
                id=read_text(id_file).strip() if id_file.exists() else None,
                resume="allow",
                config=config,
                allow_val_change=True,
            )
            # Not W&B's own step, which may not decrease: a resumed run may begin at an earlier one.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # W&B raises many types, for example without a login
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"--wandb: {reason.rstrip('.')}: run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        finally:
            sys.argv = arguments
        replace_text(id_file, f"{self._run.id}\n")

    def record(self, prefix: str, step: int, values: Mapping[str, Any]) -> None:
        """Log one record with the names of TensorBoard."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        logged = {"step": step, **{f"{prefix}/{name}": value for name, value in numbers.items()}}
        if numbers:
            self._try(lambda: self._run.log(logged))

    def image(self, name: str, step: int, pixels: "np.ndarray") -> None:
        """Log uint8 `pixels` (H, W, 3)."""
        self._try(lambda: self._run.log({"step": step, name: self._wandb.Image(pixels)}))

    def close(self) -> None:
        """End the run; this waits for its upload."""
        self._try(lambda: self._run.finish())

    def _try(self, action: Callable[[], object]) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:  # whatever it is, a logger must not end a run
            self._run = None
            console.warning(f"--wandb: logging has stopped ({error}); training continues")
