"""The trainer uses the splits of a manifest and --split_seed; missing and changed files are reported."""

import json

import pytest
import torch

from tests.harness.preparing import write_manifest
from vae.config.options import build
from vae.data.manifest import image_root, is_manifest, read_rows, train_and_val
from vae.images.folder import list_images
from vae.system.errors import DataError, UserError
from vae.system.files import sha256_of_file
from vae.training.datasets import find_images
from vae.training.distributed import Distributed
from vae.training.early_checks import Command
from vae.training.setup import prepare_run


def row(name, **values):
    plain = {"sha256": f"{name:0>64}", "width": 1, "height": 1, "source": name, "flags": []}
    return {"path": name, **plain, "group": None, "label": None} | values


def write(folder, rows):
    write_manifest(folder / "manifest.jsonl", rows)
    return folder / "manifest.jsonl"


def choose(path, **options):
    return train_and_val(path, **{"fold": None, "val_split": 0.25, "seed": 0} | options)


def test_rows_with_unusual_names_round_trip(tmp_path):
    names = ["a.png", "a..b.png", "..a/b.png", "12:30 a\\b.png", "Ümlaut 日本.png", "line\nbreak.png"]
    rows = [row(name) for name in (*names, b"caf\xe9.png".decode("utf-8", "surrogateescape"))]
    path = write(tmp_path, rows)
    assert list(read_rows(path)) == rows
    assert len(path.read_bytes().splitlines()) == len(rows)
    assert [name.name for name in tmp_path.iterdir()] == ["manifest.jsonl"]  # no temporary file remains


def test_split_of_manifest_is_used(tmp_path):
    splits = ["val", "train", "train", "val"]
    path = write(tmp_path, [row(f"{i}.png", split=split, fold=None) for i, split in enumerate(splits)])
    assert choose(path) == (["1.png", "2.png"], ["0.png", "3.png"])
    with pytest.raises(UserError, match=r"--val_split 0.25.*split already"):
        choose(path, val_split_given=True)


def test_fold_is_validation_set_and_rows_without_fold_are_excluded(tmp_path):
    folds = [0, 1, 2, None, 1]
    path = write(tmp_path, [row(f"{i}.png", split="train", fold=fold) for i, fold in enumerate(folds)])
    assert choose(path, fold=1) == (["0.png", "2.png"], ["1.png", "4.png"])
    with pytest.raises(UserError, match=r"--fold 1 and --val_split 0\.25"):
        choose(path, fold=1, val_split_given=True)
    with pytest.raises(UserError, match="folds 0 to 2"):
        choose(path, fold=3)


def test_manifest_without_splits_uses_val_split_by_group(tmp_path):
    rows = [row(f"{i:03d}.png", group=f"g{i // 4}") for i in range(200)] + [row("x.png"), row("y.png")]
    rows[-1]["sha256"] = rows[-2]["sha256"]  # copies stay together without a group
    path = write(tmp_path, rows)
    train, validation = choose(path, val_split_given=True)
    assert len(train) + len(validation) == 202
    assert 40 <= len(validation) <= 60
    groups = {one["path"]: one["group"] or one["sha256"] for one in rows}
    assert not {groups[name] for name in train} & {groups[name] for name in validation}
    with pytest.raises(UserError, match="has no folds"):
        choose(path, fold=0)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{torn", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"path": 7}', "line 2 lacks path, sha256"),
        (json.dumps(row("../a.png")), "is not in the manifest"),
        (json.dumps(row("/a.png")), "is not in the manifest"),
        (json.dumps(row("")), "is not in the manifest"),
        (json.dumps(row("c:a.png")), "is not in the manifest"),
        (json.dumps(row("inner\\..\\..\\a.png")), "is not in the manifest"),
        (json.dumps(row("\\\\server\\share\\a.png")), "is not in the manifest"),
        (json.dumps(row("b.png", split="test")), "split 'test'"),
        (json.dumps(row("b.png", fold=-1)), "fold -1"),
        (json.dumps(row("a.png")), "a.png twice"),
    ],
)
def test_broken_manifest_reports_line_number(tmp_path, line, word):
    path = tmp_path / "manifest.jsonl"
    path.write_text(json.dumps(row("a.png")) + "\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        choose(path)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_manifests_are_errors(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        choose(tmp_path / "manifest.jsonl")
    (tmp_path / "manifest.jsonl").write_text("")
    with pytest.raises(DataError, match="lists no images"):
        choose(tmp_path / "manifest.jsonl")
    assert is_manifest(tmp_path / "manifest.jsonl")
    assert not is_manifest(tmp_path)
    assert image_root(tmp_path) == tmp_path == image_root(tmp_path / "manifest.jsonl")


def real_manifest(images, folder, **values):
    names = list_images(images)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((images / name).read_bytes())
    rows = [row(name, sha256=sha256_of_file(folder / name)) for name in names]
    for number, one in enumerate(rows):
        one |= {key: value[number % len(value)] for key, value in values.items()}
    return write(folder, rows), names


def test_trainer_uses_manifest_and_fold(image_folder, other_images, tiny, tmp_path):
    splits = ["val", "train", "train", "train"]
    path, names = real_manifest(image_folder, tmp_path / "set", split=splits, fold=[0, 1, 2, 3])
    given = {key: value for key, value in tiny.items() if key != "val_split"} | {"data_path": str(path)}
    dist = Distributed.start("cpu")
    run = prepare_run(Command(given), dist)
    assert run.validation_set.images.names == names[::4]
    assert run.training_set.images.names == [name for name in names if name not in names[::4]]
    assert run.training_set.crops(run.config, 32)[0, 0].image.dtype == torch.uint8
    run = prepare_run(Command(given | {"fold": 2}), dist)
    assert run.validation_set.images.names == names[2::4]
    for extra, words in (
        ({"val_split": 0.2}, "split already"),
        ({"fold": 1, "val_split": 0.2}, "--fold 1 and --val_split 0.2"),
        ({"fold": 1, "val_path": str(image_folder)}, "--fold 1 and --val_path"),
        ({"fold": 9}, "folds 0 to 3"),
        ({"fold": 1, "data_path": str(image_folder)}, "manifest.jsonl"),
    ):
        with pytest.raises(UserError, match=words):
            prepare_run(Command(given | extra), dist)
    run = prepare_run(Command(given | {"val_path": str(other_images)}), dist)
    assert run.training_set.images.names == [name for name in names if name not in names[::4]]
    assert run.validation_set.images.location == str(other_images)


def held_out(image_folder, **options) -> list[str]:
    given = {"data_path": str(image_folder), "val_split": 0.25, **options}
    _, validation = find_images(build(given))
    return validation.record()


def test_validation_images_follow_the_split_seed(image_folder):
    of_seed = held_out(image_folder, seed=1)
    assert of_seed == held_out(image_folder, seed=9, split_seed=1)
    assert of_seed != held_out(image_folder, seed=1, split_seed=6)
