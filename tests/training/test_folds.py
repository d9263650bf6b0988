"""--folds: every fold is a resumable run of its own; each image is measured by the VAE that never saw it."""

import csv
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train_vae
from tests.harness.preparing import write_manifest
from tests.harness.runs import ROOT, TINY
from tests.harness.training_runs import SHORT, last_checkpoint
from tests.harness.waiting import wait_until
from vae.config.flags import command_words
from vae.system import child_process
from vae.system.errors import EXIT_SAVED_RESUMABLE, UserError
from vae.system.files import read_json, sha256_of_file
from vae.system.folder_marker import claim_folder
from vae.training import child_runs
from vae.training import folds as folds_module
from vae.training.command import Command
from vae.training.folds import find_folds, spread


@pytest.fixture
def manifest(image_folder, tmp_path):
    """The images of `image_folder` in four folds; two of them are the test set, in no fold."""
    target = tmp_path / "data"
    target.symlink_to(image_folder, target_is_directory=True)
    paths = sorted(image_folder.rglob("*.png"))
    rows = [
        {
            "path": path.relative_to(image_folder).as_posix(),
            "sha256": sha256_of_file(path),
            "fold": number % 4 if number < 14 else None,
            "split": "train" if number < 14 else "val",
        }
        for number, path in enumerate(paths)
    ]
    path = tmp_path / "data" / f"{tmp_path.name}.jsonl"
    write_manifest(path, rows)
    yield path
    path.unlink()


@pytest.fixture
def given(manifest, tmp_path):
    return {**TINY, **SHORT, "data_path": str(manifest), "output_dir": str(tmp_path / "out")} | {
        "val_split": None,
        "max_steps": 1,
    }


def words(given):
    return command_words({name: value for name, value in given.items() if value is not None})


@pytest.mark.slow
def test_stopped_folds_are_resumed_by_the_same_command_and_give_one_table(given, manifest, capfd):
    given |= {"max_steps": 30, "num_epochs": 30, "val_freq": 30}
    command = [sys.executable, "train_vae.py", *words(given), "--folds", "1", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    folder = Path(given["output_dir"])
    wait_until(lambda: list(folder.glob("fold_1/checkpoint_*")), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == EXIT_SAVED_RESUMABLE
    assert not (folder / "fold_3").exists()
    assert 0 < last_checkpoint(folder / "fold_1")["position"]["step"] < 30

    assert train_vae.main([*words(given), "--folds", "1", "3"]) == 0
    printed = capfd.readouterr().out
    assert "exact" in printed
    names = {path.name for path in folder.glob("[!.]*")}
    assert names == {"fold_1", "fold_3", "folds.csv", "folds.json"}
    last = [last_checkpoint(folder / f"fold_{fold}") for fold in (1, 3)]
    assert [content["position"]["step"] for content in last] == [30, 30]
    starts = {content["run"]["start"] for content in last}
    assert len(starts) == 1  # so that export_vae.py may average them
    assert len(starts.pop()) == 64
    check_table(folder, manifest, printed)


def check_table(folder, manifest, out):
    """Every image of the folds is measured once, and the means are those of the validations."""
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    images = list(csv.DictReader((folder / "folds.csv").open()))
    expected = {row["path"]: str(row["fold"]) for row in rows if row["fold"] in (1, 3)}
    assert {row["image"]: row["fold"] for row in images} == expected
    values = [float(row["psnr"]) for row in images]
    assert values == sorted(values)
    results = read_json(folder / "folds.json")
    for fold in ("1", "3"):
        own = [float(row["psnr"]) for row in images if row["fold"] == fold]
        assert results["folds"][fold]["psnr"] == pytest.approx(sum(own) / len(own), abs=2e-3)
    assert results["worst"][0]["image"] == images[0]["image"]
    assert "mean" in out
    assert images[0]["image"] in out


@pytest.mark.parametrize(
    ("wanted", "changes", "tokens"),
    [
        (["7"], {}, ("--folds 7", "folds 0 to 3", "all")),
        (["0", "x"], {}, ("--folds 0 x", "x is no fold")),
        (["all"], {"fold": 1}, ("--folds all", "--fold", "remove")),
        (["all"], {"resume_from": "latest"}, ("--resume_from", "repeat the command")),
        (["all"], {"data_path": "images"}, ("needs a manifest", "images", "--num_folds")),
    ],
)
def test_mistakes_are_one_line(given, wanted, changes, tokens):
    with pytest.raises(UserError) as caught:
        find_folds(Command({**given, **changes}), wanted)
    assert "\n" not in str(caught.value)
    assert all(token in str(caught.value) for token in tokens)


def test_manifest_without_folds(given, manifest):
    write_manifest(manifest, [{"path": "a.png", "sha256": "0"}])
    with pytest.raises(UserError, match=r"has no folds: .*--num_folds 5"):
        find_folds(Command(given), ["all"])


class Ended:
    """A process that has ended at once."""

    def __init__(self, returncode):
        self.returncode = returncode

    def poll(self):
        return self.returncode

    def wait(self):
        return self.returncode


@pytest.fixture
def started(monkeypatch):
    """The commands and the cards of the processes that are started; they end at once with code `fails`."""
    monkeypatch.setattr(child_runs, "POLL_SECONDS", 0.0)
    commands = []

    def fake(fails=0):
        def start(command, env, **_rest):
            commands.append((command[command.index("--fold") + 1], env.get("CUDA_VISIBLE_DEVICES")))
            return Ended(fails)

        monkeypatch.setattr(child_process, "start", start)
        return commands

    return fake


def test_one_process_each_on_several_cards(given, monkeypatch, started):
    commands = started()
    monkeypatch.setattr(folds_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert folds_module._cards(Command({**given, "device": "cpu"})) == [None]
    cards = folds_module._cards(Command({**given, "device": "auto"}))
    claim_folder(Path(given["output_dir"]), "folds")
    assert folds_module._train(find_folds(Command(given), ["all"]), cards) == 0
    assert sorted(commands) == [("0", "4"), ("1", "6"), ("2", "4"), ("3", "6")]


def test_first_failure_ends_the_command_with_its_code(given, capfd, started):
    commands = started(fails=77)
    assert train_vae.main([*words(given), "--folds", "all"]) == 77
    assert "fold 0 ended with exit code 77" in capfd.readouterr().err
    assert len(commands) == 1


def test_weights_of_the_start_are_not_given_again(given):
    fold = find_folds(Command({**given, "init_from": "first/vae"}), ["2"])[0]
    assert "--init_from" in fold.words()
    claim_folder(fold.folder, "train")
    (fold.folder / "checkpoint_epoch_1.pt").touch()
    assert "--init_from" not in fold.words()
    assert fold.words()[-2:] == ["--resume_from", "latest"]


def test_spread():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(math.sqrt(2)), "min": 1.0, "max": 3.0}
