"""The search space: which options of train_vae.py are searched, as Optuna's distributions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from vae.config.declare import base_type, check, is_list, nearest
from vae.config.flags import read_object
from vae.config.options import Config, all_options, flatten
from vae.system.errors import UserError

Part = FloatDistribution | IntDistribution | CategoricalDistribution
Space = dict[str, Part]

_SECTIONS = ("model", "loss", "optim")
_OTHERS = (
    *("crop", "crop_scale", "crop_ratio", "horizontal_flip", "rotate90", "color_jitter"),
    *("batch_size", "accumulation_steps"),
)
SEARCHABLE = {name for name, (section, _) in all_options().items() if section in _SECTIONS or name in _OTHERS}
EXAMPLE = '{"learning_rate": {"low": 1e-5, "high": 1e-3, "log": true}}'
# The space without --space. Ranges around published settings: AdamW at 4.5e-6 (CompVis' KL autoencoders) to
# 1e-3 (our demo profile), LPIPS weights of 0.1 to 1.
DEFAULT: dict[str, Any] = {
    "learning_rate": {"low": 5e-6, "high": 3e-3, "log": True},
    "warmup_epochs": {"low": 0.0, "high": 10.0},
    "perceptual_weight": {"low": 0.05, "high": 2.0, "log": True},
    "ema_decay": [0.9, 0.99, 0.995, 0.999, 0.9995, 0.9999],
}


def read_space(path: Path | None, base: Config) -> Space:
    """The space in a JSON file, which must contain the options of `base`; UserError for mistakes in it.

    Without a file: the parts of DEFAULT that contain them, so that a loss which is off stays off.
    """
    values = flatten(base)
    if path is None:
        default = {name: _part(name, given) for name, given in DEFAULT.items()}
        return {name: part for name, part in default.items() if _contains(part, values[name])}
    loaded = read_object(path, "--space", EXAMPLE)
    if not loaded:
        raise UserError(f"--space {path} is empty: give at least one option, for example {EXAMPLE}")
    space = {}
    for name, given in loaded.items():
        try:
            space[name] = _part(name, given)
        except ValueError as error:  # UserError is one
            raise UserError(f'--space {path}: "{name}" {error}') from None
        if not _contains(space[name], values[name]):
            raise UserError(
                f'--space {path}: "{name}" does not contain its value in --config, '
                f"{json.dumps(values[name])}: widen it, or change --config"
            )
    return space


def _part(name: str, given: Any) -> Part:
    """One option's distribution; ValueError for what is wrong with it."""
    options = all_options()
    if name not in options:
        raise UserError(f"is an unknown option{nearest(name, SEARCHABLE)}")
    if name not in SEARCHABLE:
        raise UserError("cannot be searched, as trials could not be compared: set it in --config")
    item = options[name][1]
    if isinstance(given, list):
        return CategoricalDistribution([as_choice(_value(item, value)) for value in given])
    if not isinstance(given, dict) or is_list(item) or base_type(item) not in (int, float):
        raise UserError(f"needs a list of values{', or a range' if base_type(item) in (int, float) else ''}")
    if not {"low", "high"} <= given.keys() <= {"low", "high", "log", "step"}:
        raise UserError(f'needs "low" and "high", and may have "log" and "step": for example {EXAMPLE}')
    low = _value(item, given["low"])
    high = _value(item, given["high"])
    log = given.get("log", False) is True
    if base_type(item) is int:
        return IntDistribution(low, high, log, _value(item, given.get("step", 1)))
    step = None if given.get("step") is None else _value(item, given["step"])
    return FloatDistribution(low, high, log, step)


def _value(item: Any, given: Any) -> Any:
    """A value of the option within its limits."""
    kind = base_type(item)
    parts = given if is_list(item) else [given]
    if not isinstance(parts, list) or any(
        type(part) not in ({int, float} if kind is float else {kind}) for part in parts
    ):
        raise UserError(f"has no value {json.dumps(given)}")
    check(item, given)
    return given


def _contains(part: Part, value: Any) -> bool:
    """Whether the value can be drawn; an option that is not set is decided by the trainer."""
    if value is None:
        return True
    if isinstance(part, CategoricalDistribution):
        return as_choice(value) in part.choices
    return part.low <= value <= part.high


def as_choice(value: Any) -> Any:
    """A value as Optuna stores it: a list as JSON text."""
    return json.dumps(list(value)) if isinstance(value, list | tuple) else value


def suggest(trial: Trial, name: str, part: Part) -> Any:
    """The value of a parameter in this trial."""
    if isinstance(part, CategoricalDistribution):
        return trial.suggest_categorical(name, part.choices)
    if isinstance(part, IntDistribution):
        return trial.suggest_int(name, part.low, part.high, log=part.log, step=part.step)
    return trial.suggest_float(name, part.low, part.high, log=part.log, step=part.step)


def options_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a trial as options of train_vae.py: lists are lists again."""
    options = all_options()
    return {
        name: json.loads(value) if isinstance(value, str) and is_list(options[name][1]) else value
        for name, value in params.items()
    }
