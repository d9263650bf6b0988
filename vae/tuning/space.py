"""The search space: which options of train_vae.py are searched, as Optuna's distributions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from vae.config.declare import base_type, coerce, is_list, nearest
from vae.config.flags import read_object
from vae.config.options import Config, LossConfig, all_options, flatten, image_weights
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
        except (ValueError, TypeError) as error:  # Optuna's, and UserError
            raise UserError(f'--space {path}: "{name}": {error}') from None
        if not _contains(space[name], values[name]):
            raise UserError(
                f'--space {path}: "{name}" does not contain its value in --config, '
                f"{json.dumps(values[name])}: widen it, or change --config"
            )
    return space


def check_comparable(space: Space, loss: LossConfig) -> None:
    """Raise UserError if trials may not have the terms of `loss`, by which they are compared."""
    names = ("reconstruction_loss", "perceptual_net", "perceptual_weights")
    measures = [name for name in names if name in space]
    without = [
        f"{name}_weight"
        for name, weight in image_weights(loss).items()
        if weight and f"{name}_weight" in space and _contains(space[f"{name}_weight"], 0.0)
    ]
    if measures:
        raise UserError(
            f'--objective loss cannot compare trials with different "{measures[0]}": remove it from --space, '
            "or give --objective psnr ssim"
        )
    if without:
        raise UserError(
            f'--objective loss needs the term of "{without[0]}" in every trial: leave 0 out of its values in '
            "--space, or give --objective psnr ssim"
        )


def _part(name: str, given: Any) -> Part:
    """One option's distribution; ValueError or TypeError for what is wrong with it."""
    options = all_options()
    if name not in options:
        raise UserError(f"it is an unknown option{nearest(name, SEARCHABLE)}")
    if name not in SEARCHABLE:
        raise UserError("it cannot be searched, as trials could not be compared: set it in --config")
    item = options[name][1]
    if isinstance(given, list):
        return CategoricalDistribution([as_choice(coerce(item, value)) for value in given])
    ranges: dict[type, type[IntDistribution | FloatDistribution]]
    ranges = {int: IntDistribution, float: FloatDistribution}
    kind = None if is_list(item) else ranges.get(base_type(item))
    if kind is None or not isinstance(given, dict):
        raise UserError(f"it needs a list of values{', or a range' if kind else ''}: for example {EXAMPLE}")
    return kind(**{key: value if key == "log" else coerce(item, value) for key, value in given.items()})


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
