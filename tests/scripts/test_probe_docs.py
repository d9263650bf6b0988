"""Every command of docs/probe.md runs, and its files have the promised content; mistakes are one line."""

import csv
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import evaluate_vae
from tests.harness.runs import ROOT
from tests.harness.small_vae import SMALL, write_vae
from vae.files import read_json
from vae.script import exit_code

TEXT = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
TINY_VAE = replace(SMALL, channels=(8, 8), norm_groups=4, z_channels=4)
QUICK = ["--device", "cpu", "--sizes", "32", "--probe_folds", "3", "--probe_epochs", "2"]


@pytest.fixture
def workplace(image_folder, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    shutil.copytree(image_folder, "data/test")
    for seed, name in enumerate(("first", "second")):
        write_vae(Path("outputs", name, "vae"), seed, TINY_VAE)
    names = sorted(path.relative_to("data/test").as_posix() for path in Path("data/test").rglob("*.png"))
    rows = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    Path("labels.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return tmp_path


def test_every_command_runs(workplace, capsys):
    (block,) = re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 2
    for _, _, *words in lines:
        assert evaluate_vae.main([*words, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "ResNet-50" in out
    assert "95 % interval" in out
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


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--probe", "nothing.csv"], ("--probe nothing.csv", "is no file")),
        (
            ["--probe", "labels.csv", "--probe_heads", "lineal"],
            ("--probe_heads lineal", "did you mean linear"),
        ),
        (["--probe", "labels.csv", "--sizes", "0"], ("--probe", "--sizes 0")),
        (["--probe", "labels.csv", "--probe_folds", "9"], ("--probe_folds 9", "class")),
    ],
)
def test_mistakes_are_one_line(workplace, capsys, words, tokens):
    flags = [
        "--vae",
        "outputs/first/vae",
        "--data_path",
        "data/test",
        "--output_dir",
        "out",
        "--device",
        "cpu",
    ]
    given = words if "--sizes" in words else [*words, "--sizes", "32"]
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
