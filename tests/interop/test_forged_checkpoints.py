"""Checkpoints whose content cannot be used: each is refused in one line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.checkpoints import WITH_DISCRIMINATOR, checkpoint
from vae.interop.checkpoint_content import ContentError
from vae.interop.checkpoint_file import load_checkpoint, record_path, save_checkpoint
from vae.interop.checkpoint_schema import check_content
from vae.interop.vae_files import load_vae
from vae.system.errors import UserError

NAN, INF = float("nan"), float("inf")
WEIGHT = "decoder.conv_out.weight"


def put(*keys: Any, value: Any) -> Callable[[dict], None]:
    """Set content[key][key]... to `value`."""

    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def fill(*keys: Any, value: float) -> Callable[[dict], None]:
    """Set one number of a tensor."""

    def change(content: dict) -> None:
        for key in keys:
            content = content[key]
        content[(0,) * content.dim()] = value

    return change


def repeated(content: dict) -> None:
    """A tensor of the expected shape whose numbers are all the same one."""
    content["model"][WEIGHT] = torch.zeros(1, 1, 1, 1).expand(content["model"][WEIGHT].shape)


def other_architecture(content: dict) -> None:
    content["config"] |= {"channels": [8, 32], "z_channels": 4}


def endless_architecture(content: dict) -> None:
    """Building this network would take years."""
    content["config"]["layers_per_block"] = 10**9


FORGED = {
    "no_model": (drop("model"), "lacks model"),
    "list_as_model": (put("model", value=[1, 2]), "model is a list"),
    "text_as_tensor": (put("model", WEIGHT, value="x" * 1000), WEIGHT),
    "number_as_name": (put("model", 3, value=torch.zeros(1)), "a key of model is 3"),
    "missing_weight": (drop("model", WEIGHT), f"lacks {WEIGHT}"),
    "other_shape": (put("model", WEIGHT, value=torch.zeros(3, 8, 1, 1)), r"\(3, 8, 1, 1\)"),
    "other_dtype": (put("model", WEIGHT, value=torch.zeros(3, 8, 3, 3).half()), "float16"),
    "sparse_weight": (put("ema", WEIGHT, value=torch.zeros(3, 8).to_sparse()), "not a dense tensor"),
    "repeated_numbers": (repeated, "larger than its data"),
    "nan_weight": (fill("model", WEIGHT, value=NAN), rf"model: {WEIGHT} .*not finite"),
    "inf_ema": (fill("ema", WEIGHT, value=INF), rf"ema: {WEIGHT} .*not finite"),
    "no_moments": (put("optimizers", 0, "state", value={}), "moments of 0 parameters"),
    "moments_of_one": (drop("optimizers", 0, "state", 3), "moments of"),
    "no_second_moment": (drop("optimizers", 0, "state", 0, "exp_avg_sq"), "parameter 0"),
    "one_optimizer": (drop("optimizers", 1), "1 optimizers, not 2"),
    "no_discriminator": (put("discriminator", value=None), "lacks discriminator"),
    "other_parameters": (put("optimizers", 0, "param_groups", 0, "params", value=[0]), "optimizer 0"),
    "negative_step": (put("position", "step", value=-7), "position.step is -7"),
    "huge_step": (put("position", "step", value=10**5000), "position.step is a huge number"),
    "no_stages": (put("stages", value=[]), "no stages"),
    "stage_of_0_px": (put("stages", 0, "image_size", value=0), "image_size is 0"),
    "stages_with_a_gap": (put("stages", 0, "first_epoch", value=5), "begin at"),
    "list_in_history": (put("history", "best", value={"psnr": []}), "history.best.'psnr' is a list"),
    "list_as_run": (put("run", value=[]), "run is a list"),
    "other_ancestor": (put("run", "ancestors", value=[["a", "b"]]), r"run.ancestors\[0\]\[1\] is 'b'"),
    "list_as_rollbacks": (put("rollbacks", value=[1]), "rollbacks is a list"),
    "text_in_rollbacks": (put("rollbacks", 0, value=["1"]), r"rollbacks.0\[0\] is '1'"),
    "text_as_scaling": (put("latent_scaling", value=["1", "2"]), "latent_scaling"),
    "unknown_option": (put("config", "shell", value="rm"), "unknown option 'shell'"),
    "text_as_option": (put("config", "learning_rate", value="fast"), "--learning_rate 'fast'"),
    "huge_whole_option": (put("config", "seed", value=10**5000), "--seed"),
    "option_of_10_mb": (put("config", "init", value="y" * 10**7), "--init 'y"),
    "no_channels": (drop("config", "channels"), "and its config"),
    "other_architecture": (other_architecture, r"channels \[8, 16\], and its config \(8, 32\)"),
    "endless_architecture": (endless_architecture, "layers_per_block"),
    "endless_discriminator": (put("config", "disc_layers", value=10**9), "--disc_layers"),
    "indivisible_norms": (put("config", "norm_groups", value=5), "--norm_groups 5"),
    "other_topology": (put("contract", "topology", "streams", value="many"), "contract.topology.streams"),
    "infinite_scaling": (put("latent_scaling", value=[INF, 0.0]), "latent_scaling is not finite"),
}


LAST = ("optimizers", 0, "state", 119)  # the momentum of a hidden weight
FORGED_MUON = {
    "nan_momentum": (
        fill(*LAST, "momentum_buffer", value=NAN),
        "parameter 119 .*not finite",
    ),
    "other_shape": (put(*LAST, "momentum_buffer", value=torch.zeros(2)), r"\(2,\)"),
    "no_momentum": (drop(*LAST, "momentum_buffer"), "no moments of parameter 119"),
    "moments_of_adamw": (put(*LAST, "exp_avg", value=torch.zeros(2)), "no moments of parameter 119"),
    "moments_of_some": (drop(*LAST), "moments of 119 parameters, not of 120"),
    "one_group": (drop("optimizers", 0, "param_groups", 1), "not Muon's state of 120 parameters"),
    "other_optimizer": (put("config", "optimizer", value="adamw"), "not AdamW's state of 120 parameters"),
}


def refusal(path: Path) -> str:
    """The message about an unusable checkpoint, which is the same line for every use of the file."""
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message.replace(str(path), "")) < 400
    with pytest.raises(UserError, match=r"^--vae "):
        load_vae(path)
    return message


@pytest.mark.parametrize(
    ("optimizer", "name"), [*(("adamw", name) for name in FORGED), *(("muon", name) for name in FORGED_MUON)]
)
def test_forged_content_is_refused_in_one_line(optimizer, name):
    change, pattern = (FORGED if optimizer == "adamw" else FORGED_MUON)[name]
    content = checkpoint(**WITH_DISCRIMINATOR, optimizer=optimizer)
    change(content)
    with pytest.raises(ContentError, match=pattern) as caught:
        check_content(content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_forged_content_in_a_file_is_refused_with_its_path(tmp_path):
    path = tmp_path / "checkpoint_epoch_1.pt"
    save_checkpoint(path, {**checkpoint(), "model": {WEIGHT: torch.zeros(3)}})
    assert "cannot be used" in refusal(path)


def test_unchanged_checkpoints_are_accepted(tmp_path):
    path = tmp_path / "checkpoint_epoch_1.pt"
    for options in (
        {},
        WITH_DISCRIMINATOR,
        {"train_part": "decoder"},
        {"train_part": "decoder", "optimizer": "muon"},
        {"latent_norm": True, "ema_decay": 0.0},
    ):
        save_checkpoint(path, checkpoint(**options))
        load_checkpoint(path)
    content = checkpoint(**WITH_DISCRIMINATOR)
    content["optimizers"][1]["state"] = {}  # before --disc_start
    save_checkpoint(path, {**content, "more": 1})  # a later version may save more
    load_checkpoint(path)


# ---- files that are no checkpoint ------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "checkpoint_epoch_1.pt")
    save_checkpoint(tmp_path / "checkpoint_epoch_2.pt", checkpoint())
    record_path(tmp_path / "checkpoint_epoch_2.pt").unlink()
    os.mkfifo(record_path(tmp_path / "checkpoint_epoch_2.pt"))
    for name in ("checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt.sha256"):
        with pytest.raises(UserError, match=f"{name} cannot be read: it is not a regular file"):
            load_checkpoint(tmp_path / name.removesuffix(".sha256"))
