"""The planned memory equals that of the real step; the micro-batch is the largest that fits."""

import math
from dataclasses import replace

import pytest
import torch

from tests.harness.memory_of_a_gpu import memory_of_a_gpu
from tests.harness.step_predictions import MODEL, PIXELS_ONLY, SPEC, check_prediction
from tests.harness.toy_networks import ALL_LOSSES
from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE, LossConfig
from vae.memory import plan
from vae.memory.plan import choose_step, fastest_level, largest_count, step_memory
from vae.memory.plan_table import features_note
from vae.system.errors import UserError
from vae.system.host import GIB

ALL = replace(ALL_LOSSES, disc_channels=8, disc_layers=2)


@pytest.fixture(autouse=True)
def step_of_a_gpu():
    """The prediction is for a GPU."""
    with memory_of_a_gpu():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "micro_batch"), [(PIXELS_ONLY, 3), (ALL, 1)], ids=["pixels", "all losses"])
def test_prediction_equals_the_peak_of_the_real_step(loss, micro_batch):
    # 4 = 3 + 1 is planned as two passes of 3: the plan may be larger than the step, never smaller
    check_prediction(replace(SPEC, loss=loss), micro_batch, tolerance=0.012 if micro_batch != 3 else 0.05)


@pytest.mark.slow
def test_prediction_with_a_decoder_of_twice_the_size():
    spec = replace(SPEC, loss=ALL)
    twice = check_prediction(replace(spec, model=replace(MODEL, decoder_scale=2)), 2)
    assert twice.working < step_memory(spec, 2).working  # the networks run at half the size of the crops


@pytest.mark.slow
def test_prediction_in_bf16_and_channels_last():
    # The peak is a product of attention with an fp32 result: 256 queries of 1024 keys. Only on the CPU it is
    # a temporary tensor in bf16 first.
    spec = replace(SPEC, dtype=torch.bfloat16, channels_last=True, batch=2)
    check_prediction(spec, 1, cpu_only=256 * 1024 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [PIXELS_ONLY, ALL], ids=["pixels", "all losses"])
def test_prediction_with_muon(loss):
    """At 16 px, the update needs more memory than backward; with other losses, gradients of both networks."""
    wide = replace(MODEL, channels=(32, 64))
    spec = replace(SPEC, model=wide, loss=loss, image_size=16, optimizer="muon")
    predicted = check_prediction(spec, 2)
    adamw = step_memory(replace(spec, optimizer="adamw"), 2)
    assert predicted.resident < adamw.resident
    assert predicted.working > adamw.working


@pytest.mark.slow
@pytest.mark.parametrize("level", ["activations", "blocks", "all"])
def test_prediction_at_each_recompute_level(level):
    check_prediction(replace(SPEC, recompute=level), 2)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "all"])
def test_prediction_with_reflect_padding(level):
    """Its residual blocks are not fused, so each layer stores its own input."""
    check_prediction(replace(SPEC, model=replace(MODEL, padding="reflect"), recompute=level), 2)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "blocks"])
def test_prediction_with_a_tiny_decoder(level):
    spec = replace(SPEC, model=replace(MODEL, decoder="tiny"))
    predicted = check_prediction(replace(spec, recompute=level), 2)
    assert (predicted.working < step_memory(spec, 2).working) == (level != "none")


def test_disabled_parts_need_no_memory():
    assert step_memory(replace(SPEC, ema=False), 2).resident < step_memory(SPEC, 2).resident
    frozen, whole = (step_memory(replace(SPEC, train_part=part), 1) for part in ("decoder", "all"))
    assert frozen.resident < whole.resident  # two moments for each weight of the encoder
    assert frozen.working < whole.working  # neither gradients nor activations of the encoder
    lpips = replace(SPEC, loss=replace(PIXELS_ONLY, perceptual_weight=1.0))
    assert step_memory(lpips, 2).total > step_memory(SPEC, 2).total
    # with a third level, because the scores of attention over many tokens are fp32 in both
    deep = replace(SPEC, model=replace(SPEC.model, channels=(16, 32, 32)))
    half = replace(deep, dtype=torch.bfloat16)
    assert step_memory(half, 4).working < 0.8 * step_memory(deep, 4).working


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_auto_selects_the_fewest_passes_that_fit_and_balances_them(batch):
    spec = replace(SPEC, batch=batch)
    totals = {micro_batch: step_memory(spec, micro_batch).total for micro_batch in range(1, batch + 1)}
    for available in {total + extra for total in totals.values() for extra in (-1, 0, 1)}:
        fitting = [micro_batch for micro_batch, total in totals.items() if total <= available]
        if fitting:
            found = choose_step(spec, available, "auto", "none")
            passes = math.ceil(batch / max(fitting))
            assert found.micro_batch == math.ceil(batch / passes)
            assert found.total <= available
        elif available < totals[1]:
            with pytest.raises(UserError):
                choose_step(spec, available, "auto", "none")


def test_auto_selects_the_whole_batch_if_gradients_are_larger_than_images():
    # one pass needs no gradients of an earlier one: the whole batch can fit even if one image less does not
    wide = ModelConfig(channels=(128, 128), layers_per_block=1, norm_groups=4, z_channels=4)
    spec = replace(SPEC, model=wide, image_size=16, batch=5)
    available = max(step_memory(spec, micro_batch).total for micro_batch in (1, 5))
    assert step_memory(spec, 4).total > available
    assert choose_step(spec, available, "auto", "none").micro_batch == 5


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("auto", r"--recompute \w+, .*: lower --image_size"),
        ("none", "--recompute none, .*: use --recompute auto"),
        ("all", "--recompute all, .*: lower --image_size"),
    ],
)
def test_single_image_that_does_not_fit_is_an_error(recompute, words):
    with pytest.raises(UserError, match=rf"--image_size 64 .* GiB .* {words}") as caught:
        choose_step(SPEC, 1000, "auto", recompute)
    assert "\n" not in str(caught.value)


def test_auto_selects_the_fastest_level_that_fits_one_image():
    spec = replace(SPEC, batch=1)
    totals = {level: step_memory(replace(spec, recompute=level), 1).total for level in RECOMPUTE}
    for available in sorted(totals.values()):
        expected = next(level for level in RECOMPUTE if totals[level] <= available)
        assert choose_step(spec, available, "auto", "auto").recompute == expected
        assert choose_step(spec, available, "1", "auto").recompute == expected
    assert fastest_level(spec, 0, 1, "auto").total == min(totals.values())
    assert choose_step(spec, 0, "1", "auto").total == min(totals.values())  # a number is used as it is


@pytest.mark.parametrize("bends", [(), (5, 40), (2, 3, 90)])
def test_largest_count_is_found_in_few_totals(bends):
    def total(count):
        asked.append(count)
        return 1000 + 7 * count + sum(13 * max(0, count - bend) for bend in bends)

    for available in (1010, 1100, 1500, 2000, 10_000):
        asked = []
        expected = max(n for n in range(1, 128) if total(n) <= available or n == 1)
        asked.clear()
        assert largest_count(total, available, 128) == expected
        assert len(set(asked)) <= (5 if not bends else 12)


def test_explicit_micro_batch_is_used_as_it_is():
    assert choose_step(SPEC, 0, "3", "none").micro_batch == 3
    assert choose_step(SPEC, 0, "9", "none").micro_batch == 4


def test_features_of_convolutions_are_counted():
    side = SPEC.image_size
    for micro_batch in (1, 3):
        assert step_memory(SPEC, micro_batch).features == 32 * side**2  # before the decoder's last level
    with_lpips = replace(SPEC, loss=LossConfig(perceptual_net="random"))
    assert step_memory(with_lpips, 2).features == 64 * side**2


@pytest.mark.parametrize(("images", "micro_batch"), [(8.0, 8), (7.9, 4), (3.0, 3), (1.5, 1), (0.9, 1)])
def test_features_limit_the_micro_batch(images, micro_batch, monkeypatch):
    spec = replace(SPEC, batch=8)
    monkeypatch.setattr(plan, "MAX_FEATURES", int(images * step_memory(spec, 1).features))
    found = choose_step(spec, 100 * GIB, "auto", "none")
    assert found.micro_batch == micro_batch
    note, warning = features_note(found, 8), features_note(step_memory(spec, 8), 8)
    assert (note is None) == (images >= 8)
    assert (warning is None) == (images >= 8)
    if images < 1:
        assert "only a smaller --image_size" in note
        assert note.startswith("WARNING")
    elif images < 8:
        assert note.startswith(f"note: with more than {int(images)} per pass")
        assert warning.startswith("WARNING: with 8 per pass")
        assert f"--micro_batch_size {int(images)}" in warning
