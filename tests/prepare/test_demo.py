"""Demo images are reproducible, varied and detailed; the script writes complete files only."""

import hashlib
import os
import signal

import numpy as np

from tests.harness.runs import run_here, run_script
from tests.harness.waiting import kill_when, posix
from vae.images.decoding import decode_image
from vae.images.folder import list_images
from vae.prepare.demo import draw_image

GOLDEN = "7bff85a308dedce52fc156229a1ed3cef01b63a28f22f415c9a2dd2892f2815f"


def test_pixels_equal_the_recorded_hash():
    assert hashlib.sha256(draw_image(96, 0, 0).tobytes()).hexdigest() == GOLDEN


def test_script_draws_only_missing_images(tmp_path):
    line = ("--mode", "demo", "--output_dir", str(tmp_path / "demo"), "--count", "3", "--target_size", "64")
    first = run_script("prepare_data.py", *line, "--num_workers", "2")
    assert first.returncode == 0, first.stderr
    names = list_images(tmp_path / "demo")
    assert names == ["demo_00000.png", "demo_00001.png", "demo_00002.png"]
    assert np.array_equal(decode_image(tmp_path / "demo" / names[2]), draw_image(64, 0, 2))
    (tmp_path / "demo" / names[1]).unlink()
    before = {name: (tmp_path / "demo" / name).stat().st_mtime_ns for name in names if name != names[1]}
    assert "3 images, 1 of them drawn now" in run_script("prepare_data.py", *line).stdout
    assert "3 images, 0 of them drawn now" in run_here("prepare_data.py", *line).stdout
    assert before == {name: (tmp_path / "demo" / name).stat().st_mtime_ns for name in before}
    assert np.array_equal(decode_image(tmp_path / "demo" / names[1]), draw_image(64, 0, 1))

    other = run_here("prepare_data.py", *line, "--seed", 1)
    assert other.returncode == 78
    assert "seed 0" in other.stderr
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == sorted(
        [*names, "demo_settings.json", ".vae_folder.json"]
    )


@posix
def test_signal_leaves_only_complete_images(tmp_path):
    line = ["prepare_data.py", "--mode", "demo", "--count", "5000", "--target_size", "64"]
    line += ["--num_workers", "2", "--output_dir", str(tmp_path)]
    code, err = kill_when(lambda: list(tmp_path.glob("demo_*.png")), line, signal.SIGINT, os.killpg)
    assert (code, "Traceback" in err) == (130, False)
    assert not list(tmp_path.glob(".*.tmp"))
    for name in list_images(tmp_path):
        decode_image(tmp_path / name)
