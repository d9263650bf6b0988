"""The recipe learns what is there; passes, compilation and cards of 16 GB change nothing that is learned."""

import functools

import numpy as np
import pytest
import torch

from vae.classifier.batches import CachedSet, training_batches
from vae.classifier.latent_cache import view_of
from vae.classifier.memory import ClassifierSpec, choose_micro_batch, classifier_memory
from vae.classifier.network import LatentClassifier, NetworkShape
from vae.classifier.recipe import Recipe, add_gradients, begin, forward_of, predict, train_epoch
from vae.config.evaluate_flags import parse_evaluate_flags
from vae.memory.available import cuda_reserve
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan_table import DRIVER_AND_CONTEXT_GIB
from vae.system.errors import UserError
from vae.system.gpus import CARDS
from vae.system.host import GIB

SMALL = NetworkShape("convnext", channels=3, side=8, classes=4, widths=(8, 16), depths=(1, 1))


def network(shape=SMALL, dtype=torch.float32):
    torch.manual_seed(0)
    mean, std = torch.zeros(1, shape.channels, 1, 1), torch.ones(1, shape.channels, 1, 1)
    return LatentClassifier(shape, mean, std).to(dtype)


def made_set(count: int, views: int = 2) -> CachedSet:
    """Random latents whose class is the quadrant with the largest mean."""
    random, targets = np.random.default_rng(0), np.arange(count) % 4
    latents = random.normal(size=(count, views, 3, 8, 8)).astype(np.float16)
    for position, target in enumerate(targets):
        row, column = 4 * (target // 2), 4 * (target % 2)
        latents[position, :, 1, row : row + 4, column : column + 4] += 2
    return CachedSet(latents, targets, np.arange(count))


@pytest.mark.parametrize("head", ["convnext", "resnet", "linear", "mlp"])
def test_the_ema_of_every_head_learns_a_simple_rule(head):
    shape = NetworkShape(head, 3, 8, 4, (16, 32), (1, 1))
    recipe = Recipe(6, 5e-3, 16, 1.0, 0.05, 0.1, 0.9999, seed=0)
    state = begin(network(shape), recipe, micro_batch=16)
    data, other = (
        made_set(192),
        CachedSet(*(lambda s: (s.latents, s.targets, np.arange(192, 256)))(made_set(256))),
    )
    for epoch in range(recipe.epochs):
        train_epoch(state, forward_of(state.model, torch.float32), data, recipe, f"epoch {epoch}")
    assert state.measured is state.ema
    found = predict(state.measured, forward_of(state.measured, torch.float32), other, 32)
    assert (found.argmax(1) == other.targets[other.usable]).mean() > 0.9


def gradients(micro_batch: int, dtype=torch.float64) -> list[torch.Tensor]:
    data = made_set(12)
    model, (latents, targets) = network(dtype=dtype), data.read(np.arange(12), np.zeros(12, np.int64))
    for part, labels in zip(latents.split(micro_batch), targets.split(micro_batch), strict=True):
        add_gradients(forward_of(model, dtype), part, labels, smoothing=0.1, batch=12)
    return [parameter.grad for parameter in model.parameters()]


def test_passes_give_the_gradients_of_the_whole_batch():
    for whole, passes in zip(gradients(12), gradients(5), strict=True):
        torch.testing.assert_close(whole, passes, rtol=1e-5, atol=1e-7)  # logits and loss are fp32


@pytest.mark.slow
def test_the_compiled_network_gives_the_same_logits(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, latents = network(), torch.randn(4, 3, 8, 8).half()
    for dtype in (torch.float32, torch.bfloat16):
        expected = forward_of(model, dtype)(latents)
        assert expected.dtype == torch.float32
        torch.testing.assert_close(forward_of(model, dtype, is_compiled=True)(latents), expected)


def test_an_epoch_has_every_image_once_in_views_that_change():
    data = made_set(40)
    seen = [torch.cat([targets for _, targets in training_batches(data, 8, 0, epoch)]) for epoch in (0, 0, 1)]
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.bincount(seen[2]).tolist() == [10] * 4
    marked = CachedSet(np.arange(80, dtype=np.float16).reshape(40, 2, 1, 1, 1), data.targets, data.usable)
    numbers = [torch.cat([x for x, _ in training_batches(marked, 8, 0, e)]).flatten().int() for e in (0, 1)]
    assert all(
        torch.equal((found // 2).sort().values, torch.arange(40, dtype=torch.int32)) for found in numbers
    )
    assert all(5 < int((found % 2).sum()) < 35 for found in numbers)
    assert not torch.equal(numbers[0].sort().values, numbers[1].sort().values)


def test_views_are_the_square_its_mirror_image_and_keyed_regions():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    views = [view_of(pixels, view, 5, 32, "resize", 0) for view in range(4)]
    assert all(view.shape == (32, 32, 3) for view in views)
    assert np.array_equal(views[1], views[0][:, ::-1])
    assert np.array_equal(views[2], view_of(pixels, 2, 5, 32, "resize", 0))
    assert not np.array_equal(views[2], view_of(pixels, 2, 6, 32, "resize", 0))
    assert not np.array_equal(views[2], views[3][:, ::-1])


def spec_of_profile(channels: int, head: str = "convnext") -> ClassifierSpec:
    """The profile as it is on a card: 256 px, a VAE with 8-fold downsampling, 1000 classes."""
    config = parse_evaluate_flags(
        [
            *["--vae", "v", "--data_path", "d", "--output_dir", "o", "--probe_profile", "probe-imagenet"],
            "--probe_heads",
            head,
        ]
    )
    shape = NetworkShape(head, channels, 32, 1000, config.probe_widths, config.probe_depths)
    return ClassifierSpec(shape, config.probe_batch_size, torch.bfloat16, True, cuda_reserve())


def test_the_profile_is_planned_for_every_card_with_16_gb():
    smallest = min(card.vram_gib for card in CARDS if card.vram_gib > 15.5)
    available = int((smallest - DRIVER_AND_CONTEXT_GIB) * GIB)
    found = choose_micro_batch(spec_of_profile(16), available, "auto")
    assert found.total <= available
    assert found.micro_batch == 512  # two equal passes of 1024 images
    assert found.resident > 4 * 28e6 * 4  # weights, EMA, two moments
    assert found.working > 512 * 14 * 2**20  # activations of 14 MB per image are in it


def test_the_plan_counts_what_a_step_allocates():
    spec = ClassifierSpec(SMALL, 8, torch.bfloat16, True, 0)
    model, (latents, targets) = network(), made_set(8).read(np.arange(4), np.zeros(4, np.int64))
    model.to(memory_format=torch.channels_last)
    with LiveBytes() as counter:
        for _ in range(2):
            add_gradients(forward_of(model, spec.dtype), latents, targets, smoothing=0.1, batch=8)
    assert classifier_memory(spec, 4).working == pytest.approx(counter.peak, rel=0.05)


def test_too_little_memory_is_one_line():
    spec = ClassifierSpec(SMALL, 8, torch.float32, True, 0)
    assert choose_micro_batch(spec, GIB, "3").micro_batch == 3
    single = classifier_memory(spec, 1).total
    assert choose_micro_batch(spec, single, "auto").micro_batch == 1
    with pytest.raises(
        UserError, match=r"--probe_widths 8 16 needs .* GiB for a single image.*smaller widths"
    ):
        choose_micro_batch(spec, 1000, "auto")
