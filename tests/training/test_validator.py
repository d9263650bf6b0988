"""Sample grids show tiles, titles, PSNR and own images; quick validations warn and leave a run unchanged."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.toy_networks import MODEL, NO_LPIPS, toy_networks
from tests.harness.training_runs import (
    assert_same,
    last_checkpoint,
    records,
    reproducible_records,
    train_short,
)
from vae.config.options import build
from vae.data.image_files import FolderImages
from vae.images.pixels import psnr, to_float
from vae.model.autoencoder import AutoencoderKL
from vae.system.errors import DataError
from vae.training import validator as module
from vae.training.run import train
from vae.training.stages import Stage
from vae.training.validation import History, ValidationSet
from vae.training.validator import ERROR_GAIN, GAP, MIN_TILE, TEXT_HEIGHT, load_sample_images, sample_grid

WHITE = 255


def random_images(count: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def grid_of(images: torch.Tensor) -> np.ndarray:
    torch.manual_seed(0)
    networks = toy_networks(torch.float32, loss=NO_LPIPS, discriminator=False)
    return sample_grid(AutoencoderKL(MODEL), networks, images)


def tile(grid: np.ndarray, row: int, column: int, side: int) -> np.ndarray:
    top, left = TEXT_HEIGHT + row * (side + TEXT_HEIGHT), column * (side + GAP)
    return grid[top : top + side, left : left + side]


@pytest.mark.parametrize(("size", "scale"), [(32, 5), (192, 1)])
def test_tiles_contain_the_images_pixel_by_pixel(size, scale):
    images = random_images(2, size)
    grid = grid_of(images)
    side = size * scale
    assert side >= MIN_TILE
    assert grid.shape == (TEXT_HEIGHT + 2 * (side + TEXT_HEIGHT), 4 * (side + GAP) - GAP, 3)
    for row, image in enumerate(images):
        found = tile(grid, row, 0, side)[::scale, ::scale]
        assert np.array_equal(found, image.permute(1, 2, 0).numpy())


def test_large_crops_show_their_centre(monkeypatch):
    """With a limit of 160 px instead of 512: the attention of a large image takes long."""
    monkeypatch.setattr(module, "GRID_SIDE", 160)
    images = random_images(1, 160 + 64)
    found = tile(grid_of(images), 0, 0, 160)
    assert np.array_equal(found, images[0, :, 32:-32, 32:-32].permute(1, 2, 0).numpy())


def test_error_tile_is_the_difference_of_the_first_two():
    grid = grid_of(random_images(1, 160)).astype(int)
    original, recon, error = (tile(grid, 0, column, 160) for column in range(3))
    expected = np.clip(np.abs(recon - original) * ERROR_GAIN, 0, 255)
    assert np.abs(error - expected).max() <= ERROR_GAIN  # the reconstruction is rounded, the error is not


def test_each_row_states_the_psnr_of_its_own_image(monkeypatch):
    captions = []
    draw = module.draw_grid
    monkeypatch.setattr(module, "draw_grid", lambda *parts: captions.extend(parts[2]) or draw(*parts))
    images = random_images(2, 32)
    images[1] = 128  # a grey image is reconstructed better, and by the bicubic baseline exactly
    grid = grid_of(images)
    recons = [
        torch.from_numpy(tile(grid, row, 1, 160)[::5, ::5].copy()).permute(2, 0, 1)[None] for row in (0, 1)
    ]
    for row, recon in enumerate(recons):
        value = float(psnr(to_float(recon), to_float(images[row : row + 1])))
        assert captions[row][1] == f"PSNR {value:.2f} dB"
    assert captions[1][3] == "PSNR inf dB"
    below = grid[-TEXT_HEIGHT:]
    assert below[:, MIN_TILE + GAP : 2 * MIN_TILE].min() < 100
    assert below[:, :MIN_TILE].min() == WHITE  # the input has no caption


# --- --sample_images ------------------------------------------------------------------------------------


@pytest.fixture
def own_images(tmp_path) -> Path:
    """Three images of any size and kind."""
    folder = tmp_path / "my images"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, size in (("a.png", (20, 90)), ("b.jpg", (300, 200)), ("c.webp", (32, 32))):
        Image.fromarray(random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(folder / name)
    return folder


def test_own_images_are_scaled_and_cropped_to_every_size(own_images):
    found = load_sample_images(
        build({"sample_images": str(own_images)}), [Stage(0, 1, 32, 1), Stage(1, 1, 64, 1)]
    )
    assert {size: tuple(images.shape) for size, images in found.items()} == {
        32: (3, 3, 32, 32),
        64: (3, 3, 64, 64),
    }
    exact = np.asarray(Image.open(own_images / "c.webp").convert("RGB"))
    assert np.array_equal(found[32][2].permute(1, 2, 0).numpy(), exact)  # the size fits: unchanged


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_run_shows_the_own_images_with_and_without_a_validation_set(tiny, tmp_path, own_images, validation):
    train_short(tiny, tmp_path / "run", sample_images=str(own_images), val_split=validation)
    (path,) = (tmp_path / "run" / "samples").glob("*.png")  # the grid at the end of the run
    grid = np.asarray(Image.open(path))
    assert grid.shape[0] == TEXT_HEIGHT + 3 * (MIN_TILE + TEXT_HEIGHT)
    exact = np.asarray(Image.open(own_images / "c.webp").convert("RGB"))
    assert np.array_equal(tile(grid, 2, 0, MIN_TILE)[::5, ::5], exact)


def test_unusable_own_image_is_an_error_before_anything_is_written(tiny, tmp_path, own_images):
    (own_images / "b.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"--sample_images .*b\.jpg") as caught:
        train_short(tiny, tmp_path / "run", sample_images=str(own_images))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# ---- Quick validations -----------------------------------------------------------------------------------


def measured(loss: float, images: int = 8) -> dict[str, float]:
    return {"image_size": 32, "images": images, "loss": loss}


def warned(history: History, *values: float) -> list[bool]:
    return [history.regression_warning(measured(value), 0.1) is not None for value in values]


def test_one_warning_for_each_rise():
    history = History()
    assert warned(history, 0.3, 0.2, 0.219, 0.221, 0.3, 0.21, 0.25, math.nan) == [
        *(False, False, False, True),  # more than a tenth above 0.2
        *(False, False, True, False),  # fallen and risen again; then it stays above
    ]
    assert history.quick_best == measured(0.2)
    warning = History(quick_best=measured(0.2)).regression_warning(measured(math.nan), 0.15)
    for token in ("--regression_share 0.15", "0.2000", "--learning_rate"):
        assert token in warning


def test_other_images_are_not_compared():
    history = History()
    assert warned(history, 0.2) == [False]
    assert history.regression_warning(measured(0.5, images=4), 0.1) is None
    assert history.regression_warning({**measured(0.9, images=4), "image_size": 64}, 0.1) is None
    assert history.regression_warning({"image_size": 64, "images": 4}, 0.1) is not None  # no usable image


def test_its_images_are_a_sample_by_hash_that_stays():
    """Not the first names; more images displace few of the others."""
    names = [f"a/{n}.png" for n in range(60)] + [f"z/{n}.png" for n in range(540)]
    few = ValidationSet(FolderImages("", names), range(600)).sample(60)
    assert 40 < sum(index >= 60 for index in few.indices) < 60  # 54 of 60 are expected, deviation 2.2
    assert set(few.sample(6).indices) < set(few.indices)
    assert few.sample(99).indices == few.indices
    more = ValidationSet(FolderImages("", names + [f"b/{n}.png" for n in range(30)]), range(630)).sample(60)
    assert len(set(few.indices) & set(more.indices)) > 45  # 57 are expected


@pytest.mark.slow
def test_it_measures_beside_the_validation_set_and_changes_nothing(tiny, tmp_path):
    """6 steps in 2 epochs."""
    changes = {"with": {"quick_val_images": 2, "quick_val_steps": 2, "regression_share": 0}, "without": {}}
    for name, change in changes.items():
        assert train({**tiny, **change, "output_dir": str(tmp_path / name)}) == 0
    found = records(tmp_path / "with", "quick_validation")
    assert [(record["step"], record["images"]) for record in found] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    everything = records(tmp_path / "with", "validation")
    assert [(record["step"], record["images"]) for record in everything] == [(0, 4), (3, 4), (6, 4)]
    assert all(record["images_per_second"] > 0 for record in (*found, *everything))
    assert records(tmp_path / "without", "quick_validation") == []  # shorter than --quick_val_steps
    measured_too, plain = (last_checkpoint(tmp_path / name) for name in changes)
    assert measured_too["history"]["quick_best"]["loss"] == min(record["loss"] for record in found)
    for part in ("model", "ema", "optimizers", "position"):
        assert_same(measured_too[part], plain[part], part)
    assert measured_too["history"]["best"] == plain["history"]["best"]
    steps = [reproducible_records(tmp_path / name, "train") for name in changes]
    assert_same(*steps, "steps")


def test_noise_that_hides_the_latents_is_reported_once(tiny, monkeypatch, capsys):
    monkeypatch.setattr(module, "MAX_SIGMA_OVER_STD", 0.0)
    assert train({**tiny, "kl_weight": 0.5}) == 0  # with three validations
    assert "".join(capsys.readouterr()).count("lower --kl_weight (now 0.5)") == 1


@pytest.mark.slow
def test_a_rise_validates_all_images_at_once(tiny, tmp_path, capsys):
    """3 steps per epoch; the steps are too large, so the loss rises."""
    given = {
        **tiny,
        "init": "warm",
        "learning_rate": 0.03,
        "warmup_epochs": 0.0,
        "quick_val_steps": 1,
        "regression_share": 0.01,
    }
    assert train({**given, "val_freq": 1}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--regression_share 0.01" in line]
    assert len(lines) == 1
    steps = [record["step"] for record in records(tmp_path / "run", "validation")]
    assert steps == [0, 1, 3, 6]
    assert last_checkpoint(tmp_path / "run")["history"]["best"]["epoch"] == 0  # the start; not step 1
