"""The search space: which options of train_vae.py are searched, and between which values. Needs no Optuna."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vae.config.flags import read_object
from vae.config.options import Config, all_options, flatten
from vae.config.values import base_type, check, from_json, is_list, nearest
from vae.system import files
from vae.system.errors import UserError

_SEARCHED_SECTIONS = ("model", "loss", "optim")
SEARCHABLE = {
    name
    for name, (section, item) in all_options().items()
    if item.metadata["searched"] or (item.metadata["searched"] is None and section in _SEARCHED_SECTIONS)
}
RANGE_KEYS = ("low", "high", "log", "step")


class Range(NamedTuple):
    """Numbers from `low` to `high`, both included; whole numbers if both are."""

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def contains(self, value: Any) -> bool:
        """Whether the value can be drawn; the steps between the ends are not checked."""
        return not isinstance(value, str | bool | None) and self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """The value of the range that is nearest to this one."""
        return min(max(value, self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


class Choices(NamedTuple):
    """One of these values; lists are written as JSON text, because Optuna has no lists."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Whether the value is one of them."""
        return as_choice(value) in [as_choice(choice) for choice in self.values]

    def nearest(self, value: float) -> float:
        """The choice, of numbers, that is nearest to this value."""
        return min(self.values, key=lambda choice: abs(choice - value))

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


Space = dict[str, Range | Choices]


def as_choice(value: Any) -> Any:
    """A value as Optuna stores it."""
    return json.dumps(list(value)) if isinstance(value, list | tuple) else value


def read_space(path: Path) -> Space:
    """The space in a JSON file; UserError for an unknown option, an empty range or a wrong type."""
    example = '{"learning_rate": {"low": 1e-5, "high": 1e-3, "log": true}}'
    loaded = read_object(path, "--space", example, ": give quick, full or a JSON file")
    if not loaded:
        raise UserError(f"--space {path} is empty: give at least one option, for example {example}")
    return {name: _parse(path, name, given) for name, given in loaded.items()}


def _parse(path: Path, name: str, given: Any) -> Range | Choices:
    """One option's part of the file."""
    where = f'--space {path}: "{name}"'
    options = all_options()
    if name not in options:
        raise UserError(f"{where} is an unknown option{nearest(name, SEARCHABLE)}")
    if options[name][1].metadata["scope"] == "machine":
        raise UserError(f"{where} belongs to the machine and is never searched: set it in --config")
    if name not in SEARCHABLE:
        raise UserError(f"{where} cannot be searched, as trials could not be compared: set it in --config")
    item = options[name][1]
    try:
        if isinstance(given, list):
            return Choices(tuple(_value(item, value) for value in _not_empty(given)))
        if isinstance(given, dict):
            return _range(item, given)
        raise UserError('must be a list of values, or an object with "low" and "high"')
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _not_empty(values: list[Any]) -> list[Any]:
    if len({json.dumps(value) for value in values}) < max(2, len(values)):
        raise UserError(f"{json.dumps(values)} has fewer than two different values, or one of them twice")
    return values


def _value(item: Any, given: Any) -> Any:
    """A value of the option, checked as in --config."""
    value = from_json(item, given)
    check(item, value)
    return value


def _range(item: Any, given: Mapping[str, Any]) -> Range:
    unknown = next((key for key in given if key not in RANGE_KEYS), None)
    if unknown is not None:
        raise UserError(
            f'has the unknown key "{unknown}"{nearest(unknown, RANGE_KEYS)} ({", ".join(RANGE_KEYS)})'
        )
    if "low" not in given or "high" not in given:
        raise UserError('lacks "low" or "high": give both ends of the range')
    if base_type(item) not in (int, float) or is_list(item):
        raise UserError("has no range: give a list of values")
    low, high, log, step = (given.get(key) for key in RANGE_KEYS)
    low, high = _value(item, low), _value(item, high)
    if not low < high:
        raise UserError(f"the range {low:g} to {high:g} is empty: low must be below high")
    if log not in (None, True, False):
        raise UserError(f'"log" must be true or false, not {json.dumps(log)}')
    if log and low <= 0:
        raise UserError(f'"log" needs a low above 0, not {low:g}: raise low, or remove "log"')
    if step is not None:
        step = from_json(item, step)
        if log or not 0 < step <= high - low:
            raise UserError(f'"step" {step:g} must be above 0, at most high - low, and without "log"')
    return Range(low, high, bool(log), step)


def check_space(space: Space, base: Config, objectives: tuple[str, ...], source: str) -> None:
    """Raise UserError if the defaults are outside of the space, or an objective would not be measured."""
    values = flatten(base)
    for name, part in space.items():
        if not part.contains(values[name]):
            raise UserError(
                f'--space {source}: "{name}" is {part}, which does not contain the default '
                f"{_shown(values[name])} of --config: widen it, or change --config"
            )
    if "lpips" in objectives:
        part = space.get("perceptual_weight", Range(base.loss.perceptual_weight, math.inf))
        least = part.low if isinstance(part, Range) else min(part.values)
        if base.loss.perceptual_weight == 0 or least == 0 or base.loss.perceptual_net == "dinov2-s":
            raise UserError(
                "--objective lpips is measured only if LPIPS is part of the loss: raise perceptual_weight in "
                "--config and --space above 0 with a perceptual_net other than dinov2-s, or use psnr or ssim"
            )


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def options_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a trial as options of train_vae.py: lists are lists again."""
    options = all_options()
    values_by_name = {}
    for name, value in params.items():
        is_text = isinstance(value, str) and is_list(options[name][1])
        values_by_name[name] = files.parse_json(value) if is_text else value
    return values_by_name
