"""A search from top to bottom: measure the noise, train the trials, repeat the best one, report."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from vae.config.options import flatten
from vae.config.tune_flags import RANDOM_TRIALS, TuneConfig
from vae.system import console
from vae.system.addresses import public_options
from vae.system.errors import UserError
from vae.system.files import replace_text, write_json
from vae.training.child_runs import Validation, validations
from vae.tuning.claims import wait_for_claim
from vae.tuning.defaults import Base
from vae.tuning.page import write_search_page
from vae.tuning.presets import known_recipes
from vae.tuning.repeats import repeat
from vae.tuning.results import Gain, TrialRow, cells, shown, sign, smallest_gain
from vae.tuning.space import options_of
from vae.tuning.study import DEFAULTS, NAME, REASON, SECONDS, STEPS, VALUES, Claim, SharedStudy, identity_of
from vae.tuning.training_process import RUN_NAME, Ended, Kind, train

BEST_NAME = "best.json"
ROWS_NAME = "trials.jsonl"
PAGE_NAME = "report.html"
REDUCTION = 3  # of both pruners: a third of the trials goes on
FAILURES = 3  # in a row end the search: the reason is not in the settings
WAIT_SECONDS = 2.0  # for the trials of other processes
# What a trial that has not finished says about its settings. They are no failures of the search.
PRUNED = (Kind.STOPPED, Kind.DIVERGED, Kind.OUT_OF_MEMORY, Kind.REJECTED)


@dataclass
class Search:
    """What the functions of a search share."""

    config: TuneConfig
    base: Base
    shared: SharedStudy
    # of the defaults, by objective: per seed
    noise: dict[str, tuple[float, ...]] = field(default_factory=dict)
    default_steps: int = 0  # optimizer steps of a whole run of the defaults
    default_curve: list[Validation] = field(default_factory=list)  # of trial 0, once it is complete
    printed: set[int] = field(default_factory=set)
    verdicts: list[tuple[str, bool]] = field(default_factory=list)  # texts, and whether a gain is shown

    @property
    def card(self) -> int | None:
        return self.config.cards[0] if self.config.cards else None

    @property
    def pruner(self) -> str:
        if len(self.config.objective) > 1:
            return "none"
        automatic = "none" if self.config.trials <= RANDOM_TRIALS else "asha"
        return automatic if self.config.pruner == "auto" else self.config.pruner


def search(config: TuneConfig, base: Base) -> None:
    """Run or join the search in --output_dir, until all trials are trained and the best one is repeated."""
    folder = Path(config.output_dir)
    shared = SharedStudy(folder, config, base.space)
    values = flatten(base.config)
    first = {DEFAULTS: {name: values[name] for name in base.space}, **known_recipes(base.space, base.config)}
    shared.begin(identity_of(base.config, base.space, config.objective), first)
    run = Search(config, base, shared)
    try:
        _measure_noise(run)
        console.info(_header(config.objective))
        _train_trials(run)
        _compare_best(run)
    finally:
        if shared.study.trials:
            report(run)
    console.info(f"page    {folder / PAGE_NAME}")


def _measure_noise(run: Search) -> None:
    """Train the defaults with --seeds other seeds than theirs; the last one of them has all steps."""
    console.info(f"noise   the defaults with {run.config.seeds} seeds")
    results = repeat(run.shared, DEFAULTS, run.base.options, run.config, run.card)
    run.noise = {name: tuple(result[name] for result in results) for name in run.config.objective}
    run.default_steps = int(results[0]["step"])
    for name, values in run.noise.items():
        listed = ", ".join(shown(name, value) for value in values)
        mean, noise = shown(name, fmean(values)), shown(name, stdev(values))
        console.info(f"        {name} {listed}: mean {mean}, noise {noise}")
        least = shown(name, smallest_gain(values))
        console.info(f"        a gain below about {least} will not be shown: --seeds (now {len(values)})")


def _train_trials(run: Search) -> None:
    """Train trials until all are done, those of other processes included."""
    failures = 0
    _print_new(run)
    while True:
        claim = run.shared.next_trial(_pruner(run))
        if claim is None:
            if not run.shared.running():
                return
            time.sleep(WAIT_SECONDS)  # for the others: their trials are ours if they are killed
            _print_new(run)
            continue
        with claim.lock:
            state = _train_trial(run, claim)
        failures = failures + 1 if state == TrialState.FAIL else 0
        report(run)
        _print_new(run)
        if failures == FAILURES:
            raise UserError(
                f"{FAILURES} trials in a row have failed, the last one with: "
                f"{run.shared.study.trials[claim.trial.number].user_attrs[REASON]}; the logs are in "
                f"{run.shared.trial_folder(claim.trial.number)}"
            )


def _pruner(run: Search) -> optuna.pruners.BasePruner:
    """The pruner; resources are optimizer steps."""
    if run.pruner == "none":
        return optuna.pruners.NopPruner()
    least = run.config.min_steps or max(1, run.default_steps // REDUCTION**2)
    if run.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=REDUCTION)
    return optuna.pruners.HyperbandPruner(
        min_resource=least, max_resource=max(least, run.default_steps), reduction_factor=REDUCTION
    )


def _train_trial(run: Search, claim: Claim) -> TrialState:
    """Train one trial and record its outcome."""
    trial = claim.trial
    folder = run.shared.trial_folder(claim.trial.number)
    is_default = trial.user_attrs.get(NAME) == DEFAULTS
    started = time.monotonic() - trial.user_attrs.get(SECONDS, 0.0)
    watch = _reporter(run, trial, may_stop=not is_default)
    try:
        ended = train(folder, {**run.base.options, **claim.params}, run.card, watch)
    finally:
        trial.set_user_attr(SECONDS, round(time.monotonic() - started, 1))
    if is_default and ended.kind is not Kind.FINISHED:
        raise UserError(f"the defaults cannot be trained: {ended.reason} (log: {folder})")
    return _record(run, trial, ended)


def _reporter(run: Search, trial: Trial, may_stop: bool) -> Callable[[Validation], bool]:
    """A function that reports validations to the pruner, and returns whether it stops the trial."""
    if len(run.config.objective) > 1:  # Optuna has no intermediate values then
        return lambda _record: False
    name = run.config.objective[0]
    reported = set(run.shared.study.trials[trial.number].intermediate_values)

    def watch(record: Validation) -> bool:
        step = int(record["step"])
        value = record.get(name)
        if value is None:
            return False
        if step not in reported:
            reported.add(step)
            trial.report(value, step)
        # The defaults compete, too. A run that is about to end is not worth stopping.
        return run.pruner != "none" and trial.should_prune() and may_stop and step < run.default_steps

    return watch


def _record(run: Search, trial: Trial, ended: Ended) -> TrialState:
    """Write the outcome into the journal."""
    values = {name: ended.last[name] for name in run.config.objective if ended.last.get(name) is not None}
    trial.set_user_attr(STEPS, int(ended.last.get("step", 0)))
    trial.set_user_attr(VALUES, values)
    kind, reason = ended.kind, ended.reason
    if kind is Kind.FINISHED and len(values) < len(run.config.objective):
        kind = Kind.FAILED
        reason = f"no validation has measured {' and '.join(run.config.objective)}"
    state = TrialState.COMPLETE if kind is Kind.FINISHED else TrialState.FAIL
    if kind in PRUNED:
        state, reason = TrialState.PRUNED, f"{kind.value}: {reason}" if reason else kind.value
    trial.set_user_attr(REASON, reason)
    complete = list(values.values()) if state == TrialState.COMPLETE else None
    run.shared.study.tell(trial, complete, state=state)
    return state


def rows(run: Search) -> list[TrialRow]:
    """The trials that were begun, as plain data; trial 0 has the defaults."""
    begun = [t for t in run.shared.study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]
    if begun and begun[0].state == TrialState.COMPLETE and not run.default_curve:
        run.default_curve = list(validations(run.shared.trial_folder(0) / RUN_NAME))
    return [
        TrialRow(
            trial=trial.number,
            state=trial.state.name.lower(),
            params=options_of(trial.params),
            folder=str(run.shared.trial_folder(trial.number).relative_to(run.shared.folder)),
            difference=_difference(trial, run.default_curve),
            noise={name: stdev(values) for name, values in run.noise.items()},
            **trial.user_attrs,
        )
        for trial in begun
    ]


def _difference(trial: FrozenTrial, defaults: Sequence[Validation]) -> dict[str, float]:
    """A complete trial against the end of the defaults, and a stopped one against the same step of theirs."""
    steps = math.inf if trial.state == TrialState.COMPLETE else trial.user_attrs.get(STEPS, 0)
    reference: Validation = next((record for record in reversed(defaults) if record["step"] <= steps), {})
    values = trial.user_attrs.get(VALUES, {})
    return {name: v - reference[name] for name, v in values.items() if reference.get(name) is not None}


def front(run: Search, all_rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The trials of the Pareto front, best first in the first objective; for one objective the best trial."""
    objective, *others = run.config.objective
    numbers = {trial.number for trial in run.shared.study.best_trials}
    best = [row for row in all_rows if row.trial in numbers and row.state == "complete"]
    best.sort(key=lambda row: (-sign(objective) * row.values[objective], row.trial))
    return best if others else best[:1]


def report(run: Search) -> None:
    """Write trials.jsonl, best.json and the page; other processes write the same files."""
    objectives = run.config.objective
    with run.shared.claims():
        all_rows = rows(run)
        best = front(run, all_rows)
        replace_text(run.shared.folder / ROWS_NAME, (json.dumps(asdict(row)) + "\n" for row in all_rows))
        if best:
            best_options = public_options({**run.base.options, **best[0].params})
            write_json(run.shared.folder / BEST_NAME, best_options, indent=2)
    with wait_for_claim(run.shared.folder / ".page.lock"):  # drawing takes seconds: others may begin trials
        all_rows = rows(run)
        best = front(run, all_rows)
        page = run.shared.folder / PAGE_NAME
        write_search_page(page, run.shared.study, all_rows, best, objectives, run.noise, run.verdicts)


def _compare_best(run: Search) -> None:
    """Repeat the best trial with the seeds of the noise, and print whether it is better."""
    best = front(run, rows(run))
    if not best:
        raise UserError(f"no trial of {run.config.trials} has finished: see {run.shared.folder / ROWS_NAME}")
    if len(best) > 1:
        numbers = ", ".join(str(row.trial) for row in best)
        console.info(f"front   trials {numbers}; the first one has the best {run.config.objective[0]}")
    if best[0].name == DEFAULTS:
        run.verdicts.append(("the defaults: no trial was better, NO GAIN is shown", False))
        console.info(f"best    {run.verdicts[0][0]}")
        return
    options = {**run.base.options, **best[0].params}
    console.info(f"best    trial {best[0].trial}, repeated with the {run.config.seeds} seeds of the defaults")
    results = repeat(run.shared, f"trial_{best[0].trial:04d}", options, run.config, run.card)
    for name in run.config.objective:
        gain = Gain(name, run.noise[name], tuple(result[name] for result in results))
        run.verdicts.append((str(gain), gain.is_shown))
        console.info(f"gain    {gain}")
    console.info(f"options {run.shared.folder / BEST_NAME}, for train_vae.py --config")


def _header(objectives: Sequence[str]) -> str:
    columns = "".join(f"{name:>12}{'against the defaults':>30}" for name in objectives)
    return f"{'trial':>5} {'state':<9}{'steps':>7}{columns}  settings"


def _print_new(run: Search) -> None:
    """Print a line for each trial that has ended since the last time, in any process."""
    for row in rows(run):
        if row.trial in run.printed or row.state == "running":
            continue
        run.printed.add(row.trial)
        columns = "".join("{:>12}{:>30}".format(*cells(name, row)) for name in run.config.objective)
        settings = row.name or row.settings
        reason = f"  [{row.reason}]" if row.reason else ""
        console.info(f"{row.trial:>5} {row.state:<9}{row.steps:>7}{columns}  {settings}{reason}")
