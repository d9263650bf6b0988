"""The options and stages of a command, from flags, JSON, checkpoint, --init_from, profile and machine."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from vae.config.declare import OptionValues, published_flags
from vae.config.model_options import ModelConfig
from vae.config.options import Config, build
from vae.config.recipes import recipe_values
from vae.config.resolve import check_encoder, resolve, with_local_batch
from vae.interop.checkpoint_file import CheckpointContent, load_checkpoint
from vae.interop.teacher import read_teacher
from vae.interop.vae_files import VaeFile, check_fit, missing_part, read_vae
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_marker
from vae.system.gpus import CPU_SETTINGS, match_card
from vae.system.host import GIB
from vae.training.checkpoints import Loaded, load_newest, load_on_all
from vae.training.distributed import Distributed
from vae.training.early_checks import Command
from vae.training.schedule import RANDOM, TRAINED, WARM
from vae.training.stages import Position, Stage, first_stages, resumed_stages, stages_left

ALONE = Distributed(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class ResolvedOptions:
    """The options of a command from all sources, its stages, and the files among these sources."""

    config: Config
    stages: list[Stage]
    position: Position  # where the run begins or resumes
    path: Path | None  # of the checkpoint of --resume_from
    content: CheckpointContent | None  # of this checkpoint
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


def machine_of(device: torch.device) -> tuple[bool, OptionValues]:
    """Whether the device is a card, and the options that it sets."""
    if device.type != "cuda":
        return False, CPU_SETTINGS
    properties = torch.cuda.get_device_properties(device)
    card = match_card(properties.name, properties.total_memory / GIB)
    return True, card.settings if card else {}


def resolve_options(
    command: Command, has_gpu: bool, machine_settings: OptionValues, dist: Distributed = ALONE
) -> ResolvedOptions:
    """Read the files that the options name, and combine all sources; UserError if something is wrong.

    `dist`: the processes that call this together.
    """
    given = command.given
    path = None
    content = None
    saved = None
    if command.resume_from is not None:
        path, content = load_on_all(partial(_find_checkpoint, command), dist) or (None, None)
    if content is not None:
        saved = _saved_options(content)
    profile_name = command.value("profile")
    profile = recipe_values(profile_name, has_gpu) if profile_name else None
    source = None
    if content is None and given.get("init_from"):
        source = dist.main_first(partial(read_vae, Path(given["init_from"])))
    teacher_path = given.get("teacher", (saved or {}).get("teacher"))
    teacher = dist.main_first(partial(read_teacher, teacher_path)).model if teacher_path else None

    shape = source.shape if source else None
    config = resolve(_absolute_paths(given), saved, profile, machine_settings, shape, teacher)
    if content is None:
        check_encoder(config, given)
    if source is not None:
        _fit(source, config.model, f"--init_from {given['init_from']}")
    _check_scaling(config, path, content, source)
    config = with_local_batch(config, dist.world_size)
    stages, position = _stages(config, command, content)
    return ResolvedOptions(config, stages, position, path, content, source)


def _saved_options(content: CheckpointContent) -> OptionValues:
    """The options in a checkpoint, with those that the data of its run decided: defaults may change."""
    config = content["config"]
    topology = content["provenance"]["topology"]
    decided = {"data_streams": topology["streams"], "shuffle_shards": topology["shuffle_shards"]}
    return {**config, **{name: value for name, value in decided.items() if config[name] is None}}


def _absolute_paths(given: OptionValues) -> OptionValues:
    """The options with absolute paths of VAEs on this machine: another working directory may resume."""
    paths = {name: given[name] for name in ("init_from", "teacher") if given.get(name)}
    here = {name: str(Path(path).absolute()) for name, path in paths.items() if os.path.lexists(path)}
    return {**given, **here}


def _fit(source: VaeFile, model: ModelConfig, where: str) -> None:
    """Give the VAE of --init_from the decoder and the image channels of `model`; UserError if it cannot."""
    in_file = build({"norm_groups": model.norm_groups, **source.shape}).model
    check_fit(in_file, source.weights, where)
    if missing_part(source.weights) == "encoder":
        raise UserError(f"{where} has no encoder, which training needs")
    source.fit_decoder(model)
    source.change_image_channels(model.image_channels)
    if model.module and not source.has_decoder:
        raise UserError(f"{where} has no decoder, which training needs")
    if model.family == "wan" and not source.has_decoder and not model.decoder:
        raise UserError(
            f"{where} has RMS norms, so no new decoder of channels {' '.join(map(str, model.up_channels))}: "
            "give a file with a decoder, and no --decoder_channels"
        )


def _check_scaling(
    config: Config, path: Path | None, content: CheckpointContent | None, source: VaeFile | None
) -> None:
    """Raise UserError if the constants of latents that do not change are not known, or cannot be changed.

    They are those with which diffusion models were trained: images that a user has cannot show them.
    """
    model = config.model
    where = f"--init_from {model.init_from}" if source else "--latent_norm"
    is_known = model.latent_norm or model.scaling_factor is not None
    if content is not None:
        where = f"--resume_from {path}"
        is_known = is_known or content["latent_scaling"] is not None
    if source is not None:
        is_known = is_known or source.constants.is_known
    has_statistics = model.latent_norm or (model.module and '"scaling_factor"' not in model.module)
    if model.scaling_factor is not None and has_statistics:
        raise UserError(f"--scaling_factor {model.scaling_factor:g}: {where} has no place for it: omit it")
    if config.optim.train_part != "decoder" or is_known:
        return
    if source is not None and source.encoder_trained:
        raise UserError(
            f"{where} was saved before its run measured the scaling of its latents, which --train_part "
            "decoder keeps: give the folder vae/ of that run, or export it with --data_path first"
        )
    raise UserError(
        f"{where} does not contain the scaling of its latents, which --train_part decoder keeps: give "
        f"that of its diffusion model ({published_flags()}), or the folder vae/ of that model"
    )


def _find_checkpoint(command: Command) -> Loaded | None:
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


def _stages(
    config: Config, command: Command, content: CheckpointContent | None
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
