"""What decides the samples is on record, and a resumed run says how it continues."""

import json

import pytest

from tests.harness.runs import TINY
from tests.harness.training_runs import SHORT, last_checkpoint, records
from vae.config.flags import parse_flags
from vae.training.provenance import EXACT, OTHER_DATA, TOPOLOGY, Resume, compare
from vae.training.run import train

SAMPLES = {
    "training": {"path": "a", "version": "1" * 64, "images": 30, "policy": {"min_size": 1}},
    "validation": {"path": "b", "version": "2" * 64, "images": 3, "policy": None},
    "transform": {"crop": "random", "max_pixels": 9},
    "seed": {"seed": 0, "rules": 1},
    "topology": {"processes": 4, "batch_size": 2, "accumulation_steps": 1, "streams": 64},
    "code": {"torch": "2", "revision": None},
    "continues": None,
}


def changed(part, **values):
    return {**SAMPLES, part: {**SAMPLES[part], **values}}


@pytest.mark.parametrize(
    ("now", "resume"),
    [
        (SAMPLES, Resume(EXACT)),
        (changed("training", path="elsewhere"), Resume(EXACT)),
        (changed("code", revision="other"), Resume(EXACT)),
        (changed("topology", processes=2), Resume(TOPOLOGY, "processes 4 -> 2")),
        (changed("transform", crop="center"), Resume(OTHER_DATA, "transform", comparable=False)),
        (changed("validation", images=2), Resume(OTHER_DATA, "validation", comparable=False)),
        ({**SAMPLES, "validation": None}, Resume(OTHER_DATA, "validation", comparable=False)),
        (
            changed("training", version="3" * 64) | {"topology": {**SAMPLES["topology"], "batch_size": 4}},
            Resume(OTHER_DATA, "training, batch_size 2 -> 4"),
        ),
    ],
)
def test_kinds_of_continuation(now, resume):
    assert compare(SAMPLES, now) == resume


@pytest.mark.slow
def test_run_records_its_samples_and_each_resume(image_folder, tmp_path, capsys):
    out = tmp_path / "run"
    given = {**TINY, **SHORT, "data_path": str(image_folder), "output_dir": str(out), "num_epochs": 3}
    latest = {**given, "resume_from": "latest"}
    commands = [
        ({**given, "max_steps": 1}, ""),
        ({**latest, "max_steps": 2}, "exact"),
        ({**latest, "max_steps": 3, "accumulation_steps": 2}, "accumulation_steps 1 -> 2"),
        ({**latest, "max_steps": 4, "accumulation_steps": 2, "crop": "center"}, "this is a new branch"),
    ]
    for command, text in commands:
        assert train(command) == 0
        printed = capsys.readouterr()
        assert text in printed.out + printed.err
    runs = records(out, "run")
    assert [run["resume"] for run in runs] == ["new", EXACT, TOPOLOGY, OTHER_DATA]
    assert runs[-1]["changed"] == "transform"
    recorded = json.loads((out / "config.json").read_text())["provenance"]
    assert recorded["training"]["version"] == runs[-1]["training"]
    assert recorded["topology"]["processes"] == 1
    assert recorded["continues"]["run"] == runs[-2]["id"]
    assert recorded["continues"]["step"] == 3
    assert last_checkpoint(out)["provenance"] == recorded
    assert parse_flags(["--config", str(out / "config.json")])["crop"] == "center"  # it can be used again


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"val_split": 0.4}, {"reconstruction_weight": 0.5}])
def test_validations_of_other_images_or_another_loss_are_not_compared(image_folder, tmp_path, change):
    out = tmp_path / "run"
    given = {**TINY, **SHORT, "data_path": str(image_folder), "output_dir": str(out), "checkpoint_freq": 1}
    given["val_split"] = 0.2
    assert train({**given, "num_epochs": 3, "max_steps": 4}) == 0
    assert last_checkpoint(out)["history"]["start"]
    assert train({**given, **change, "num_epochs": 3, "max_steps": 6, "resume_from": "latest"}) == 0
    history = last_checkpoint(out)["history"]
    assert not history["start"]
    assert history["best"]["images"] == records(out, "validation")[-1]["images"]
