"""Charts: ranges of axes, values that are not numbers, and files that are the same again."""

import os
import subprocess
import sys

import pytest

from tests.harness.runs import ROOT
from vae.charts import BLUE, Line, draw_lines, finite_points, new_figure, png, value_range, write_chart


def test_range_contains_all_values_except_those_above_the_quantile():
    low, high = value_range([0.1, 9.0] + [0.2] * 200, quantile=0.99)
    assert low < 0.1
    assert 0.2 < high < 1
    low, high = value_range([0.1, 9.0])
    assert low < 0.1
    assert high > 9
    low, high = value_range([3.0])  # one value needs a range too
    assert low < 3 < high


def test_missing_and_infinite_values_are_left_out():
    content = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": float("inf")}]
    assert finite_points(content, "a") == [(1.0, 1.0)]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(0, 1.0), (5, 1e5)]])
def test_same_values_give_the_same_file(points, scale):
    files = []
    for _ in range(2):
        figure, (axes,) = new_figure()
        axes.set_yscale(scale)
        draw_lines(axes, [Line(BLUE, points, "name with $ and <")])
        files.append(png(figure))
    assert files[0] == files[1]


OF_A_USER = """\
import io, os, sys
from pathlib import Path
from vae.charts import BLUE, Line, draw_lines, new_figure, png, write_chart
def draw():
    figure, (axes,) = new_figure()
    draw_lines(axes, [Line(BLUE, [(0, 1.0), (1, 2.0)], "a name")])
    return png(figure)
print(write_chart(Path(sys.argv[1]), draw), "matplotlib.pyplot" in sys.modules, os.environ.get("MPLBACKEND"))
"""


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no backend", None])
def test_settings_of_a_notebook_and_of_a_user_change_nothing(tmp_path, backend):
    """Not MPLBACKEND, with or without its package, nor a matplotlibrc: the picture is the same."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.dpi: 10\nlines.linewidth: 20\n")
    settings = {"MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": str(ROOT), "MPLBACKEND": backend}
    environ = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    words = [sys.executable, "-c", OF_A_USER, tmp_path / "a.png"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"True False {backend}\n", done.stderr
    figure, (axes,) = new_figure()
    draw_lines(axes, [Line(BLUE, [(0, 1.0), (1, 2.0)], "a name")])
    assert (tmp_path / "a.png").read_bytes() == png(figure)


def test_picture_that_cannot_be_drawn_is_a_warning(tmp_path, capsys):
    def fail() -> bytes:
        raise RuntimeError("no font")

    assert not write_chart(tmp_path / "a.png", fail)
    assert "WARNING: " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
