"""`--probe_profile` as a command: its files, a stopped run that continues, and one line for each mistake."""

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics

import evaluate_vae
from tests.harness.http_store import http_store, hurry
from tests.harness.labelled_shards import CLASSES, drawn, write_labelled
from tests.harness.runs import ROOT
from tests.harness.small_vae import SMALL, write_vae
from vae.config.flags import command_words
from vae.images.formats import BadImageError
from vae.probe import command, latents
from vae.probe.training import Training
from vae.shards.dataset_json import dataset_content, read_dataset
from vae.shards.index import Shard
from vae.shards.shard_images import ShardImages
from vae.system.files import read_json, write_json
from vae.system.script import exit_code

TINY_VAE = replace(SMALL, channels=(8, 8, 8), norm_groups=4, z_channels=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A VAE, 96 labelled images to train on, and 24 for the validation."""
    folder = tmp_path_factory.mktemp("classifier")
    write_vae(folder / "vae", 0, TINY_VAE)
    write_labelled(folder / "train", 96)
    write_labelled(folder / "val", 24, first=1000)
    return folder


def words(folder: Path, out: Path, **flags: object) -> list[str]:
    """A command that takes a second; a value None leaves a flag out."""
    given: dict[str, object] = {
        "vae": folder / "vae",
        "data_path": folder / "train" / "dataset.json",
        "val_path": folder / "val" / "dataset.json",
        "output_dir": out,
        "probe_profile": "probe-imagenet",
        "sizes": 32,
        "device": "cpu",
        "probe_widths": (8, 16),
        "probe_depths": (1, 1),
        "probe_epochs": 2,
        "probe_batch_size": 32,
        "probe_learning_rate": 0.01,
    }
    return list(map(str, command_words({k: v for k, v in (given | flags).items() if v is not None})))


def run(*args: object, **flags: object) -> int:
    return exit_code("evaluate_vae.py", evaluate_vae.main, words(*args, **flags))


def images_of(folder: Path, side: str) -> ShardImages:
    return ShardImages(read_dataset(folder / side / "dataset.json"), num_streams=1)


def results(out: Path) -> tuple[dict, str]:
    return read_json(out / "probe.json"), (out / "probe_0.csv").read_text()


def test_a_whole_recipe_writes_scores_and_probabilities(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "out", probe_views=3) == 0
    out = capsys.readouterr().out
    assert "96 images in --data_path and 24 images in --val_path, 4 classes" in out
    assert "32 images per step, 32 in a pass; planned" in out
    content, text = results(tmp_path / "out")
    (found,) = content["sets"].values()
    assert content["classes"] == list(CLASSES)
    assert [record["epoch"] for record in found["epochs"]] == [1, 2]
    assert found["epochs"][1]["loss"] < found["epochs"][0]["loss"]
    assert found["epochs"][1]["learning_rate"] < 0.01  # cosine: nearly 0 at the end
    rows = list(csv.DictReader(text.splitlines()))
    images = images_of(folder, "val")
    truth = [images.metadata(index)["label"] for index in range(24)]
    assert [row["id"] for row in rows] == [images.name(index) for index in range(24)]
    values = np.array([[float(row[name]) for name in CLASSES] for row in rows])
    assert values.sum(1) == pytest.approx(np.ones(24), abs=4e-6)
    scores = found["scores"]["convnext"]
    assert scores["top1"] == metrics.accuracy_score(truth, np.array(CLASSES)[values.argmax(1)])
    assert scores["log_loss"] == pytest.approx(
        metrics.log_loss(truth, values / values.sum(1, keepdims=True)), abs=1e-4
    )
    assert not list((tmp_path / "out").glob("*.pt"))


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_numbers(folder, tmp_path):
    flags = {"probe_epochs": 3, "probe_micro_batch_size": 16}
    assert run(folder, tmp_path / "whole", **flags) == 0
    command = [sys.executable, str(ROOT / "evaluate_vae.py"), *words(folder, tmp_path / "killed", **flags)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        assert any("epoch 1 of 3" in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "probe.json").exists()
    assert run(folder, tmp_path / "killed", **flags) == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


@pytest.mark.parametrize("flags", [{}, {"probe_learning_rate": 0.02}])
def test_a_stopped_run_continues_only_with_the_same_settings(folder, tmp_path, capsys, monkeypatch, flags):
    def stop(training: Training, path: Path) -> None:
        save(training, path)
        raise KeyboardInterrupt

    save = Training.save
    with monkeypatch.context() as patch:
        patch.setattr(Training, "save", stop)
        assert run(folder, tmp_path / "out") == 130
    (state,) = (tmp_path / "out").glob("probe_*.pt")
    content = state.read_bytes()
    state.write_bytes(content[:1000])
    assert run(folder, tmp_path / "out") == 78
    assert f"{state} is damaged" in capsys.readouterr().err
    state.write_bytes(content)
    assert run(folder, tmp_path / "out", **flags) == 0
    assert ("continues after epoch 1 of 2" in capsys.readouterr().out) == (not flags)
    assert run(folder, tmp_path / "whole", **flags) == 0
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_remote_datasets_give_the_numbers_of_local_ones(folder, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="requirements-remote.txt is not installed")
    hurry(monkeypatch)
    (tmp_path / "all").mkdir()  # a dataset that names its validation.json
    for side, prefix, name, val in (
        ("val", "validation", "validation.json", None),
        ("train", "images", "dataset.json", "validation.json"),
    ):
        for path in (folder / side).glob("images-*"):
            shutil.copy(path, tmp_path / "all" / path.name.replace("images", prefix))
        shards = [Shard(**shard) for shard in read_json(folder / side / "dataset.json")["shards"]]
        renamed = [shard._replace(name=shard.name.replace("images", prefix)) for shard in shards]
        write_json(tmp_path / "all" / name, dataset_content(renamed, {}, val))
    flags = {"val_path": None, "probe_epochs": 1, "cache_dir": tmp_path / "shards"}
    with http_store(tmp_path / "all") as web:
        assert run(folder, tmp_path / "remote", data_path=web.url(), **flags) == 0
    local = tmp_path / "all" / "dataset.json"
    assert run(folder, tmp_path / "local", data_path=local, **flags) == 0
    assert results(tmp_path / "remote") == results(tmp_path / "local")


@pytest.mark.parametrize(
    ("where", "function", "words"),
    [
        (Training, "train_epoch", "--probe_micro_batch_size 16: out of memory: try"),
        (command, "encode_set", "--batch_size 4"),
    ],
)
def test_too_little_memory_names_the_flag(folder, tmp_path, capsys, monkeypatch, where, function, words):
    def fail(*_args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(where, function, fail)
    assert run(folder, tmp_path / "out", probe_micro_batch_size=16, batch_size=4) == 78
    assert words in capsys.readouterr().err


def test_labels_from_a_csv_file_and_from_folders(folder, tmp_path, capsys):
    sources = {side: images_of(folder, side) for side in ("train", "val")}
    rows = [
        f"{images.name(index)},{images.metadata(index)['label']}"
        for side, images in sources.items()
        for index in range(len(images) - (side == "train"))
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,kind", *rows]))
    flags = {"probe_epochs": 1, "probe_cache": tmp_path / "cache"}
    assert run(folder, tmp_path / "a", probe=tmp_path / "labels.csv", probe_column="kind", **flags) == 0
    assert "1 of 96 images have no label" in capsys.readouterr().out
    assert run(folder, tmp_path / "b", probe_column="folder", **flags) == 0
    sides = {"data_path": tmp_path / "train", "val_path": tmp_path / "val"}
    for number, (kind, path) in enumerate(itertools.product(CLASSES, sides.values())):
        (path / kind).mkdir(parents=True)
        for seed in (number, number + 100):
            drawn(kind, seed).save(path / kind / f"{seed}.png")
    assert run(folder, tmp_path / "c", probe_column="folder", **sides, **flags) == 0
    for name in ("a", "b", "c"):
        assert read_json(tmp_path / name / "probe.json")["classes"] == list(CLASSES)
    shutil.copy(tmp_path / "train/circle/0.png", tmp_path / "val/circle/0.png")
    for row, message in (
        ("square/0.png,b", "1 of its 2 images are not in --data_path or --val_path"),
        ("circle/100.png,b", "circle/0.png is in --data_path and in --val_path"),
    ):
        (tmp_path / "labels.csv").write_text(f"path,label\ncircle/0.png,a\n{row}\n")
        assert run(folder, tmp_path / "d", probe=tmp_path / "labels.csv", **sides, **flags) == 77
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (
            {"data_path": "UNLABELLED"},
            ("--data_path", "no labels", "images-000000.tar/", "--probe_column", "folder"),
        ),
        ({"data_path": "CIRCLES"}, ("only the class circle", "two classes")),
        ({"val_path": "STRANGE"}, ("--val_path", "4 classes", "not_circle")),
        ({"probe_folds": 4}, ("--probe_folds", "no effect", "--probe_profile")),
        ({"probe_profile": None, "probe": "x.csv"}, ("--val_path", "no effect", "without --probe_profile")),
        ({"sizes": (32, 64)}, ("--sizes 32 64", "one size")),
        ({"probe_heads": "lineal"}, ("--probe_heads lineal", "did you mean linear")),
        ({"probe_widths": 8}, ("--probe_widths has 1", "--probe_depths 2")),
        ({"probe_widths": 8, "probe_depths": 1}, ("--probe_depths 1", "two blocks")),
        (
            {"probe_widths": (8, 8, 8, 8, 8), "probe_depths": (1, 1, 1, 1, 1)},
            ("--probe_widths", "5 stages", "8 x 8", "--sizes"),
        ),
        ({"probe_micro_batch_size": "many"}, ("--probe_micro_batch_size many", "auto")),
        ({"probe_learning_rate": 1e30}, ("--probe_learning_rate 1e+30", "smaller")),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, flags, tokens):
    made = {
        "UNLABELLED": lambda: write_labelled(tmp_path / "set", 8, labels=lambda _kind: None),
        "CIRCLES": lambda: write_labelled(tmp_path / "set", 8, labels=lambda _kind: "circle"),
        "STRANGE": lambda: write_labelled(tmp_path / "set", 8, labels=lambda kind: f"not_{kind}"),
    }
    flags = {
        name: made.get(value, lambda value=value: value)() if isinstance(value, str) else value
        for name, value in flags.items()
    }
    assert run(folder, tmp_path / "out", **flags) not in (0, 1)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluate_vae.py: ")]
    assert all(token in line for token in tokens), line
    assert not (tmp_path / "out" / "probe.json").exists()


@pytest.mark.slow
def test_an_interrupted_encoding_continues_where_it_was(folder, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    monkeypatch.setattr(latents, "SECONDS_PER_SAVE", 0.0)
    flags = {"probe_epochs": 1, "probe_views": 3, "batch_size": 4}
    assert run(folder, tmp_path / "a", probe_cache=whole, **flags) == 0
    decode, seen = ShardImages.decode, []

    def counted(images, index, **settings):
        seen.append(index)
        if index == 70 and seen.count(70) == 1:
            raise KeyboardInterrupt
        return decode(images, index, **settings)

    monkeypatch.setattr(ShardImages, "decode", counted)
    assert run(folder, tmp_path / "b", probe_cache=stopped, **flags) == 130
    before = len(seen)
    done = [read_json(path)["done"] for path in stopped.glob("*.json")]
    assert done == [68]  # whole batches
    assert run(folder, tmp_path / "b", probe_cache=stopped, **flags) == 0
    assert len(seen) - before == 96 - 68 + 24  # nothing is encoded twice
    names = sorted(path.name for path in whole.glob("*.f16"))
    assert names == sorted(path.name for path in stopped.glob("*.f16"))
    assert all((whole / name).read_bytes() == (stopped / name).read_bytes() for name in names)
    seen.clear()
    assert run(folder, tmp_path / "c", probe_cache=stopped, **flags) == 0
    assert seen == []  # another run reads the cache
    assert json.dumps(results(tmp_path / "c")) == json.dumps(results(tmp_path / "a"))


def test_damaged_images_are_left_out_and_named(folder, tmp_path, capsys, monkeypatch):
    decode = ShardImages.decode

    def damaged(images, index, **settings):
        if index in (3, 7):
            raise BadImageError("truncated", "the file ends early")
        return decode(images, index, **settings)

    monkeypatch.setattr(ShardImages, "decode", damaged)
    assert run(folder, tmp_path / "out", probe_epochs=1) == 0
    assert "--data_path: 2 images are left out" in capsys.readouterr().out
    assert read_json(tmp_path / "out" / "probe.json")["images"] == 22
    monkeypatch.setattr(latents, "MAX_UNUSABLE", 0.01)
    assert run(folder, tmp_path / "other", probe_views=1) == 77
    assert "2 of 96 images cannot be used" in capsys.readouterr().err
