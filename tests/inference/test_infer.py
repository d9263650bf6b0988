"""The five modes on real files, and bad files among good ones."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.harness.checkpoints import checkpoint
from tests.harness.small_vae import write_vae
from vae import progress
from vae.config.precision import PrecisionSupport
from vae.images import formats
from vae.inference import infer, tasks
from vae.interop.checkpoint_file import save_checkpoint
from vae.interop.vae_files import load_vae
from vae.system.errors import DataError, UserError
from vae.system.files import claim_folder


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.fixture
def odd_image(image_folder, tmp_path):
    """An image of 37 x 23 px, whose sides are not multiples of the downsampling."""
    path = tmp_path / "one.png"
    Image.open(image_folder / "image_00.png").crop((0, 0, 37, 23)).save(path)
    return path


def test_reconstruction_has_the_image_size_and_equals_the_model(command, odd_image, vae_folder, tmp_path):
    assert command("reconstruct", "--input", odd_image) == 0
    found = pixels(tmp_path / "out" / "one.png")
    original = pixels(odd_image)
    assert found.shape == original.shape == (23, 37, 3)
    model = load_vae(vae_folder).autoencoder
    padded = np.pad(original, ((0, 1), (0, 3), (0, 0)), mode="edge")
    images = torch.from_numpy(padded).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        recon = ((model(images)[0] + 1) * 127.5).round().clamp(0, 255)[0, :, :23, :37]
    difference = np.abs(found.astype(int) - recon.permute(1, 2, 0).numpy().astype(int))
    assert difference.max() <= 1  # another memory layout may round a value of half a level the other way
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_webp_has_the_pixels_of_png(channels, tmp_path):
    """Also the colors of transparent pixels, which WebP changes unless asked not to."""
    image = np.random.default_rng(0).integers(0, 256, (24, 32, channels), np.uint8)
    image[:12, :, -1] = 0
    for path in (tmp_path / "a.png", tmp_path / "a.webp"):
        infer.write_image(path, image)
        with Image.open(path) as written:
            assert written.format.lower() == path.suffix[1:]
            expected = image if channels > 1 else image.repeat(3, 2)
            assert np.array_equal(np.asarray(written.convert("RGBA" if channels == 4 else "RGB")), expected)


def test_webp_is_written_by_every_mode_that_writes_images(
    command, image_folder, tmp_path, monkeypatch, capsys
):
    first, second = image_folder / "image_00.png", image_folder / "image_02.png"
    assert command("reconstruct", "--input", first) == 0
    for mode, inputs in {
        "reconstruct": [first],
        "interpolate": [first, second],
        "variations": [first],
    }.items():
        assert command(mode, "--format", "webp", "--input", *inputs, "--output_dir", tmp_path / mode) == 0
        assert {path.suffix for path in (tmp_path / mode).glob("image*")} == {".webp"}
    found = pixels(tmp_path / "reconstruct" / "image_00.webp")
    assert np.array_equal(found, pixels(tmp_path / "out" / "image_00.png"))
    with pytest.raises(UserError, match=r"^--format webp has no effect with --mode encode"):
        command("encode", "--format", "webp", "--input", first, "--output_dir", tmp_path / "latents")
    monkeypatch.setitem(formats.MAX_SIDE, "webp", 16)
    assert (
        command("reconstruct", "--format", "webp", "--input", first, "--output_dir", tmp_path / "large") == 77
    )
    assert "exceeds the limit of webp, 16: use --format png" in capsys.readouterr().err
    assert not list((tmp_path / "large").glob("image*"))


def test_encode_then_decode_equals_reconstruct(command, odd_image, tmp_path):
    assert command("reconstruct", "--input", odd_image) == 0
    assert command("encode", "--input", odd_image, "--output_dir", tmp_path / "latents") == 0
    assert command("decode", "--input", tmp_path / "latents", "--output_dir", tmp_path / "decoded") == 0
    assert np.array_equal(pixels(tmp_path / "decoded" / "one.png"), pixels(tmp_path / "out" / "one.png"))


def test_latent_file_contains_tensors_and_metadata(command, odd_image, tmp_path):
    assert command("encode", "--input", odd_image) == 0
    with safe_open(tmp_path / "out" / "one.safetensors", framework="pt") as file:
        latents, logvar, metadata = file.get_tensor("latents"), file.get_tensor("logvar"), file.metadata()
    assert latents.shape == logvar.shape == (16, 6, 10)
    assert latents.dtype == torch.float32
    assert (metadata["width"], metadata["height"], metadata["downsampling"]) == ("37", "23", "4")
    assert (float(metadata["scaling_factor"]), float(metadata["shift_factor"])) == (0.5, 0.25)
    mean = [float(part) for part in metadata["channel_mean"].strip("[]").split(",")]
    torch.testing.assert_close(torch.tensor(mean), latents.mean(dim=(1, 2)), rtol=0, atol=2e-6)
    assert metadata["source"] == "one.png"


def test_tiles_of_one_image_show_progress(command, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    Image.effect_noise((400, 300), 50).convert("RGB").save(tmp_path / "large.png")
    tiled = ("--tiles", "blended", "--tile_size", "32", "--input", tmp_path / "large.png")
    assert command("reconstruct", *tiled) == 0
    lines = capsys.readouterr().err.splitlines()
    for part in ("encode", "decode"):
        found = [line for line in lines if line.startswith(f"{part}: ")]
        percent = [int(re.match(rf"{part}: (\d+) %, ", line)[1]) for line in found]
        assert len(found) > 10
        assert percent == sorted(percent)
        assert percent[-1] == 100


def test_interpolation_starts_and_ends_at_the_reconstructions(command, image_folder, tmp_path):
    ends = [image_folder / "image_00.png", image_folder / "image_02.png"]
    assert command("reconstruct", "--input", *ends) == 0
    assert command("interpolate", "--input", *ends, "--steps", 5, "--output_dir", tmp_path / "series") == 0
    series = [pixels(path) for path in sorted((tmp_path / "series").glob("[!.]*"))]
    assert len(series) == 5
    assert np.array_equal(series[0], pixels(tmp_path / "out" / "image_00.png"))
    assert np.array_equal(series[-1], pixels(tmp_path / "out" / "image_02.png"))
    away = [np.abs(series[0].astype(int) - frame).mean() for frame in series]
    assert away == sorted(away)
    assert len(set(away)) == 5


def test_interpolation_needs_two_inputs_of_one_size(command, image_folder, odd_image, tmp_path, capsys):
    with pytest.raises(UserError, match=r"--input names 3.*two files"):
        command("interpolate", "--input", odd_image, odd_image, odd_image)
    assert command("interpolate", "--input", odd_image, image_folder / "image_00.png") == 77
    assert "37x23 and 48x40" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_variations_depend_on_seed_scale_and_name_but_not_on_other_files(command, image_folder, tmp_path):
    names = [image_folder / "image_00.png", image_folder / "image_02.png"]

    def vary(folder, *words):
        assert command("variations", "--output_dir", tmp_path / folder, "--count", 2, *words) == 0
        return {path.name: pixels(path).astype(int) for path in (tmp_path / folder).glob("[!.]*")}

    both = vary("both", "--input", *names)
    alone = vary("alone", "--input", names[1])
    assert len(both) == 4
    assert all(np.array_equal(alone[name], both[name]) for name in alone)
    seeded = vary("seeded", "--input", names[1], "--seed", 1)
    far = vary("far", "--input", names[1], "--noise_scale", 8)
    middle = vary("middle", "--input", names[1], "--noise_scale", 0)
    first, second = sorted(alone)
    assert np.array_equal(middle[first], middle[second])
    assert not np.array_equal(alone[first], alone[second])
    assert not np.array_equal(alone[first], seeded[first])
    assert np.abs(far[first] - middle[first]).mean() > np.abs(alone[first] - middle[first]).mean()


def test_bad_files_are_reported_and_others_are_finished(command, image_folder, odd_image, tmp_path, capsys):
    folder = tmp_path / "mixed"
    shutil.copytree(image_folder / "inner", folder)
    (folder / "torn.png").write_bytes(odd_image.read_bytes()[:300])
    (folder / "text.jpg").write_text("not an image")
    Image.new("RGB", (40, 7)).save(folder / "thin.png")
    assert command("reconstruct", "--input", folder) == 77
    found = capsys.readouterr()
    assert "8 of 11 done, 3 failed" in found.out
    assert "torn.png: truncated" in found.err
    assert "text.jpg: not_an_image" in found.err
    assert "thin.png: too_small: 40x7 px" in found.err
    assert len(list((tmp_path / "out").glob("[!.]*"))) == 8
    assert command("reconstruct", "--input", folder / "torn.png", "--output_dir", tmp_path / "none") == 77
    assert "0 of 1 done, 1 failed\n" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["decode", "encode", "reconstruct"])
def test_input_of_the_wrong_kind_names_the_mode_that_reads_it(command, image_folder, tmp_path, mode):
    image = image_folder / "image_00.png"
    assert command("encode", "--input", image, "--output_dir", tmp_path / "z") == 0
    file = image if mode == "decode" else tmp_path / "z" / "image_00.safetensors"
    other = "--mode encode" if mode == "decode" else "--mode decode"
    for wrong in (file, file.parent):
        with pytest.raises(
            DataError, match=f"--input {re.escape(str(wrong))}.*--mode {mode} reads .*{other}"
        ):
            command(mode, "--input", wrong)
    if mode == "decode":
        with pytest.raises(DataError, match=r"\.safetensors.*--mode reconstruct"):
            command(mode, "--input", image)
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_latents_of_another_vae_are_refused(command, odd_image, tmp_path, capsys):
    assert command("encode", "--input", odd_image, "--output_dir", tmp_path / "z") == 0
    other = write_vae(tmp_path / "other", seed=1)
    latents = tmp_path / "z" / "one.safetensors"
    assert command("decode", "--input", latents, "--vae", other) == 77
    assert "one.safetensors: latents_of_another_vae" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.png"))
    assert command("decode", "--input", latents, "--vae", other, "--any_vae") == 0


def test_existing_results_are_kept_without_overwrite(command, odd_image, tmp_path):
    assert command("reconstruct", "--input", odd_image) == 0
    before = (tmp_path / "out" / "one.png").stat().st_mtime_ns
    with pytest.raises(UserError, match="--overwrite"):
        command("reconstruct", "--input", odd_image)
    assert (tmp_path / "out" / "one.png").stat().st_mtime_ns == before
    assert command("reconstruct", "--input", odd_image, "--overwrite") == 0
    assert (tmp_path / "out" / "one.png").stat().st_mtime_ns > before


def test_folders_of_others_are_refused(command, odd_image, tmp_path):
    for words in ([], ["--overwrite"]):
        with pytest.raises(UserError, match="contains files that this command did not write"):
            command("reconstruct", "--input", odd_image, "--output_dir", odd_image.parent, *words)
    claim_folder(tmp_path / "run", "train")
    with pytest.raises(UserError, match="the folder of another command"):
        command("reconstruct", "--input", odd_image, "--output_dir", tmp_path / "run")


def test_input_is_never_overwritten(command, odd_image, tmp_path):
    assert command("reconstruct", "--input", odd_image) == 0
    with pytest.raises(UserError, match="replace the input"):
        command("reconstruct", "--input", tmp_path / "out" / "one.png", "--overwrite")
    with pytest.raises(UserError, match=r"--output_dir .* inside --input"):
        command("reconstruct", "--input", odd_image.parent, "--output_dir", odd_image.parent / "results")


def test_inputs_that_differ_in_extension_get_different_results(command, odd_image, tmp_path):
    folder = tmp_path / "twins"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.png", "inner/b.png"):
        Image.open(odd_image).save(folder / name)
    Image.open(odd_image).convert("L").save(folder / "A.jpg")
    assert command("reconstruct", "--input", folder) == 0
    written = (tmp_path / "out").rglob("*.png")
    names = sorted(path.relative_to(tmp_path / "out").as_posix() for path in written)
    assert names == ["A_jpg.png", "a_png.png", "inner/b.png"]
    with pytest.raises(UserError, match="would both write"):
        command("reconstruct", "--input", odd_image, odd_image)
    # on a file system that distinguishes them
    names = ["IMG_1.JPG", "img_1.jpg", "img_2.jpg"]
    *twins, other = (stem.casefold() for stem in tasks._stems([(name, Path(name)) for name in names]))
    assert len({*twins}) == 2
    assert other == "img_2"


def test_latents_have_the_constants_of_the_vae(command, odd_image, vae_folder, tmp_path, capsys):
    """Of each channel, if its config.json has them; measured, if its run has not measured them yet."""
    shutil.copytree(vae_folder, tmp_path / "vae")
    path = tmp_path / "vae" / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"latents_mean": [0.5] * 16, "latents_std": [2.0] * 16}
    path.write_text(json.dumps(content), encoding="utf-8")
    save_checkpoint(tmp_path / "checkpoint_step_1.pt", checkpoint())
    found = {}
    for name in ("vae", "checkpoint_step_1.pt"):
        words = ("--input", odd_image, "--vae", tmp_path / name, "--output_dir", tmp_path / "out" / name)
        assert command("encode", *words) == 0
        with safe_open(tmp_path / "out" / name / "one.safetensors", framework="pt") as file:
            found[name] = file.metadata(), file.get_tensor("latents"), file.get_tensor("logvar")
    metadata, *_ = found["vae"]
    assert json.loads(metadata["latents_std"]) == [2.0] * 16
    metadata, latents, logvar = found["checkpoint_step_1.pt"]
    assert "that of these images is taken" in "".join(capsys.readouterr())
    scaled = (latents - float(metadata["shift_factor"])) * float(metadata["scaling_factor"])
    variance = scaled.square().mean() + logvar.exp().mean() * float(metadata["scaling_factor"]) ** 2
    torch.testing.assert_close(variance, torch.tensor(1.0))


def louder(vae_folder: Path, folder: Path, factor: float) -> Path:
    """The VAE with features multiplied by `factor`, which its norms remove; fp16 ends at 65,504."""
    shutil.copytree(vae_folder, folder)
    from safetensors.torch import load_file, save_file

    weights = load_file(vae_folder / "diffusion_pytorch_model.safetensors")  # Windows replaces no mapped file
    for name in ("encoder.conv_in.weight", "decoder.conv_in.weight"):
        weights[name] = weights[name] * factor
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder


@pytest.mark.parametrize("tiles", ["off", "blended"])
def test_features_beyond_fp16_are_scaled(command, odd_image, vae_folder, tmp_path, tiles):
    given = ("--input", odd_image, "--vae", louder(vae_folder, tmp_path / "loud", 1e3), "--tiles", tiles)
    given += () if tiles == "off" else ("--tile_size", 32)
    assert command("reconstruct", *given, "--dtype", "fp16") == 0
    assert command("reconstruct", *given, "--dtype", "fp32", "--output_dir", tmp_path / "fp32") == 0
    found, expected = (pixels(tmp_path / folder / "one.png").astype(int) for folder in ("out", "fp32"))
    assert np.abs(found - expected).max() <= 3


def test_fp16_overflow_is_refused_with_its_remedy(command, odd_image, vae_folder, tmp_path, capsys):
    overflowing = louder(vae_folder, tmp_path / "loud", 1e8)
    assert command("reconstruct", "--input", odd_image, "--vae", overflowing, "--dtype", "fp16") == 77
    errors = capsys.readouterr().err
    assert "not_finite" in errors
    assert "--dtype fp32" in errors
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_fp16_that_overflows_by_itself_becomes_fp32(
    command, odd_image, vae_folder, tmp_path, monkeypatch, capsys
):
    card = PrecisionSupport("the CPU", is_gpu=True, bf16="native")
    monkeypatch.setattr(infer, "precision_support", lambda _device: card)
    given = ("--input", odd_image, "--vae", louder(vae_folder, tmp_path / "loud", 1e8))
    assert command("reconstruct", *given) == 0
    printed = capsys.readouterr()
    assert "fp16 on cpu" in printed.out
    assert "--dtype auto continues in fp32" in printed.out + printed.err
    assert command("reconstruct", *given, "--dtype", "fp32", "--output_dir", tmp_path / "fp32") == 0
    assert np.array_equal(pixels(tmp_path / "out" / "one.png"), pixels(tmp_path / "fp32" / "one.png"))
