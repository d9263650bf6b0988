"""The scripts in examples/ run as a user runs them, without downloads."""

import csv
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.harness.runs import ROOT, run_script
from tests.harness.small_vae import SMALL, write_vae
from vae.config.flags import parse_flags
from vae.config.options import flatten
from vae.system.files import read_json
from vae.training.early_checks import Command
from vae.training.resolved_options import machine_of, resolve_options


def example(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    spec = spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_strip_has_a_column_per_image_and_a_row_per_vae(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for index, size in enumerate([(40, 32), (24, 48)]):
        Image.linear_gradient("L").resize(size).convert("RGB").save(images / f"{index}.png")
    vae, output = str(write_vae(tmp_path / "vae")), tmp_path / "new" / "strip.jpg"
    words = ["--vae", vae, vae, "--labels", "before", "after", "--input", str(images), "--side", "16"]
    done = run_script("examples/make_strip.py", *words, "--zoom", "2", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "0.png: 40x32 px, before: PSNR " in done.stdout
    assert "1.png: 24x48 px, after: PSNR " in done.stdout
    with Image.open(output) as strip:
        assert strip.size == (2 * 32 + 6, 3 * (24 + 32))


def test_strip_shows_the_worst_square():
    strip = example("make_strip")
    error = np.zeros((20, 30))
    error[5:8, 12] = 1
    error[19, 0] = 2.5  # a single larger error
    left, top, right, bottom = strip.worst_square(error, 3)
    assert (right - left, bottom - top) == (3, 3)
    assert error[top:bottom, left:right].sum() == 3
    assert strip.worst_square(error, 50) == (0, 0, 20, 20)


@pytest.mark.slow
def test_python_api_example(tmp_path, image_folder):
    images = tmp_path / "images"
    for path in image_folder.rglob("*.png"):  # the example's crops are 64 px
        images.mkdir(exist_ok=True)
        Image.open(path).resize((80, 72), Image.Resampling.BICUBIC).save(images / path.name)
    results = tmp_path / "results"
    env = {"IMAGES": str(images), "RESULTS": str(results)}
    done = run_script("examples/python_api.py", env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "images (1, 3, 72, 80), latents (1, 16, 18, 20)" in done.stdout
    for name in ("original.png", "reconstruction.png"):
        with Image.open(results / name) as image:
            assert image.size == (80, 72)
    assert (results / "evaluation" / "report.html").exists()
    assert (results / "vae.safetensors").exists()


RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_given_vae_and_flags_override_it(path, tmp_path):
    vae = write_vae(tmp_path / "vae", shape=replace(SMALL, z_channels=4))
    words = ["--config", str(path), "--init_from", str(vae), "--learning_rate", "2e-3", "--num_steps", "7"]
    config = resolve_options(Command(parse_flags(words)), *machine_of(torch.device("cpu"))).config
    assert (config.optim.learning_rate, config.run.num_steps, config.run.num_epochs) == (2e-3, 7, None)
    written = {
        name: value for name, value in read_json(path).items() if name not in ("num_steps", "num_epochs")
    }
    differing = {name for name, value in written.items() if flatten(config)[name] != value}
    assert differing <= {"learning_rate"}
    assert f"[{path.stem}]({path.name})" in (path.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_recipe_trains(tmp_path, image_folder):
    """With terms of L1 and MSE, and the adversarial loss."""
    vae, output = write_vae(tmp_path / "vae"), tmp_path / "run"
    words = ["--config", "examples/recipes/furception.json", "--init_from", str(vae), "--num_steps", "2"]
    words += ["--data_path", str(image_folder), "--output_dir", str(output), "--device", "cpu"]
    words += ["--image_size", "32", "--global_batch_size", "2", "--perceptual_weight", "0"]
    words += ["--disc_layers", "2", "--disc_warmup", "0"]
    done = run_script("train_vae.py", *words)
    assert done.returncode == 0, done.stderr
    assert "1 l1 + 1 mse" in done.stdout
    assert (output / "vae").is_dir()


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """A folder for each class of scikit-learn's digits, about 12 images of 64 px in each."""
    folder = tmp_path_factory.mktemp("digits")
    pixels, targets = load_digits(return_X_y=True)
    for number, (values, target) in enumerate(zip(pixels[:120], targets[:120], strict=True)):
        (folder / str(target)).mkdir(exist_ok=True)
        image = Image.fromarray((values.reshape(8, 8) * 15.9).astype(np.uint8))
        image.resize((64, 64), Image.Resampling.BICUBIC).save(folder / str(target) / f"{number:03}.png")
    return folder


CLASSIFIER = """--size 64 --folds 2 --network resnet18 --batch_size 32 --min_crop 1 --micro_batch 16
    --num_workers 0 --device cpu"""


@pytest.mark.slow
def test_latent_classifier_reads_digits(tmp_path, digits):
    """Both heads and their ensemble, on folds; a second command finds the latents of the first."""
    words = ["--vae", str(write_vae(tmp_path / "vae")), "--data", str(digits)]
    words += ["--output", str(tmp_path / "out"), *CLASSIFIER.split()]
    done = run_script("examples/latent_classifier.py", *words, "--epochs", "3")
    assert done.returncode == 0, done.stderr
    (heads,) = read_json(tmp_path / "out" / "results.json").values()
    network, linear, ensemble = (heads[head] for head in ("network", "linear", "ensemble"))
    assert min(network["top1"], linear["top1"]) > 0.3  # by chance 0.1
    assert ensemble["log_loss"] <= 1.02 * min(network["log_loss"], linear["log_loss"])
    with (tmp_path / "out" / "probabilities_0.csv").open(encoding="utf-8") as file:
        title, *rows = csv.reader(file)
    assert title == ["image", *"0123456789"]
    assert len(rows) == 120
    assert all(sum(map(float, row[1:])) == pytest.approx(1, abs=1e-4) for row in rows)
    (cached,) = (tmp_path / "out" / "latents").iterdir()
    written = cached.stat().st_mtime_ns
    done = run_script("examples/latent_classifier.py", *words, "--epochs", "1", "--val", str(digits))
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_mtime_ns for path in cached.parent.iterdir()] == [written]


@pytest.fixture(scope="module")
def classifier() -> ModuleType:
    return example("latent_classifier")


def test_the_share_of_a_head_is_chosen_on_the_other_folds(classifier):
    random = np.random.default_rng(0)
    targets = random.integers(0, 4, 300)
    folds = np.arange(300) % 3
    logits = 2.0 * np.eye(4)[targets]
    network, linear = (np.exp(logits + random.normal(0, 2, (300, 4))) for _ in range(2))
    network, linear = (values / values.sum(1, keepdims=True) for values in (network, linear))
    mixed = classifier.weighted_ensemble(network, linear, targets, folds)
    losses = [classifier.loss_of(values, targets) for values in (network, linear, mixed)]
    assert losses[2] < 0.9 * min(losses[:2])  # the errors of both are independent
    changed = np.where(folds == 0, (targets + 1) % 4, targets)
    again = classifier.weighted_ensemble(network, linear, changed, folds)
    assert np.array_equal(again[folds == 0], mixed[folds == 0])  # its own targets do not count
    useless = np.full((300, 4), 0.25)
    assert np.array_equal(
        classifier.weighted_ensemble(np.eye(4)[targets], useless, targets, folds)[0], np.eye(4)[targets[0]]
    )
