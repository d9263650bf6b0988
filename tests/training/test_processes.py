"""Several processes train what one process trains with the whole batch; what one meets, all decide on."""

import json
import textwrap
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.harness.runs import ROOT, as_flags, run_script
from tests.harness.toy_networks import relative_difference
from vae.training.distributed import Processes
from vae.training.run import train

pytestmark = pytest.mark.slow

RECIPE = {
    "init": "default",
    "val_split": 0.0,
    "num_epochs": 2,
    "log_freq": 1,
    "disc_channels": 8,
    "disc_layers": 2,
}
ADVERSARIAL = {"adversarial_weight": 0.5, "disc_start": 2, "disc_ramp": 2}


def two_processes(options: dict, before: str = "", rc: int = 0):
    """A run of two gloo processes under torchrun; `before` is Python that each runs first."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if not before:
        found = run_script(*words, "train_vae.py", *as_flags(options))
    else:
        script = Path(options["output_dir"]).with_name("patched_trainer.py")
        script.write_text(
            f"{textwrap.dedent(before)}\nfrom train_vae import main, run_script\n"
            "run_script('train_vae.py', main)\n"
        )
        found = run_script(*words, str(script), *as_flags(options), env={"PYTHONPATH": str(ROOT)})
    assert (found.returncode == 0) == (rc == 0), found.stderr[-3000:]
    return found


def one_process(options: dict) -> None:
    assert train(options) == 0


def load(options: dict, name: str) -> dict:
    return torch.load(Path(options["output_dir"]) / name, weights_only=True)


def assert_same_training(two: dict, one: dict, epoch: int = 2) -> None:
    """The first step's gradients agree to fp32 rounding, the final weights to what Adam makes of it."""
    first_two, first_one = (load(options, "checkpoint_step_1.pt") for options in (two, one))
    moments = []
    for content in (first_two, first_one):  # after one step the moment is a tenth of the gradient
        states = content["optimizers"][0]["state"]
        moments.append({str(key): state["exp_avg"] for key, state in states.items()})
    assert relative_difference(*moments) < 1e-5  # fp32: the sum over images in another order
    last_two, last_one = (load(options, f"checkpoint_epoch_{epoch}.pt") for options in (two, one))
    assert last_two["position"] == last_one["position"]
    for network in ("model", "ema", "discriminator"):
        if last_one[network] is None:
            continue
        # Adam divides by the gradient's size: where that is rounding alone (a bias under softmax), the
        # steps are noise of full size; elsewhere rounding stays rounding
        keep = [name for name in last_one[network] if not name.endswith("to_k.bias")]
        found, expected = ({n: c[network][n] for n in keep} for c in (last_two, last_one))
        assert relative_difference(found, expected) < 2e-5, network


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_two_processes_train_what_one_trains_with_the_whole_batch(tiny, tmp_path, accumulation_steps):
    options = {**tiny, **RECIPE, "checkpoint_steps": 1, "keep_checkpoints": 100}
    options |= {"perceptual_weight": 1.0, "perceptual_net": "random"} if accumulation_steps == 2 else {}
    two = {**options, "batch_size": 2 // accumulation_steps, "output_dir": str(tmp_path / "two")}
    one = {**options, "batch_size": 4, "output_dir": str(tmp_path / "one")}
    found = two_processes({**two, "accumulation_steps": accumulation_steps})
    one_process(one)
    assert_same_training(two, one)
    assert found.stdout.count("done: 2 epochs") == 1  # one process speaks and writes


@pytest.mark.slow
def test_unequal_counts_and_an_adversary(tiny, tmp_path):
    folder = tmp_path / "damaged"
    copytree(tiny["data_path"], folder)
    bad = sorted(folder.rglob("*.png"))[5]
    bad.write_bytes(bad.read_bytes()[:100])
    options = {**tiny, **RECIPE, **ADVERSARIAL, "data_path": str(folder), "max_bad_fraction": 0.1}
    options |= {"checkpoint_steps": 1, "keep_checkpoints": 100}
    two = {**options, "batch_size": 2, "output_dir": str(tmp_path / "two"), "micro_batch_size": "1"}
    one = {**options, "batch_size": 4, "output_dir": str(tmp_path / "one")}
    found = two_processes(two)
    one_process(one)
    assert_same_training(two, one)
    torch.testing.assert_close(
        load(two, "checkpoint_epoch_2.pt")["running_sq_norms"][0]
        / load(two, "checkpoint_epoch_2.pt")["running_sq_norms"][1],
        load(one, "checkpoint_epoch_2.pt")["running_sq_norms"][0]
        / load(one, "checkpoint_epoch_2.pt")["running_sq_norms"][1],
        rtol=1e-4,
        atol=0,
    )
    assert (found.stdout + found.stderr).count(f"skipped {bad.relative_to(folder).as_posix()}") <= 1
    for name in ("loss", "psnr", "kl"):
        values = [records(options, name) for options in (two, one)]
        assert values[0] == pytest.approx(values[1], rel=1e-3)


def records(options: dict, name: str) -> list[float]:
    lines = (Path(options["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [record[name] for record in found if record["kind"] == "train"]


OUT_OF_MEMORY = """
    import os, sys, torch
    from vae.model.autoencoder import AutoencoderKL
    plain = AutoencoderKL.forward
    def limited(self, images, noise=None):
        training = torch.is_grad_enabled() and images.device.type == "cpu"  # the plan runs on meta
        if os.environ["RANK"] == "1" and training and len(images) > 2:
            raise torch.OutOfMemoryError("injected")
        return plain(self, images, noise)
    AutoencoderKL.forward = limited
"""


def test_out_of_memory_on_one_process_shrinks_the_micro_batch_of_both(tiny, tmp_path):
    options = {**tiny, **RECIPE, **ADVERSARIAL, "checkpoint_steps": 1, "keep_checkpoints": 100}
    two = {**options, "batch_size": 4, "output_dir": str(tmp_path / "two")}
    one = {**options, "batch_size": 8, "output_dir": str(tmp_path / "one")}
    found = two_processes(two, OUT_OF_MEMORY)
    assert found.stdout.count("out of memory: micro-batch lowered to") == 1
    one_process(one)
    assert_same_training(two, one)


OUT_OF_MEMORY_AT_A_SINGLE_IMAGE = """
    import os, sys, torch
    from vae.model.autoencoder import AutoencoderKL
    plain = AutoencoderKL.forward
    def limited(self, images, noise=None):
        training = torch.is_grad_enabled() and images.device.type == "cpu"
        if os.environ["RANK"] == "1" and training and not self.encoder.redone:
            raise torch.OutOfMemoryError("injected")
        return plain(self, images, noise)
    AutoencoderKL.forward = limited
"""


@pytest.mark.slow
def test_a_single_image_too_much_on_one_process_takes_both_to_the_next_rungs(tiny, tmp_path):
    options = {**tiny, **RECIPE, **ADVERSARIAL, "checkpoint_steps": 1, "keep_checkpoints": 100}
    two = {**options, "batch_size": 2, "output_dir": str(tmp_path / "two")}
    one = {**options, "batch_size": 4, "output_dir": str(tmp_path / "one")}
    found = two_processes(two, OUT_OF_MEMORY_AT_A_SINGLE_IMAGE)
    assert found.stdout.count("from here on; same batch and gradients, more arithmetic") == 3
    one_process(one)
    assert_same_training(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["activations", "all"])
def test_two_processes_train_on_a_rung_what_one_trains_without(tiny, tmp_path, rung):
    options = {**tiny, **RECIPE, **ADVERSARIAL, "checkpoint_steps": 1, "keep_checkpoints": 100}
    options["micro_batch_size"] = "1"
    two = {**options, "batch_size": 2, "output_dir": str(tmp_path / "two"), "recompute": rung}
    one = {**options, "batch_size": 4, "output_dir": str(tmp_path / "one"), "recompute": "none"}
    two_processes(two)
    one_process(one)
    assert_same_training(two, one)


OUT_OF_MEMORY_IN_THE_DISCRIMINATOR = """
    import os, sys, torch
    from vae.model.discriminator import Discriminator
    plain = Discriminator.forward
    def limited(self, images):
        own_block = images.device.type == "cpu" and not images.requires_grad
        if os.environ["RANK"] == "1" and own_block and len(images) > 4:
            raise torch.OutOfMemoryError("injected")
        return plain(self, images)
    Discriminator.forward = limited
"""


@pytest.mark.slow
def test_out_of_memory_in_the_discriminators_block_of_one_process(tiny, tmp_path):
    options = {**tiny, **RECIPE, **ADVERSARIAL, "checkpoint_steps": 1, "keep_checkpoints": 100}
    two = {**options, "batch_size": 4, "output_dir": str(tmp_path / "two")}
    one = {**options, "batch_size": 8, "output_dir": str(tmp_path / "one")}
    found = two_processes(two, OUT_OF_MEMORY_IN_THE_DISCRIMINATOR)
    assert found.stdout.count("out of memory: micro-batch lowered to") == 1
    one_process(one)
    assert_same_training(two, one)


@pytest.mark.slow
def test_two_compiled_processes_train(tiny, tmp_path):
    compiled = {**tiny, "batch_size": 2, "max_steps": 2, "use_torch_compile": True}
    plain = {**compiled, "use_torch_compile": False, "output_dir": str(tmp_path / "plain")}
    two_processes(compiled)
    two_processes(plain)
    assert records(compiled, "loss") == pytest.approx(records(plain, "loss"), rel=1e-4)


NON_FINITE = """
    import os, sys, torch
    import vae.training.oom_retry as within_memory
    plain, calls = within_memory.compute_gradients, []
    def poisoned(networks, inputs, *rest):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            inputs.noise.fill_(float("nan"))
        return plain(networks, inputs, *rest)
    within_memory.compute_gradients = poisoned
"""


@pytest.mark.slow
def test_a_non_finite_gradient_on_one_process_skips_the_step_on_both(tiny, tmp_path):
    options = {**tiny, **RECIPE, "batch_size": 2, "checkpoint_steps": 1, "keep_checkpoints": 100}
    two_processes(options, NON_FINITE)
    first, second, third = (load(options, f"checkpoint_step_{step}.pt") for step in (1, 2, 3))
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name]), name
    assert any(not torch.equal(value, third["model"][name]) for name, value in second["model"].items())
    assert [int(c["update"]["nonfinite_total"]) for c in (first, second, third)] == [0, 1, 1]


DESYNCHRONISED = """
    import os, sys, torch
    import vae.training.run as run
    plain = run._finish
    def finish(run_state, *rest):
        weights = torch.cat([p.detach().flatten() for p in run_state.state.shipped.parameters()])
        total = run_state.processes.sum_tensor(weights.clone())
        assert torch.equal(total, 2 * weights), "the processes hold different weights"
        print("weights agree")
        return plain(run_state, *rest)
    run._finish = finish
"""


def test_both_processes_hold_the_same_weights_at_the_end(tiny, tmp_path):
    options = {**tiny, **RECIPE, **ADVERSARIAL, "batch_size": 3}
    found = two_processes(options, DESYNCHRONISED)
    assert found.stdout.count("weights agree") == 2


def test_a_mistake_under_torchrun_is_said_once(tiny):
    found = two_processes({**tiny, "data_path": "/nowhere"}, rc=1)
    lines = [line for line in found.stderr.splitlines() if "/nowhere" in line]
    assert 1 <= len(lines) <= 2
    assert (
        str(ROOT / "vae") not in found.stderr
    )  # torchrun's own traceback is about its children, not in ours


def test_one_process_exchanges_nothing():
    processes = Processes(0, 1, torch.device("cpu"))
    assert processes.is_main
    assert processes.sum_numbers(1, 2.5) == [1, 2.5]
    value = torch.ones(3)
    assert processes.sum_tensor(value) is value
    processes.wait()
    processes.close()
