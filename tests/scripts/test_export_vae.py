"""The command line of export_vae.py: one-line errors, and complete files."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.faults import limit_file_size
from tests.harness.runs import TINY, run_here
from tests.harness.vae_families import SMALL, diffusers_model
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


def test_checkpoint_gives_the_same_vae_as_the_export_of_the_run(run, image_folder, tmp_path):
    words = ("--vae", run / "checkpoint_epoch_2.pt", "--data_path", image_folder)
    assert run_export(*words, "--output", tmp_path / "out")[0] == 0
    final, exported = (load_vae(path) for path in (run / "vae", tmp_path / "out"))
    for name, value in final.autoencoder.state_dict().items():
        assert torch.equal(value, exported.autoencoder.state_dict()[name]), name
    assert exported.scaling_factor == pytest.approx(final.scaling_factor, rel=0.1)  # from other crops
    assert exported.file.sample_size == 32


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
