"""The search space: what a file may contain, what is never searched, and the space without a file."""

import json

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from vae.config.options import all_options, build
from vae.system.errors import UserError
from vae.tuning.space import SEARCHABLE, options_of, read_space

BASE = build({"learning_rate": 1e-4})
BAD = [
    ("learning_rat", '{"learning_rat": [1, 2]}'),
    ("image_size", '{"image_size": [64, 128]}'),  # losses of two sizes are not compared
    ("learning_rate", '{"learning_rate": {"low": 1e-3, "high": 1e-4}}'),
    ("learning_rate", '{"learning_rate": {"low": "a", "high": 1e-3}}'),
    ("hi", '{"learning_rate": {"low": 1e-4, "hi": 1e-3}}'),
    ("learning_rate", '{"learning_rate": 1e-3}'),
    ("learning_rate", '{"learning_rate": []}'),
    ("batch_size", '{"batch_size": [2, 2.5]}'),
    ("batch_size", '{"batch_size": {"low": 0, "high": 4}}'),
    ("lr_schedule", '{"lr_schedule": {"low": 1, "high": 2}}'),
    ("beta1", '{"beta1": [0.5, 0.8]}'),  # without its default
    ("", "{}"),
    ("", "[]"),
]


@pytest.mark.parametrize(("name", "text"), BAD, ids=[text for _, text in BAD])
def test_mistakes_in_a_space_are_named(tmp_path, name, text):
    path = tmp_path / "space.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_space(path, BASE)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert name in message.replace(str(path), "")


def test_space_is_read_with_its_types(tmp_path):
    path = tmp_path / "space.json"
    given = {"batch_size": {"low": 1, "high": 8}, "beta1": [0.5, 0.9], "channels": [[8, 16], [16, 16]]}
    path.write_text(json.dumps({**given, "warmup_epochs": {"low": 0, "high": 10, "step": 0.5}}))
    assert read_space(path, build({"channels": [8, 16]})) == {
        "batch_size": IntDistribution(1, 8),
        "beta1": CategoricalDistribution((0.5, 0.9)),
        "channels": CategoricalDistribution(("[8, 16]", "[16, 16]")),
        "warmup_epochs": FloatDistribution(0.0, 10.0, step=0.5),
    }
    assert options_of({"channels": "[8, 16]", "beta1": 0.5}) == {"channels": [8, 16], "beta1": 0.5}


def test_what_belongs_to_the_machine_is_never_searched():
    options = all_options()
    assert set(options) >= SEARCHABLE
    assert not {name for name, (section, _) in options.items() if section == "speed"} & SEARCHABLE
    for name in ("num_workers", "seed", "output_dir", "data_path", "val_split", "num_epochs", "device"):
        assert name not in SEARCHABLE


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, {"learning_rate", "warmup_epochs", "perceptual_weight", "ema_decay"}),
        ({"perceptual_weight": 0.0}, {"learning_rate", "warmup_epochs", "ema_decay"}),
        ({"ema_decay": 0.5, "learning_rate": 0.1}, {"warmup_epochs", "perceptual_weight"}),
    ],
)
def test_without_a_file_what_contains_the_defaults_is_searched(values, names):
    assert set(read_space(None, build({"learning_rate": 1e-4, "perceptual_weight": 1.0} | values))) == names
