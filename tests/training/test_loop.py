"""What changes no weight: settings of time and memory, non-finite steps; and what --val_freq decides."""

from itertools import islice

import pytest
import torch

from tests.harness.faults import Fault, injected
from tests.harness.training_runs import SHORT, assert_weights_close, records, train_short
from vae.data.loading import TrainLoader
from vae.interop.checkpoint_file import load_checkpoint
from vae.system.errors import EXIT_DATA, EXIT_NON_FINITE, EXIT_WORKER, DataError, NonFiniteError, WorkerError
from vae.training.run import train

# --- settings that do not change the weights ------------------------------------------------------------

QUICK = {"init": "default", "num_epochs": 5, "keep_checkpoints": 10}


def test_accumulation_equals_a_larger_batch(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "larger", batch_size=8)
    found = train_short(tiny, tmp_path / "accumulated", batch_size=2, accumulation_steps=4)
    assert found["position"] == expected["position"]
    assert_weights_close(found, expected)


def test_logging_saving_and_memory_settings_change_no_bit(tiny, tmp_path):
    expected = train_short(tiny, tmp_path / "expected")
    settings = {"enable_tf32": False, "log_freq": 3, "checkpoint_steps": 2, "vram_margin": 0.5}
    found = train_short(tiny, tmp_path / "found", **settings)
    assert all(torch.equal(value, found["model"][name]) for name, value in expected["model"].items())


# --- non-finite steps -----------------------------------------------------------------------------------


DISCRIMINATOR = {
    "adversarial_weight": 0.5,
    "disc_start": 0,
    "disc_warmup": 0,
    "disc_channels": 8,
    "disc_layers": 2,
}


@pytest.mark.slow
def test_nonfinite_step_is_counted_and_changes_no_weight_of_either_network(tiny, tmp_path):
    options = {"checkpoint_steps": 1, "keep_checkpoints": 9, **DISCRIMINATOR}
    with injected(Fault("nan", "step", nth=2)):
        train_short(tiny, tmp_path / "run", **options)
    with injected(Fault("nan", "step", nth=2)):  # only a stop saves that step
        stopped = train_short(tiny, tmp_path / "stopped", **options, max_steps=2)
    first, third = (load_checkpoint(tmp_path / "run" / f"checkpoint_step_{step}.pt") for step in (1, 3))
    found = [first, stopped, third]
    for network in ("model", "discriminator"):
        before, after, later = (content[network] for content in found)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert any(not torch.equal(after[name], later[name]) for name in before)
    assert all(value.isfinite().all() for value in found[2]["ema"].values())
    assert [record["nonfinite_steps"] for record in records(tmp_path / "run", "train")] == [0, 1, 1, 1]
    assert [content["position"]["step"] for content in found] == [1, 2, 3]


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(tiny):
    with (
        injected(Fault("nan", "step", nth=2, times=100)),
        pytest.raises(NonFiniteError, match=r"--max_nonfinite_steps 3.*--learning_rate") as caught,
    ):
        train({**tiny, **SHORT, "max_nonfinite_steps": 3})
    assert caught.value.exit_code == EXIT_NON_FINITE == 76
    assert "\n" not in str(caught.value)


# --- failed decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "code"), [(0, EXIT_DATA), (1, EXIT_WORKER)])
def test_failed_decoding_is_worth_another_start_after_a_step(tiny, monkeypatch, steps, code):
    batches = TrainLoader.batches

    def few_batches(self, epoch, first_step=0):
        yield from islice(batches(self, epoch, first_step), steps)
        raise WorkerError("decoding processes failed: any")

    monkeypatch.setattr(TrainLoader, "batches", few_batches)
    with pytest.raises(DataError, match=rf"failed: any; saved at step {steps}, resume with") as caught:
        train(tiny)
    assert caught.value.exit_code == code


# --- records --------------------------------------------------------------------------------------------


def test_a_run_without_a_finite_step_is_an_error(tiny, tmp_path):
    """Fewer steps than --max_nonfinite_steps: nothing is learned, so nothing is exported."""
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match="none of the 4 steps had a finite gradient"):
        train({**tiny, **SHORT, "kl_weight": 1e38, "output_dir": str(folder)})
    assert not (folder / "vae").exists()


def test_a_folder_of_files_that_are_no_images_is_not_a_question_of_the_batch(tiny, tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "a.png").write_text("hello")
    with pytest.raises(DataError, match="none of the 1 images that were tried can be used"):
        train({**tiny, **SHORT, "data_path": str(tmp_path / "fake")})


def test_epochs_that_are_validated_and_saved(tiny, tmp_path):
    assert train({**tiny, **QUICK, "val_freq": 2, "checkpoint_freq": 3}) == 0
    assert [record["epoch"] for record in records(tmp_path / "run", "validation")] == [0, 2, 4, 5]
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{epoch}.pt" for epoch in (3, 5)}


def test_last_epoch_of_every_stage_is_validated(tiny, tmp_path, capsys):
    given = {**tiny, "init": "default", "progressive": "32:1:4,16:2:4", "val_freq": 10}
    assert train(given) == 0
    found = [(record["epoch"], record["image_size"]) for record in records(tmp_path / "run", "validation")]
    assert found == [(0, 32), (1, 32), (1, 16), (3, 16)]
    starts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
    assert [line.rpartition("; ")[2] for line in starts] == ["default start", "goes on at step 3"]
