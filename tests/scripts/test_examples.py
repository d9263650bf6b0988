"""The scripts in examples/ run as a user runs them, without downloads."""

import pytest
from PIL import Image

from tests.harness.runs import ROOT, run_script
from tests.harness.small_vae import write_vae


@pytest.mark.slow
def test_strip_has_a_column_per_image(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for index, size in enumerate([(40, 32), (24, 48)]):
        Image.linear_gradient("L").resize(size).convert("RGB").save(images / f"{index}.png")
    vae, output = write_vae(tmp_path / "vae"), tmp_path / "new" / "strip.jpg"
    words = ["--vae", str(vae), "--input", str(images), "--output", str(output), "--side", "24"]
    done = run_script("examples/make_strip.py", *words)
    assert done.returncode == 0, done.stderr
    assert "0.png: 40x32 px, PSNR " in done.stdout
    with Image.open(output) as strip:
        assert strip.size == (2 * 24 + 6, 2 * (24 + 24))
    done = run_script("examples/make_strip.py", "--vae", "/nothing", *words[2:])
    assert done.returncode == 1
    assert "/nothing" in done.stderr
    assert done.stderr.count("\n") == 1


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
