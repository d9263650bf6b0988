"""Mistakes of public VAE trainers: the tests check that this trainer does not make them.

Others are in test_resume.py (another run after a resume), test_distributed.py (gradients of processes),
test_bad_images.py (black images) and tests/test_step.py (losses that have no gradient, or a wrong one).
"""

import ast
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from tests.harness.runs import ROOT
from tests.harness.toy_networks import (
    ALL_LOSSES,
    MODEL,
    TERM_WEIGHTS,
    gradients,
    random_lpips,
    relative_difference,
    toy_inputs,
    toy_networks,
)
from tests.harness.training_runs import last_checkpoint, records
from vae.config.options import Config, all_options
from vae.interop.checkpoint_file import load_checkpoint
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.step import compute_gradients
from vae.training.run import train

ADVERSARIAL = {
    "adversarial_weight": 0.5,
    "disc_start": 2,
    "disc_warmup": 0,
    "disc_ramp": 2,
    "disc_channels": 8,
    "disc_layers": 2,
    "init": "default",
}


# --- weights cast to bf16 after the optimizer was built ---------------------------------------------


def test_bf16_run_saves_fp32_weights_and_moments(tiny, tmp_path):
    assert train({**tiny, "init": "default", "use_bf16": True, "num_epochs": 1, "learning_rate": 4.5e-6}) == 0
    saved = last_checkpoint(tmp_path / "run")
    tensors = [*saved["model"].values(), *saved["ema"].values()]
    for state in saved["optimizers"][0]["state"].values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    assert {t.dtype for t in tensors} == {torch.float32}


# --- a loss term that is computed and never added ---------------------------------------------------


@pytest.mark.parametrize("name", TERM_WEIGHTS)
def test_each_loss_weight_changes_the_gradient(name):
    def found(loss):
        nets = toy_networks(torch.float64, loss=loss)
        compute_gradients(nets, toy_inputs(2, 32), [2])
        return gradients(nets.autoencoder)

    assert relative_difference(found(replace(ALL_LOSSES, **{name: 0.0})), found(ALL_LOSSES)) > 1e-3


# --- steps of two optimizers counted together; two places that start the discriminator ---------------


@pytest.mark.slow
def test_schedules_and_disc_start_count_autoencoder_steps(tiny, tmp_path):
    options = {**tiny, **ADVERSARIAL, "batch_size": 2, "accumulation_steps": 2, "val_split": 0.0}
    options |= {"log_freq": 1, "num_epochs": 2, "disc_start": 5}
    options |= {"lr_schedule": "cosine", "warmup_epochs": 0, "learning_rate": 1e-3}
    assert train(options) == 0
    found = records(tmp_path / "run", "train")
    assert [record["step"] for record in found] == list(range(1, 9))  # 16 images, 2 x 2 per step, 2 epochs
    assert ["adversarial" in record for record in found] == [False] * 5 + [True] * 3
    assert ["discriminator" in record for record in found] == [False] * 5 + [True] * 3
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert [record["learning_rate"] for record in found] == pytest.approx(expected, rel=1e-4)
    expected = [1e-4 * 0.5 * (1 + math.cos(math.pi * step / 3)) for step in range(3)]  # its own cosine
    assert [record["disc_learning_rate"] for record in found[5:]] == pytest.approx(expected, rel=1e-6)
    assert not any("disc_learning_rate" in record for record in found[:5])
    last = last_checkpoint(tmp_path / "run")
    assert last["position"]["step"] == 8
    counted = [state["state"][0]["step"].item() for state in last["optimizers"]]
    assert counted == [8, 3]


def test_disc_warmup_trains_the_discriminator_alone(tiny, tmp_path):
    """The autoencoder is bitwise the same as without an adversarial loss, until the warm-up ends."""
    options = {**tiny, "val_split": 0.0, "num_epochs": 1, "log_freq": 1, "checkpoint_steps": 1, "seed": 3}
    options |= {"keep_checkpoints": 100}
    warmed = {**ADVERSARIAL, "disc_start": 0, "disc_warmup": 2, "disc_ramp": 0}
    for name, given in {"warmed": warmed, "none": {"init": "default"}}.items():
        assert train({**options, **given, "max_steps": 3, "output_dir": str(tmp_path / name)}) == 0

    def weights(name, step, network="model"):
        return load_checkpoint(tmp_path / name / f"checkpoint_step_{step}.pt")[network]

    for step, is_equal in ((1, True), (2, True), (3, False)):
        pair = weights("warmed", step), weights("none", step)
        assert all(torch.equal(pair[0][key], pair[1][key]) for key in pair[0]) == is_equal
    before, after = (weights("warmed", step, "discriminator") for step in (1, 2))
    assert any(not torch.equal(before[key], after[key]) for key in before)
    logged = records(tmp_path / "warmed", "train")
    factors = [record["adversarial_factor"] for record in logged]
    assert factors[:2] == [0, 0]
    used = logged[1]["adversarial_ratio"] * warmed["adversarial_weight"]
    assert factors[2] == pytest.approx(used, rel=1e-5)
    assert factors[2] > 0


# --- batch statistics with micro-batches or several processes -----------------------------------------


def all_networks() -> dict[str, nn.Module]:
    return {
        "autoencoder": AutoencoderKL(MODEL).double(),
        "discriminator": Discriminator(8, 2).double(),
        "LPIPS": random_lpips(torch.float64),
    }


@pytest.mark.parametrize("name", all_networks())
def test_no_module_couples_the_images_of_a_batch(name):
    network = all_networks()[name]
    coupling = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.Dropout)
    for module in network.modules():
        assert not isinstance(module, coupling), module
        assert not hasattr(module, "parametrizations"), f"{module} is parametrized"
        assert not module._forward_pre_hooks, f"{module} has a hook before each forward"
    buffers = {n: b.clone() for n, b in network.named_buffers()}
    images = torch.rand(3, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    arguments = (images, torch.rand_like(images)) if name == "LPIPS" else (images,)
    network.train(name != "LPIPS")
    out = network(*arguments)
    for part in out if isinstance(out, tuple) else (out,):
        (gradient,) = torch.autograd.grad(part[1].sum(), images, retain_graph=True)
        assert gradient[0].abs().max() == gradient[2].abs().max() == 0
        assert gradient[1].abs().max() > 0
    assert all(torch.equal(buffers[n], b) for n, b in network.named_buffers())


# --- flags that are parsed and never used --------------------------------------------------------------


def words_read(path, strings: bool) -> set[str]:
    """Attribute names that a file reads and, with `strings`, its string constants."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_every_option_is_read_somewhere():
    givers = {"recipes.py", "resolve.py", "gpus.py", "report.py"}  # set or print values by name
    files = [p for p in [*(ROOT / "vae").rglob("*.py"), *ROOT.glob("*.py")] if p.name != "options.py"]
    read = set().union(*(words_read(path, strings=path.name not in givers) for path in files))
    read |= {f"{path.stem}_weight" for path in files if path.parent.name == "losses"}  # terms, by their file
    assert [name for name in all_options() if name not in read] == []
    assert {section.name for section in fields(Config)} <= read
