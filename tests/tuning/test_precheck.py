"""Mistakes in a command of tune_vae.py are one line, before anything is written."""

import json

import pytest

import tune_vae
from vae.system.errors import UserError
from vae.tuning import precheck


def command(tmp_path, image_folder, options: dict, *words: str) -> list[str]:
    path = tmp_path / "base.json"
    path.write_text(json.dumps({"data_path": str(image_folder), "perceptual_weight": 0.0, **options}))
    return ["--config", str(path), "--output_dir", str(tmp_path / "search"), *words]


@pytest.mark.parametrize(
    ("options", "words", "parts"),
    [
        ({}, ["--objective", "pnsr"], ["--objective pnsr", "psnr"]),
        ({}, ["--objective", "psnr", "psnr"], ["--objective", "psnr twice"]),
        ({}, ["--objective", "lpips"], ["--objective lpips", "perceptual_weight"]),
        ({}, ["--cards", "1", "1"], ["--cards", "1 twice"]),
        ({}, ["--space", "quik"], ["--space quik", "quick, full"]),
        ({"train_minutes": 3.0}, [], ["train_minutes", "num_epochs"]),
        ({"progressive": "32:1:2"}, [], ["progressive", "one stage"]),
        ({"val_split": 0.0}, [], ["val_split", "val_path"]),
        ({"image_size": 513}, [], ["--image_size 513", "512"]),
        ({"learning_rat": 1}, [], ["learning_rat", "learning_rate"]),
        ({"data_path": "nowhere"}, [], ["--data_path nowhere", "does not exist"]),
    ],
)
def test_mistakes_are_named(image_folder, tmp_path, options, words, parts):
    with pytest.raises(UserError) as caught:
        tune_vae.main(command(tmp_path, image_folder, options, *words))
    for part in parts:
        assert part in str(caught.value)
    assert not (tmp_path / "search").exists()


def test_missing_package_is_named_with_its_install_line(image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(precheck, "find_spec", lambda name: None if name == "optuna" else name)
    with pytest.raises(UserError, match=r"needs optuna: run pip install -r requirements-tune.txt"):
        tune_vae.main(command(tmp_path, image_folder, {}))
