"""The training curves beside a checkpoint, from the records of its run."""

from pathlib import Path
from typing import Any

from vae.system.files import read_json_lines

CURVES_NAME = "metrics.jsonl"
OTHER_DATA = "other data"  # how a run continued: see vae/training/provenance.py
MAX_CURVE_RECORDS = 2000  # training records per VAE; more are thinned evenly, so that the page stays small


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl, training records thinned evenly; none if the file does not exist."""
    if not path.is_file():
        return []
    records = list(read_json_lines(path))
    train = [record for record in records if record.get("kind") == "train"]
    every = -(-len(train) // MAX_CURVE_RECORDS) or 1
    kept = {id(record) for record in train[::every]}
    return [record for record in records if record.get("kind") != "train" or id(record) in kept]


def branches(curves: list[dict[str, Any]]) -> str | None:
    """The steps from which a run used other images or transforms than before, and what changed."""
    runs = [record for record in curves if record.get("kind") == "run" and record.get("resume") == OTHER_DATA]
    return "; ".join(f"from step {run.get('step')}: {run.get('changed')}" for run in runs) or None
