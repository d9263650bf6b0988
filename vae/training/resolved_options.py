"""The options and stages of a command, from flags, JSON, checkpoint, --init_from, profile and machine."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vae.config.declare import published_flags
from vae.config.options import Config
from vae.config.recipes import recipe_values
from vae.config.resolve import (
    DECODER_SHAPE,
    check_background,
    check_decoder,
    check_encoder,
    check_image_channels,
    check_new_decoder,
    check_shape,
    resolve,
    tiny_shape,
    with_tiny,
)
from vae.interop.checkpoint_file import load_checkpoint
from vae.interop.teacher import read_teacher
from vae.interop.vae_files import VaeFile, check_fit, missing_part, read_vae
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_marker
from vae.system.gpus import CPU_SETTINGS, match_card
from vae.system.host import GIB
from vae.training.checkpoints import load_newest, load_on_all
from vae.training.command import Command
from vae.training.distributed import Distributed
from vae.training.schedule import RANDOM, TRAINED, WARM
from vae.training.stages import Position, Stage, first_stages, resumed_stages, stages_left

ALONE = Distributed(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class ResolvedOptions:
    """The options of a command from all sources, and the files among these sources."""

    config: Config
    path: Path | None  # of the checkpoint of --resume_from
    content: dict[str, Any] | None  # of this checkpoint
    source: VaeFile | None  # of --init_from

    @property
    def begun_from(self) -> str:
        """The weights that the first stage of the run began with."""
        model = self.config.model
        if self.content is not None:
            return self.content["begun_from"]
        if self.source is not None:
            return TRAINED if self.source.is_trained else RANDOM if model.decoder else WARM
        return WARM if model.init == "warm" else RANDOM


def machine_of(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Whether the device is a card, and the options that it sets."""
    if device.type != "cuda":
        return False, CPU_SETTINGS
    properties = torch.cuda.get_device_properties(device)
    card = match_card(properties.name, properties.total_memory / GIB)
    return True, card.settings if card else {}


def resolve_options(
    command: Command, has_gpu: bool, machine_settings: dict[str, Any], dist: Distributed = ALONE
) -> ResolvedOptions:
    """Combine the given options with the files that they name, the profile and the machine.

    `dist`: the processes that call this together.
    """
    given = command.given
    path = None
    content = None
    if command.resume_from is not None:
        path, content = load_on_all(partial(_find_checkpoint, command), dist) or (None, None)
    if content is not None:
        _keep_order(content)
    name = command.value("profile")
    profile = recipe_values(name, has_gpu) if name else None
    config = resolve(given, content["config"] if content else None, profile, machine_settings)
    source = None
    if content is None:
        check_encoder(config, given)
        config, source = _existing_vae(config, given, dist)
        where = f"--init_from {config.model.init_from}" if source else "--latent_norm"
        config = _with_shape_of_teacher(with_tiny(config, given), given, where if source else None, dist)
        in_file = source is not None and source.scaling_factor is not None
        is_trained = source is not None and source.encoder_trained
        _check_scaling(config, in_file, where, is_trained)
    else:
        where = f"--resume_from {path}"
        config = _with_shape_of_teacher(with_tiny(config, given), given, where, dist)
        config = replace(config, model=replace(config.model, init_from=content["config"]["init_from"]))
        _check_scaling(config, content["latent_scaling"] is not None, where)
    check_decoder(config)
    check_background(config)
    return ResolvedOptions(config, path, content, source)


def _check_scaling(config: Config, in_file: bool, where: str, encoder_trained: bool = False) -> None:
    """Raise UserError if the constants of latents that do not change are not known, or cannot be changed.

    They are those with which diffusion models were trained: images that a user has cannot show them.
    `encoder_trained`: by the run of the checkpoint `where`, which measures them at its end.
    """
    model = config.model
    if model.scaling_factor is not None and model.latent_norm:
        raise UserError(
            f"--scaling_factor {model.scaling_factor:g}: {where} has latent statistics instead: omit it"
        )
    is_known = in_file or model.latent_norm or model.scaling_factor is not None
    if config.optim.train_part == "decoder" and not is_known:
        if encoder_trained:
            raise UserError(
                f"{where} was saved before its run measured the scaling of its latents, which --train_part "
                "decoder keeps: give the folder vae/ of that run, or export it with --data_path first"
            )
        raise UserError(
            f"{where} does not contain the scaling of its latents, which --train_part decoder keeps: give "
            f"that of its diffusion model ({published_flags()}), or the folder vae/ of that model"
        )


def _find_checkpoint(command: Command) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint of --resume_from; None if there is none yet."""
    folder = command.output_dir
    if command.checkpoint is not None:
        path, content = command.checkpoint, load_checkpoint(command.checkpoint)
    elif (newest := load_newest(folder) if folder.is_dir() else None) is not None:
        path, content = newest
    else:
        console.info(f"--resume_from latest: {folder} contains no checkpoint yet, so a new run begins")
        return None
    marker = read_marker(folder)
    is_inside = path.parent.resolve() == folder.resolve()
    if marker is not None and is_inside and content["run"]["id"] != marker.id:
        raise UserError(
            f"--resume_from {command.resume_from}: {path} is not of the run in --output_dir {folder}: give a "
            "new --output_dir"
        )
    return path, content


def _keep_order(content: dict[str, Any]) -> None:
    """Add the --data_streams and --shuffle_shards that the data of the run decided: defaults may change."""
    config = content["config"]
    for name, of_run in (("data_streams", "streams"), ("shuffle_shards", "shuffle_shards")):
        if config[name] is None:
            config[name] = content["provenance"]["topology"][of_run]


def _existing_vae(config: Config, given: dict[str, Any], dist: Distributed) -> tuple[Config, VaeFile | None]:
    """The VAE of --init_from, and the configuration with its shape; unchanged and None without the flag.

    Another given shape of the decoder replaces its decoder by a new one.
    """
    if not config.model.init_from:
        return config, None
    file = dist.main_first(partial(read_vae, Path(config.model.init_from)))
    own = config.model
    shape = {"norm_groups": own.norm_groups, "padding": own.padding, "image_channels": 3, **file.shape}
    of_decoder = {name: value for name in DECODER_SHAPE if (value := getattr(config.model, name)) is not None}
    can_change = (*of_decoder, "image_channels")
    check_shape(
        {name: value for name, value in given.items() if name not in can_change}, shape, "--init_from"
    )
    shape |= {name: tuple(value) for name, value in shape.items() if isinstance(value, list)}
    model = replace(config.model, **shape)
    check_fit(model, file.weights, f"--init_from {config.model.init_from}")
    if missing_part(file.weights) == "encoder":
        raise UserError(f"--init_from {config.model.init_from} has no encoder, which training needs")
    wanted = replace(model, **{name: getattr(config.model, name) for name in of_decoder})
    if os.path.lexists(config.model.init_from):  # not of the hub; another working directory may resume
        wanted = replace(wanted, init_from=str(Path(config.model.init_from).absolute()))
    if "image_channels" in given:
        wanted = replace(wanted, image_channels=config.model.image_channels)
        check_image_channels(wanted, model.image_channels, config.optim.train_part)
    file.fit_decoder(wanted)
    file.change_image_channels(wanted.image_channels)
    if not file.has_decoder:
        check_new_decoder(wanted)
    return replace(config, model=wanted), file


def _with_shape_of_teacher(
    config: Config, given: dict[str, Any], where: str | None, dist: Distributed
) -> Config:
    """The shape of an AutoencoderTiny from its teacher; UserError if its file, `where`, has another one."""
    path, model = config.loss.teacher, config.model
    if path is None:
        return config
    teacher = dist.main_first(partial(read_teacher, path)).model
    shape = tiny_shape(teacher.z_channels, len(teacher.channels), model.family)
    check_shape(given, {name: shape[name] for name in ("channels", "z_channels")}, "--teacher")
    wanted = replace(model, **shape)
    if where and wanted != model:
        raise UserError(
            f"{where} has {model.z_channels} latent channels and {len(model.channels)} "
            f"levels, but --teacher {path} {teacher.z_channels} and {len(teacher.channels)}: give its VAE"
        )
    if os.path.lexists(path):  # not of the hub; another working directory may resume
        path = str(Path(path).absolute())
    return replace(config, model=wanted, loss=replace(config.loss, teacher=path))


def run_stages(
    config: Config, command: Command, content: dict[str, Any] | None
) -> tuple[list[Stage], Position]:
    """The stages of the run and the position at which it begins or resumes."""
    if content is None:
        return first_stages(config), Position()
    if profile := command.value("profile"):
        console.info(f"note: --profile {profile} does not change a resumed run: use flags instead")
    saved = [Stage(**stage) for stage in content["stages"]]
    position = Position(**content["position"])
    if config.loss.disc_start != content["config"]["disc_start"]:  # another share counts anew
        position.disc_begun_at = None
    stages, position = resumed_stages(saved, position, config, command.given)
    if config.run.global_batch_size is not None:  # the saved stages may have had another number of processes
        left = stages_left(stages, position)
        done = stages[: len(stages) - len(left)]
        stages = done + [replace(stage, batch_size=config.run.batch_size) for stage in left]
    return stages, position
