"""The same options with several seeds, each run once, by whichever process of the search is free."""

import time
from pathlib import Path
from typing import Any

from vae.config.options import all_options
from vae.config.tune_flags import TuneConfig
from vae.system.errors import UserError
from vae.system.files import read_json, write_json
from vae.system.folder_marker import claim_folder
from vae.training.output.folder_lock import LOCK_NAME
from vae.tuning.claims import try_claim
from vae.tuning.defaults import COMMAND
from vae.tuning.study import SharedStudy
from vae.tuning.training_process import Kind, train

REPEATS_NAME = "repeats"  # folder
RESULT_NAME = "result.json"
WAIT_SECONDS = 1.0

Result = dict[str, float]  # the last validation


def repeat(
    shared: SharedStudy, name: str, options: dict[str, Any], config: TuneConfig, card: int | None
) -> list[Result]:
    """The last validations of these options with --seeds seeds, none of which the trials use."""
    first = options.get("seed", all_options()["seed"][1].default) + 1
    seeds = range(first, first + config.seeds)
    folders = {seed: shared.folder / REPEATS_NAME / f"{name}_seed_{seed}" for seed in seeds}
    while True:
        for seed, folder in folders.items():
            _run(folder, {**options, "seed": seed}, config, card)
        if all((folder / RESULT_NAME).exists() for folder in folders.values()):
            return [read_json(folder / RESULT_NAME) for folder in folders.values()]
        time.sleep(WAIT_SECONDS)  # another process trains the rest


def _run(folder: Path, options: dict[str, Any], config: TuneConfig, card: int | None) -> None:
    """Train unless it is done, or another process trains it; UserError if it does not finish."""
    if (folder / RESULT_NAME).exists():
        return
    for ours in (folder.parent, folder):
        claim_folder(ours, COMMAND)
    lock = try_claim(folder / LOCK_NAME)
    if lock is None:
        return
    with lock:
        if (folder / RESULT_NAME).exists():
            return
        ended = train(folder, options, card, lambda _record: False)
        if ended.kind is not Kind.FINISHED:
            raise UserError(f"{folder.name} cannot be trained: {ended.reason} (log: {folder})")
        missing = [name for name in config.objective if ended.last.get(name) is None]
        if missing:
            raise UserError(f"--objective {missing[0]} is not in the validations of {folder}: use another")
        write_json(folder / RESULT_NAME, ended.last)
