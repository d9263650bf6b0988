"""A dataset of the Hugging Face hub as a dataset of shards on this machine, for training and evaluation.

It is read once; later commands use the shards, without asking the hub. Each --val_split only has own
indexes. Nothing is written to the hub.
"""

import re
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from vae.config.prepare_flags import ShardConfig
from vae.config.trained_vae_flags import EvaluateConfig
from vae.shards.dataset_json import read_dataset
from vae.shards.hub_files import SCHEME, is_hub_dataset, parquet_files
from vae.shards.shard_cache import default_folder
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import why_not_writable

FOLDER_NAME = "vae-trainer-hub"


def local_dataset(text: str, flag: str, cache_dir: str | None, val_split: float = 0.0) -> str:
    """The path of the dataset.json with the images that a name of the hub means, written if it is missing.

    It is in FOLDER_NAME in --cache_dir. DataError if the hub has no such images, UserError if they cannot be
    read without other flags.
    """
    from vae.prepare.shard import TRAINING, run_shard
    from vae.prepare.shard_split import split_shards

    name = re.sub(r"[^\w.@-]", "--", text.removeprefix(SCHEME))
    root = Path(cache_dir) if cache_dir else default_folder()
    folder = root / FOLDER_NAME / name
    if problem := why_not_writable(folder):
        raise UserError(f"--cache_dir {root}: {folder} {problem}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):  # the processes of a run, and other runs
        if (folder / TRAINING).is_file():
            read_dataset(folder / TRAINING, flag=flag)
            console.info(f"{flag} {text}: uses its copy in {folder}; to read it anew, remove that folder")
        else:
            parquet_files(text, flag)  # a mistake is an error with this flag
            console.info(f"{flag} {text}: is read into {folder}")
            try:
                code = run_shard(ShardConfig(input_dir=text, output_dir=str(folder), val_split=0.0))
            except UserError as error:
                own = f"prepare_data.py --mode shard --input_dir {text} --output_dir DIR"
                raise type(error)(
                    f"{flag} {text}: {error} ({own} writes it elsewhere, and has more flags)"
                ) from None
            if code != 0:
                raise DataError(f"{flag} {text}: none of its images can be used")
        if val_split:
            folder = split_shards(folder, text, val_split)
    return str(folder / TRAINING)


def with_local_data(config: EvaluateConfig) -> EvaluateConfig:
    """The command with a local dataset.json instead of a dataset of the hub."""
    if not is_hub_dataset(config.data_path):
        return config
    return replace(config, data_path=local_dataset(config.data_path, "--data_path", config.cache_dir))
