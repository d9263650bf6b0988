"""--save_config: the options of a command as a JSON file for --config."""

import os
from pathlib import Path
from typing import Any

from vae.config.options import flatten
from vae.device import pick_device
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import write_json
from vae.training.setup import machine_of, resolve_options
from vae.training.stages import planned_stages


def save_config(given: dict[str, Any], path: str) -> None:
    """Resolve the `given` options and write all of them to `path`; UserError if something is wrong.

    The file contains no reference to other files of options, because it replaces them.
    """
    file = Path(path)
    if os.path.lexists(file):
        raise UserError(f"--save_config {file} exists: use another name, or delete it first")
    options = resolve_options(given, *machine_of(pick_device(given.get("device", "auto"))))
    if options.content is None:
        planned_stages(options.config)  # checks --progressive
    values = flatten(options.config)
    del values["config"], values["profile"]  # their options are in the file
    if values["train_minutes"] is not None:  # chosen by the run; in the file it would contradict
        del values["num_epochs"]
    if "val_split" not in given:  # given with a manifest that is split already, it is an error
        del values["val_split"]
    try:
        write_json(file, values, indent=2)
    except OSError as error:
        raise UserError(f"--save_config {file} cannot be written: {error.strerror}") from None
    command = console.command_line("python", "train_vae.py", "--config", file)
    console.info(f"{file}: {len(values)} options; nothing was trained. Train with: {command}")
