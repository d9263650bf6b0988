"""An export below the start of its stage is reported; a VAE of others is kept; NaN is never exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs import TINY, run_here
from tests.harness.training_runs import ONE_PROCESS, last_checkpoint, records
from vae.config.flags import command_words
from vae.config.options import build
from vae.interop.latent_statistics import LatentConstants
from vae.interop.vae_files import RUN_KEY
from vae.interop.writing import save_diffusers_folder
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import MARKER_NAME, write_json
from vae.training.command import Command
from vae.training.export import write_export
from vae.training.run import train
from vae.training.setup import prepare_run
from vae.training.state import begin_state
from vae.training.validation import History

# With the default decay, the EMA weights of a later stage remember a good start.
RUINOUS = {"image_size": 40, "num_epochs": 1, "learning_rate": 0.2, "warmup_epochs": 0.0, "max_steps": 4}
RUINOUS |= {"ema_decay": 0.1}

RUN = "0123456789abcdef"  # id of a run


@pytest.fixture
def finished(tiny, tmp_path, capsys) -> dict[str, Any]:
    """The flags that resume a run of 3 steps with an export."""
    assert train({**tiny, "num_epochs": 1}) == 0
    capsys.readouterr()
    return {"resume_from": str(tmp_path / "run" / "checkpoint_epoch_1.pt")}


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept_folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("vae_*"))


def test_worse_export_is_reported_with_the_better_checkpoint(finished, tmp_path):
    """As a user extends a run to a larger size."""
    run = tmp_path / "run"
    done = run_here("train_vae.py", *command_words({**finished, **RUINOUS}))
    assert done.returncode == 0, done.stderr
    start, last = (record["psnr"] for record in records(run, "validation")[-2:])
    (line,) = [line for line in done.stdout.splitlines() if "WARNING: PSNR is" in line]
    words = f"WARNING: PSNR is {last:.2f} dB, and {start:.2f} dB at the start of this stage"
    for text in (words, "--learning_rate (now 0.2)", "resume from checkpoint_epoch_1.pt, which is better"):
        assert text in line
    assert f"start (best)     PSNR {start:6.2f} dB" in done.stdout
    history = last_checkpoint(run)["history"]
    assert history["best_checkpoint"] == "checkpoint_epoch_1.pt"
    assert history["best"]["psnr"] == start
    assert kept_folders(run) == []


@pytest.mark.parametrize("what", ["scaling", "weights"])
def test_values_that_are_not_finite_are_not_exported(finished, tmp_path, what):
    before = content_of(tmp_path / "run" / "vae")
    run, scaling = prepare_run(Command({**finished, "num_epochs": 1}), ONE_PROCESS), 1.0
    if what == "scaling":
        scaling = math.nan
    else:
        run.state.eval_model.decoder.conv_out.bias.data.fill_(math.inf)
    constants = LatentConstants(scaling)
    with pytest.raises(NonFiniteError, match=r"vae is not written, .*--learning_rate") as caught:
        write_export(run.config, run.state, "train longer", constants, tmp_path / "none.pt")
    assert "\n" not in str(caught.value)
    assert content_of(tmp_path / "run" / "vae") == before
    assert kept_folders(tmp_path / "run") == []


def export_worse(folder: Path, adversarial_weight: float) -> None:
    """Export into `folder` after a stage that began at 30 dB and ended at 20 dB."""
    config = build({**TINY, "adversarial_weight": adversarial_weight, "output_dir": str(folder)})
    state = begin_state(config, torch.device("cpu"), fp16=False)
    state.history = History(start_psnr=30.0, last_psnr=20.0)
    checkpoint = folder / "checkpoint_epoch_1.pt"
    checkpoint.touch()
    write_json(folder / MARKER_NAME, {"command": "train", "id": RUN})
    write_export(config, state, "train longer", LatentConstants(), checkpoint)


@pytest.mark.parametrize("metadata", [{}, {RUN_KEY: "another run"}])
def test_a_vae_of_others_in_the_place_of_the_export_is_kept(tmp_path, metadata, capsys):
    save_diffusers_folder(tmp_path / "vae", {"weight": torch.ones(1)}, {}, metadata)
    before = content_of(tmp_path / "vae")
    export_worse(tmp_path, 0.0)
    assert content_of(tmp_path / "vae_before_1") == before
    assert "vae is not of this run, so it is kept in" in capsys.readouterr().out


def test_adversarial_loss_is_no_warning(tmp_path, capsys):
    save_diffusers_folder(tmp_path / "vae", {"weight": torch.zeros(1)}, {}, {RUN_KEY: RUN})
    export_worse(tmp_path, 0.5)
    printed = capsys.readouterr().out
    assert "20.00 dB, and 30.00 dB" in printed
    assert "adversarial loss may lower PSNR" in printed
    assert "WARNING" not in printed


def test_folder_that_is_in_use_is_one_line(tmp_path, monkeypatch):
    """Windows renames no folder with an open file."""

    def refuse(*_arguments):
        raise PermissionError(13, "in use")

    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").touch()
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match=r"vae cannot be renamed to vae_before_1: in use: .*--resume_from"):
        export_worse(tmp_path, 0.0)
