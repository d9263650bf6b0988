"""A VAE of others in the place of the export stays; NaN is never exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs import TINY
from tests.harness.training_runs import ONE_PROCESS
from vae.config.options import build
from vae.interop.latent_statistics import LatentConstants
from vae.interop.writing import save_diffusers_folder
from vae.system.errors import NonFiniteError, UserError
from vae.system.files import MARKER_NAME, write_json
from vae.training.early_checks import Command
from vae.training.export import RUN_KEY, write_export
from vae.training.run import train
from vae.training.setup import prepare_run
from vae.training.state import begin_state

RUN = "0123456789abcdef"  # id of a run


@pytest.fixture
def finished(tiny, tmp_path, capsys) -> dict[str, Any]:
    """The flags that resume a run of 3 steps with an export."""
    assert train({**tiny, "num_epochs": 1}) == 0
    capsys.readouterr()
    return {"resume_from": str(tmp_path / "run" / "checkpoint_epoch_1.pt")}


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
        write_export(tmp_path / "run", run.state, constants, tmp_path / "none.pt", "")
    assert "\n" not in str(caught.value)
    assert content_of(tmp_path / "run" / "vae") == before


def export(folder: Path) -> None:
    """Export new weights into the folder of a run."""
    state = begin_state(build({**TINY, "output_dir": str(folder)}), torch.device("cpu"), fp16=False)
    checkpoint = folder / "checkpoint_epoch_1.pt"
    checkpoint.touch()
    write_json(folder / MARKER_NAME, {"command": "train", "id": RUN})
    write_export(
        folder,
        state,
        LatentConstants(1.0),
        checkpoint,
        Command({"output_dir": str(folder), "max_steps": 6}).resume_command,
    )


@pytest.mark.parametrize("metadata", [{}, {RUN_KEY: "another run"}])
def test_a_vae_of_others_in_the_place_of_the_export_is_refused(tmp_path, metadata):
    save_diffusers_folder(tmp_path / "vae", {"weight": torch.ones(1)}, {}, metadata)
    before = content_of(tmp_path / "vae")
    with pytest.raises(UserError, match=r"vae is not of this run.*--resume_from.*--max_steps 6$"):
        export(tmp_path)
    assert content_of(tmp_path / "vae") == before
