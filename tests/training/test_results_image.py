"""results.png shows the curves of a run, is updated by every validation, and never ends a run."""

import io

import numpy as np
import pytest
from PIL import Image, ImageColor

from tests.harness.training_runs import records, train_short
from vae.charts import BLUE, GREEN, ORANGE
from vae.training import results_image
from vae.training.logbook import Logbook
from vae.training.results_image import HEIGHT, RESULTS_NAME, WIDTH, draw_results


@pytest.fixture(autouse=True)
def _curves_are_drawn(monkeypatch):
    monkeypatch.setattr(results_image, "draw_results", draw_results)


def quality(psnr: float) -> dict[str, float]:
    return {"psnr": psnr, "loss": 1 / psnr}


def stage(
    size: int, first: int, last: int, psnr: float, bicubic: float, mean_colour: float = 11
) -> list[dict]:
    """The records of one stage, with rising PSNR and falling losses."""
    found = [
        {"kind": "baseline", "step": first, "codec": codec, "image_size": size, **quality(value)}
        for codec, value in (("bicubic", bicubic), ("mean_colour", mean_colour))
    ]
    for step in range(first, last + 1, 10):
        values = quality(psnr + (step - first) / 10)
        found.append({"kind": "validation", "step": step, "image_size": size, **values})
    for step in range(first + 5, last + 1, 5):
        rate = 1e-4 * (1 - step / 500)
        found.append({"kind": "train", "step": step, "loss": 1 / step, "learning_rate": rate})
    return found


def drawn(content: list[dict]) -> np.ndarray:
    """The pixels of the chart (H, W, 3)."""
    return np.asarray(Image.open(io.BytesIO(draw_results(content))).convert("RGB")).astype(int)


def test_every_curve_is_drawn():
    """The learning rate is green; the validation loss is blue, below the orange bicubic baseline."""
    pixels = drawn(stage(512, 0, 200, psnr=25, bicubic=22))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    rows = {}
    for colour in (GREEN, BLUE, ORANGE):
        matches = np.abs(pixels - ImageColor.getrgb(colour)).max(-1) < 60  # apart from anti-aliasing
        rows[colour] = np.flatnonzero(matches[42 : HEIGHT // 2 - 62, WIDTH // 2 + 70 : -50].any(1))
        assert matches.any()
    assert rows[BLUE].min() > rows[ORANGE].max()  # a better value is lower, and has a larger row


def test_run_updates_the_image_at_every_validation_and_at_its_end(tiny, tmp_path, capsys, monkeypatch):
    validations = []
    draw = Logbook.draw_results

    def spy(self):
        draw(self)
        validations.append(len(records(self.folder, "validation")))

    monkeypatch.setattr(Logbook, "draw_results", spy)
    train_short(tiny, tmp_path / "run", val_split=0.25, num_epochs=2)
    assert validations == [1, 2, 3, 3]  # start, two epochs, end
    path = tmp_path / "run" / RESULTS_NAME
    assert Image.open(path).size == (WIDTH, HEIGHT)
    assert f"curves  {path}" in capsys.readouterr().out


def test_unreadable_records_are_a_warning(tmp_path, capsys):
    logbook = Logbook(tmp_path, 0, active=True)
    logbook.record("train", 1, {"loss": 1.0, "learning_rate": 1e-4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train"}\n')
    logbook.draw_results()
    logbook.draw_results()
    logbook.close()
    assert capsys.readouterr().out.count("WARNING") == 1
    assert not (tmp_path / RESULTS_NAME).exists()
