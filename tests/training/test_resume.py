"""A run that is stopped and resumed equals the uninterrupted run, bit for bit (CPU, fp32, one thread)."""

import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.faults import Fault, injected
from tests.harness.runs import TINY
from tests.harness.small_vae import write_vae
from tests.harness.steps import before_steps
from tests.harness.training_runs import (
    assert_same,
    assert_same_result,
    assert_weights_close,
    reproducible_records,
    train_short,
)
from vae.config.resolve import PER_COMMAND
from vae.interop.checkpoint_file import load_checkpoint
from vae.system.errors import UserError
from vae.training.checkpoints import list_checkpoints
from vae.training.run import train

# Two stages of 2 epochs of 10 steps; the discriminator starts at step 3.
RECIPE = {
    **TINY,
    "progressive": "32:2:2,16:2:2",
    "batch_size": 2,
    "val_split": 0.1,
    "log_freq": 1,
    "adversarial_weight": 0.5,
    "disc_channels": 8,
    "disc_layers": 1,
    "disc_start": 3,
    "disc_warmup": 0,
    "disc_ramp": 10,
    "keep_checkpoints": 100,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict:
    """RECIPE on 22 images, 20 of them for training."""
    folder = tmp_path_factory.mktemp("twenty_two")
    random = np.random.default_rng(1)
    for index in range(22):
        coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((48, 40), Image.Resampling.BICUBIC).save(folder / f"{index:02d}.png")
    return {**RECIPE, "data_path": str(folder)}


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory) -> Path:
    """The folder of the run that is not stopped: 40 steps."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train({**recipe, "output_dir": str(folder)}) == 0
    assert final_checkpoint(folder)["position"]["step"] == 40
    return folder


def final_checkpoint(folder: Path) -> dict:
    return load_checkpoint(folder / "checkpoint_epoch_4.pt")


def assert_same_checkpoint(found: dict, expected: dict, *changed: str) -> None:
    """Everything is equal, except for the run's id, options of one command and the `changed` options."""
    for content in (found, expected):
        del content["run"], content["provenance"]  # random ids
        options = content["config"].items()
        content["config"] = {k: v for k, v in options if k not in PER_COMMAND and k not in changed}
    assert found["discriminator"]
    assert found["ema"]
    assert [len(optimizer["state"]) > 0 for optimizer in found["optimizers"]] == [True, True]
    assert found["running_sq_norms"].gt(0).all()
    assert_same(found, expected, "checkpoint")


def assert_same_records(found: Path, expected: Path) -> None:
    """The training records are equal."""
    records = [reproducible_records(folder, "train") for folder in (found, expected)]
    assert_same(*records, "train")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint_*.pt")}


def assert_same_run(
    folder: Path, uninterrupted: Path, stops: Iterable[int] = (), last: str = "checkpoint_epoch_4.pt"
) -> None:
    """The checkpoint and the records are equal. Each stop by --max_steps adds a validation of its export."""
    assert_same_checkpoint(*(load_checkpoint(path / last) for path in (folder, uninterrupted)))
    assert_same_records(folder, uninterrupted)
    expected, found = (reproducible_records(path, "validation") for path in (uninterrupted, folder))
    steps = {record["step"] for record in expected}
    assert {record["step"] for record in found} == steps | set(stops)
    assert_same([record for record in found if record["step"] in steps], expected, "validation")


def run_in_parts(recipe: dict, folder: Path, stops: list[int]) -> None:
    """Train to each of the `stops`, resuming from the last, and then to the end."""
    given = {**recipe, "output_dir": str(folder)}
    for index, stop in enumerate([*stops, None]):
        part = {"resume_from": "latest"} if index else {}
        assert train({**given, **part, **({"max_steps": stop} if stop else {})}) == 0
        if stop:
            newest = max(folder.glob("checkpoint_*.pt"), key=lambda path: path.stat().st_mtime_ns)
            assert load_checkpoint(newest)["position"]["step"] == stop


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run(recipe, uninterrupted, tmp_path):
    """At the first step of the discriminator, within epochs, at the ends of an epoch, a stage and the run."""
    stops = [3, 10, 13, 20, 39]
    run_in_parts(recipe, tmp_path / "run", stops)
    assert_same_run(tmp_path / "run", uninterrupted, stops)


@pytest.mark.slow
def test_resumed_run_in_steps_equals_the_uninterrupted_run(recipe, tmp_path):
    """Two stages of 1.5 and 1.7 epochs, stopped in the adversarial phase and where a stage ends, too."""
    given = {**recipe, "progressive": "32:15steps:2,16:17steps:2", "val_freq": None}
    given["disc_start"] = 0.2  # of the first stage
    assert train({**given, "output_dir": str(tmp_path / "whole")}) == 0
    stops = [2, 10, 12, 15, 31]
    run_in_parts(given, tmp_path / "run", stops)
    assert {f"checkpoint_step_{step}.pt" for step in (15, 32)} <= names(tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole", stops, "checkpoint_step_32.pt")
    final = load_checkpoint(tmp_path / "run" / "checkpoint_step_32.pt")
    rates = [record["learning_rate"] for record in reproducible_records(tmp_path / "run", "train")]
    assert final["position"]["disc_begun_at"] == 3
    for first, end in ((0, 15), (15, 32)):  # of a cosine to 0, a stage in which warm-up takes a fifth
        assert rates[end - 1] < 0.03 * max(rates[first:end])


@pytest.mark.slow
def test_loading_processes_change_nothing(recipe, uninterrupted, tmp_path):
    given = {**recipe, "num_workers": "2", "persistent_workers": True}
    run_in_parts(given, tmp_path / "run", [13, 27])
    found, expected = (final_checkpoint(folder) for folder in (tmp_path / "run", uninterrupted))
    assert_same_checkpoint(found, expected, "persistent_workers")
    assert_same_records(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "progressive", "name"),
    [
        (10, RECIPE["progressive"], "checkpoint_epoch_4.pt"),
        (12, "32:12steps:2,16:3steps:2", "checkpoint_step_15.pt"),
    ],
)
def test_checkpoint_of_a_last_step_resumes_before_its_end(
    recipe, uninterrupted, tmp_path, last, progressive, name
):
    """If a save signal arrives in the last step of an epoch or a stage, the resumed run ends it."""

    def kill(loop, _batch):
        if loop.state.position.step == last:
            raise KeyboardInterrupt  # kills the process before it saves anything newer

    folder = tmp_path / "run"
    given = {**recipe, "output_dir": str(folder), "checkpoint_freq": 2, "progressive": progressive}
    save = Fault("signal", "step", nth=last, value=signal.SIGUSR1)
    with injected(save), before_steps(kill), pytest.raises(KeyboardInterrupt):
        train(given)
    assert load_checkpoint(list_checkpoints(folder)[0])["position"]["images_in_epoch"]  # not ended
    assert train({**given, "resume_from": "latest"}) == 0
    whole = uninterrupted
    if last != 10:
        whole = tmp_path / "whole"
        assert train({**given, "output_dir": str(whole)}) == 0
    assert_same_checkpoint(*(load_checkpoint(path / name) for path in (folder, whole)), "checkpoint_freq")


DISCRIMINATOR = {
    "adversarial_weight": 0.5,
    "disc_channels": 8,
    "disc_layers": 1,
    "disc_start": 1,
    "disc_warmup": 0,
}
SHAPE = (
    "channels",
    "layers_per_block",
    "norm_groups",
    "z_channels",
)  # of the file of --init_from or --teacher
FEATURES = {
    "muon": {**DISCRIMINATOR, "optimizer": "muon", "channels_last": True},
    "regularisers": {**DISCRIMINATOR, "variance_weight": 0.01, "equivariance_weight": 0.25},
    "decoder of a trained VAE": {**DISCRIMINATOR, "init_from": "a VAE", "train_part": "decoder"},
    "tiny decoder": {"init_from": "a VAE", "train_part": "decoder", "decoder": "tiny"},
    "tiny VAE": {"family": "tiny", "teacher": "a VAE"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_resumed_run_with_other_state_equals_the_uninterrupted_run(tiny, tmp_path, name):
    given = {**FEATURES[name], "num_epochs": 2}
    if "a VAE" in given.values():
        vae = str(write_vae(tmp_path / "vae"))
        given = {option: vae if value == "a VAE" else value for option, value in given.items()}
        tiny = {option: value for option, value in tiny.items() if option not in SHAPE}
    whole = train_short(tiny, tmp_path / "whole", **given)
    train_short(tiny, tmp_path / "parts", **given, max_steps=3)
    of_folder = {"output_dir": str(tmp_path / "parts"), "device": "cpu", "num_workers": "0"}
    assert train({**of_folder, "resume_from": "latest", "max_steps": 5}) == 0  # the rest is in the file
    train_short(tiny, tmp_path / "parts", **given, resume_from="latest")
    assert_same_result(tmp_path / "parts", tmp_path / "whole")
    if name == "muon":
        assert any("momentum_buffer" in state for state in whole["optimizers"][0]["state"].values())
    if name == "regularisers":
        assert whole["running_moments"].abs().min() > 0


def test_resuming_with_another_optimizer_is_an_error(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", optimizer="muon", max_steps=1)
    with pytest.raises(UserError, match=r"--optimizer adamw contradicts .* muon: .*--init_from"):
        train_short(tiny, tmp_path / "run", optimizer="adamw", resume_from="latest")


@pytest.mark.slow
def test_layout_may_change_when_a_run_is_resumed(tiny, tmp_path):
    given = {"optimizer": "muon", "num_epochs": 2}
    contents = []
    for layout in (True, False):
        train_short(tiny, tmp_path / f"{layout}", **given, max_steps=2)
        last = {"resume_from": "latest", "channels_last": layout}
        contents.append(train_short(tiny, tmp_path / f"{layout}", **given, **last))
    assert_weights_close(*contents)


def test_resuming_after_max_steps_changes_no_file(recipe, tmp_path, capsys):
    given = {**recipe, "output_dir": str(tmp_path / "run"), "max_steps": 4}
    assert train(given) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train({**given, "resume_from": "latest"}) == 0
    printed = capsys.readouterr().out
    assert "--max_steps 4" in printed
    assert "raise it" in printed
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_run_that_was_killed_before_its_first_save_starts_again(recipe, tmp_path):
    folder = tmp_path / "run"
    given = {**recipe, "output_dir": str(folder), "max_steps": 2}
    assert train(given) == 0
    for path in folder.glob("checkpoint_*"):
        path.unlink()
    assert train({**given, "resume_from": "latest"}) == 0
    assert [record["step"] for record in reproducible_records(folder, "train")] == [1, 2]
