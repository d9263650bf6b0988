"""infer_vae.py as a command: one-line errors, and no incomplete files."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.harness.runs import ROOT
from tests.harness.small_vae import write_vae
from tests.harness.waiting import wait_until
from vae.system.files import MARKER_NAME


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory) -> Path:
    return write_vae(tmp_path_factory.mktemp("infer") / "vae")


@pytest.fixture
def flags(vae_folder, image_folder, tmp_path) -> dict[str, object]:
    """Flags of a valid command."""
    return {
        "--vae": vae_folder,
        "--mode": "reconstruct",
        "--input": image_folder / "image_00.png",
        "--output_dir": tmp_path / "out",
        "--device": "cpu",
    }


def flat(flags: dict[str, object]) -> list[object]:
    return [word for pair in flags.items() for word in pair]


@pytest.mark.slow
def test_sigterm_leaves_only_complete_images(flags, image_folder, tmp_path):
    if sys.platform == "win32":
        pytest.skip("Windows has no SIGTERM handler")
    folder = tmp_path / "many"
    folder.mkdir()
    large = Image.open(image_folder / "image_00.png").resize((240, 200))
    for number in range(200):
        large.save(folder / f"{number}.bmp")
    words = [sys.executable, "infer_vae.py", *map(str, flat({**flags, "--input": folder}))]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out = tmp_path / "out"
    wait_until(lambda: len(list(out.glob("*.png"))) >= 2, process)
    process.terminate()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert errors.startswith("stopped")
    names = [path.name for path in out.iterdir() if path.name != MARKER_NAME]
    assert not [name for name in names if not name.endswith(".png")]  # no temporary file
    assert 2 <= len(names) < 200
    for name in names:
        Image.open(out / name).load()
