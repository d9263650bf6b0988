"""The lines that a run prints about its device, its start, its validations and its result."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.training_runs import ONE_PROCESS, records
from vae.config.options import LossConfig, SpeedConfig, build
from vae.sampling.order import StreamOrder
from vae.shards.shard_cache import SPARE_BYTES, ShardCache
from vae.shards.shard_images import ShardImages
from vae.system.errors import UserError
from vae.system.host import GIB
from vae.training.datasets import TrainingSet, check_cache
from vae.training.distributed import Distributed
from vae.training.early_checks import Command
from vae.training.report import (
    PROBLEMS_PAGE,
    command_for_other_programs,
    device_line,
    late_discriminator_note,
    verdict_line,
)
from vae.training.run import train
from vae.training.setup import prepare_run

BICUBIC = "8x bicubic", 0.2226
REMEDY = "lower --learning_rate (now 0.1), or train for more epochs"


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [("NVIDIA GeForce RTX 5090", 31.36, True), ("NVIDIA GeForce RTX 5060 Ti", 7.5, False)],
)
def test_device_line_reports_gpus_without_a_profile(monkeypatch, name, gib, known):
    # There is no such GPU here: only the answer of its driver is replaced.
    properties = SimpleNamespace(name=name, total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    dist = Distributed(0, 2, torch.device("cuda", 0))
    line = device_line(dist, SpeedConfig(channels_last=True), torch.bfloat16, compiled=True)
    assert name in line
    assert ("no profile" in line) != known
    for words in ("2 processes", "bf16", "channels_last", "compiled"):
        assert words in line


def printed_lines(given: dict, capsys) -> list[str]:
    capsys.readouterr()
    assert train(given) == 0
    return capsys.readouterr().out.splitlines()


def validations(given: dict) -> list[dict]:
    return records(Path(given["output_dir"]), "validation")


@pytest.mark.slow
def test_run_that_max_steps_ends_is_validated_at_its_last_step(tiny, capsys):
    """12 images, 4 per step: 5 steps are an epoch and two thirds of another."""
    lines = printed_lines({**tiny, "max_steps": 5}, capsys)
    start, epoch, end = validations(tiny)
    assert [record["step"] for record in (start, epoch, end)] == [0, 3, 5]
    assert any(
        line.startswith(f"start: VAE loss {start['loss']:.4f}, PSNR {start['psnr']:.2f} ") for line in lines
    )
    result = lines[lines.index("done: 1.6 of 2 epochs, 5 steps, 20 images") :]
    best = "epoch 1 " if end["loss"] < epoch["loss"] else "epoch 1 (best) "
    (line,) = [line for line in result if line.startswith("epoch 1")]
    assert line.startswith(best)
    assert ("(best)" in line) == ("(best)" in best)
    assert f"{epoch['psnr']:.2f} dB" in line
    assert any(line.startswith("step 5 ") and f"{end['psnr']:.2f} dB" in line for line in result)
    lines = printed_lines({**tiny, "resume_from": "latest"}, capsys)
    assert "done: 2 epochs, 6 steps, 24 images" in lines
    assert not any(line.startswith("start: ") for line in lines)
    assert [record["step"] for record in validations(tiny)] == [0, 3, 5, 6]


def test_a_decoder_of_wan_is_put_into_the_video_vae_for_other_programs():
    for start, output in (("wan.safetensors", "exported/run.safetensors"), ("wan", "exported/run")):
        config = build({"family": "wan", "init_from": start})
        words = command_for_other_programs(Path("run"), config).split()
        assert words[-4:] == ["--into", start, "--output", output]
    assert command_for_other_programs(Path("run"), build({})) == ""


@pytest.mark.parametrize(
    ("loss", "start", "better", "not_better", "remedy"),
    [
        (0.2, 0.18, "8x bicubic", "at the start", REMEDY),
        (0.3, None, None, "8x bicubic", "train for more epochs"),
        (float("nan"), 0.18, None, "8x bicubic (0.2226) or than at the start", REMEDY),
        (0.22264, 0.24, "at the start", "8x bicubic", "train for more epochs"),  # printed as equal
    ],
)
def test_bad_result_names_its_remedy(loss, start, better, not_better, remedy):
    line = verdict_line(loss, BICUBIC, start, REMEDY)
    is_better, _, is_not = line.partition("not better than")
    assert (f"better than {better}" in is_better) == (better is not None)
    assert is_not.startswith(f" {not_better}")
    assert remedy in is_not
    assert line.endswith(f"({PROBLEMS_PAGE})")


DISCRIMINATOR = {"adversarial_weight": 0.5, "disc_channels": 8, "disc_layers": 1}


@pytest.mark.parametrize(("start", "warmup"), [(5000, 0), (4, 2), (0.9, 1)])
def test_a_run_that_ends_before_its_adversarial_loss_is_an_error(tiny, start, warmup):
    """It has 6 steps. A later stage may reach it, and --max_steps is no end."""
    given = {**tiny, **DISCRIMINATOR, "disc_start": start, "disc_warmup": warmup}
    with pytest.raises(UserError, match=r"--disc_start .* ends at step 6: .*--adversarial_weight 0"):
        train(given)
    assert not Path(given["output_dir"]).exists()
    later = {**given, "progressive": "32:1:4,16:9000steps:4", "max_steps": 1}
    assert prepare_run(Command.of(later), ONE_PROCESS).last_step == 9003


def test_max_steps_that_stop_a_run_before_its_adversarial_loss_are_named(tiny, capsys):
    assert train({**tiny, **DISCRIMINATOR, "disc_start": 0.5, "disc_warmup": 1, "max_steps": 2}) == 0
    printed = capsys.readouterr().out
    assert "adversarial from step 4 (discriminator from step 3)" in printed
    assert "--max_steps 2 stops this run" in printed
    for weight, step, max_steps, is_noted in (
        *((0.5, 0, 4, True), (0.5, 0, 5, False), (0.5, 2, 2, False)),
        *((0.5, 0, None, False), (0.0, 0, 2, False)),
    ):
        schedule = SimpleNamespace(loss=LossConfig(adversarial_weight=weight), adversarial_first_step=4)
        assert (late_discriminator_note(schedule, step, max_steps) is not None) == is_noted


def test_run_ends_with_the_verdict_and_labels_values_as_during_training(tiny, capsys):
    assert train({**tiny, "init": "default", "learning_rate": 1e-3}) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = [line for line in lines if line.startswith("start: ")]
    (verdict,) = [line for line in lines if line.startswith("result  ")]
    loss = start.split("VAE loss ")[1].split(",")[0]
    assert f"at the start of the stage ({loss})" in verdict
    assert "2x bicubic" in start
    assert "2x bicubic (" in verdict
    assert any(line.startswith("2x bicubic ") for line in lines)
    assert any(line.startswith("epoch 2: VAE loss") for line in lines)
    assert any(line.startswith("epoch 2 (best) ") for line in lines)


@pytest.mark.parametrize(
    ("world_size", "local", "cache_gib", "expected"),
    [
        (1, 1, 330, ("--cache_gib 576", "--data_streams 64 --shuffle_shards 256")),  # 9 shards per stream
        (32, 8, 50, ("--cache_gib 144",)),  # four machines share the streams
        (64, 8, 80, None),
        (1, 1, 600, ("--cache_gib 600 (400 on this disk)",)),
    ],
)
def test_cache_that_is_too_small_for_the_streams_is_refused(
    world_size, local, cache_gib, expected, tmp_path, monkeypatch
):
    free = SimpleNamespace(free=400 * GIB + SPARE_BYTES)
    monkeypatch.setattr("vae.shards.shard_cache.shutil.disk_usage", lambda _folder: free)
    images = object.__new__(ShardImages)
    monkeypatch.setattr(ShardImages, "version", "0" * 64)
    monkeypatch.setattr(ShardImages, "cached_bytes", np.full(1000, GIB))
    images.cache = ShardCache(tmp_path, cache_gib)
    training_set = TrainingSet(images, StreamOrder([100] * 1000, 64, seed=0))
    dist = Distributed(0, world_size, torch.device("cpu"), local)
    if expected is None:
        check_cache(training_set, dist)
        return
    with pytest.raises(UserError) as caught:
        check_cache(training_set, dist)
    for token in expected:
        assert token in str(caught.value)


@pytest.mark.parametrize(
    ("others", "free_gib", "expected"),
    [
        (["0" * 64], 900, None),  # the same dataset, which fits
        (["1" * 64], 900, "give all --cache_gib 1152"),
        (["1" * 64], 700, "more than its 700 GiB, and download them again: free some space"),
    ],
)
def test_commands_that_need_a_larger_cache_together_are_warned(
    others, free_gib, expected, tmp_path, monkeypatch, capsys
):
    free = SimpleNamespace(free=free_gib * GIB + SPARE_BYTES)
    monkeypatch.setattr("vae.shards.shard_cache.shutil.disk_usage", lambda _folder: free)
    monkeypatch.setattr(ShardImages, "cached_bytes", np.full(600, GIB))
    caches = []
    for version in [*others, "0" * 64]:
        monkeypatch.setattr(ShardImages, "version", version)
        images = object.__new__(ShardImages)
        images.cache = ShardCache(tmp_path, 800)
        caches.append(images.cache)
        check_cache(TrainingSet(images, StreamOrder([100] * 600, 64, seed=0)), ONE_PROCESS)
    warnings = "".join(capsys.readouterr())
    assert expected in warnings if expected else not warnings
