"""Optuna's own plots of a study, as PNG files."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.visualization import matplotlib as plots

from vae.system.files import replace_bytes

MIN_COMPLETE = 10  # trials for importances and slices: of fewer, they show chance


def write_plots(folder: Path, study: optuna.Study, objectives: Sequence[str], params: list[str]) -> None:
    """Write what the complete trials are enough for, of which there is at least one."""
    matplotlib.use("agg")
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, name in enumerate(objectives):
            target = None if len(objectives) == 1 else lambda trial, index=index: trial.values[index]
            plots.plot_optimization_history(study, target=target, target_name=name)
            _save(folder / f"history_{name}.png")
            if len(complete) >= MIN_COMPLETE:
                evaluator = PedAnovaImportanceEvaluator()
                plots.plot_param_importances(study, evaluator, params, target=target, target_name=name)
                _save(folder / f"importances_{name}.png")
                plots.plot_slice(study, target=target, target_name=name)
                _save(folder / f"slices_{name}.png")
        if len(objectives) == 1:
            plots.plot_intermediate_values(study)
            _save(folder / "validations.png")
        elif len(objectives) <= 3:
            plots.plot_pareto_front(study, target_names=list(objectives))
            _save(folder / "pareto_front.png")


def _save(path: Path) -> None:
    from matplotlib import pyplot

    content = io.BytesIO()
    pyplot.gcf().savefig(content, format="png", dpi=90, bbox_inches="tight")
    pyplot.close("all")
    replace_bytes(path, content.getvalue())
