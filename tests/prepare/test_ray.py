"""examples/prepare_on_ray.py checks the blocks of --mode shard, which then only packs them."""

import sys

import pytest

from tests.harness.image_kinds import detailed, encoded
from tests.harness.preparing import prepare
from tests.harness.runs import ROOT, run_script
from vae.shards.dataset_json import read_dataset

pytest.importorskip("ray.data", reason="ray[data] is not installed")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ray on Windows is not tested")
def test_dataset_checked_on_ray_is_that_of_one_command(tmp_path):
    (tmp_path / "raw").mkdir()
    for number in range(30):
        (tmp_path / "raw" / f"{number:02}.png").write_bytes(encoded(detailed(number), "PNG"))
    (tmp_path / "raw/bad.png").write_bytes(b"no image")
    words = ("--input_dir", str(tmp_path / "raw"), "--num_workers", "1", "--output_dir")
    done = run_script(str(ROOT / "examples/prepare_on_ray.py"), *words, str(tmp_path / "ray"))
    assert done.returncode == 0, done.stderr
    assert "1 blocks are checked, 1 images rejected" in done.stdout
    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray/.prepare/rows").iterdir()}
    for name in ("ray", "here"):
        prepare("--mode", "shard", *words, tmp_path / name, code=0)
    assert {path: path.stat().st_mtime_ns for path in rows} == rows
    versions = {read_dataset(tmp_path / name / "dataset.json").version for name in ("ray", "here")}
    assert len(versions) == 1
