"""--save_config writes a file that gives --config the options of the command, and trains nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_vae
from tests.harness.training_runs import last_checkpoint, train_short
from vae.config.flags import parse_flags
from vae.config.options import Config, all_options
from vae.training.early_checks import Command
from vae.training.resolved_options import machine_of, resolve_options

CPU = torch.device("cpu")


def saved(words: list[str], path: Path) -> dict:
    """The content of the file that --save_config writes for this command."""
    assert train_vae.main([*words, "--save_config", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def resolved(words: list[str]) -> Config:
    """The options of a command, without the names of the files and profiles that they came from."""
    config = resolve_options(Command(parse_flags(words)), *machine_of(CPU)).config
    return replace(config, run=replace(config.run, config=None, profile=None))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--profile", "standard", "--batch_size", "2", "--no-use_torch_compile", "--channels", "32", "64"],
        ["--profile", "demo", "--data_path", "a b", "--max_steps", "3", "--micro_batch_size", "1"],
        ["--progressive", "64:2:4,128:1:2", "--learning_rate", "3e-5"],
    ],
)
def test_saved_file_gives_the_options_of_the_command(words, tmp_path):
    words = [*words, "--device", "cpu"]
    path = tmp_path / "new folder" / "saved.json"
    values = saved(words, path)
    assert resolved(["--config", str(path)]) == resolved(words)
    assert all_options().keys() - values.keys() == {"config", "profile", "val_split"}
    assert list(tmp_path.iterdir()) == [path.parent]


def test_architecture_of_init_from_is_in_the_file(tiny, tmp_path):
    train_short(tiny, tmp_path / "first")
    words = ["--init_from", str(tmp_path / "first" / "vae"), "--device", "cpu"]
    values = saved(words, tmp_path / "saved.json")
    assert (values["channels"], values["z_channels"]) == (tiny["channels"], tiny["z_channels"])
    assert resolved(["--config", str(tmp_path / "saved.json")]) == resolved(words)


@pytest.mark.slow
def test_saved_file_of_a_resume_does_not_contradict_it(tiny, tmp_path):
    train_short(tiny, tmp_path / "first")
    begun = {"init_from": str(tmp_path / "first" / "vae"), "max_steps": 1}
    content = train_short(tiny, tmp_path / "second", **begun)
    resume = ["--output_dir", str(tmp_path / "second"), "--resume_from", "latest", "--max_steps", "2"]
    saved(resume, tmp_path / "saved.json")
    assert train_vae.main(["--config", str(tmp_path / "saved.json")]) == 0
    resumed = last_checkpoint(tmp_path / "second")
    assert resumed["position"]["step"] == 2
    assert resumed["config"]["init_from"] == content["config"]["init_from"] == begun["init_from"]
