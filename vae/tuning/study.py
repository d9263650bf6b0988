"""The Optuna study in a shared folder: its journal, what identifies it, and who works on which trial.

A running trial is held by a lock of its process. A trial without one is stale: the next process continues it
under the same number, in the same folder, from its last checkpoint.
"""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import Trial, TrialState

from vae.config.options import Config, flatten, names_where
from vae.config.tune_flags import DIRECTIONS, RANDOM_TRIALS, TuneConfig
from vae.data.manifest import is_manifest
from vae.images.folder import walk_images
from vae.shards.dataset_json import is_dataset, read_dataset
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import NotRegularError, open_appending, parse_json, sha256_of_file
from vae.system.folder_marker import claim_folder
from vae.training.output.folder_lock import LOCK_NAME
from vae.tuning.claims import try_claim, wait_for_claim
from vae.tuning.defaults import COMMAND
from vae.tuning.space import Choices, Range, Space, as_choice, options_of

TRIALS_NAME = "trials"  # folder
DEFAULTS = "defaults"  # name of trial 0
IDENTITY = "identity"  # attribute of the study
# Attributes of a trial, with the names of results.TrialRow.
NAME = "name"
STEPS = "steps"
SECONDS = "seconds"
REASON = "reason"
VALUES = "values"

JOURNAL_NAME = "journal.log"
STUDY_NAME = "vae"


class JournalLock(JournalFileOpenLock):
    """Ends with its process; Optuna's own locks stay for 30 s after theirs was killed.

    While it is held, an incomplete last record is removed, so that no record is written behind it.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._file: BinaryIO | None = None

    def acquire(self) -> bool:
        self._file = wait_for_claim(self._journal.parent / ".journal.lock")
        cut_torn_record(self._journal)
        return True

    def release(self) -> None:
        assert self._file is not None
        cut_torn_record(self._journal)  # of a full disk
        self._file.close()


def open_study(folder: Path, objectives: Sequence[str]) -> optuna.Study:
    """The study in the folder, or a new one; UserError for a link, damage or other objectives."""
    path = folder / JOURNAL_NAME
    try:
        open_appending(path).close()
    except NotRegularError as error:
        raise UserError(f"--output_dir {folder}: {JOURNAL_NAME}: {error.strerror}: remove it") from None
    directions: list[Any] = [DIRECTIONS[name] for name in objectives]
    try:
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path), JournalLock(path))),
            study_name=STUDY_NAME,
            directions=directions,
            load_if_exists=True,
        )
    except (ValueError, LookupError, AssertionError, TypeError, RecursionError) as error:
        raise UserError(
            f"--output_dir: the journal {path} is damaged: its records do not fit together "
            f"({type(error).__name__}): restore it from a copy, or search in another folder"
        ) from None
    if [direction.name.lower() for direction in study.directions] != directions:
        raise UserError(
            f"--objective {' '.join(objectives)}: {folder} has other objectives: use another --output_dir"
        )
    return study


def cut_torn_record(path: Path) -> None:
    """Remove an incomplete last line, of a killed process or a full disk."""
    with open_appending(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
        console.warning(f"{path}: removes the incomplete last record, of a killed process or a full disk")
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


class Claim(NamedTuple):
    """A trial that this process works on until the lock is closed."""

    trial: Trial
    params: dict[str, Any]  # options of train_vae.py
    lock: BinaryIO


class SharedStudy:
    """The study of one search, which several processes share."""

    def __init__(self, folder: Path, config: TuneConfig, space: Space) -> None:
        """Open the journal, or create it; UserError if it is damaged."""
        self.folder = folder
        self.config = config
        self.space = space
        claim_folder(folder, COMMAND)
        optuna.logging.set_verbosity(logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.study = open_study(folder, config.objective)

    def claims(self) -> BinaryIO:
        """The context in which one process at a time gets a trial or writes shared files."""
        return wait_for_claim(self.folder / ".claims.lock")

    def begin(self, identity: Mapping[str, Any], first: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that the study is of these data and this space; enqueue the `first` trials by name, once."""
        with self.claims():
            known = self.study.user_attrs.get(IDENTITY)
            if known is None:
                self.study.set_user_attr(IDENTITY, dict(identity))
            else:
                _check_same(self.folder, known, identity)
            names = {trial.user_attrs.get(NAME) for trial in self.study.get_trials(deepcopy=False)}
            for name, params in first.items():
                if name not in names:
                    stored = {key: as_choice(value) for key, value in params.items()}
                    self.study.enqueue_trial(stored, user_attrs={NAME: name})

    def trial_folder(self, number: int) -> Path:
        """The folder of a trial."""
        return self.folder / TRIALS_NAME / f"{number:04d}"

    def next_trial(self, pruner: optuna.pruners.BasePruner) -> Claim | None:
        """A stale trial, or a new one if fewer than --trials were begun; None if there is neither."""
        with self.claims():
            trials = self.study.get_trials(deepcopy=False)
            self.study.pruner = pruner
            # A number of its own for every draw: processes with equal seeds would draw the same.
            seed = (
                self.config.seed * 1_000_003 + len(trials) + sum(t.state.is_finished() for t in trials)
            ) % 2**32
            self.study.sampler = _sampler(self.config.trials, seed)
            for trial in trials:
                if trial.state == TrialState.RUNNING and (lock := self._lock(trial.number)):
                    return self._claim(Trial(self.study, trial._trial_id), lock)
            if sum(trial.state != TrialState.WAITING for trial in trials) >= self.config.trials:
                return None
            new = self.study.ask()
            lock = self._lock(new.number)
            assert lock is not None, "nobody else has seen this trial"
            return self._claim(new, lock)

    def running(self) -> int:
        """The number of trials that are being trained."""
        return len(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _lock(self, number: int) -> BinaryIO | None:
        folder = self.trial_folder(number)
        for ours in (folder.parent, folder):
            claim_folder(ours, COMMAND)
        return try_claim(folder / LOCK_NAME)

    def _claim(self, trial: Trial, lock: BinaryIO) -> Claim:
        params = {name: _suggest(trial, name, part) for name, part in self.space.items()}
        return Claim(trial, options_of(params), lock)


def _sampler(trials: int, seed: int) -> optuna.samplers.BaseSampler:
    """Random settings for a short search: it has too few trials for TPE to learn from."""
    if trials <= RANDOM_TRIALS:
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _suggest(trial: Trial, name: str, part: Range | Choices) -> Any:
    """The trial's value: the one that it has already, the enqueued one, or a new one."""
    if isinstance(part, Choices):
        return trial.suggest_categorical(name, [as_choice(value) for value in part.values])
    low, high = part.low, part.high
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=part.log, step=int(part.step or 1))
    return trial.suggest_float(name, low, high, log=part.log, step=part.step)


def identity_of(base: Config, space: Space, objectives: Sequence[str]) -> dict[str, Any]:
    """What trials must share to be comparable: data, space, objectives, and the options of the defaults."""
    paths = {"data_path": base.data.data_path, "val_path": base.data.val_path}
    images = {name: _fingerprint(path) for name, path in paths.items() if path}
    parts = {
        name: {"kind": type(part).__name__, **parse_json(json.dumps(part._asdict()))}
        for name, part in space.items()
    }
    values = flatten(base)
    options = {name: values[name] for name in names_where("scope", "result")}
    return {"images": images, "space": parts, "objective": list(objectives), "defaults": options}


def _fingerprint(path: str) -> str:
    """A hash of the names and sizes of a folder's images, of a manifest, or the version of a dataset."""
    if is_dataset(path):
        return read_dataset(path).version
    if is_manifest(path):
        return sha256_of_file(path)
    digest = hashlib.sha256()
    for name in sorted(walk_images(path)):
        digest.update(f"{name}\n{os.path.getsize(os.path.join(path, name))}\n".encode("utf-8", "replace"))
    return digest.hexdigest()


def _check_same(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the study in the folder is another one."""
    remedy = f"--output_dir {folder} contains a search of another"
    if known["images"] != now["images"]:
        raise UserError(f"{remedy} set of images: repeat its --data_path, or use another folder")
    if known["objective"] != now["objective"]:
        raise UserError(
            f"{remedy} --objective, {' '.join(known['objective'])}: repeat it, or use another folder"
        )
    for title, key in (("space", "space"), ("--config", "defaults")):
        before, after = known[key], now[key]
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if names:
            raise UserError(
                f'{remedy} {title}: "{names[0]}" was {_shown(before.get(names[0]))}, and is now '
                f"{_shown(after.get(names[0]))}: repeat the command of that search, or use another folder"
            )


def _shown(value: Any) -> str:
    """An option, or the part of a space, as users write it."""
    if not isinstance(value, dict) or "kind" not in value:
        return "not set" if value is None else json.dumps(value)
    return json.dumps(value.get("values", {name: value[name] for name in value if name != "kind"}))
