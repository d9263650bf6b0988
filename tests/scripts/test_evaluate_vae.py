"""evaluate_vae.py as a command: its files contain correct values, and each mistake is one line."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.runs import run_here
from tests.harness.small_vae import write_vae
from vae.evaluation import compare
from vae.evaluation.compare import short_names
from vae.evaluation.metrics import bicubic_baseline, ssim
from vae.images.pixels import psnr, to_float, to_uint8
from vae.interop.vae_files import load_vae
from vae.system.files import claim_folder, replace_text, write_json

OUTPUTS = {"report.html", "results.json", "results.csv", "per_image.csv", "samples"}
EVIL = "<script>alert(1)</script>.png".replace("/", "\u2215")  # a file name cannot contain a slash


def run_command(flags: dict, *more: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the script."""
    words = [word for flag, value in flags.items() for word in (flag, *np.atleast_1d(value))]
    done = run_here("evaluate_vae.py", *words, *more)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(image_folder, tmp_path_factory) -> Path:
    """Two VAEs, three images and a truncated one."""
    folder = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate(("first", "second")):
        write_vae(folder / name / "vae", seed)
    (folder / "data").mkdir()
    for name, index in (("a.png", 0), ("b.png", 2), (EVIL, 4)):
        shutil.copy(image_folder / f"image_{index:02d}.png", folder / "data" / name)
    (folder / "data" / "torn.png").write_bytes((image_folder / "image_00.png").read_bytes()[:200])
    return folder


@pytest.fixture
def flags(folder, tmp_path) -> dict[str, object]:
    """Flags of a valid command."""
    return {
        "--vae": [str(folder / "first" / "vae"), str(folder / "second" / "vae")],
        "--data_path": folder / "data",
        "--output_dir": tmp_path / "out",
        "--sizes": [32],
        "--crop": "center",
        "--perceptual_net": "none",
        "--samples": 1,
        "--device": "cpu",
    }


@pytest.mark.slow
def test_comparison_writes_correct_values_to_every_file(flags, folder, tmp_path):
    code, output, errors = run_command(flags)
    assert (code, errors) == (0, "")
    out = tmp_path / "out"
    assert {path.name for path in out.glob("[!.]*")} == OUTPUTS
    results = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in results["vaes"]] == [
        "first/vae", "second/vae", "bicubic 4x", "JPEG 8 bit/px", "WebP 8 bit/px",
    ]  # fmt: skip
    first = results["vaes"][0]
    model = load_vae(folder / "first" / "vae").autoencoder
    values = {}
    for name in ("a.png", "b.png", EVIL):
        pixels = np.asarray(Image.open(folder / "data" / name))[4:36, 8:40]  # of 40 rows and 48 columns
        image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float() / 127.5 - 1
        recon = model.decode(model.encode(image).mode())
        values[name] = psnr(recon, image).item(), ssim(recon, image).item()
        found = first["sizes"][0]["per_image"][name]
        # A value of half a level may round the other way.
        assert math.isclose(found["psnr"], values[name][0], abs_tol=1e-3)
        assert math.isclose(found["ssim"], values[name][1], abs_tol=1e-4)
        assert found["ms_ssim"] is found["lpips"] is None
        expected = psnr(to_float(to_uint8(bicubic_baseline(image, 4))), image).item()
        bicubic = results["vaes"][2]["sizes"][0]["per_image"][name]["psnr"]
        assert math.isclose(bicubic, expected, abs_tol=1e-3)
    mean = sum(value for value, _ in values.values()) / 3
    assert math.isclose(first["sizes"][0]["metrics"]["psnr"], mean, abs_tol=1e-3)
    assert f"{mean:.2f}" in output
    assert "torn.png" in results["unusable"]
    assert "1 images left out" in output
    assert {"lpips", "rfid", "ms_ssim at 32", "peak memory"} <= set(results["missing"])
    assert first["latents"]["channels"] == len(first["latents"]["std"]) == 16
    assert len(first["samples"][0]["latents"]) == 16
    assert all((out / sample["recon"]).is_file() for row in results["vaes"] for sample in row["samples"])
    with (out / "results.csv").open(newline="", encoding="utf-8") as file:
        by_name = {row["vae"]: row for row in csv.DictReader(file)}
    assert list(by_name) == [row["name"] for row in results["vaes"]]
    assert by_name["bicubic 4x"]["kind"] == "baseline"
    shown = f"{results['vaes'][2]['sizes'][0]['metrics']['psnr']:.2f}"
    assert f"{float(by_name['bicubic 4x']['psnr']):.2f}" == shown
    assert shown in next(line for line in output.splitlines() if line.startswith("bicubic 4x "))
    with (out / "per_image.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["vae"] == "first/vae"]
    assert rows[0]["image"] == min(values, key=lambda name: values[name][0])
    assert rows[0]["lpips"] == ""
    assert "<script>alert" not in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_samples_of_the_posterior_do_not_depend_on_the_batch(flags, tmp_path):
    flags.update({"--posterior": "sample", "--vae": flags["--vae"][:1]})
    found = []
    for batch, seed in ((1, 0), (3, 0), (1, 1)):
        flags["--output_dir"] = tmp_path / f"{batch}_{seed}"
        assert run_command(flags, "--batch_size", batch, "--seed", seed, "--no-codecs")[0] == 0
        results = json.loads((flags["--output_dir"] / "results.json").read_text())
        found.append([row["psnr"] for row in results["vaes"][0]["sizes"][0]["per_image"].values()])
    assert np.allclose(found[0], found[1], atol=0.01)
    assert not np.allclose(found[0], found[2], atol=0.01)


def test_vae_that_returns_nan_has_no_means_and_a_reason(flags, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(folder / "first" / "vae", broken)
    (file,) = broken.glob("*.safetensors")
    weights = load_file(file)
    weights["decoder.conv_out.weight"][:] = 3e38  # finite, as files must be, but sums overflow
    save_file(weights, file)
    flags.update({"--vae": [str(broken)]})
    code, output, _ = run_command(flags, "--diagnose")
    assert code == 0
    assert "NaN or infinity for 3 of 3 images" in output
    assert "broken: not measured: grid of 2 px, " in output
    assert "missing: defects of broken: " in output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["vaes"][0]["sizes"][0]["metrics"]["psnr"] is None


def test_the_best_checkpoint_is_promoted(flags, folder, tmp_path):
    """Of all files that match; the folder is a VAE of diffusers, and only --overwrite replaces it."""
    flags |= {"--vae": str(folder / "*" / "vae"), "--promote": tmp_path / "best"}
    claim_folder(tmp_path / "best", "export")
    (tmp_path / "mine.html").write_text("mine")
    (tmp_path / "best" / "report.html").symlink_to(tmp_path / "mine.html")
    assert run_command(flags, "--no-codecs")[0] == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    best = max(results["vaes"], key=lambda row: row["sizes"][0]["metrics"]["psnr"])
    found = load_vae(tmp_path / "best").autoencoder.state_dict()
    expected = load_vae(Path(best["path"])).autoencoder.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "<title>Comparison" in (tmp_path / "best" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "mine.html").read_text() == "mine"
    code, _, errors = run_command({**flags, "--output_dir": tmp_path / "again"})
    assert (code, "--promote" in errors and "--overwrite" in errors) == (78, True)


def test_overwrite_replaces_results_and_old_samples(flags, tmp_path):
    """Those that the earlier results name, and no others with such a name."""
    claim_folder(tmp_path / "out", "evaluate")
    old, mine = (tmp_path / "out" / "samples" / name for name in ("07_original.png", "08_original.png"))
    outside = tmp_path / "letter.txt"
    named = [f"samples/{old.name}", "../letter.txt", "samples/../../letter.txt", str(outside)]
    sample = {"original": named[0], "recon": named[1], "error": named[2], "latents": [named[3]]}
    write_json(tmp_path / "out" / "results.json", {"vaes": [{"samples": [sample]}]})
    for path in (old, mine, outside, tmp_path / "out" / "notes.txt"):
        replace_text(path, "mine")
    code, _, errors = run_command(flags, "--no-codecs")
    assert (code, "--overwrite" in errors) == (78, True)
    flags.update({"--vae": flags["--vae"][:1]})
    assert run_command(flags, "--overwrite", "--no-codecs", "--diffusability", "--diagnose")[0] == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 1 <= results["vaes"][0]["diffusability"]["effective rank"] <= 16
    assert results["vaes"][0]["diagnosis"]["cast"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(caption in page for caption in ("Latents for diffusion", "Defects, ", "cast after 10 rounds"))
    assert [row["kind"] for row in results["vaes"]] == ["diffusers"]
    assert not old.exists()
    assert mine.exists()
    assert outside.exists()
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {*OUTPUTS, "notes.txt"}


def test_a_cancelled_comparison_does_not_block_the_next(flags, tmp_path, monkeypatch):
    def cancel(*_arguments):
        raise KeyboardInterrupt

    flags.update({"--vae": flags["--vae"][:1]})
    with monkeypatch.context() as patched:
        patched.setattr(compare, "write_report", cancel)
        assert run_command(flags, "--no-codecs")[0] != 0
    assert (tmp_path / "out" / "samples").exists()
    assert run_command(flags, "--no-codecs")[0] == 0
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == OUTPUTS
    code, _, errors = run_command(flags, "--no-codecs")  # a complete one is not replaced
    assert code == 78
    assert "--overwrite" in errors


def test_short_names_are_unique():
    assert short_names(("x/a/vae", "x/b/vae")) == ["a/vae", "b/vae"]
    assert short_names(("x/1/a.pt", "x/2/a.pt", "b.pt")) == ["1/a.pt", "2/a.pt", "b.pt"]
