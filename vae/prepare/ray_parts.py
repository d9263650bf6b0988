"""--engine ray of the modes that write a folder: their parts on all nodes, and then --mode merge."""

from contextlib import closing
from dataclasses import replace
from functools import partial

from vae.config.prepare_flags import MergeConfig, PreprocessConfig, ShardConfig
from vae.prepare.engine import Cluster, Work
from vae.prepare.merge import run_merge
from vae.prepare.parts import Part, count_parts, parts_folder
from vae.prepare.preprocess.preprocess_images import run_preprocess
from vae.prepare.shard.shard_images import run_shard
from vae.progress import Progress
from vae.system.errors import DataError

FolderConfig = PreprocessConfig | ShardConfig
PARTS_PER_NODE = 4  # so that a node that is slow, or lost, keeps few files waiting
MAX_ROUNDS = 3  # check, write, and write again what has changed


def run_on_ray(config: FolderConfig) -> int:
    """Run all parts of a mode and merge them; returns the exit code."""
    with closing(Cluster(config, partial(_part_worker, config))) as cluster:
        wanted = 1 if cluster.is_own else PARTS_PER_NODE * max(1, len(cluster.cores()))
        for _ in range(MAX_ROUNDS):
            total = count_parts(parts_folder(config)) or wanted
            parts = (str(Part(number, total)) for number in range(total))
            with Progress("parts", total, "part") as bar:
                for _ in cluster.run(parts):
                    bar.update()
            code = run_merge(MergeConfig(output_dir=config.output_dir, num_workers="auto"))
            if not parts_folder(config).exists():
                return code
    raise DataError(f"--input_dir {config.input_dir} changes while it is read: run the command again")


def _part_worker(config: FolderConfig, num_workers: int) -> Work:
    """A function of a part, which does it in so many processes."""

    def run(part: str) -> None:
        own = replace(config, part=part, num_workers=str(num_workers), engine="processes", ray_address=None)
        if isinstance(own, PreprocessConfig):
            run_preprocess(own)
        else:
            run_shard(own)

    return run
