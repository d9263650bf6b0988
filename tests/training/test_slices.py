"""Validation by label: the mean of each slice over all processes, and the worst one in the record."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.harness.preparing import write_manifest
from tests.harness.shards import pack
from tests.harness.training_runs import ONE_PROCESS, records, train_on_two_processes
from vae.system.files import sha256_of_file
from vae.training.run import train
from vae.training.validation import MAX_SLICES, Slices, slice_record, slice_text


def test_mean_of_each_label():
    slices = Slices.of({0: "a", 1: "b", 2: None, 5: "a", 7: ""}, ONE_PROCESS)
    assert slices.labels == ["a", "b"]
    sums = slices.sums([0, 2, 5, 7], [20.0, 99.0, 30.0, 99.0])  # image 1 was unusable
    means = slices.means(sums, ONE_PROCESS)
    assert means == {"a": 25.0}


@pytest.mark.parametrize("labels", [[], ["one"] * 5, [str(n) for n in range(MAX_SLICES + 1)]])
def test_no_labels_one_label_and_names_of_images_are_no_slices(labels):
    slices = Slices.of(dict(enumerate(labels)), ONE_PROCESS)
    sums = slices.sums(range(len(labels)), [1.0] * len(labels))
    assert slices.means(sums, ONE_PROCESS) == {}
    assert slice_record({}) == {}
    assert slice_text({}) == ""


def test_worst_label_is_named():
    record = slice_record({"sky": 30.0, "text\n": 20.0})
    assert record == {"slices": 2, "slice_mean_psnr": 25.0, "slice_worst_psnr": 20.0, "worst_slice": "text\n"}
    assert slice_text(record) == r" | worst of 2 labels: text\n, 20.00 dB"


@pytest.fixture
def manifest(image_folder, tmp_path) -> Path:
    """16 images, 4 of them for validation: 3 are `smooth` and the last one is `noise`."""
    rows = []
    for number, path in enumerate(sorted(image_folder.rglob("*.png"))):
        copy = tmp_path / "data" / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        if number == 15:
            noise = torch.randint(0, 256, (40, 48, 3), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(copy)
        row = {"path": copy.name, "sha256": sha256_of_file(copy), "split": "val" if number > 11 else "train"}
        rows.append({**row, "label": "noise" if number == 15 else "smooth"})
    file = tmp_path / "data" / "manifest.jsonl"
    write_manifest(file, rows)
    return file


def given_for(tiny, manifest) -> dict:
    given = {**tiny, "data_path": str(manifest), "num_epochs": 1, "batch_size": 2}
    del given["val_split"]
    return given


def test_a_run_records_the_worst_label(tiny, manifest, tmp_path, capsys):
    assert train({**given_for(tiny, manifest), "max_steps": 1}) == 0
    found = records(tmp_path / "run", "validation")
    for record in found:
        assert (record["slices"], record["worst_slice"]) == (2, "noise")
        smooth = 2 * record["slice_mean_psnr"] - record["slice_worst_psnr"]
        assert record["psnr"] == pytest.approx((3 * smooth + record["slice_worst_psnr"]) / 4)
    assert capsys.readouterr().out.count("worst of 2 labels: noise, ") == 2


@pytest.mark.slow
def test_labels_of_shards_are_those_of_the_manifest(tiny, manifest, tmp_path):
    dataset = pack(manifest.parent, tmp_path / "set")
    sharded = {**given_for(tiny, manifest), "data_path": str(dataset)}
    assert train({**sharded, "max_steps": 1, "output_dir": str(tmp_path / "shards")}) == 0
    assert train({**given_for(tiny, manifest), "max_steps": 1}) == 0
    pair = [records(tmp_path / name, "validation")[0] for name in ("run", "shards")]
    for name in ("slices", "worst_slice", "slice_worst_psnr"):
        assert pair[0][name] == pytest.approx(pair[1][name])


@pytest.mark.slow
def test_two_processes_have_the_same_slices(tiny, manifest, tmp_path):
    given = given_for(tiny, manifest)
    train_on_two_processes({**given, "batch_size": 1})
    assert train({**given, "output_dir": str(tmp_path / "one")}) == 0
    pair = [records(tmp_path / name, "validation")[0] for name in ("run", "one")]
    for name in ("slices", "worst_slice"):
        assert pair[0][name] == pair[1][name]
    for name in ("slice_mean_psnr", "slice_worst_psnr"):
        # Gradients are added in another order, and Adam's first steps enlarge that.
        assert pair[0][name] == pytest.approx(pair[1][name], abs=0.001)  # dB
