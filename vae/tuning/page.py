"""The HTML page of a search: Optuna's own plots as images, in the project's template."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import optuna
from markupsafe import Markup
from optuna.visualization import matplotlib as plots

from vae.html import data_uri, write_page
from vae.tuning.results import Noise, Row, shown, shown_difference

MOST_IN_LEGEND = 12


class Plot(NamedTuple):
    """A plot as an image, or why there is none."""

    title: str
    note: str
    uri: Markup | None


def write_search_page(
    path: Path,
    study: optuna.Study,
    found: Sequence[Row],
    best: Sequence[Row],
    objectives: Sequence[str],
    noise: dict[str, Noise],
    verdicts: Sequence[tuple[str, bool]],
) -> None:
    """Write the page of the trials so far; `best` is the best trial, or the Pareto front."""
    write_page(
        path,
        "search.html.jinja",
        objectives=objectives,
        best=[row.trial for row in best],
        verdicts=verdicts,
        noise=[
            (name, shown(name, one.mean), shown(name, one.spread), len(one.values))
            for name, one in noise.items()
        ],
        rows=[_cells(row, objectives) for row in found],
        plots=_plots(study, objectives) if found else [],
    )


def _cells(row: Row, objectives: Sequence[str]) -> dict[str, Any]:
    return {
        "trial": row.trial,
        "name": row.name,
        "state": row.state,
        "steps": row.steps,
        "values": [
            (shown(name, row.values[name]) if name in row.values else "-", shown_difference(name, row))
            for name in objectives
        ],
        "params": " ".join(f"{n}={_short(v)}" for n, v in row.params.items()),
        "reason": row.reason,
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plots(study: optuna.Study, objectives: Sequence[str]) -> list[Plot]:
    """Optuna's plots. One that needs more trials than there are is left out, with the reason."""
    drawn = []
    single = len(objectives) == 1
    for index, name in enumerate(objectives):
        chosen = {"target": _target(index), "target_name": name} if not single else {"target_name": name}
        drawn.append(
            _plot(f"History of {name}", lambda c=chosen: plots.plot_optimization_history(study, **c))
        )
        drawn.append(
            _plot(f"Importance for {name}", lambda c=chosen: plots.plot_param_importances(study, **c))
        )
        drawn.append(_plot(f"Slices of {name}", lambda c=chosen: plots.plot_slice(study, **c)))
    if single:
        drawn.append(_plot("Validations of all trials", lambda: plots.plot_intermediate_values(study)))
    elif len(objectives) <= 3:
        drawn.append(
            _plot("Pareto front", lambda: plots.plot_pareto_front(study, target_names=list(objectives)))
        )
    return drawn


def _target(index: int) -> Any:
    return lambda trial: trial.values[index]


def _plot(title: str, draw: Any) -> Plot:
    """The image of one plot. Optuna raises many kinds of errors if there are too few or equal trials."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draw()
            figure = pyplot.gcf()
            for axes in figure.axes:  # one entry per trial would be larger than the plot
                if (legend := axes.get_legend()) and len(legend.get_texts()) > MOST_IN_LEGEND:
                    legend.remove()
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=90, bbox_inches="tight")
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError) as error:
        return Plot(title, f"not yet: {error}", None)
    finally:
        pyplot.close("all")
    return Plot(title, "", data_uri(content.getvalue(), "image/png"))
