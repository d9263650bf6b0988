"""The content of a checkpoint, checked before it is used: types, required keys, shapes, finite values."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from vae.config.options import Config, all_options, build
from vae.config.values import check, from_json
from vae.interop.fitting import config_from_shapes, group_names
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.optimizers import ADAMW_STATE, MUON_STATE, parameter_groups
from vae.system.errors import UserError

_LARGEST_COUNT = 2**53
_MAX_SHOWN = 40  # characters of a value in a message

# Required keys of a checkpoint and their types; more keys are allowed.
CONTENT: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "ema": (dict, type(None)),
    "discriminator": (dict, type(None)),
    "optimizers": (list,),
    "update": (dict,),
    "fp16": (bool,),
    "running_sq_norms": (torch.Tensor,),
    "position": (dict,),
    "history": (dict,),
    "config": (dict,),
    "stages": (list,),
    "data_fingerprint": (str,),
}
# The fields of the dataclasses in vae/training that a checkpoint contains (a test compares them).
POSITION = ("epoch", "images_in_epoch", "step", "images")
STAGE = {"first_epoch": 0, "num_epochs": 1, "image_size": 1, "batch_size": 1}  # with their smallest values
HISTORY: dict[str, tuple[type, ...]] = {
    "best": (dict,),
    "best_is_start": (bool,),
    "best_checkpoint": (str, type(None)),
    "best_checkpoint_psnr": (float, type(None)),
    "without_gain": (int,),
    "start_psnr": (float, type(None)),
    "last_psnr": (float, type(None)),
    "decrease_reported": (bool,),
    "smoke_best": (dict,),
    "smoke_has_fallen": (bool,),
}
UPDATE = ("loss_scale", "finite_steps", "nonfinite_streak", "nonfinite_total")
_REQUIRED_OPTIONS = ("channels", "layers_per_block", "z_channels", "norm_groups", "adversarial_weight")


class ContentError(ValueError):
    """The content is not what train_vae.py saves; the message names the part."""


def check_content(content: Mapping[str, Any]) -> None:
    """Raise ContentError, in one line, for the first part of a checkpoint that cannot be used."""
    for key, types in CONTENT.items():
        if key not in content:
            raise ContentError(f"it lacks {key}")
        if not isinstance(content[key], types):
            raise ContentError(f"{key} is {shown(content[key])}")
    config = _config(content["config"])
    _check_progress(content)
    networks = _check_networks(content, config)
    _check_optimizers(content, networks, config.optim.optimizer)
    _check_running_values(content, config)


def _config(values: Mapping[str, Any]) -> Config:
    """The configuration of the run; ContentError for an option that this version cannot read."""
    options = all_options()
    checked = {}
    for name, value in values.items():
        if name not in options:
            raise ContentError(f"its config has the unknown option {shown(name)}")
        item = options[name][1]
        try:
            checked[name] = from_json(item, value)
            check(item, checked[name])
        except (UserError, TypeError):
            raise ContentError(f"its config has --{name} {shown(value)}") from None
    for name in _REQUIRED_OPTIONS:
        if name not in checked:
            raise ContentError(f"its config lacks {name}")
    return build(checked)


# ---- plain data ------------------------------------------------------------------------------------------


def _check_progress(content: Mapping[str, Any]) -> None:
    """Check the stages, the position and the history."""
    if not content["stages"]:
        raise ContentError("it has no stages")
    for stage in content["stages"]:
        _check_counts("a stage", stage, STAGE)
    first_epochs = [stage["first_epoch"] for stage in content["stages"]]
    ends = [0] + [stage["first_epoch"] + stage["num_epochs"] for stage in content["stages"]]
    if first_epochs != ends[:-1]:
        raise ContentError(f"its stages begin at epochs {shown(first_epochs)}, and end at {shown(ends[1:])}")
    _check_counts("position", content["position"], dict.fromkeys(POSITION, 0))
    _check_run(content.get("run", {"id": "", "ancestors": []}))
    if not isinstance(content.get("contract"), dict | None):
        raise ContentError(f"contract is {shown(content['contract'])}")
    rollbacks = content.get("rollbacks", {})
    if not isinstance(rollbacks, dict) or not all(map(_is_rollbacks, rollbacks, rollbacks.values())):
        raise ContentError(f"rollbacks is {shown(rollbacks)}")
    history = content["history"]
    for name, value in history.items():
        if name not in HISTORY or not isinstance(value, HISTORY[name]):
            raise ContentError(f"its history has {shown(name)} {shown(value)}")
    for best in ("best", "smoke_best"):
        values = history.get(best, {}).items()
        if not all(isinstance(k, str) and type(v) in (int, float) for k, v in values):
            raise ContentError(f"its history has {best} {shown(history[best])}")
    if not isinstance(overflows := content.get("overflows_fp16", False), bool):
        raise ContentError(f"overflows_fp16 is {shown(overflows)}")
    scaling = content.get("latent_scaling")
    if scaling is not None and not (
        isinstance(scaling, list)
        and len(scaling) == 2
        and all(type(value) in (int, float) and abs(value) < float("inf") for value in scaling)
    ):
        raise ContentError(f"latent_scaling is {shown(scaling)}")


def _check_run(run: Any) -> None:
    """The identity of the run: see vae/training/provenance.py."""
    ancestors = run.get("ancestors") if isinstance(run, dict) else None
    names = {"id", "ancestors"}
    if not isinstance(ancestors, list) or set(run) - {"start"} != names:
        raise ContentError(f"run is {shown(run)}")
    if not (isinstance(run["id"], str) and isinstance(run.get("start", ""), str)):
        raise ContentError(f"run is {shown(run)}")
    for one in ancestors:
        if not (isinstance(one, list) and [type(part) for part in one] == [str, int]):
            raise ContentError(f"its run has the ancestor {shown(one)}")


def _is_rollbacks(first_epoch: Any, caps: Any) -> bool:
    """Whether these are the shares of the learning rate after the rollbacks of a stage; NaN is none."""
    if type(first_epoch) is not int or not isinstance(caps, list):
        return False
    return all(type(cap) is float and 0.0 <= cap <= 1.0 for cap in caps)


def _check_counts(what: str, values: Any, smallest: Mapping[str, int]) -> None:
    """`values` maps exactly these names to whole numbers of at least these sizes."""
    if not isinstance(values, dict) or set(values) != set(smallest):
        raise ContentError(f"{what} is {shown(values)}")
    for name, least in smallest.items():
        if type(values[name]) is not int or not least <= values[name] <= _LARGEST_COUNT:
            raise ContentError(f"{what} has {name} {shown(values[name])}")


def shown(value: Any) -> str:
    """A value on one line, or the kind of a large one."""
    if isinstance(value, dict | list | tuple | torch.Tensor):
        return f"a {type(value).__name__}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**_MAX_SHOWN else "a huge number"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# ---- tensors ---------------------------------------------------------------------------------------------

Expected = Mapping[str, torch.Tensor]  # tensors without data


def _check_networks(content: Mapping[str, Any], config: Config) -> list[torch.nn.Module]:
    """Check names, shapes and values of all weights; returns the trained networks, without data."""
    weights = _plain_tensors("model", content["model"])
    try:
        shape = config_from_shapes(dict(weights), "its model")
    except UserError as error:
        raise ContentError(str(error)) from None
    for name, value in shape.items():  # so that the configuration is no larger than the file
        configured = getattr(config.model, name)
        if value != (list(configured) if isinstance(configured, tuple) else configured):
            raise ContentError(f"its model has {name} {value}, and its config {configured}")
    if any(width % config.model.norm_groups for width in config.model.channels):
        raise ContentError(f"its config has --norm_groups {config.model.norm_groups}")
    with torch.device("meta"):
        autoencoder = AutoencoderKL(config.model)
    if config.optim.train_part == "decoder":
        autoencoder.freeze_encoder()
    expected = autoencoder.state_dict()
    _check_weights("model", weights, expected)
    if content["ema"] is not None:
        _check_weights("ema", _plain_tensors("ema", content["ema"]), expected)
    if config.loss.adversarial_weight > 0 and content["discriminator"] is None:
        raise ContentError("it lacks discriminator")
    if content["discriminator"] is None:
        return [autoencoder]
    tensors = _plain_tensors("discriminator", content["discriminator"])
    discriminator = _discriminator(config, tensors)
    _check_weights("discriminator", tensors, discriminator.state_dict())
    return [autoencoder, discriminator]


def _discriminator(config: Config, tensors: Mapping[str, torch.Tensor]) -> Discriminator:
    """The configured discriminator without data, if it is no larger than `tensors`."""
    loss, first = config.loss, tensors.get("convs.0.weight")
    if first is None or len(first) != loss.disc_channels or loss.disc_layers > len(tensors):
        raise ContentError(f"its discriminator has not --disc_channels {loss.disc_channels}")
    with torch.device("meta"):
        return Discriminator(loss.disc_channels, loss.disc_layers)


def _plain_tensors(what: str, tensors: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """The tensors; ContentError if one is not a dense tensor with data, or repeats its numbers."""
    for name, value in tensors.items():
        if not isinstance(name, str) or type(value) is not torch.Tensor:
            raise ContentError(f"{what} has {shown(name)}, {shown(value)}")
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise ContentError(f"{what} has {name}, which is not a dense tensor")
        if value.untyped_storage().nbytes() < value.nbytes:  # a stride of 0 repeats numbers
            raise ContentError(f"{what} has {name}, which is larger than its data")
    return dict(tensors)


def _check_weights(what: str, tensors: Mapping[str, torch.Tensor], expected: Expected) -> None:
    """The names, shapes and types are those of `expected`, and all values are finite."""
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unknown:
        problem, names, among = ("lacks", missing, expected) if missing else ("has", unknown, tensors)
        raise ContentError(f"{what} {problem} {group_names(names, among)}")
    for name, value in tensors.items():
        _check_tensor(f"{what}: {name}", value, expected[name])


def _check_tensor(what: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    actual, wanted = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (value, expected))
    if actual != wanted:
        raise ContentError(f"{what} is {actual}, not {wanted}")
    if not torch.isfinite(value).all():
        raise ContentError(f"{what} contains values that are not finite")


def _check_optimizers(content: Mapping[str, Any], networks: list[torch.nn.Module], optimizer: str) -> None:
    """Each optimizer has the moments of its network's trained parameters."""
    if len(content["optimizers"]) != len(networks):
        raise ContentError(f"it has {len(content['optimizers'])} optimizers, not {len(networks)}")
    for index, (network, saved) in enumerate(zip(networks, content["optimizers"], strict=True)):
        groups = parameter_groups(network, optimizer if index == 0 else "adamw")
        is_required = index == 0 and content["position"]["step"] > 0  # the discriminator starts later
        _check_optimizer(f"optimizer {index}", saved, groups, is_required)


def _check_optimizer(
    what: str, saved: Any, expected: Sequence[Sequence[torch.Tensor]], is_required: bool
) -> None:
    """`expected`: the parameters of AdamW, and in a second group those of Muon."""
    parameters = [parameter for group in expected for parameter in group]
    numbers = iter(range(len(parameters)))
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not (
        isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and [group.get("params") for group in groups] == [list(islice(numbers, len(g))) for g in expected]
        and isinstance(saved.get("state"), dict)
    ):
        name = "AdamW's" if len(expected) == 1 else "Muon's"
        raise ContentError(f"{what} is not {name} state of {len(parameters)} parameters")
    states = saved["state"]
    if (is_required or states) and set(states) != set(range(len(parameters))):
        raise ContentError(f"{what} has moments of {len(states)} parameters, not of {len(parameters)}")
    for number, state in states.items():
        names = ADAMW_STATE if number < len(expected[0]) else MUON_STATE
        if not isinstance(state, dict) or set(state) != set(names):
            raise ContentError(f"{what} has no moments of parameter {number}")
        for name, value in _plain_tensors(f"{what}, parameter {number}", state).items():
            wanted = torch.zeros(()) if name == "step" else parameters[number]
            _check_tensor(f"{what}: {name} of parameter {number}", value, wanted)


def _check_running_values(content: Mapping[str, Any], config: Config) -> None:
    tensors = _plain_tensors("update", content["update"])
    _check_weights("update", tensors, dict.fromkeys(UPDATE, torch.zeros(())))
    shapes = {"running_sq_norms": (2,), "running_moments": (3, config.model.z_channels)}
    running = _plain_tensors("it", {name: content[name] for name in shapes if name in content})
    for name, value in running.items():
        _check_tensor(name, value, torch.zeros(shapes[name]))
