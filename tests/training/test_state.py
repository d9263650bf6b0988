"""The EMA weights: formula, no autograd graph, and the export without an EMA."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.checkpoints import checkpoint
from tests.harness.toy_networks import relative_difference
from tests.harness.training_runs import ONE_PROCESS, SHORT, loop_of, train_short
from vae.interop.checkpoint_file import CHECKPOINT_KEYS, load_checkpoint
from vae.training.early_checks import Command
from vae.training.loop import StageEnd
from vae.training.setup import prepare_run


def test_the_saved_content_has_exactly_the_declared_keys():
    assert set(checkpoint()) == {*CHECKPOINT_KEYS}


def test_ema_weights_follow_the_formula(tiny, tmp_path):
    train_short(tiny, tmp_path / "run", checkpoint_steps=1, keep_checkpoints=9, ema_decay=0.9)
    found = [load_checkpoint(tmp_path / "run" / f"checkpoint_step_{step}.pt") for step in (2, 3)]
    decay = min(0.9, (1 + 2) / (10 + 2))
    expected = {n: decay * found[0]["ema"][n] + (1 - decay) * v for n, v in found[1]["model"].items()}
    assert relative_difference(found[1]["ema"], expected) < 1e-6


def test_ema_weights_have_no_graph_after_training_steps(tiny):
    """An EMA update that autograd records would keep a graph that grows with every step."""
    run = prepare_run(Command({**tiny, **SHORT}), ONE_PROCESS)
    state, loop = run.state, loop_of(run)
    before = {name: value.clone() for name, value in state.ema.state_dict().items()}
    with run.loader(loop.stepper.schedule, loop.alive) as loader:
        assert loop.train(loader) is StageEnd.FINISHED
    assert state.position.step == 4
    for name, parameter in state.ema.named_parameters():
        assert parameter.grad_fn is None, name
        assert not parameter.requires_grad, name
        assert not torch.equal(parameter, before[name]), name


def test_without_ema_the_export_has_the_current_weights(tiny, tmp_path):
    content = train_short(tiny, tmp_path / "run", ema_decay=0.0)
    assert content["ema"] is None
    exported = load_file(tmp_path / "run" / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, exported[name]) for name, value in content["model"].items())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_resumed_run_keeps_no_checkpoint_mapped(tiny, tmp_path):
    """Windows neither removes nor replaces a mapped file."""
    train_short(tiny, tmp_path / "run")
    run = prepare_run(Command({**tiny, **SHORT, "resume_from": "latest"}), ONE_PROCESS)
    gc.collect()
    assert run.state.position.step == 4
    assert str(tmp_path / "run" / "checkpoint_") not in Path("/proc/self/maps").read_text()
