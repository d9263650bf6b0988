"""Both sides of the comparison do the same work, counts follow CUDA's rules, and reports are correct."""

import argparse
import json
import time

import pytest
import torch

import benchmarks.run
from benchmarks.comparison import operations, report
from benchmarks.comparison import theirs as other_side
from benchmarks.comparison.cases import Bench
from benchmarks.comparison.measuring import Contestant, Stopwatch, counted
from benchmarks.comparison.ours import Work
from benchmarks.comparison.theirs import (
    BF16,
    DifferentWorkError,
    Theirs,
    check_same_work,
    patch_discriminator,
)
from vae.config.model_options import ModelConfig

CPU, META = torch.device("cpu"), torch.device("meta")
TOY = ModelConfig(channels=(8, 16), layers_per_block=1, norm_groups=4, z_channels=4, init="default")
TOY_WORK = Work(32, batch=2, model=TOY)


def test_both_sides_do_the_same_work():
    found = check_same_work(CPU, TOY_WORK)["relative_differences"]
    assert {"reconstructions", "gradients", "perceptual losses", "kl losses"} <= set(found)
    assert max(found.values()) < 1e-6


def test_different_work_is_an_error(monkeypatch):
    monkeypatch.setattr(other_side, "PERCEPTUAL_SCALE", 0.51)
    with pytest.raises(DifferentWorkError, match="gradients differ by"):
        check_same_work(CPU, TOY_WORK)


def test_contestants_run_in_turn():
    order = []
    names = ["a", "b", "c"]
    contestants = [Contestant(name, lambda name=name: lambda: order.append(name)) for name in names]
    stopwatch = Stopwatch(CPU, rounds=4, deadline=time.monotonic() + 60)
    measured = stopwatch.compare(contestants)
    assert order == names * (len(order) // 3)
    assert len(order) // 3 == 1 + len(measured["a"].seconds) >= 5  # one round warms up


def test_optional_contestants_are_skipped_after_the_deadline():
    contestants = [Contestant("a", lambda: int), Contestant("b", lambda: int, optional=True)]
    measured = Stopwatch(CPU, rounds=1, deadline=time.monotonic() - 1).compare(contestants)
    assert measured["a"].seconds
    assert measured["b"].failure == "skipped: the time limit was reached"


def test_both_sides_decode_the_same_latents_to_the_same_images():
    work = Work(32, perceptual=False, model=TOY)
    ours, theirs = (build()() for build in operations.decoders(work, CPU, [BF16]).values())
    assert ours.shape == theirs.shape == (1, 3, 32, 32)
    # weights and activations rounded to 8 bits, in another order
    assert ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item() < 0.05


def test_their_counted_bytes_on_meta_match_a_real_run():
    """For the discriminator: without attention and autocast, the CPU allocates as CUDA does."""
    images = torch.rand(1, 3, 64, 64)
    peaks = []
    for device in (CPU, META):
        network = patch_discriminator(8).to(device)
        batch = images.to(device)
        peaks.append(counted(lambda n=network, b=batch: n(b).mean().backward())["counted_bytes"])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


@pytest.mark.parametrize("one_forward", [False, True])
def test_their_adversarial_step_trains_both_networks(one_forward):
    work = Work(32, batch=2, model=TOY, perceptual=False, adversarial=True)
    side = Theirs(work, CPU, other_side.Variant("fp32", torch.float32, one_forward=one_forward))
    before = [p.clone() for p in (*side.vae.parameters(), *side.discriminator.parameters())]
    side.step()
    after = [*side.vae.parameters(), *side.discriminator.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_a_run_that_is_ended_within_a_case_keeps_what_it_has_measured(tmp_path, monkeypatch):
    def case(bench):
        """A case"""
        bench.stopwatch.compare([Contestant("ours", lambda: int), Contestant("theirs", lambda: int)])
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmarks.run, "CASES", {1: case})
    monkeypatch.setattr(report, "CASES", {1: case})
    monkeypatch.setattr(benchmarks.run, "check_same_work", lambda device: {})
    file = tmp_path / "found.json"
    options = argparse.Namespace(cases=[1], out=file)
    bench = Bench(Stopwatch(CPU, rounds=2, deadline=time.monotonic() + 60), "small", compile=False)
    with pytest.raises(KeyboardInterrupt):
        benchmarks.run.run_cases(bench, options, {}, time.monotonic())
    found = json.loads(file.read_text())["cases"]["1"]
    assert found["title"] == "A case"
    assert {name: row["side"] for name, row in found["contestants"].items()} == {
        "ours": "ours",
        "theirs": "theirs",
    }
    assert found["contestants"]["ours"]["repeats"] >= 2
