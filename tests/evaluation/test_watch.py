"""A run's checkpoints are measured as they appear; the best one is marked, and a run keeps it."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import evaluate_vae
from tests.harness.checkpoints import checkpoint
from vae.evaluation import watch
from vae.interop.checkpoint_file import save_checkpoint
from vae.interop.vae_files import CHECKPOINT_KEY
from vae.interop.writing import save_diffusers_folder
from vae.system.errors import UserError
from vae.system.files import MARKER_NAME, claim_folder, sha256_of_file, write_json


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of three checkpoints; the second one is the best: one colour, where the others have noise."""
    folder = tmp_path / "run"
    claim_folder(folder, "train")
    for step, scale in ((1, 1.0), (2, 0.0), (3, 0.5)):
        content = checkpoint(step)
        for weights in (content["model"], content["ema"]):
            weights["decoder.conv_out.weight"] *= scale
        path = folder / f"checkpoint_step_{step}.pt"
        save_checkpoint(path, content)
        os.utime(path, (9 - step, 9 - step))  # as after a copy: the order is that of the steps
    return folder


@pytest.fixture
def words(run, image_folder) -> list[str]:
    flags = ["--watch", run, "--promote", "--data_path", image_folder, "--max_images", 3, "--sizes", 32]
    return [str(word) for word in (*flags, "--perceptual_net", "none", "--device", "cpu")]


def finish(run: Path) -> None:
    """As if the run had exported a checkpoint with this SHA-256."""
    save_diffusers_folder(run / "vae", {"weight": torch.zeros(1)}, {}, {CHECKPOINT_KEY: "abc"})
    write_json(run / "run.json", {"exported": "abc"})


def test_best_checkpoint_is_promoted_and_nothing_else_is_written(run, words, capsys):
    finish(run)
    before = sorted(run.rglob("*"))
    assert evaluate_vae.main(words) == 0
    assert sorted(run.rglob("*")) == sorted([*before, run / "promoted.json"])
    found = json.loads((run / "promoted.json").read_text())
    assert found["checkpoint"] == "checkpoint_step_2.pt"
    assert found["sha256"] == sha256_of_file(run / "checkpoint_step_2.pt")
    assert found["evaluation"]["images"] == 3
    printed = capsys.readouterr().out
    assert f"psnr {found['metrics']['psnr']:.4f}" in printed
    assert [line.partition(":")[0] for line in printed.splitlines() if "promoted" in line] == [
        "checkpoint_step_1.pt", "checkpoint_step_2.pt",
    ]  # fmt: skip

    (run / "checkpoint_step_2.pt").unlink()  # a worse one does not replace it, also after a new start
    assert evaluate_vae.main(words) == 0
    assert json.loads((run / "promoted.json").read_text()) == found


def test_damaged_and_pruned_checkpoints_are_skipped(run, words, monkeypatch, capsys):
    (run / "checkpoint_step_1.pt").write_bytes(b"torn")
    finish(run)
    load = watch.load_vae

    def prune_first(path, **options):
        if path.name == "checkpoint_step_2.pt":
            path.unlink()
        return load(path, **options)

    monkeypatch.setattr(watch, "load_vae", prune_first)
    assert evaluate_vae.main(words) == 0
    assert json.loads((run / "promoted.json").read_text())["checkpoint"] == "checkpoint_step_3.pt"
    printed = capsys.readouterr()
    assert "checkpoint_step_1.pt is not " in printed.out
    assert "checkpoint_step_2" not in printed.out


def test_new_checkpoints_are_seen_until_ctrl_c(run, words, tmp_path, monkeypatch, capsys):
    best = run / "checkpoint_step_2.pt"
    shutil.move(best, tmp_path / "later.pt")
    promoted = []

    def wait(_seconds) -> None:
        promoted.append(json.loads((run / "promoted.json").read_text())["checkpoint"])
        if best.exists():
            raise KeyboardInterrupt
        shutil.move(tmp_path / "later.pt", best)

    monkeypatch.setattr(watch.time, "sleep", wait)
    assert evaluate_vae.main(words) == 0
    assert promoted == ["checkpoint_step_3.pt", "checkpoint_step_2.pt"]
    assert "the same command continues" in capsys.readouterr().out


def test_checkpoints_of_a_run_are_measured_in_the_order_of_their_numbers(run, words, capsys):
    finish(run)
    shutil.copy(run / "checkpoint_step_1.pt", run / "checkpoint_step_10.pt")
    assert evaluate_vae.main(words) == 0
    found = re.findall(r"^checkpoint_step_(\d+)\.pt: ", capsys.readouterr().out, re.MULTILINE)
    assert list(dict.fromkeys(found)) == ["1", "2", "3", "10"]


@pytest.mark.parametrize("exported", [None, "of an earlier stage"])
def test_a_run_is_finished_when_it_has_exported_its_last_checkpoint(run, exported):
    finish(run)
    assert watch._is_finished(run)
    write_json(run / "run.json", {"exported": exported} if exported else {})
    for path in (run / "vae").iterdir():  # newer than everything else: as after a copy
        path.touch()
    assert not watch._is_finished(run)


@pytest.mark.parametrize("content", ["{}", '{"checkpoint": "mine"}', "mine", None])
def test_a_promoted_file_of_others_is_not_replaced(run, words, content):
    path = run / "promoted.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r"would replace .*promoted\.json, which is not its own"):
        evaluate_vae.main(words)
    assert content is None or path.read_text() == content


def test_only_the_folder_of_a_run_is_marked(run, words):
    (run / MARKER_NAME).unlink()
    with pytest.raises(UserError, match=r"--watch .*run contains files that this command did not write"):
        evaluate_vae.main(words)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--watch", "nowhere"], "--watch nowhere is not a folder: give the --output_dir of a run"),
        (["--vae", "x"], "--vae and --output_dir have no effect with --watch"),
        (["--overwrite"], "--overwrite has no effect with --watch: remove it"),
        (["--sizes", "32", "64"], "--sizes 32 64: --watch needs a single one"),
    ],
)
def test_mistakes(words, more, message):
    with pytest.raises(UserError, match=message):
        evaluate_vae.main([*words, *more])
