"""A search from top to bottom: an Optuna study in a folder, whose trials are runs of train_vae.py."""

import io
import json
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from filelock import FileLock, Timeout
from optuna.distributions import distribution_to_json
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from vae.charts import write_chart
from vae.config.flags import read_json
from vae.config.options import Config, LossConfig, all_options, flatten, image_weights
from vae.config.resolve import PER_COMMAND
from vae.config.tune_flags import DIRECTIONS, LOSS, RANDOM_TRIALS, TuneConfig
from vae.system import console
from vae.system.addresses import public_options, public_text
from vae.system.errors import UserError
from vae.system.files import check_folder, claim_folder, replace_text, write_json
from vae.training.datasets import find_images
from vae.training.early_checks import Command, with_local_datasets
from vae.training.early_checks import check_command as check_training
from vae.training.resolved_options import resolve_options
from vae.tuning.space import Space, as_choice, check_comparable, options_of, read_space, suggest
from vae.tuning.training_process import TrialError, Validation, train

COMMAND = "tune"  # its name in the marker of the folder
JOURNAL_NAME = "journal.log"
BEST_NAME = "best.json"
ROWS_NAME = "trials.jsonl"
REDUCTION = 3  # of the pruner: a third of the trials goes on
# Options of a whole command: the search sets them for each trial.
_OF_COMMAND = ("output_dir", "resume_from", "new_stage", "find_lr", "find_lr_steps")
# Attributes of a trial.
DEFAULTS = "defaults"  # whether it has the options of --config
REASON = "reason"  # why it was pruned or has failed


class Base(NamedTuple):
    """The defaults of a search, and what is searched around them."""

    options: dict[str, Any]  # as given
    config: Config
    space: Space
    num_images: int  # number of training images


def check_command(config: TuneConfig) -> Base:
    """The defaults and the space; UserError for mistakes in the command, before anything is written."""
    folder = Path(config.output_dir)
    check_folder(folder, COMMAND)
    options = read_json(Path(config.config)) if config.config else {}
    options = {name: value for name, value in options.items() if name not in _OF_COMMAND}
    if config.data_path is not None:
        options["data_path"] = config.data_path
    if options.get("split_seed") is None:  # all trials have the same validation images
        options["split_seed"] = options.get("seed", all_options()["seed"][1].default)
    options = with_local_datasets(options)
    base = resolve_options(Command.of(options), has_gpu=False, machine_settings={}).config
    if options.get("progressive"):
        raise UserError('--config: "progressive" has stages of several sizes: search one stage at a time')
    check_training({**options, "output_dir": str(folder / "trials" / "new")})
    training, validation = find_images(base, val_split_given="val_split" in options)
    if validation is None:
        shown = public_text(" ".join(base.data.data_path))
        raise UserError(
            f"--data_path {shown}: no image is set aside for validation, "
            'so trials cannot be compared: give "val_split" 0.1 in --config, "val_path", or more images'
        )
    loss = base.loss
    if "lpips" in config.objective and (loss.perceptual_weight == 0 or loss.perceptual_net == "dinov2-s"):
        raise UserError(
            "--objective lpips is measured only if LPIPS is part of the loss: raise perceptual_weight in "
            "--config, with a perceptual_net other than dinov2-s, or use another objective"
        )
    space = read_space(Path(config.space) if config.space else None, base)
    if LOSS in config.objective:
        check_comparable(space, loss)
    return Base(options, base, space, training.num_images)


def search(config: TuneConfig, base: Base) -> None:
    """Run, continue or join the search in --output_dir, until it has --trials trials."""
    optuna.logging.set_verbosity(logging.ERROR)  # its warnings have the traceback of each failed trial
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    run = Search(config, base)
    if not run.is_complete():
        run.study.optimize(run.train, catch=(TrialError,), callbacks=[run.report])
    run.write_files()
    best = run.best()
    if not best and run.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        console.info("all trials have begun in other processes: their results are in the same folder")
        return
    if not best:
        raise UserError(f"none of the {config.trials} trials has finished: see {run.folder / ROWS_NAME}")
    if len(best) > 1:
        numbers = ", ".join(str(trial.number) for trial in best)
        console.info(f"front   trials {numbers}; the first one has the best {config.objective[0]}")
    console.info(f"best    trial {best[0].number}: {run.text_of(best[0])}")
    console.info(f"options {run.folder / BEST_NAME}, for train_vae.py --config")


class Search:
    """One process of a search: its trials, and the files that it writes after each of them."""

    def __init__(self, config: TuneConfig, base: Base) -> None:
        """Open the study, or create it; UserError if it is another one or damaged."""
        self.config = config
        self.base = base
        self.folder = Path(config.output_dir)
        claim_folder(self.folder, COMMAND)
        (self.folder / "trials").mkdir(exist_ok=True)
        with FileLock(self.folder / ".start.lock"):
            self.study = _open_study(self.folder, _identity(config, base))
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if self._is_killed(trial):
                    self.study.tell(trial.number, state=TrialState.FAIL)
            states = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
            trials = self.study.get_trials(deepcopy=False, states=states)
            if not any(DEFAULTS in trial.user_attrs for trial in trials):
                values = flatten(base.config)
                defaults = {name: as_choice(values[name]) for name in base.space if values[name] is not None}
                self.study.enqueue_trial(defaults, user_attrs={DEFAULTS: True})

    def _lock_path(self, trial: FrozenTrial | Trial) -> Path:
        return self.folder / "trials" / f".{trial.number:04d}.lock"

    def _is_killed(self, trial: FrozenTrial) -> bool:
        """Whether the process of a running trial has ended: nobody holds the lock."""
        lock = self._lock_path(trial)
        if not lock.exists():  # the trial begins
            return False
        try:
            with FileLock(lock, timeout=0):
                return True
        except Timeout:
            return False

    def is_complete(self) -> bool:
        """Whether --trials trials have begun."""
        trials = self.study.get_trials(deepcopy=False)
        return sum(trial.state != TrialState.WAITING for trial in trials) >= self.config.trials

    def train(self, trial: Trial) -> tuple[float, ...]:
        """The objective of the study: train one trial; returns the values of its last validation."""
        with FileLock(self._lock_path(trial)):
            is_default = DEFAULTS in trial.user_attrs
            # A seed of its own for each trial: processes with equal seeds would draw the same.
            self.study.sampler = _sampler(self.config, trial.number)
            self.study.pruner = optuna.pruners.NopPruner() if is_default else self._pruner()
            values = flatten(self.base.config)
            params = {
                name: suggest(trial, name, part)
                for name, part in self.base.space.items()
                if not (is_default and values[name] is None)
            }
            run = self.folder / "trials" / f"{trial.number:04d}"
            options = {**self.base.options, **options_of(params)}
            try:
                last = train(run, options, lambda record: self._should_stop(trial, record))
                values_of = {name: self._value(name, last) for name in self.config.objective}
                missing = [name for name, value in values_of.items() if value is None]
                if missing:
                    raise TrialError(f"no validation has measured {' and '.join(missing)}")
                return tuple(value for value in values_of.values() if value is not None)
            except (TrialError, optuna.TrialPruned) as error:
                trial.set_user_attr(REASON, str(error))
                if is_default:
                    raise UserError(f"the defaults cannot be trained: {error}: see {run}.log") from None
                raise

    def _value(self, objective: str, record: Validation) -> float | None:
        """The value of an objective in a validation, if it has measured it."""
        return weighted_loss(record, self.base.config.loss) if objective == LOSS else record.get(objective)

    def _should_stop(self, trial: Trial, record: Validation) -> bool:
        """Report a validation to the pruner; Optuna has no intermediate values of several objectives."""
        value = self._value(self.config.objective[0], record)
        if len(self.config.objective) > 1 or value is None:
            return False
        trial.report(value, int(record["step"]))
        return trial.should_prune()

    def _pruner(self) -> optuna.pruners.BasePruner:
        """The pruner; resources are optimizer steps, those of the first complete trial."""
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        steps = next((trial.last_step for trial in complete if trial.last_step), 0)
        kind = self.config.pruner
        if kind == "auto":
            kind = "none" if self.config.trials <= RANDOM_TRIALS else "asha"
        if kind == "none" or not steps:
            return optuna.pruners.NopPruner()
        least = self.config.min_steps or max(1, steps // REDUCTION**2)
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=REDUCTION)

    def best(self) -> list[FrozenTrial]:
        """The best trial, or the Pareto front, best first in the first objective."""
        sign = -1 if DIRECTIONS[self.config.objective[0]] == "maximize" else 1
        best = sorted(self.study.best_trials, key=lambda trial: (sign * trial.values[0], trial.number))
        return best if len(self.config.objective) > 1 else best[:1]

    def report(self, _study: Study, trial: FrozenTrial) -> None:
        """Print a trial that has ended, write the files of the search, and end it if it is complete."""
        state = f"{trial.state.name.lower():<8}"
        console.info(f"trial {trial.number:>4}  {state}  {self.text_of(trial)}")
        self.write_files()
        if self.is_complete():
            self.study.stop()

    def write_files(self) -> None:
        """Write trials.jsonl, best.json and the plots; other processes write the same files."""
        replace_text(self.folder / ROWS_NAME, map(_row, self.study.get_trials(deepcopy=False)))
        if best := self.best():
            options = {**self.base.options, **options_of(best[0].params)}
            write_json(self.folder / BEST_NAME, public_options(options), indent=2)
            write_plots(self.folder, self.study, self.config.objective, list(self.base.space))

    def text_of(self, trial: FrozenTrial) -> str:
        """The values, settings and reason of a trial that has ended."""
        values = dict(zip(self.config.objective, trial.values or (), strict=False))
        shown = " ".join(
            f"{name}={value:.5g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in {**values, **trial.params}.items()
        )
        reason = f" [{trial.user_attrs[REASON]}]" if REASON in trial.user_attrs else ""
        return f"{shown}{' (the defaults)' if DEFAULTS in trial.user_attrs else ''}{reason}"


def weighted_loss(record: Validation, loss: LossConfig) -> float | None:
    """The validation loss with the weights of `loss`, which those of a trial may differ from."""
    terms = [(weight, record.get(f"loss_{name}")) for name, weight in image_weights(loss).items() if weight]
    values = [weight * value for weight, value in terms if value is not None]
    return sum(values) if len(values) == len(terms) else None


def _open_study(folder: Path, identity: dict[str, Any]) -> Study:
    """The study in the folder, or a new one; UserError if it is damaged or that of another command."""
    path = folder / JOURNAL_NAME
    lock = JournalFileOpenLock(str(path))  # works on Windows, too
    try:
        _check_last_line(path, lock)
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path), lock)),
            study_name="vae",
            directions=[DIRECTIONS[name] for name in identity["--objective"]],  # type: ignore[misc]
            load_if_exists=True,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--output_dir {folder}: Optuna cannot read {path} ({str(error) or type(error).__name__:.80}): "
            "restore a copy of that file, or use another folder"
        ) from error
    known = study.user_attrs.get("identity", identity)
    if changed := [name for name in {**known, **identity} if known.get(name) != identity.get(name)]:
        raise UserError(
            f"--output_dir {folder} contains another search, with other values of {changed[0]}: "
            "repeat the command of that search, or use another folder"
        )
    study.set_user_attr("identity", identity)
    return study


def _check_last_line(path: Path, lock: JournalFileOpenLock) -> None:
    """Raise ValueError if the last line of a journal is damaged: Optuna would write behind it."""
    path.touch()
    lock.acquire()  # another process may be writing
    try:
        last = path.read_bytes().splitlines(keepends=True)[-1:]
    finally:
        lock.release()
    with suppress(ValueError):
        if all(line.endswith(b"\n") and json.loads(line) for line in last):
            return
    raise ValueError("its last line is damaged: delete that line")


def _identity(config: TuneConfig, base: Base) -> dict[str, Any]:
    """Return all that trials must share; the paths of files are left out: they differ between machines."""
    options = flatten(base.config)
    apart = {*PER_COMMAND, "data_path", "val_path", "perceptual_weights", "sample_images", "teacher"}
    return {
        "--objective": list(config.objective),
        **{f"--space {name}": distribution_to_json(part) for name, part in base.space.items()},
        **{f"--config {name}": value for name, value in options.items() if name not in apart},
        "the number of training images": base.num_images,
    }


def _sampler(config: TuneConfig, number: int) -> optuna.samplers.BaseSampler:
    """Random settings for a short search: it has too few trials for TPE to learn from."""
    seed = (config.seed * 1_000_003 + number) % 2**32
    if config.trials <= RANDOM_TRIALS:
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _row(trial: FrozenTrial) -> str:
    """A line of trials.jsonl."""
    row = {"trial": trial.number, "state": trial.state.name.lower(), "values": trial.values}
    return json.dumps({**row, "params": options_of(trial.params), **trial.user_attrs}) + "\n"


# ---- plots -------------------------------------------------------------------------------------------------
MIN_COMPLETE = 10  # trials for importances and slices: of fewer, they show chance


def write_plots(folder: Path, study: optuna.Study, objectives: Sequence[str], params: list[str]) -> None:
    """Write what the complete trials are enough for, of which there is at least one."""
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    for index, name in enumerate(objectives):
        target = None if len(objectives) == 1 else lambda trial, index=index: trial.values[index]
        of_values = {"target": target, "target_name": name}
        _write_plot(folder / f"history_{name}.png", "plot_optimization_history", study, **of_values)
        if len(complete) >= MIN_COMPLETE:
            evaluator = PedAnovaImportanceEvaluator()
            path = folder / f"importances_{name}.png"
            _write_plot(path, "plot_param_importances", study, evaluator, params, **of_values)
            _write_plot(folder / f"slices_{name}.png", "plot_slice", study, **of_values)
    if len(objectives) == 1:
        _write_plot(folder / "validations.png", "plot_intermediate_values", study)
    elif len(objectives) <= 3:
        _write_plot(folder / "pareto_front.png", "plot_pareto_front", study, target_names=list(objectives))


def _write_plot(path: Path, function: str, *arguments: Any, **options: Any) -> None:
    """Write a plot of optuna.visualization.matplotlib, which draws with pyplot."""

    def draw() -> bytes:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
        from optuna.visualization import matplotlib as plots

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(plots, function)(*arguments, **options)
        content = io.BytesIO()
        pyplot.gcf().savefig(content, format="png", dpi=90, bbox_inches="tight")
        pyplot.close("all")
        return content.getvalue()

    write_chart(path, draw)
