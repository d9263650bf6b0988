"""Every command of docs/probe.md runs, and its files have the promised content; mistakes are one line."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate_vae
from tests.harness.convnext_file import convnext_weights
from tests.harness.labelled_shards import CLASSES, write_labelled
from tests.harness.pages import commands, page_text
from tests.harness.small_vae import SMALL, write_vae
from vae.probe import reference
from vae.system.files import read_json
from vae.system.script import exit_code

TINY_VAE = replace(SMALL, channels=(8, 8), norm_groups=4, z_channels=4)
QUICK = ["--device", "cpu", "--sizes", "32", "--probe_folds", "3", "--probe_epochs", "2"]


@pytest.fixture(scope="module")
def vaes(tmp_path_factory) -> Path:
    """A folder with two VAEs."""
    folder = tmp_path_factory.mktemp("vaes")
    for seed, name in enumerate(("first", "second")):
        write_vae(folder / name / "vae", seed, TINY_VAE)
    return folder


@pytest.fixture
def workplace(vaes, image_folder, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request._opener", None)  # urllib reads the proxies only once
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # refused immediately
    shutil.copytree(image_folder, "data/test")
    shutil.copytree(vaes, "outputs")
    names = sorted(path.relative_to("data/test").as_posix() for path in Path("data/test").rglob("*.png"))
    rows = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    Path("labels.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(workplace, capsys):
    folds, pair, recipe = (words[2:] for words in commands(page_text("probe.md")))
    for words in (folds, pair):
        assert evaluate_vae.main([*words, *QUICK]) == 0
    write_labelled(Path("data/imagenet"), 16)
    write_labelled(Path("data/imagenet_val"), 8, first=100)
    smaller = ["--probe_widths", "8", "16", "--probe_depths", "1", "1"]
    assert evaluate_vae.main([*recipe, *smaller, *QUICK[:4], *QUICK[6:]]) == 0
    assert read_json(Path("results/imagenet/probe.json"))["classes"] == list(CLASSES)
    out = capsys.readouterr().out
    assert "resnet50-11ad3fa6.pth and convnext_tiny_22k_224.pth are not in" in out
    assert "95 % interval" in out
    for kind in ("pixels", "first/vae latents", "second/vae recon"):
        for head in ("linear", "convnext", "ensemble"):
            assert re.search(rf"^{kind} +{head} ", out, re.M)
    found = read_json(Path("results/probes/probe.json"))
    assert list(found["sets"]) == [
        *("pixels", "first/vae latents", "first/vae recon"),
        *("second/vae latents", "second/vae recon"),
    ]
    with Path("results/probes/probe_1.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["id", "a", "b"]
    assert len(rows) == 17
    assert all(float(row[1]) + float(row[2]) == pytest.approx(1, abs=2e-6) for row in rows[1:])


@pytest.mark.slow
def test_reference_sees_pixels_and_reconstructions(workplace, monkeypatch):
    """A network of random weights at its place in PyTorch's cache."""
    monkeypatch.setattr(reference, "SIDE", 32)  # px: faster
    source = reference.SOURCES["convnext_22k"]
    source.path.parent.mkdir(parents=True)
    torch.save({"model": convnext_weights()}, source.path)
    words = ["--vae", "outputs/first/vae", "--data_path", "data/test", "--probe", "labels.csv"]
    words += ["--output_dir", "out", "--probe_heads", "convnext", *QUICK]
    rows = Path("labels.csv").read_text().splitlines()
    Path("labels.csv").write_text("\n".join(rows[:9]) + "\n")
    assert evaluate_vae.main([*words, "--probe_reference", "convnext_22k"]) == 0
    found = read_json(Path("out/probe.json"))
    assert found["reference"] == "convnext_22k"
    heads = {name: list(one["scores"]) for name, one in found["sets"].items()}
    assert heads == {"pixels": ["linear"], "first/vae latents": ["convnext"], "first/vae recon": ["linear"]}


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--probe", "nothing.csv"], ("--probe nothing.csv", "is not a file")),
        (["--probe", "labels.csv", "--sizes", "0"], ("--probe", "--sizes 0")),
        (
            ["--probe", "labels.csv", "--probe_reference", "resnet50"],
            ("--probe_reference resnet50", "download", "resnet50-11ad3fa6.pth", "none"),
        ),
    ],
)
def test_mistakes_are_one_line(workplace, capsys, words, tokens):
    flags = ["--vae", "outputs/first/vae", "--data_path", "data/test", "--output_dir", "out"]
    given = words if "--sizes" in words else [*words, "--sizes", "32", "--device", "cpu"]
    assert exit_code("evaluate_vae.py", evaluate_vae.main, [*flags, *given]) != 0
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert all(token in err[0] for token in tokens), err
    assert not Path("out").exists()


def test_missing_scikit_learn_is_named_with_its_install_line(workplace, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    flags = ["--vae", "outputs/first/vae", "--data_path", "data/test", "--output_dir", "out"]
    assert exit_code("evaluate_vae.py", evaluate_vae.main, [*flags, "--probe", "labels.csv"]) == 78
    assert "pip install scikit-learn" in capsys.readouterr().err
