"""The recipe learns what is there; passes, compilation and cards of 16 GB change nothing that is learned."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from vae.config.evaluate_flags import parse_evaluate_flags
from vae.memory.available import CUDA_RESERVE
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan_table import DRIVER_AND_CONTEXT_GIB
from vae.probe.latents import view_of
from vae.probe.linear import linear_probabilities
from vae.probe.maps import MapSet
from vae.probe.memory import choose_micro_batch, step_bytes
from vae.probe.network import LatentClassifier, NetworkShape, Recipe, forward_of, recipe_of
from vae.probe.training import Training, add_gradients, random_crops, randomly_erased
from vae.system.errors import UserError
from vae.system.gpus import CARDS
from vae.system.host import GIB

RECIPE = Recipe(6, 5e-3, 16, (16, 32), (1, 1), 1.0, positions=32, layer_scale=0.1, mixup=0.2)
SMALL = NetworkShape(3, 8, 4, RECIPE)
CPU = torch.device("cpu")


def network(shape=SMALL, dtype=torch.float32):
    torch.manual_seed(0)
    mean, std = torch.zeros(1, shape.channels, 1, 1), torch.ones(1, shape.channels, 1, 1)
    return LatentClassifier(shape, mean, std).to(dtype)


def made_sets(count: int) -> list[MapSet]:
    """Random latents whose class is the quadrant with the largest mean; three quarters are to train."""
    random, targets = np.random.default_rng(0), np.arange(count) % 4
    latents = 20 + random.normal(size=(count, 2, 3, 8, 8)).astype(np.float16)
    for position, target in enumerate(targets):
        row, column = 4 * (target // 2), 4 * (target % 2)
        latents[position, :, 1, row : row + 4, column : column + 4] += 2
    parts = np.split(np.arange(count), [count * 3 // 4])
    return [MapSet(latents, targets, np.arange(count), part) for part in parts]


def trained(train: MapSet, epochs: int = 6, **settings) -> Training:
    training = Training(
        NetworkShape(3, 8, 4, replace(RECIPE, epochs=epochs, **settings)),
        train,
        CPU,
        torch.float32,
        16,
        seed=0,
    )
    while not training.is_complete:
        training.train_epoch("latents")
    return training


@pytest.mark.parametrize("head", ["linear", "convnext"])
def test_both_heads_learn_a_simple_rule_the_same_each_time(head):
    train, measured = made_sets(256)
    state = torch.random.get_rng_state()
    by_head = {
        "linear": lambda: linear_probabilities(train, measured, 4),
        "convnext": lambda: trained(train).predict(measured),
    }[head]
    found = by_head()
    assert (found.argmax(1) == measured.targets[measured.chosen]).mean() > 0.9
    assert np.array_equal(found, by_head())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_linear_head_is_regularized_by_other_groups():
    """Images of a group look alike, and groups have random labels: nothing can be learned."""
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(80), 4)
    looks = random.normal(size=(80, 1, 8, 4, 4))[groups] + 0.1 * random.normal(size=(320, 1, 8, 4, 4))
    targets = random.permutation(np.arange(80) % 2)[groups]
    train, measured = (
        MapSet(looks.astype(np.float16), targets, groups, part) for part in np.split(np.arange(320), [240])
    )
    found = linear_probabilities(train, measured, 2)
    assert -np.log(found[np.arange(80), targets[240:]]).mean() < 0.9  # ln 2 = 0.69 is chance
    one_group = replace(train, groups=np.zeros(320, np.int64))
    assert np.isfinite(linear_probabilities(one_group, measured, 2)).all()


def test_passes_give_the_gradients_of_the_whole_batch():
    def gradients(micro_batch: int) -> list[torch.Tensor]:
        model = network(replace(SMALL, recipe=replace(RECIPE, drop_path=0.0)), torch.float64)
        torch.manual_seed(1)
        latents, shares = torch.randn(12, 3, 8, 8, dtype=torch.float64), torch.rand(12, 4)
        for part, part_shares in zip(latents.split(micro_batch), shares.split(micro_batch), strict=True):
            add_gradients(forward_of(model, torch.float64), part, part_shares, smoothing=0.1, batch=12)
        return [parameter.grad for parameter in model.parameters()]

    for whole, passes in zip(gradients(12), gradients(5), strict=True):
        torch.testing.assert_close(whole, passes, rtol=1e-5, atol=1e-7)  # logits and loss are fp32


def test_only_matrices_and_convolutions_are_decayed():
    training = Training(SMALL, made_sets(64)[0], CPU, torch.float32, 16, seed=0)
    decayed = {id(p) for p in training.optimizer.param_groups[0]["params"]}
    assert training.optimizer.param_groups[1]["weight_decay"] == 0
    for name, parameter in training.model.named_parameters():
        is_matrix = name.endswith("weight") and parameter.ndim > 1
        assert (id(parameter) in decayed) == is_matrix, name


@pytest.mark.slow
def test_the_compiled_network_gives_the_same_logits(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, latents = network().eval(), torch.randn(4, 3, 8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        expected = forward_of(model, dtype)(latents)
        assert expected.dtype == torch.float32
        torch.testing.assert_close(forward_of(model, dtype, is_compiled=True)(latents), expected)


def test_crops_and_erased_regions_are_those_of_the_published_recipe():
    torch.manual_seed(0)
    maps = torch.ones(400, 1, 16, 16) * torch.arange(16.0)  # the value is the column
    torch.testing.assert_close(
        random_crops(maps, 1.0 - 1e-9)[:, :, :, 8].mean(), torch.tensor(8.0), atol=0.3, rtol=0
    )
    cropped = random_crops(maps, 0.08)
    widths = cropped[..., -1].mean((1, 2)) - cropped[..., 0].mean((1, 2))
    assert widths.min() > 15 * 0.2
    assert widths.max() < 15.01
    assert cropped.min() >= 0
    assert torch.equal(randomly_erased(maps + 1, 0.0), maps + 1)
    share = (randomly_erased(maps + 1, 0.25) == 0).double().mean((1, 2, 3))
    assert 0.15 < (share > 0).double().mean() < 0.35
    assert share.max() < 0.4


def test_an_epoch_has_every_image_once_in_views_that_change():
    data = replace(made_sets(40)[0], chosen=np.arange(40))
    seen = [torch.cat([targets for _, targets in data.epoch(8, 0, epoch)]) for epoch in (0, 0, 1)]
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.bincount(seen[2]).tolist() == [10] * 4
    marked = replace(data, maps=np.arange(80, dtype=np.float16).reshape(40, 2, 1, 1, 1))
    for maps, targets in marked.epoch(8, 0, 0):
        positions = maps.flatten().int() // 2
        assert torch.equal(targets, torch.from_numpy(data.targets)[positions])
        assert not torch.equal(positions, positions.sort().values)  # MixUp mixes neighbours
    numbers = [torch.cat([x for x, _ in marked.epoch(8, 0, e)]).flatten().int() for e in (0, 1)]
    assert all(
        torch.equal((found // 2).sort().values, torch.arange(40, dtype=torch.int32)) for found in numbers
    )
    assert all(5 < int((found % 2).sum()) < 35 for found in numbers)
    assert not torch.equal(numbers[0].sort().values, numbers[1].sort().values)


def test_views_are_the_square_its_mirror_image_and_keyed_regions():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    config = config_of("--sizes", "32")
    views = [view_of(pixels, view, 5, config) for view in range(4)]
    assert all(view.shape == (32, 32, 3) for view in views)
    assert np.array_equal(views[1], views[0][:, ::-1])
    assert np.array_equal(views[2], view_of(pixels, 2, 5, config))
    assert not np.array_equal(views[2], view_of(pixels, 2, 6, config))
    assert not np.array_equal(views[2], views[3][:, ::-1])


def config_of(*words: str):
    given = [
        "--vae",
        "v",
        "--data_path",
        "d",
        "--output_dir",
        "o",
        "--probe_profile",
        "probe-imagenet",
        *words,
    ]
    return parse_evaluate_flags(given)


def test_the_profile_is_planned_for_every_card_with_16_gb():
    """256 px, a VAE with 8-fold downsampling and 16 channels, 1000 classes."""
    shape = NetworkShape(16, 32, 1000, recipe_of(config_of(), 10**6))
    smallest = min(card.vram_gib for card in CARDS if card.vram_gib > 15.5)
    available = int((smallest - DRIVER_AND_CONTEXT_GIB) * GIB) - CUDA_RESERVE
    micro_batch, needed = choose_micro_batch(shape, torch.bfloat16, available, "auto")
    assert needed <= available
    assert micro_batch == 512  # two equal passes of 1024 images
    resident, working = step_bytes(shape, torch.bfloat16, micro_batch)
    assert resident > 4 * 28e6 * 4  # weights, EMA, two moments
    assert working > 512 * 14 * 2**20  # activations of 14 MB per image are in it


def test_the_plan_counts_what_a_step_allocates():
    shape = replace(SMALL, recipe=replace(RECIPE, batch_size=8))
    model = network().to(memory_format=torch.channels_last)
    with LiveBytes() as counter:
        for _ in range(2):
            add_gradients(
                forward_of(model, torch.bfloat16), torch.zeros(4, 3, 8, 8), torch.rand(4, 4), 0.1, 8
            )
    assert step_bytes(shape, torch.bfloat16, 4)[1] == pytest.approx(counter.peak, rel=0.05)


def test_too_little_memory_is_one_line():
    assert choose_micro_batch(SMALL, torch.float32, GIB, "3")[0] == 3
    single = sum(step_bytes(SMALL, torch.float32, 1))
    assert choose_micro_batch(SMALL, torch.float32, single, "auto")[0] == 1
    with pytest.raises(
        UserError, match=r"--probe_widths 16 32 needs .* GiB for a single image.*smaller widths"
    ):
        choose_micro_batch(SMALL, torch.float32, 1000, "auto")
