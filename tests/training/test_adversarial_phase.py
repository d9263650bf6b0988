"""An adversarial phase is compared within itself: its best, its warnings, --early_stopping, a collapse."""

import re
from pathlib import Path

import pytest

from tests.harness.training_runs import last_checkpoint, records
from vae.config.options import LossConfig, OptimConfig
from vae.training.run import train
from vae.training.schedule import RANDOM, StageSchedule
from vae.training.stability import SPIKE_STEPS, Stability
from vae.training.stages import Position, Stage, StageSteps
from vae.training.validation import History, Metrics

LOSS = {"adversarial_weight": 0.5, "disc_start": 4, "disc_warmup": 1, "disc_ramp": 5}


def metrics(loss: float, share: float = 0.0, **quality: float) -> Metrics:
    return {"image_size": 32, "images": 4, "loss": loss, "adversarial_share": share, **quality}


# ---- what is compared ------------------------------------------------------------------------------------


def test_its_best_is_compared_within_it_once_the_ramp_is_over():
    history = History()
    found = []
    for number, (loss, share) in enumerate([(0.2, 0.0), (0.1, 0.5), (0.4, 1.0), (0.5, 1.0), (0.3, 1.0)]):
        history.add_epoch(metrics(loss, share))
        history.add_checkpoint(f"{number}.pt", metrics(loss, share))
        found.append((history.best_checkpoint, history.before_adversarial, history.without_gain))
    before, first = ("0.pt", None, 0), ("2.pt", "0.pt", 0)
    assert found == [before, before, first, ("2.pt", "0.pt", 1), ("4.pt", "0.pt", 0)]


@pytest.mark.parametrize(
    ("after", "warns"),
    [
        ({"loss": 0.3, "psnr": 25.0, "ssim": 0.6, "lpips": 0.3}, True),
        ({"loss": 0.3, "psnr": 25.0, "ssim": 0.6, "lpips": 0.1}, False),  # what the adversarial loss is for
        ({"loss": 0.21, "psnr": 25.0, "ssim": 0.6}, False),  # its usual price
        ({"loss": 0.3, "psnr": 25.0, "ssim": 0.6}, True),
    ],
)
def test_a_rise_of_the_loss_in_it_is_reported_once_every_metric_is_worse(after, warns):
    history = History()
    history.begin_phase(True, metrics(0.2, psnr=26.0, ssim=0.7, lpips=0.2))
    found = [history.rise_warning(metrics(share=1.0, **after), "", 0.1) for _ in range(2)]
    assert (found[0] is not None, found[1]) == (warns, None)
    quick = History()
    assert quick.regression_warning(metrics(0.1), 0.1) is None
    assert quick.regression_warning(metrics(0.2, 0.1, psnr=26.0, ssim=0.7, lpips=0.2), 0.1) is None  # begins
    assert (quick.regression_warning(metrics(share=0.2, **after), 0.1) is not None) == warns


def schedule(total: int, **changes: int) -> StageSchedule:
    steps = StageSteps.of(Stage(0, total, 32, 4), num_images=4, accumulation_steps=1, world_size=1)
    return StageSchedule(steps, RANDOM, 16, OptimConfig(), LossConfig(**LOSS | changes))


def test_early_stopping_waits_for_a_planned_phase_and_its_ramp():
    """The first adversarial step is the sixth; the tenth has the whole weight."""
    may_stop = [schedule(20).may_stop_early(Position(epoch=step, step=step)) for step in range(1, 21)]
    assert may_stop == [False] * 9 + [True] * 11
    assert schedule(5).may_stop_early(Position(epoch=3, step=3))  # the stage ends before the phase
    assert schedule(20, adversarial_weight=0).may_stop_early(Position(epoch=3, step=3))
    assert [schedule(20).adversarial_share(step) for step in (5, 6, 9, 10, 11)] == [0, 0.2, 0.8, 1, 1]


def test_a_collapse_of_the_weights_that_train_is_divergence_after_few_records():
    """The EMA hides it for a hundred steps. Without the phase, so few records are not judged."""
    for is_adversarial in (True, False):
        stability = Stability()
        for step in range(10, 60, 10):
            stability.add_record(step, 0.2, 0.1)
        stability.begin_phase(is_adversarial)
        for step in (60, 60 + SPIKE_STEPS):
            stability.add_record(step, 0.39, 0.1)  # less than twice
            assert stability.divergence() is None
            assert stability.doubt(0) is None
        for step in (100, 100 + SPIKE_STEPS):
            stability.add_record(step, 0.9, 0.1)
        assert (stability.divergence() is not None) == is_adversarial


# ---- a real run ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("start", "checkpoint"), [(5, "checkpoint_step_5.pt"), (6, "checkpoint_epoch_2.pt")])
def test_a_run_keeps_the_best_weights_before_the_phase_and_names_them(
    tiny, tmp_path, capsys, start, checkpoint
):
    """3 steps per epoch; the phase begins within the second one or at its end, where the run is resumed."""
    given = {
        **tiny,
        **LOSS,
        "disc_start": start - 1,
        "disc_channels": 8,
        "disc_layers": 1,
        "num_epochs": 10,
        "log_freq": 1,
    }
    given |= {"keep_checkpoints": 2, "early_stopping": 1, "learning_rate": 1e-3}
    assert train({**given, "max_steps": start}) == 0
    assert train({**given, "resume_from": "latest"}) == 0
    folder = tmp_path / "run"
    validated = records(folder, "validation")
    shares = [(record["step"], record["adversarial_share"]) for record in validated]
    assert shares[:4] == (
        [(0, 0), (3, 0), (5, 0), (6, 0.2)] if start == 5 else [(0, 0), (3, 0), (6, 0), (9, 0.6)]
    )
    history = last_checkpoint(folder)["history"]
    assert history["before_adversarial"] == checkpoint  # the loss falls before it
    assert history["best"]["adversarial_share"] == 1
    assert (folder / checkpoint).is_file()  # more than two are newer
    result = capsys.readouterr().out.rpartition("done: ")[2]
    (line,) = re.findall(r"^VAE .*on purpose; the best before it is .*", result, re.MULTILINE)
    assert "export_vae.py --vae" in line
    assert str(Path("run") / checkpoint) in line
