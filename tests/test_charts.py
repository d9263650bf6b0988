"""Charts: ranges of axes, values that are not numbers, and files that are the same again."""

import pytest

from vae.charts import BLUE, Line, draw_lines, finite_points, new_figure, png, value_range


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
