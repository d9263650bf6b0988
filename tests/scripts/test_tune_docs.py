"""Every command in docs/tune.md runs, and the help names existing flags."""

import json
import shutil

import pytest

pytest.importorskip("optuna", reason="the search needs optuna: pip install -r requirements-tune.txt")

import train_vae
import tune_vae
from tests.harness.pages import code_blocks, commands, page_text
from tests.harness.stub_trainer import rows_of, write_stub
from vae.tuning import search, training_process

TEXT = page_text("tune.md")
TRIALS = 2  # of a command that does not set them
QUICK = ["--num_epochs", "1", "--val_freq", "1", "--device", "cpu", "--num_workers", "0"]


@pytest.fixture
def workplace(image_folder, tmp_path, monkeypatch):
    """A folder with the images and the space of the page; trials are those of the stand-in."""
    shutil.copytree(image_folder, tmp_path / "data" / "train")
    (space,) = code_blocks(TEXT, "json")
    (tmp_path / "space.json").write_text(space)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_process, "ROOT", write_stub(tmp_path / "stub"))
    monkeypatch.setattr(training_process, "POLL_SECONDS", 0.02)
    draw = search.write_plots

    def draw_last(folder, study, *rest) -> None:
        if study.get_trials(deepcopy=False)[-1].number in (TRIALS - 1, 29):
            draw(folder, study, *rest)

    monkeypatch.setattr(search, "write_plots", draw_last)  # most of the time would be drawing
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(workplace):
    found = [words for words in commands(TEXT) if words[0] == "python"]
    assert [words[1] for words in found].count("tune_vae.py") == 4
    for python, script, *words in found:
        assert python == "python"
        if script == "train_vae.py":
            small = ["--image_size", "32"] if "--save_config" in words else []
            assert train_vae.main([*words, *small, *QUICK]) == 0, words
            continue
        trials = [] if "--trials" in words else ["--trials", str(TRIALS)]
        assert tune_vae.main([*words, *trials]) == 0, words
        folder = workplace / words[words.index("--output_dir") + 1]
        names = {path.name for path in folder.iterdir()}
        assert {"best.json", "trials.jsonl", "trials", "journal.log"} <= names
        assert any(name.startswith("history_") for name in names)
    assert len(rows_of(workplace / "search" / "first")) == 30
    assert json.loads((workplace / "outputs" / "tuned" / "config.json").read_text())["image_size"] == 32
