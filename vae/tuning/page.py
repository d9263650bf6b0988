"""The HTML page of a search: Optuna's own plots as images, in the project's template."""

import io
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
import optuna
from matplotlib.ticker import MaxNLocator
from optuna.visualization import matplotlib as plots

from vae.html import PageChart, page_chart, write_page
from vae.tuning.results import TrialRow, cells, shown

MAX_IN_LEGEND = 12
COUNTS = ("Trial", "Step")  # Optuna's labels of axes with whole numbers
MIN_COMPLETE = 10  # trials for importance and slices: of fewer, they show chance


def write_search_page(
    path: Path,
    study: optuna.Study,
    trials: Sequence[TrialRow],
    best: Sequence[TrialRow],
    objectives: Sequence[str],
    noise: dict[str, tuple[float, ...]],
    verdicts: Sequence[tuple[str, bool]],
) -> None:
    """Write the page of the trials so far; `best` is the best trial, or the Pareto front."""
    write_page(
        path,
        "search.html.jinja",
        objectives=objectives,
        best=[row.trial for row in best],
        verdicts=verdicts,
        noise=[(n, shown(n, fmean(v)), shown(n, stdev(v)), len(v)) for n, v in noise.items()],
        rows=[(row, [cells(name, row) for name in objectives]) for row in trials],
        plots=_plots(study, objectives) if trials else [],
    )


def _plots(study: optuna.Study, objectives: Sequence[str]) -> list[PageChart]:
    """Optuna's plots. One that needs more trials than there are is left out, with the reason."""
    complete = len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
    each: dict[str, tuple[Callable[..., object], int]] = {
        "History of": (plots.plot_optimization_history, 1),
        "Importance for": (plots.plot_param_importances, MIN_COMPLETE),
        "Slices of": (plots.plot_slice, MIN_COMPLETE),
    }
    single = len(objectives) == 1
    drawn = []
    for index, name in enumerate(objectives):
        options = {"target": None if single else partial(_value, index), "target_name": name}
        for kind, (draw, needed) in each.items():
            title = f"{kind} {name}"
            if complete >= needed:
                drawn.append(_plot(title, partial(draw, study, **options)))
            else:
                reason = f"not yet: {complete} of {needed} complete trials"
                drawn.append(PageChart(title, reason, title))
    if single:
        drawn.append(_plot("Validations of all trials", partial(plots.plot_intermediate_values, study)))
    elif len(objectives) <= 3:
        front = partial(plots.plot_pareto_front, study, target_names=list(objectives))
        drawn.append(_plot("Pareto front", front))
    return drawn


def _value(index: int, trial: optuna.trial.FrozenTrial) -> float:
    return trial.values[index]


def _plot(title: str, draw: Callable[[], object]) -> PageChart:
    """The image of one plot. Optuna raises many kinds of errors if there are too few or equal trials."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw()
            figure = pyplot.gcf()
            for axes in figure.axes:
                axes.set_title("")  # the heading of the page says it
                if axes.get_xlabel() in COUNTS:
                    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                # One entry per trial would be larger than the plot.
                if (legend := axes.get_legend()) and len(legend.get_texts()) > MAX_IN_LEGEND:
                    legend.remove()
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=90, bbox_inches="tight")
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError) as error:
        return PageChart(title, f"not yet: {error}", title)
    finally:
        pyplot.close("all")
    return page_chart(content.getvalue(), title, "", title)
