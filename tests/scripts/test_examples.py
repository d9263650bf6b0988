"""The scripts in examples/ run as a user runs them, without downloads."""

import pytest
from PIL import Image

from tests.harness.runs import ROOT, run_script


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
    again = run_script("examples/python_api.py", env=env, cwd=ROOT)
    assert again.returncode == 1
    assert "--output_dir" in again.stderr  # the error names the option, without a traceback
    assert again.stderr.count("\n") == 1
