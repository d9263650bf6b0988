"""The search space: what a file may contain, what is never searched, and what presets make of defaults."""

import json

import pytest

from vae.config.options import all_options, build
from vae.config.values import check
from vae.system.errors import UserError
from vae.tuning.presets import RECIPES, known_recipes, preset
from vae.tuning.space import SEARCHABLE, Choices, Range, check_space, options_of, read_space

BAD = [
    ('{"learning_rat": [1, 2]}', ["learning_rat", "unknown", "learning_rate"]),
    ('{"num_workers": [1, 2]}', ["num_workers", "machine", "--config"]),
    ('{"micro_batch_size": [1, 2]}', ["micro_batch_size", "machine"]),
    ('{"recompute": ["none", "all"]}', ["recompute", "machine"]),
    ('{"image_size": [64, 128]}', ["image_size", "compared"]),
    ('{"learning_rate": {"low": 1e-3, "high": 1e-4}}', ["learning_rate", "empty", "low"]),
    ('{"learning_rate": {"low": 1e-3, "high": 1e-3}}', ["empty"]),
    ('{"learning_rate": {"low": 0, "high": 1e-3, "log": true}}', ["log", "above 0"]),
    ('{"learning_rate": {"low": "a", "high": 1e-3}}', ["learning_rate", "a number", '"a"']),
    ('{"learning_rate": {"low": 1e-4, "hi": 1e-3}}', ['"hi"', "high"]),
    ('{"learning_rate": {"low": 1e-4}}', ["low", "high"]),
    ('{"learning_rate": {"low": 1e-4, "high": 1e-3, "log": 1.5}}', ["log", "true or false"]),
    ('{"learning_rate": 1e-3}', ["learning_rate", "list", "low"]),
    ('{"learning_rate": []}', ["learning_rate", "fewer than two"]),
    ('{"learning_rate": [1e-4, 1e-4]}', ["learning_rate", "twice"]),
    ('{"batch_size": [2, 2.5]}', ["batch_size", "a whole number", "2.5"]),
    ('{"batch_size": {"low": 0, "high": 4}}', ["batch_size", "minimum is 1"]),
    ('{"lr_schedule": ["cosine", "linear"]}', ["lr_schedule", "linear", "onecycle"]),
    ('{"lr_schedule": {"low": 1, "high": 2}}', ["lr_schedule", "list of values"]),
    ('{"beta1": {"low": 0.5, "high": 0.9, "step": 3}}', ["beta1", "step", "3"]),
    ('{"beta1": [0.5, 0.9], "beta1": [0.5, 0.8]}', ["beta1", "twice"]),
    ("[]", ["one object", ' {"learning_rate": {"low": 1e-5, "high": 1e-3, "log": true}}']),
    ("{}", ["is empty", "at least one"]),
    ("{", ["not valid JSON"]),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[text for text, _ in BAD])
def test_mistakes_in_a_space_are_named(tmp_path, text, words):
    path = tmp_path / "space.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_space(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_file_names_the_presets(tmp_path):
    with pytest.raises(UserError, match=r"--space .*quick, full"):
        read_space(tmp_path / "quik")


def test_space_is_read_with_its_types(tmp_path):
    path = tmp_path / "space.json"
    path.write_text(
        json.dumps(
            {"batch_size": {"low": 1, "high": 8}, "beta1": [0.5, 0.9], "channels": [[8, 16], [16, 16]]}
        )
    )
    space = read_space(path)
    assert space == {
        "batch_size": Range(1, 8),
        "beta1": Choices((0.5, 0.9)),
        "channels": Choices(([8, 16], [16, 16])),
    }
    assert options_of({"channels": "[8, 16]", "beta1": 0.5}) == {"channels": [8, 16], "beta1": 0.5}


def test_defaults_must_be_inside():
    base = build({"learning_rate": 1e-4})
    with pytest.raises(UserError, match=r'"learning_rate" is 0.001 to 0.01.*0.0001.*widen'):
        check_space({"learning_rate": Range(1e-3, 1e-2)}, base, ("psnr",), "space.json")


@pytest.mark.parametrize(
    ("given", "space"),
    [
        ({"perceptual_weight": 0.0}, {}),
        ({"perceptual_net": "dinov2-s"}, {}),
        ({}, {"perceptual_weight": Range(0.0, 1.0)}),
        ({}, {"perceptual_weight": Choices((0.0, 1.0))}),
    ],
)
def test_lpips_as_objective_needs_lpips_in_the_loss(given, space):
    with pytest.raises(UserError, match=r"--objective lpips.*perceptual_weight"):
        check_space(space, build({"perceptual_weight": 1.0} | given), ("lpips",), "space.json")


def test_what_belongs_to_the_machine_is_never_searched():
    options = all_options()
    assert set(options) >= SEARCHABLE
    assert not {name for name, (section, _) in options.items() if section == "speed"} & SEARCHABLE
    for name in ("num_workers", "seed", "output_dir", "data_path", "val_split", "num_epochs", "device"):
        assert name not in SEARCHABLE


BASES = [
    {"learning_rate": 1e-4},
    {"learning_rate": 1e-6, "perceptual_weight": 0.0},
    {"learning_rate": 0.01, "adversarial_weight": 0.2, "ema_decay": 0.5},
]


@pytest.mark.parametrize("values", BASES)
@pytest.mark.parametrize("name", ["quick", "full"])
def test_presets_contain_the_defaults_and_only_valid_values(name, values):
    base = build(values)
    space, left_out = preset(name, base)
    check_space(space, base, ("psnr",), name)
    for option, part in space.items():
        assert option in SEARCHABLE
        item = all_options()[option][1]
        for value in part.values if isinstance(part, Choices) else (part.low, part.high):
            check(item, value)
    assert ("perceptual_weight" in left_out) == (base.loss.perceptual_weight == 0)
    assert ("adversarial_weight" in space) == (name == "full" and base.loss.adversarial_weight > 0)
    assert {"learning_rate", "warmup_epochs", "ema_decay"} <= set(space)
    assert name == "quick" or {"beta1", "weight_decay", "lr_schedule", "batch_size", "z_channels"} <= set(
        space
    )


def test_known_recipes_are_whole_trials_inside_of_the_space():
    base = build({"learning_rate": 1e-4})
    space, _ = preset("full", base)
    recipes = known_recipes(space, base)
    assert set(recipes) == set(RECIPES)
    for params in recipes.values():
        assert set(params) == set(space)
        assert all(space[name].contains(value) for name, value in params.items())
    assert recipes["ldm"]["learning_rate"] == 1e-4
    assert known_recipes({"weight_decay": Range(0.0, 1.0)}, base) == {}  # no recipe says anything about it
