"""The command line of export_vae.py: one-line errors, and complete files."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.faults import limit_file_size
from tests.harness.runs import TINY, run_here
from tests.harness.vae_families import SMALL, diffusers_model, research_model, save_research
from vae.interop.vae_files import load_vae
from vae.interop.vae_path import WEIGHTS_NAME
from vae.training.run import train


def run_export(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the script."""
    done = run_here("export_vae.py", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory) -> Path:
    """A run of two epochs."""
    output = tmp_path_factory.mktemp("export") / "first"
    given = {**TINY, "init": "default", "data_path": str(image_folder), "output_dir": str(output)}
    assert train({**given, "learning_rate": 1e-3}) == 0
    return output


@pytest.fixture
def source(tmp_path) -> Path:
    diffusers_model("sd", *SMALL).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_checkpoint_gives_the_same_vae_as_the_export_of_the_run(run, image_folder, tmp_path):
    words = ("--vae", run / "checkpoint_epoch_2.pt", "--data_path", image_folder)
    assert run_export(*words, "--output", tmp_path / "out")[0] == 0
    final, exported = (load_vae(path) for path in (run / "vae", tmp_path / "out"))
    for name, value in final.autoencoder.state_dict().items():
        assert torch.equal(value, exported.autoencoder.state_dict()[name]), name
    assert exported.scaling_factor == pytest.approx(final.scaling_factor, rel=0.1)  # from other crops
    assert exported.file.sample_size == 32


def test_raw_weights_are_exported_on_request(run, tmp_path):
    words = ("--vae", run / "checkpoint_epoch_2.pt", "--weights", "raw", "--scaling_factor", 1)
    assert run_export(*words, "--output", tmp_path / "out")[0] == 0
    saved = torch.load(run / "checkpoint_epoch_2.pt", weights_only=True)["model"]
    for name, value in load_file(tmp_path / "out" / WEIGHTS_NAME).items():
        assert torch.equal(value, saved[name]), name


def test_average_by_score_uses_recorded_psnr(run, tmp_path):
    paths = [run / f"checkpoint_epoch_{epoch}.pt" for epoch in (1, 2)]
    words = ("--vae", *paths, "--average_by", "score", "--temperature", 1, "--scaling_factor", 1)
    code, out, _ = run_export(*words, "--output", tmp_path / "out")
    assert code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    psnr = [r["psnr"] for r in records if r["kind"] == "validation" and r["step"] > 0]
    weights = torch.softmax(torch.tensor(psnr, dtype=torch.float64), 0)
    assert f"averaged: {weights[1]:.1%} of" in out
    saved = [torch.load(path, weights_only=True)["ema"] for path in paths]
    for name, value in load_file(tmp_path / "out" / WEIGHTS_NAME).items():
        expected = weights[0] * saved[0][name].double() + weights[1] * saved[1][name].double()
        assert torch.allclose(value, expected.float(), rtol=1e-6, atol=1e-9), name


def test_existing_output_is_kept_without_overwrite(source, tmp_path):
    (tmp_path / "one.safetensors").write_bytes(b"mine")
    words = ("--vae", source, "--output", tmp_path / "one.safetensors")
    code, _, err = run_export(*words)
    assert code == 78
    assert "--overwrite" in err
    assert (tmp_path / "one.safetensors").read_bytes() == b"mine"
    assert run_export(*words, "--overwrite")[0] == 0
    assert load_vae(tmp_path / "one.safetensors").kind == "compvis"
    before = {name: value.clone() for name, value in load_file(source / WEIGHTS_NAME).items()}
    assert run_export("--vae", source, "--output", source)[0] == 78  # onto itself
    assert run_export("--vae", source, "--output", source, "--overwrite")[0] == 0
    for name, value in load_file(source / WEIGHTS_NAME).items():
        assert torch.equal(value, before[name])


def bad_inputs(tmp_path: Path) -> dict[str, tuple[list, str]]:
    """Words after --vae SOURCE --output OUT, and a part of the expected message."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    other = diffusers_model("flux", *SMALL)
    other.save_pretrained(tmp_path / "other")
    research = save_research(tmp_path / "whole.safetensors", research_model("sd", *SMALL))
    return {
        "no scaling": (["--vae", research], "does not contain the scaling"),
        "other shapes": (["--vae", tmp_path / "source", tmp_path / "other"], "cannot be averaged"),
        "no scores": (
            ["--vae", tmp_path / "source", tmp_path / "source", "--average_by", "score"],
            "is not a checkpoint of a run: give --scores",
        ),
        "output in a file": (["--output", tmp_path / "file" / "out"], "which is a file: use another folder"),
        "output a file": (["--output", tmp_path / "file"], "is a file: give a folder"),
        "output a folder": (["--output", tmp_path / "d.safetensors"], "is a folder: give a file"),
        "broken images": (["--data_path", tmp_path / "broken"], "none of 1 images gives a crop"),
        "odd size": (["--data_path", tmp_path / "broken", "--image_size", 33], "not a multiple of 2: try 34"),
    }


def test_invalid_input_is_a_one_line_error_and_writes_nothing(source, tmp_path):
    (tmp_path / "d.safetensors").mkdir()
    cases = bad_inputs(tmp_path)
    before = files_in(tmp_path)
    for case, (words, message) in cases.items():
        code, _, err = run_export("--vae", source, "--output", tmp_path / "out", *words)
        assert code == (77 if case == "broken images" else 78), case
        assert len(err.splitlines()) == 1, err
        assert err.startswith("export_vae.py: ")
        assert message in err
        assert files_in(tmp_path) == before, case


@pytest.mark.skipif(os.name == "nt", reason="needs a limit on file sizes")
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_full_disk_leaves_old_file_and_no_temporary_file(name, source, tmp_path):
    words = ["--vae", str(source), "--output", str(tmp_path / name), "--overwrite"]
    assert run_export(*words)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limit_file_size(100_000)
    try:
        code, _, err = run_export(*words)
    finally:
        limit_file_size(None)
    assert (code, len(err.splitlines())) == (1, 1), err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
