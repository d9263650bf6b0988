"""The statistics of an analysis equal values computed by hand; its histograms have every value."""

import csv
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.harness.preparing import prepare
from vae.images.decoding import read_image_bytes
from vae.prepare.analyze import HEIGHT, WIDTH, bin_edges
from vae.prepare.check import estimate_jpeg_quality, measure_image, sharpness
from vae.prepare.demo import draw_image

EVIL = "<img src=x onerror=alert(1)> & \"quoted\" 'too'" if os.name != "nt" else "& 'too'"


def analyze(folder, output):
    """The statistics, the histograms, and what is printed."""
    words = ("--mode", "analyze", "--input_dir", folder, "--output_dir", output)
    done = prepare(*words, code=0)
    stats = json.loads(Path(output, "stats.json").read_text())
    return stats, Path(output, "histograms.png").read_bytes(), done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of known sizes and kinds, duplicates, and two files that cannot be read."""
    root = tmp_path_factory.mktemp("set")
    drawn = [Image.fromarray(draw_image(128, 1, index)) for index in range(4)]
    drawn[0].resize((1600, 1100)).save(root / "large.jpg", quality=60)
    drawn[1].resize((800, 1200)).save(root / f"{EVIL}.png")
    drawn[1].resize((400, 600)).save(root / "half.webp", quality=90)
    drawn[2].save(root / "one.png")
    (root / "sub").mkdir()
    (root / "sub/two.png").write_bytes((root / "one.png").read_bytes())
    drawn[3].resize((520, 520)).filter(ImageFilter.GaussianBlur(9)).save(root / "soft.png")
    Image.new("RGB", (900, 300), (7, 8, 9)).save(root / "blank.png")
    (root / "torn.jpg").write_bytes((root / "large.jpg").read_bytes()[:5000])
    (root / "nothing.png").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def analysis(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("out")
    return *analyze(folder, output), output


def test_statistics_of_the_set(analysis, folder):
    stats, _, printed, output = analysis
    assert stats["images"] == 7
    assert {reason: one["count"] for reason, one in stats["rejected"].items()} == {"truncated": 1, "empty": 1}
    sizes = {one["image_size"]: one["images"] for one in stats["resolutions"]}
    assert {size: sizes[size] for size in (512, 768, 1024, 1536)} == {512: 3, 768: 2, 1024: 1, 1536: 0}
    files = (path for path in folder.rglob("*.*") if path.name not in ("torn.jpg", "nothing.png"))
    assert stats["space"]["bytes"] == sum(path.stat().st_size for path in files)
    assert stats["shapes"] == {"portrait": 2, "square": 3, "landscape": 2}
    assert stats["formats"] == {"PNG": 5, "JPEG": 1, "WEBP": 1}
    assert list(stats["formats"]) == ["PNG", "JPEG", "WEBP"]
    assert stats["quantiles"]["short_side"]["max"] == 1100
    assert stats["quantiles"]["short_side"]["min"] == 128
    assert stats["quantiles"]["jpeg_quality"]["p50"] == 60
    assert stats["exact_duplicates"] == 1
    assert stats["near_duplicates"] == {"groups": 1, "images": 2}
    with open(output / "near_duplicates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["path"], row["width"], row["keep"]) for row in rows] == [
        (f"{EVIL}.png", "800", "1"),
        ("half.webp", "400", "0"),
    ]
    assert "near duplicates: 2 images in 1 group, all listed in " in printed
    assert f"{rows[0]['group']}: {EVIL}.png, half.webp" in printed


def test_examples_are_named_by_kind(analysis):
    stats, histograms, _, _ = analysis
    examples = stats["examples"]
    assert examples["largest"][0] == "large.jpg"
    assert examples["most_blurred"][0] == "soft.png"
    assert examples["blank"] == ["blank.png"]
    assert examples["most_compressed"] == ["large.jpg"]
    assert examples["most_elongated"] == ["blank.png"]
    assert Image.open(io.BytesIO(histograms)).size == (WIDTH, HEIGHT)


def test_measurements_equal_values_by_hand(tmp_path):
    random = np.random.default_rng(0)
    noise = random.normal(128, 20, (400, 400, 1)).repeat(3, axis=2).clip(0, 255).astype(np.uint8)
    assert sharpness(noise) == pytest.approx(20, rel=0.1)  # 1 + 1 + 1 + 1 + 16
    soft = np.asarray(Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2)))
    assert sharpness(soft) < 1
    assert sharpness(np.full((50, 40, 3), 90, np.uint8)) == 0
    assert sharpness(np.zeros((1, 2, 3), np.uint8)) == 0
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:32] = (200, 100, 50)
    Image.fromarray(pixels).save(tmp_path / "half.png")
    found = SimpleNamespace(
        **measure_image(read_image_bytes((tmp_path / "half.png").read_bytes(), "half.png"), b"")
    )
    assert found.channel_means == pytest.approx((100, 50, 25))
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    assert found.brightness == pytest.approx(luma / 2, rel=1e-5)
    assert found.contrast == pytest.approx(luma / 2, rel=1e-5)


@pytest.mark.parametrize("quality", [1, 10, 35, 50, 75, 90, 95, 100])
def test_jpeg_quality_is_estimated(tmp_path, quality):
    Image.fromarray(draw_image(64, 0, 0)).save(tmp_path / "a.jpg", quality=quality)
    assert abs(estimate_jpeg_quality((tmp_path / "a.jpg").read_bytes()) - quality) <= 1


def test_histograms_count_every_value():
    random = np.random.default_rng(0)
    equal = [np.full(3, 7.0), np.full(24, 256.0), np.zeros(2)]
    for values in (random.lognormal(6, 1, 5000), np.array([1.0, np.nan, 3.0]), *equal):
        for is_log in (False, True):
            counted = np.isfinite(values) & ((values > 0) | (not is_log))
            edges = bin_edges(values, is_log)
            assert len(edges) or not counted.any()
            assert (np.diff(edges) > 0).all()  # also of equal values: bars have a width
            assert np.histogram(values[counted], edges if len(edges) else 1)[0].sum() == counted.sum()
