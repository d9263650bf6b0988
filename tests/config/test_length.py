"""One source sets the length of training: --train_minutes, or --num_epochs, --max_steps and --progressive."""

import json

import pytest

from vae.config.flags import parse_flags
from vae.config.options import Config, flatten
from vae.config.recipes import recipe_values
from vae.config.resolve import resolve
from vae.system.errors import UserError

DEMO = recipe_values("demo", has_gpu=False)
LENGTHS = [("num_epochs", 7), ("max_steps", 7), ("progressive", "32:1:4")]


@pytest.mark.parametrize(("name", "value"), LENGTHS)
def test_two_given_lengths_are_an_error(name, value):
    with pytest.raises(UserError, match=rf"--train_minutes 2 and --{name} {value} .*remove one"):
        resolve({"train_minutes": 2.0, name: value})


@pytest.mark.parametrize(("name", "value"), LENGTHS)
def test_given_length_replaces_that_of_the_profile(name, value):
    assert resolve({}, profile=DEMO).run.train_minutes == 4
    assert resolve({name: value}, profile=DEMO).run.train_minutes is None
    assert resolve({name: None, "train_minutes": 9.0}, profile=DEMO).run.train_minutes == 9


def test_checkpoint_has_its_length():
    checkpoint = {**flatten(Config()), "num_epochs": 34}
    config = resolve({}, checkpoint=checkpoint, profile=DEMO)
    assert (config.run.num_epochs, config.run.train_minutes) == (34, None)
    assert resolve({"train_minutes": 5.0}, checkpoint=checkpoint).run.train_minutes == 5


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ({"num_epochs": 34, "max_steps": None}, ["--train_minutes", "5"], {"train_minutes": 5.0}),
        ({"train_minutes": 5, "seed": 1}, ["--num_epochs", "9"], {"seed": 1, "num_epochs": 9}),
        ({"train_minutes": 5}, ["--seed", "1"], {"train_minutes": 5.0, "seed": 1}),
    ],
)
def test_flag_replaces_the_length_in_the_json_file(tmp_path, file, flags, expected):
    path = tmp_path / "my.json"
    path.write_text(json.dumps(file))
    values = parse_flags(["--config", str(path), *flags])
    assert values.pop("config") == str(path)
    assert values == expected


def test_saved_options_of_the_demo_keep_the_minutes(tmp_path):
    from vae.training.save_config import save_config

    path = tmp_path / "saved.json"
    save_config({"profile": "demo", "device": "cpu"}, str(path))
    config = resolve(parse_flags(["--config", str(path)]))
    assert config.run.train_minutes == 4


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_minutes_are_positive(value):
    with pytest.raises(UserError, match=f"--train_minutes {value}"):
        parse_flags(["--train_minutes", value])
