"""The loop: what goes wrong in a step changes nothing but time, and what only saves time changes nothing."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness.runs import as_flags, run_script
from tests.harness.toy_networks import relative_difference
from vae.config.errors import EXIT_NON_FINITE, NonFiniteError, UserError
from vae.config.options import RECOMPUTE, SpeedConfig
from vae.model.autoencoder import AutoencoderKL
from vae.model.recompute import set_recompute
from vae.noise import posterior_noise
from vae.training import oom_retry as within_memory
from vae.training.precision import compute_dtype
from vae.training.run import train

SHORT = {"init": "default", "val_split": 0.0, "num_epochs": 1, "log_freq": 1}  # 4 steps of 4 images
CPU = torch.device("cpu")


def trained(options: dict, tmp_path, name: str, **changes) -> dict:
    """The last checkpoint of a run into a folder of its own."""
    folder = tmp_path / name
    assert train({**options, **SHORT, "output_dir": str(folder), **changes}) == 0
    found = [torch.load(path, weights_only=True) for path in folder.glob("checkpoint_*.pt")]
    return max(found, key=lambda content: content["position"]["step"])


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def movable(weights: dict) -> dict:
    """Weights without those whose gradient is rounding alone (a bias under softmax): Adam blows that up."""
    return {name: value for name, value in weights.items() if not name.endswith("to_k.bias")}


def assert_same_weights(found: dict, expected: dict) -> None:
    # fp32 sums in another order, a few Adam steps: far below the learning rate of 1e-4 a step
    assert relative_difference(movable(found["model"]), movable(expected["model"])) < 2e-5
    assert relative_difference(movable(found["ema"]), movable(expected["ema"])) < 2e-5


# --- out of memory ----------------------------------------------------------------------------------


def limit_memory(monkeypatch, images: int, from_call: int = 0):
    """Training passes of more than `images` images run out of memory from the given one on."""
    plain, calls = AutoencoderKL.forward, []

    def limited(self, image_folder, noise=None):
        if torch.is_grad_enabled() and image_folder.device.type == "cpu":
            calls.append(len(image_folder))
            if len(image_folder) > images and len(calls) > from_call:
                raise torch.OutOfMemoryError("injected")
        return plain(self, image_folder, noise)

    monkeypatch.setattr(AutoencoderKL, "forward", limited)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("adversarial", [False, True])
def test_out_of_memory_halves_the_micro_batch_and_changes_no_weight(
    tiny, tmp_path, monkeypatch, capsys, adversarial
):
    options = dict(tiny)
    if adversarial:
        options |= {"adversarial_weight": 0.5, "disc_start": 1, "disc_channels": 8, "disc_layers": 2}
    expected = trained(options, tmp_path, "undisturbed")
    calls = limit_memory(monkeypatch, images=2, from_call=1)
    capsys.readouterr()
    found = trained(options, tmp_path, "disturbed")
    assert calls == [4, 4, 2, 2, 2, 2, 2, 2]  # a step, the failing one, then halves
    assert_same_weights(found, expected)
    said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(said) == 1
    assert "micro-batch lowered to 2" in said[0]


def test_out_of_memory_in_a_later_pass_takes_back_the_first_ones_gradients(tiny, tmp_path, monkeypatch):
    expected = trained(tiny, tmp_path, "undisturbed")
    plain, passes = AutoencoderKL.forward, []

    def once(self, image_folder, noise=None):
        if torch.is_grad_enabled() and image_folder.device.type == "cpu":
            passes.append(len(image_folder))
            if len(passes) == 4:  # the second pass of the second step
                raise torch.OutOfMemoryError("injected")
        return plain(self, image_folder, noise)

    monkeypatch.setattr(AutoencoderKL, "forward", once)
    found = trained(tiny, tmp_path, "disturbed", micro_batch_size="2")
    assert passes == [2, 2, 2, 2] + [1] * 12
    assert_same_weights(found, expected)


def test_out_of_memory_in_the_discriminators_block_takes_the_step_again(tiny, tmp_path, monkeypatch):
    options = {**tiny, "adversarial_weight": 0.5, "disc_start": 1, "disc_channels": 8, "disc_layers": 2}
    expected = trained(options, tmp_path, "undisturbed")
    import vae.step

    plain, calls = vae.step.discriminator_gradients, []

    def once(*arguments):
        calls.append(1)
        found = plain(*arguments)  # its gradients are there when memory runs out
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected")
        return found

    monkeypatch.setattr(vae.step, "discriminator_gradients", once)
    found = trained(options, tmp_path, "disturbed")
    assert len(calls) == 4
    assert_same_weights(found, expected)
    assert relative_difference(found["discriminator"], expected["discriminator"]) < 2e-5


def full_until(monkeypatch, rung: str):
    """Training passes run out of memory until the network is on the given rung of the ladder."""
    plain, tried = AutoencoderKL.forward, []

    def limited(self, image_folder, noise=None):
        if torch.is_grad_enabled() and image_folder.device.type == "cpu":
            tried.append((len(image_folder), name_of_rung(self)))
            if tried[-1] != (1, rung):
                raise torch.OutOfMemoryError("injected")
        return plain(self, image_folder, noise)

    monkeypatch.setattr(AutoencoderKL, "forward", limited)
    return tried


def name_of_rung(network: AutoencoderKL) -> str:
    """The rung whose settings the network has."""

    def settings(of: AutoencoderKL):
        names = ("recompute", "redone", "start_redone", "fused_out")
        return [getattr(module, name, None) for module in of.modules() for name in names]

    found, other = settings(network), copy.deepcopy(network)
    for rung in RECOMPUTE:
        set_recompute(other, rung)
        if settings(other) == found:
            return rung
    raise AssertionError("no rung has these settings")


@pytest.mark.slow
def test_out_of_memory_at_a_single_image_takes_the_next_rung(tiny, tmp_path, monkeypatch, capsys):
    expected = trained(tiny, tmp_path, "undisturbed")
    tried = full_until(monkeypatch, "encoder")
    capsys.readouterr()
    found = trained(tiny, tmp_path, "disturbed")
    assert tried[:5] == [(4, "none"), (2, "none"), *((1, rung) for rung in RECOMPUTE[:3])]
    assert set(tried[5:]) == {(1, "encoder")}
    assert_same_weights(found, expected)
    said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert len(said) == 5
    assert "--recompute encoder from here on" in said[-1]
    record = [json.loads(line) for line in (tmp_path / "disturbed" / "metrics.jsonl").open()]
    (memory,) = (line for line in record if line.get("recompute"))
    assert (memory["recompute"], memory["micro_batch"]) == ("encoder", 1)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({}, "--recompute all: lower --image_size"),
        ({"recompute": "blocks"}, "--recompute blocks: take --recompute auto"),
    ],
)
def test_out_of_memory_with_nothing_left_is_one_line(tiny, monkeypatch, given, remedy):
    limit_memory(monkeypatch, images=0)
    with pytest.raises(UserError, match=f"out of memory with --micro_batch_size 1 {remedy}") as caught:
        train({**tiny, **SHORT, **given})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("rung", RECOMPUTE)
def test_the_rung_changes_no_weight(tiny, tmp_path, rung):
    expected = trained(tiny, tmp_path, "none", recompute="none", max_steps=2)
    assert_same_weights(trained(tiny, tmp_path, "rung", recompute=rung, max_steps=2), expected)


def test_the_micro_batch_changes_no_weight(tiny, tmp_path):
    whole = trained(tiny, tmp_path, "whole", micro_batch_size="4")
    for size in ("1", "3"):
        assert_same_weights(trained(tiny, tmp_path, size, micro_batch_size=size), whole)


def test_accumulation_is_a_larger_batch(tiny, tmp_path):
    whole = trained(tiny, tmp_path, "whole", batch_size=8)
    parts = trained(tiny, tmp_path, "parts", batch_size=2, accumulation_steps=4)
    assert whole["position"] == parts["position"]
    assert_same_weights(parts, whole)


# --- non-finite steps ---------------------------------------------------------------------------------


def poison(monkeypatch, steps: set[int]):
    """The gradients of these steps, counted from 1, are not finite."""
    plain, calls = within_memory.compute_gradients, []

    def poisoned(networks, inputs, *rest):
        calls.append(1)
        if len(calls) in steps:
            inputs.noise.fill_(float("nan"))
        return plain(networks, inputs, *rest)

    monkeypatch.setattr(within_memory, "compute_gradients", poisoned)


@pytest.mark.slow
def test_a_non_finite_step_changes_no_weight_is_counted_and_training_goes_on(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {2})
    trained(tiny, tmp_path, "run", checkpoint_steps=1, keep_checkpoints=9)
    found = [torch.load(tmp_path / "run" / f"checkpoint_step_{s}.pt", weights_only=True) for s in (1, 2, 3)]
    first, second, third = (content["model"] for content in found)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(second[name], third[name]) for name in first)
    assert all(value.isfinite().all() for value in found[2]["ema"].values())
    assert [record["nonfinite_steps"] for record in records(tmp_path / "run")] == [0, 1, 1, 1]
    assert [content["position"]["step"] for content in found] == [1, 2, 3]


@pytest.mark.slow
def test_a_non_finite_step_changes_no_weight_of_the_discriminator(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {3})
    options = {"adversarial_weight": 0.5, "disc_start": 0, "disc_channels": 8, "disc_layers": 2}
    trained(tiny, tmp_path, "run", checkpoint_steps=1, keep_checkpoints=9, **options)
    found = [torch.load(tmp_path / "run" / f"checkpoint_step_{s}.pt", weights_only=True) for s in (2, 3)]
    for network in ("model", "discriminator"):
        assert all(torch.equal(value, found[1][network][name]) for name, value in found[0][network].items())
    assert torch.equal(found[0]["running_sq_norms"], found[1]["running_sq_norms"])


def test_too_many_in_a_row_stop_the_run(tiny, monkeypatch):
    poison(monkeypatch, {2, 3, 4})
    with pytest.raises(NonFiniteError, match=r"--max_nonfinite_steps 3") as caught:
        train({**tiny, **SHORT, "max_nonfinite_steps": 3})
    assert caught.value.exit_code == EXIT_NON_FINITE == 76
    assert "\n" not in str(caught.value)


def test_as_many_but_not_in_a_row_do_not(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {1, 2, 4})
    content = trained(tiny, tmp_path, "run", max_nonfinite_steps=3)
    assert int(content["update"]["nonfinite_total"]) == 3


# --- precision, layout, compiling -----------------------------------------------------------------------


def losses(options: dict, tmp_path, name: str, **changes) -> list[float]:
    trained(options, tmp_path, name, **changes)
    return [record["loss"] for record in records(tmp_path / name)]


def test_bf16_follows_fp32(tiny, tmp_path):
    plain = losses(tiny, tmp_path, "fp32")
    for name, flags in {"use": {"use_bf16": True}, "mixed": {"mixed_precision": True}}.items():
        found = losses(tiny, tmp_path, name, **flags)
        assert found == pytest.approx(plain, rel=0.02)  # bf16 holds 8 bits
        assert found != plain


def test_mixed_precision_alone_says_bf16_on_the_cpu(tiny, capsys):
    assert train({**tiny, **SHORT, "max_steps": 1, "mixed_precision": True}) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("device ")]
    assert "bf16" in line
    assert compute_dtype(SpeedConfig(mixed_precision=True), CPU) == torch.bfloat16
    assert compute_dtype(SpeedConfig(use_bf16=True), CPU) == torch.bfloat16
    assert compute_dtype(SpeedConfig(), CPU) == torch.float32


def test_precision_on_cards_without_bf16(monkeypatch):
    # no such card here: the driver's answers are all that is replaced
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    card = torch.device("cuda", 0)
    assert compute_dtype(SpeedConfig(mixed_precision=True), card) == torch.float16
    with pytest.raises(UserError, match=r"--use_bf16: Tesla T4 has no bf16"):
        compute_dtype(SpeedConfig(mixed_precision=True, use_bf16=True), card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    assert compute_dtype(SpeedConfig(mixed_precision=True), card) == torch.bfloat16


def test_memory_layout_changes_only_rounding(tiny, tmp_path):
    on = trained(tiny, tmp_path, "on", channels_last=True)
    off = trained(tiny, tmp_path, "off", channels_last=False)
    assert_same_weights(on, off)


@pytest.mark.slow
def test_compiled_networks_give_the_same_losses(tiny, tmp_path, capsys):
    plain = losses(tiny, tmp_path, "eager")
    capsys.readouterr()
    compiled = losses(tiny, tmp_path, "compiled", use_torch_compile=True)
    assert "training goes on without it" not in capsys.readouterr().out
    assert compiled == pytest.approx(plain, rel=1e-4)


# --- noise, records, profile ------------------------------------------------------------------------------


def test_noise_is_keyed_by_image_and_epoch():
    shape = (4, 6, 5)

    def noise(epochs, indices, seed=0):
        return posterior_noise(torch.tensor(epochs), torch.tensor(indices), shape, seed, CPU)

    together = noise([0, 0, 1], [5, 7, 5])
    assert torch.equal(together[1], noise([0], [7])[0])
    assert torch.equal(together[[2, 0]], noise([1, 0], [5, 5]))
    assert not torch.equal(together[0], together[2])
    assert not torch.equal(together[0], noise([0], [5], seed=1)[0])
    assert noise([], []).shape == (0, *shape)
    state = torch.random.get_rng_state()
    many = noise([0] * 200, list(range(200)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert many.dtype == torch.float32
    assert abs(float(many.mean())) < 0.02  # 24,000 draws: four standard errors of the mean are 0.026
    assert float(many.std()) == pytest.approx(1, abs=0.02)


def test_averaged_weights_follow_the_formula(tiny, tmp_path):
    trained(tiny, tmp_path, "run", checkpoint_steps=1, keep_checkpoints=9, ema_decay=0.9)
    found = [torch.load(tmp_path / "run" / f"checkpoint_step_{s}.pt", weights_only=True) for s in (2, 3)]
    decay = min(0.9, (1 + 2) / (10 + 2))
    expected = {n: decay * found[0]["ema"][n] + (1 - decay) * v for n, v in found[1]["model"].items()}
    assert relative_difference(found[1]["ema"], expected) < 1e-6


def test_without_averaging_the_weights_themselves_are_shipped(tiny, tmp_path):
    content = trained(tiny, tmp_path, "run", ema_decay=0.0)
    assert content["ema"] is None
    from safetensors.torch import load_file

    shipped = load_file(tmp_path / "run" / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, shipped[name]) for name, value in content["model"].items())


def test_records_have_what_a_person_needs(tiny, tmp_path):
    trained(tiny, tmp_path, "run")
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    wanted = {"loss", "reconstruction", "kl", "psnr", "learning_rate", "gradient_norm", "images_per_second"}
    wanted |= {"data_wait_share", "nonfinite_steps", "memory_peak_gib", "epoch"}
    for record in found:
        assert wanted <= record.keys()
        assert record["images_per_second"] > 0
        assert 0 <= record["data_wait_share"] <= 1


@pytest.mark.slow
def test_profile_writes_a_trace_and_a_table(tiny, tmp_path):
    options = {**tiny, **SHORT, "batch_size": 2, "profile_steps": 2}
    found = run_script("train_vae.py", *as_flags(options))
    assert found.returncode == 0, found.stderr
    folder = Path(options["output_dir"]) / "profile" / "32px"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "convolution" in (folder / "table.txt").read_text()


def test_a_profile_longer_than_the_run_is_no_error(tiny, tmp_path):
    trained(tiny, tmp_path, "run", profile_steps=50, max_steps=2)


def test_options_that_only_save_time_change_nothing(tiny, tmp_path):
    plain = trained(tiny, tmp_path, "plain")
    other = trained(
        tiny, tmp_path, "other", enable_tf32=False, log_freq=3, checkpoint_steps=2, vram_margin=0.5
    )
    assert all(torch.equal(value, other["model"][name]) for name, value in plain["model"].items())
    assert replace(SpeedConfig()) == SpeedConfig()
