"""Preprocessing: sizes, names and repeated runs; interruptions do not change the output."""

import csv
import json
import os
import random
import shutil
import signal
import tarfile
import unicodedata
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
from PIL import Image

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare, tree
from tests.harness.runs import run_script
from tests.harness.tars import write_tar
from tests.harness.waiting import kill_when, posix
from vae.config.prepare_flags import PreprocessConfig
from vae.data.manifest import read_rows
from vae.images.decoding import decode_image
from vae.images.formats import BadImageError
from vae.prepare.demo import draw_image
from vae.prepare.preprocess import plan_shape, resize, resize_to_shape


def command(source, output, *flags):
    line = ["prepare_data.py", "--mode", "preprocess", "--input_dir", source, "--output_dir", output]
    workers = [] if "--num_workers" in flags else ["--num_workers", "1"]
    return [*map(str, line), *map(str, flags), *workers]


def settings(**given):
    """A configuration for functions that do not read the folders."""
    return PreprocessConfig(input_dir="in", output_dir="out", **{"format": "png", **given})


def preprocess(source, output, *flags, code=0, says=""):
    return prepare(*command(source, output, *flags)[1:], code=code, says=says)


def manifest(folder):
    return list(read_rows(Path(folder) / "manifest.jsonl"))


@pytest.fixture
def raw(tmp_path):
    """Six images of different formats and sizes; one is bad and one is a duplicate."""
    folder = tmp_path / "raw"
    (folder / "sub").mkdir(parents=True)
    detailed(0, 96, 128).save(folder / "wide.jpg", quality=95)
    detailed(1, 128, 96).save(folder / "sub" / "tall.png")
    detailed(2, 64, 64).save(folder / "square.webp", lossless=True)
    detailed(3, 40, 48).save(folder / "little.png")
    (folder / "bad.jpg").write_bytes(encoded(detailed(4), "JPEG")[:-2])
    detailed(1, 128, 96).save(folder / "twin.png")
    return folder


@pytest.mark.parametrize(
    ("mode", "expected"),  # of 400 x 300 and of 100 x 50 at size 200; None: rejected
    [
        ("cover", ((267, 200), None)),
        ("longest", ((200, 150), None)),
        ("contain", ((200, 150), (100, 50))),
        ("crop", ((200, 200), None)),
        ("pad", ((200, 200), None)),
        ("stretch", ((200, 200), None)),
    ],
)
def test_output_sizes_of_each_mode(mode, expected):
    for (width, height), size in zip(((400, 300), (100, 50)), expected, strict=True):
        pixels = np.zeros((height, width, 3), dtype=np.uint8)
        if size is None:
            with pytest.raises(BadImageError, match="too_small"):
                plan_shape(width, height, settings(target_size=200, resize_mode=mode))
            assert plan_shape(
                width, height, settings(target_size=200, resize_mode=mode, upscale=True)
            ).upscaled
            continue
        shape = plan_shape(width, height, settings(target_size=200, resize_mode=mode))
        assert not shape.upscaled
        assert resize_to_shape(pixels, shape, "white").shape == (size[1], size[0], 3)


def test_padding_is_centred_and_has_the_background_colour():
    shape = plan_shape(80, 40, settings(target_size=40, resize_mode="pad"))
    padded = resize_to_shape(np.zeros((40, 80, 3), dtype=np.uint8), shape, "#102030")
    assert padded[:10].reshape(-1, 3).tolist() == [[16, 32, 48]] * 400
    assert padded[30:].reshape(-1, 3).tolist() == [[16, 32, 48]] * 400
    assert padded[10:30].max() == 0


def test_outputs_beyond_the_limits_are_rejected():
    with pytest.raises(BadImageError, match="too_large_for_format"):
        plan_shape(200_000, 1000, settings(target_size=1000, max_pixels=10**9, format="jpeg"))
    with pytest.raises(BadImageError, match="too_many_pixels"):
        plan_shape(200_000, 10, settings(target_size=1000, max_pixels=10**9, upscale=True))


def fine_detail(pixels):
    """Energy of the finest scale: mean squared difference of neighbouring pixels."""
    grey = pixels.astype(float).mean(-1)
    return float((np.diff(grey, axis=0)[:, :-1] ** 2 + np.diff(grey, axis=1)[:-1] ** 2).mean())


@pytest.mark.parametrize("size", [(333, 250), (171, 128), (500, 400), (80, 60)])
def test_resizing_agrees_with_lanczos_of_pillow(size):
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC)
    reference = np.asarray(image.resize(size, Image.Resampling.LANCZOS))
    ours = resize(np.asarray(image), *size)
    assert np.abs(ours.astype(int) - reference).mean() < 1.5
    assert 0.98 < fine_detail(ours) / fine_detail(reference) < 1.05


def test_commands_of_the_guide(raw, tmp_path, monkeypatch):
    """The documented commands, except for the size, because these images are small."""
    monkeypatch.chdir(tmp_path)
    line = (
        "--mode preprocess --input_dir ./raw --output_dir ./data/train "
        "--target_size 32 --resize_mode cover --num_workers 8"
    )
    prepare(*line.split(), code=0)
    line = "--mode validate --input_dir ./data/train --output_file validation_report.json"
    prepare(*line.split(), code=0)
    report = json.loads((tmp_path / "validation_report.json").read_text())
    assert (report["accepted"], report["rejected"], report["manifest_checked"]) == (4, 0, True)
    rows = manifest(tmp_path / "data/train")
    assert [row["path"] for row in rows] == ["little.jpg", "square.jpg", "sub/tall.jpg", "wide.jpg"]
    assert [(row["width"], row["height"]) for row in rows] == [(38, 32), (32, 32), (32, 43), (43, 32)]
    assert rows[2]["source"] == "sub/tall.png"
    assert " ".join(rows[0]) == "path sha256 width height source flags phash group label"


def test_sources_without_an_image_are_listed(raw, tmp_path):
    preprocess(raw, tmp_path / "out", "--target_size", 64, "--format", "png")
    rows = manifest(tmp_path / "out")
    assert [row["path"] for row in rows] == ["square.png", "sub/tall.png", "wide.png"]
    rejected = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert [(row["source"], row["reason"]) for row in rejected] == [
        ("bad.jpg", "truncated"),
        ("little.png", "too_small"),
        ("twin.png", "exact_duplicate"),
    ]
    for row in rows:
        assert decode_image(tmp_path / "out" / row["path"]).shape == (row["height"], row["width"], 3)


def test_second_run_makes_what_is_missing_or_has_changed(raw, tmp_path):
    out, flags = tmp_path / "out", ("--target_size", 32)
    preprocess(raw, out, *flags)
    before = tree(out)
    preprocess(raw, out, *flags)
    assert tree(out) == before
    (out / "wide.jpg").unlink()
    (out / "square.jpg").write_bytes(b"torn")
    preprocess(raw, out, *flags)
    assert tree(out) == before

    detailed(9, 50, 50).save(raw / "square.webp")
    (raw / "wide.jpg").unlink()
    preprocess(raw, out, *flags, says="1 images no longer have a source")
    assert "wide.jpg" not in [row["path"] for row in manifest(out)]
    assert (out / "wide.jpg").exists()  # nothing is deleted
    assert np.array_equal(decode_image(out / "square.jpg").shape, (32, 32, 3))


def test_look_alikes_are_dropped_by_the_rule_of_analyze_and_come_back_without_the_flag(tmp_path):
    raw, out, flags = tmp_path / "raw", tmp_path / "out", ("--target_size", 64, "--drop_duplicates")
    raw.mkdir()
    for number in range(2):
        image = Image.fromarray(draw_image(192, 3, number))
        image.resize((96, 96)).save(raw / f"{number} small.png")
        image.save(raw / f"{number} large.jpg", quality=90)
    shutil.copy(raw / "0 small.png", raw / "0 copy.png")
    done = preprocess(raw, out, *flags)
    assert "2 images, 0 rejected, 1 exact duplicate " in done.stdout
    kept = ["0 large.jpg", "1 large.jpg"]
    assert [row["path"] for row in manifest(out)] == kept
    assert sorted(path.name for path in out.glob("*.jpg")) == kept
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(row["source"], row["reason"], row["detail"]) for row in rejected] == [
        ("0 copy.png", "near_duplicate", "of 0 large.jpg"),
        ("0 small.png", "exact_duplicate", "of 0 copy.png"),
        ("1 small.png", "near_duplicate", "of 1 large.jpg"),
    ]
    prepare("--mode", "analyze", "--input_dir", raw, "--output_dir", tmp_path / "stats")
    with open(tmp_path / "stats/near_duplicates.csv", newline="") as file:
        assert sorted(row["path"] for row in csv.DictReader(file) if row["keep"] == "1") == kept
    preprocess(raw, out, *flags[:2], says="4 images")
    preprocess(raw, tmp_path / "all", *flags[:2])
    assert {p.name for p in out.glob("*.jpg")} == {p.name for p in (tmp_path / "all").glob("*.jpg")}


def test_result_depends_on_the_sources_only_not_on_their_history(raw, tmp_path):
    """Sources that became duplicates after they were converted leave no trace."""
    preprocess(raw, tmp_path / "out", "--target_size", 32)
    shutil.copy(raw / "wide.jpg", raw / "a first copy.jpg")
    shutil.copy(raw / "sub/tall.png", raw / "square.webp")
    preprocess(raw, tmp_path / "out", "--target_size", 32)
    preprocess(raw, tmp_path / "fresh", "--target_size", 32)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_foreign_values_in_the_manifest_are_kept(raw, tmp_path):
    out = tmp_path / "out"
    preprocess(raw, out, "--target_size", 32)
    rows = manifest(out)
    rows[1].update(group="g1", label="cat", split="val", fold=3)
    (out / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    detailed(9, 50, 50).save(raw / "another.png")
    preprocess(raw, out, "--target_size", 32)
    assert manifest(out)[1:] == rows


ODD_NAMES = (
    "CON.png", "a/aux.b.png", "nul", "COM1.tar.png", "lpt9 .png", "dir. /x.png", "dir /x.png", "ends. ",
    "a?.png", "a*.png", "A?.png", "Foo/a.png", "foo/A.png", "d" * 248 + "/x.png", "d" * 248 + "/y.png",
    "e\u0301.png", "\u00e9.png", "x" * 250 + ".png", "tab\t.png", "caf\udce9.png", "\U0001f600.png",
)  # fmt: skip


def test_outputs_of_a_tar_file_have_names_that_every_system_accepts_and_tells_apart(tmp_path):
    # Windows limits a whole path to 260 characters, unless its registry allows more.
    names = [name for name in ODD_NAMES if os.name != "nt" or len(name) < 200]
    members = [
        (f"{name}.png" if "png" not in name else name, encoded(detailed(seed, 32, 32), "PNG"))
        for seed, name in enumerate(names)
    ]
    write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT)
    preprocess(tmp_path / "a.tar", tmp_path / "out", "--target_size", 32)
    rows = manifest(tmp_path / "out")
    # Names with control characters, and those that are no UTF-8, are rejected in a tar file.
    assert len(rows) == len(names) - 2
    assert len({unicodedata.normalize("NFC", row["path"]).casefold() for row in rows}) == len(rows)
    for part in {part for row in rows for part in row["path"].split("/")}:
        assert len(part.encode()) <= 250
        assert not part.endswith((" ", "."))
        assert PureWindowsPath(part).stem.split(".")[0].rstrip().upper() not in ("CON", "AUX", "NUL", "LPT9")
        assert part.isprintable()
        assert not set('\\<>:"|?*') & set(part)


def test_background_and_rotation_are_applied(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    Image.new("RGBA", (64, 64), (250, 10, 10, 128)).save(raw / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    detailed(0, 32, 64).save(raw / "turned.png", exif=exif)
    preprocess(raw, tmp_path / "out", "--target_size", 32, "--format", "png", "--background", "#102030")
    share = 128 / 255
    expected = np.array([250, 10, 10]) * share + np.array([16, 32, 48]) * (1 - share)
    assert np.abs(decode_image(tmp_path / "out" / "clear.png") - expected).max() <= 1.5
    assert decode_image(tmp_path / "out" / "turned.png").shape == (64, 32, 3)


@pytest.mark.parametrize("file_format", ["png", "webp"])
def test_alpha_is_kept_and_hidden_colors_do_not_bleed(file_format, tmp_path):
    """Red cut-outs whose invisible pixels are green, from files and from a tar, in each kind of file."""
    raw = tmp_path / "raw"
    raw.mkdir()
    y, x = np.mgrid[0:64, 0:96]
    alpha = np.where(np.hypot(y - 32, x - 48) < 24, 255, 0).astype(np.uint8)
    red, green = np.uint8([250, 10, 10]), np.uint8([0, 255, 0])
    cut_out = Image.fromarray(np.dstack([np.where(alpha[..., None] > 0, red, green), alpha]))
    cut_out.save(raw / "a.png")
    cut_out.transpose(Image.Transpose.ROTATE_90).save(raw / "b.webp", lossless=True, exact=True)
    cut_out.rotate(180).save(raw / "c.tif")
    detailed(0, 64, 96).save(raw / "opaque.jpg")
    write_tar(tmp_path / "cut_outs.tar", [("d.png", (raw / "a.png").read_bytes())])
    flags = "--target_size", 32, "--resize_mode", "pad", "--keep_alpha", "--format", file_format
    preprocess(raw, tmp_path / "files", *flags)
    preprocess(tmp_path / "cut_outs.tar", tmp_path / "tar", *flags)
    paths = tmp_path.glob(f"[ft]*/**/*.{file_format}")
    images = {path.stem: np.asarray(Image.open(path)) for path in paths}
    assert {name: image.shape[2] for name, image in images.items()} == dict.fromkeys("abcd", 4) | {
        "opaque": 3
    }
    for name in "abcd":
        pixels = images[name]
        assert pixels.shape == (32, 32, 4)
        share = (pixels[..., 3] / 255).sum() / (np.pi * 8**2)
        assert share == pytest.approx(1, abs=0.03)
        seen = pixels[pixels[..., 3] > 64, :3].astype(int)
        assert np.abs(seen - red).max() <= (6 if file_format == "png" else 40)  # 8 bits; quality 95, 4:2:0
        assert (pixels[[0, -1], :, 3] == 0).all()
    assert not any("alpha_flattened" in row["flags"] for row in manifest(tmp_path / "files"))
    preprocess(raw, tmp_path / "jpeg", "--keep_alpha", code=2, says="--keep_alpha needs --format png")


def test_other_settings_and_other_sources_are_errors(raw, tmp_path):
    preprocess(raw, tmp_path / "out", "--target_size", 32)
    before = tree(tmp_path / "out")
    preprocess(raw, tmp_path / "out", "--target_size", 48, code=78, says="target_size 32")
    done = preprocess(raw / "sub", tmp_path / "out", "--target_size", 32, code=78)
    assert str(raw) in done.stderr
    assert tree(tmp_path / "out") == before


def test_without_pyvips_and_simplejpeg_it_works_and_warns(raw, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("pyvips", "simplejpeg"):
        (blocked / f"{name}.py").write_text("raise ImportError")
    environment = {"PYTHONPATH": str(blocked)}
    done = run_script(
        *command(raw, tmp_path / "out", "--target_size", 32, "--format", "png"), env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pyvips is not installed") == 1
    assert done.stdout.count("simplejpeg is not installed") == 1
    preprocess(raw, tmp_path / "fast", "--target_size", 32, "--format", "png")
    for row in manifest(tmp_path / "out"):
        slow, fast = (decode_image(tmp_path / name / row["path"]).astype(int) for name in ("out", "fast"))
        assert np.abs(slow - fast).mean() < 1.5
    flags = ("--target_size", 32, "--format", "png")
    preprocess(raw, tmp_path / "out", *flags, code=78, says="engine Pillow")


def many(folder, count):
    """Images of about 10 ms each, with folders, duplicates, name collisions and bad files."""
    folder.mkdir()
    base = np.asarray(detailed(0, 480, 640))
    for index in range(count):
        pixels = np.roll(base, (index % 20) * 7, axis=1)
        place = folder / f"part{index % 3}"
        place.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(place / f"{index // 2:04d}.{'jpg' if index % 2 else 'png'}")
        if index % 10 == 0:
            (place / f"bad{index}.jpg").write_bytes(b"\xff\xd8\xff")


def images_in(folder):
    return {path for path in Path(folder).rglob("*.jpg") if ".prepare" not in path.parts}


@posix
@pytest.mark.slow
def test_output_after_two_kills_equals_an_undisturbed_run(tmp_path):
    """Killed at random shares of its work, and continued each time."""
    many(tmp_path / "raw", 60)
    flags = ("--target_size", 256, "--num_workers", 2)
    preprocess(tmp_path / "raw", tmp_path / "undisturbed", *flags)
    total = len(images_in(tmp_path / "undisturbed"))
    chance, line = random.Random(1), command(tmp_path / "raw", tmp_path / "out", *flags)
    for target in sorted(chance.sample(range(1, total - 4), 2)):
        code, _ = kill_when(lambda least=target: len(images_in(tmp_path / "out")) >= least, line)
        assert code == -signal.SIGKILL  # it was still running
    preprocess(tmp_path / "raw", tmp_path / "out", *flags)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.slow
@posix
def test_signal_stops_with_one_line_and_no_temporary_files(tmp_path):
    many(tmp_path / "raw", 150)
    line = command(tmp_path / "raw", tmp_path / "out", "--target_size", 256, "--num_workers", 2)
    code, err = kill_when(lambda: any((tmp_path / "out").glob("part0/*.jpg")), line, signal.SIGTERM)
    assert code == 130
    assert err.strip().splitlines()[-1] == "stopped: the same command continues from here"
    assert "Traceback" not in err
    assert not list((tmp_path / "out/.prepare").glob("scratch-*"))
    assert not (tmp_path / "out/manifest.jsonl").exists()


@posix
def test_full_disk_is_an_error_of_one_line(tmp_path):
    """A limit on file sizes makes writes fail as on a full disk."""
    many(tmp_path / "raw", 4)
    line = command(tmp_path / "raw", tmp_path / "out", "--target_size", 400, "--format", "png")
    code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_script("-c", code, *line)
    assert done.returncode == 78, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("prepare_data.py: --output_dir")
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    prepare(*line[1:], code=0)
