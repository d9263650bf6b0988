"""The content of a checkpoint, checked before it is used: types, keys, shapes, finite values."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from vae.config.options import Config, all_options, build
from vae.config.values import check, from_json
from vae.interop.checkpoint_content import CheckpointContent, ContentError, check_keys, shown
from vae.interop.fitting import config_from_shapes, group_names
from vae.model.autoencoder import AutoencoderKL, widths_fit
from vae.model.discriminator import Discriminator
from vae.optimizers import ADAMW_STATE, MUON_STATE, parameter_groups
from vae.system.errors import UserError


def check_content(content: Mapping[str, Any]) -> None:
    """Raise ContentError, in one line, for the first part of a checkpoint that cannot be used."""
    check_keys("it", content, CheckpointContent)
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
    return build(checked)


def _check_progress(content: Mapping[str, Any]) -> None:
    """The values that types do not limit."""
    if not content["stages"]:
        raise ContentError("it has no stages")
    first_epochs = [stage["first_epoch"] for stage in content["stages"]]
    ends = [0] + [stage["first_epoch"] + stage["num_epochs"] for stage in content["stages"]]
    if first_epochs != ends[:-1]:
        raise ContentError(f"its stages begin at epochs {shown(first_epochs)}, and end at {shown(ends[1:])}")
    if not all(0.0 <= cap <= 1.0 for caps in content["rollbacks"].values() for cap in caps):  # NaN is not
        raise ContentError("rollbacks has a share of the learning rate outside of 0 to 1")
    if not all(math.isfinite(value) for value in content["latent_scaling"] or ()):
        raise ContentError("latent_scaling is not finite")


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
    if not widths_fit(config.model):
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
    loss = config.loss
    first = tensors.get("convs.0.weight")
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
        groups = parameter_groups(network, optimizer) if index == 0 else [list(network.parameters())]
        is_required = index == 0 and content["position"]["step"] > 0  # the discriminator starts later
        _check_optimizer(f"optimizer {index}", saved, groups, is_required)


def _check_optimizer(
    what: str, saved: Any, expected: Sequence[Sequence[torch.Tensor]], is_required: bool
) -> None:
    """`expected`: the groups of parameters; those of a third one are Muon's."""
    parameters = [parameter for group in expected for parameter in group]
    numbers = iter(range(len(parameters)))
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not (
        isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
        and [group.get("params") for group in groups] == [list(islice(numbers, len(g))) for g in expected]
        and isinstance(saved.get("state"), dict)
    ):
        name = "Muon's" if len(expected) == 3 else "AdamW's"
        raise ContentError(f"{what} is not {name} state of {len(parameters)} parameters")
    states = saved["state"]
    if (is_required or states) and set(states) != set(range(len(parameters))):
        raise ContentError(f"{what} has moments of {len(states)} parameters, not of {len(parameters)}")
    for number, state in states.items():
        names = ADAMW_STATE if number < sum(map(len, expected[:2])) else MUON_STATE
        if not isinstance(state, dict) or set(state) != set(names):
            raise ContentError(f"{what} has no moments of parameter {number}")
        for name, value in _plain_tensors(f"{what}, parameter {number}", state).items():
            wanted = torch.zeros(()) if name == "step" else parameters[number]
            _check_tensor(f"{what}: {name} of parameter {number}", value, wanted)


def _check_running_values(content: Mapping[str, Any], config: Config) -> None:
    update = {f"update: {name}": (value, torch.zeros(())) for name, value in content["update"].items()}
    running = {
        "running_sq_norms": (content["running_sq_norms"], torch.zeros(2)),
        "running_moments": (content["running_moments"], torch.zeros(3, config.model.z_channels)),
    }
    for name, (value, expected) in {**update, **running}.items():
        _check_tensor(name, value, expected)
