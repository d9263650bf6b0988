"""From given options to a run that is ready to train: everything is checked before anything is written."""

import hashlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vae.config.errors import DataError, UserError
from vae.config.options import Config
from vae.config.recipes import recipe_values
from vae.config.resolve import check_discriminator, check_image_size, check_shape, resolve
from vae.data.dataset import FolderDataset
from vae.data.probing import probe
from vae.data.sampling import steps_per_epoch
from vae.data.workers import resolve_num_workers
from vae.files import nearest_existing
from vae.gpus import CPU_SETTINGS, match_card
from vae.host import GIB
from vae.interop.fitting import check_fit, load_weights
from vae.interop.vae_files import VaeFile, read_vae
from vae.losses.perceptual import build_perceptual
from vae.losses.trunk_weights import find_trunk_weights
from vae.model.recompute import set_recompute
from vae.step import Networks
from vae.training.checkpoints import (
    folders_of_runs,
    latest_command,
    list_checkpoints,
    load_named,
    load_newest,
)
from vae.training.datasets import choose_images, train_dataset
from vae.training.distributed import Processes
from vae.training.logbook import METRICS_NAME, say
from vae.training.precision import can_compile, compile_in_place, compute_dtype, set_backends
from vae.training.stages import Position, Stage, first_stages, resumed_stages
from vae.training.state import TrainingState, begin_state, restore
from vae.training.validation_set import Held


@dataclass
class Run:
    """A run that is ready to train."""

    config: Config
    stages: list[Stage]
    processes: Processes
    state: TrainingState
    networks: Networks
    train_names: list[str]
    held: Held | None
    fingerprint: str
    resumed_from: Path | None
    compiled: bool
    num_workers: int
    rejected: set[str] = field(default_factory=set)
    recompute: str = "none"  # both set when a stage begins, and lowered when memory runs out
    micro_batch: int = 0
    saved_step: int = -1  # optimizer step of the newest checkpoint written by this command
    validated_step: int = -1  # and of its newest validation
    newest: dict[str, float] = field(default_factory=dict)  # the metrics of that validation

    @property
    def output_dir(self) -> Path:
        return Path(self.config.run.output_dir)

    @property
    def fp16(self) -> bool:
        return self.networks.dtype == torch.float16

    def use(self, recompute: str, micro_batch: int) -> None:
        """Take the steps to come at a rung of the ladder, in passes of `micro_batch` images."""
        self.recompute, self.micro_batch = recompute, micro_batch
        set_recompute(self.state.autoencoder, recompute)

    def local_batch(self, stage: Stage) -> int:
        """Indices of one optimizer step of this process."""
        return stage.batch_size * self.config.run.accumulation_steps

    def images_per_step(self, stage: Stage) -> int:
        """Indices of one optimizer step over all processes."""
        return self.local_batch(stage) * self.processes.world

    def steps_per_epoch(self, stage: Stage) -> int:
        """Optimizer steps of one epoch of `stage`."""
        return steps_per_epoch(len(self.train_names), self.local_batch(stage), self.processes.world)

    def stage_progress(self, stage: Stage) -> tuple[int, int]:
        """Optimizer steps of `stage` that are done, and all of them."""
        per_epoch, position = self.steps_per_epoch(stage), self.state.position
        done = (position.epoch - stage.first_epoch) * per_epoch
        done += position.images_in_epoch // self.images_per_step(stage)
        return done, stage.num_epochs * per_epoch

    def train_dataset(self, stage: Stage) -> FolderDataset:
        """The training crops of `stage`."""
        return train_dataset(self.config, self.train_names, stage.image_size)


def prepare_run(given: dict[str, Any], processes: Processes) -> Run:
    """Check everything and build the run; UserError, with nothing written, where something is wrong."""
    tell = say if processes.is_main else lambda _text: None
    given, found = _find_checkpoint(given, tell)
    path, content = found if found else (None, None)
    config = _resolve(given, content, processes.device)
    config, source = _existing_vae(config, given)
    _check_output(config, path, latest=given.get("resume_from") == "latest")
    stages, position = _stages(config, given, content, tell)
    dtype = compute_dtype(config.speed, processes.device)
    train_names, held = choose_images(config, given)
    _check_stages(config, stages, position, train_names, processes)
    set_backends(config.speed)
    state = _build_state(config, processes, dtype, source)
    perceptual = _perceptual(config, processes, dtype)
    networks, compiled = _networks(config, processes, state, perceptual, dtype, tell)
    fingerprint = hashlib.sha256("\n".join(train_names).encode("utf-8", "surrogateescape")).hexdigest()
    if content:
        restore(state, content)
        state.position = position
        if content["data_fingerprint"] != fingerprint:
            tell("WARNING: the training images are not those of the checkpoint: their order differs now")
    return Run(
        config=config,
        stages=stages,
        processes=processes,
        state=state,
        networks=networks,
        train_names=train_names,
        held=held,
        fingerprint=fingerprint,
        resumed_from=path,
        compiled=compiled,
        num_workers=resolve_num_workers(config.data.num_workers, processes_here=processes.on_this_host),
    )


def _existing_vae(config: Config, given: dict[str, Any]) -> tuple[Config, VaeFile | None]:
    """The VAE that --init_from names, if it does, and the configuration with its shape."""
    if not config.model.init_from:
        return config, None
    file = read_vae(Path(config.model.init_from))
    shape = {"norm_groups": config.model.norm_groups, **file.shape}
    check_shape(given, shape, "the file of --init_from")
    shape["channels"] = tuple(shape["channels"])
    model = replace(config.model, **shape)
    check_fit(model, file.weights, f"--init_from {config.model.init_from}")
    return replace(config, model=model), file


def _stages(config: Config, given: dict[str, Any], content: dict[str, Any] | None, tell):
    """Stages of the run and the position it begins or goes on at."""
    if content is None:
        return first_stages(config), Position()
    if given.get("profile"):
        tell(f"note: --profile {given['profile']} does not change a run that goes on: give flags for that")
    saved = [Stage(**stage) for stage in content["stages"]]
    return resumed_stages(saved, Position(**content["position"]), config, given)


def _find_checkpoint(given, tell):
    """The checkpoint that --resume_from names, and `given` with the output folder it implies."""
    wanted = given.get("resume_from")
    if wanted is None:
        return given, None
    if wanted == "latest":
        folder = Path(given.get("output_dir", Config().run.output_dir))
        found = load_newest(folder, tell) if folder.is_dir() else None
        if found is None:
            _no_checkpoint_yet(folder, "output_dir" in given, tell)
        return given, found
    path, content = load_named(Path(wanted), tell)
    return {"output_dir": str(path.parent), **given}, (path, content)


def _no_checkpoint_yet(folder: Path, named: bool, tell) -> None:
    """Say that a new run begins, as restart loops want it; UserError where another folder is surely meant."""
    inside = folders_of_runs(folder)
    shown = ", ".join(map(str, inside[:3])) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
    if inside and not named:
        raise UserError(
            f"--resume_from latest: {folder} holds no checkpoint, but {shown} "
            f"{'does' if len(inside) == 1 else 'do'}: go on with: {latest_command(inside[0])}"
        )
    tell(
        f"--resume_from latest: {folder} holds no checkpoint yet, so a new run begins"
        + (f" (there are checkpoints in {shown})" if inside else "")
    )


def _resolve(given: dict[str, Any], content: dict[str, Any] | None, device: torch.device) -> Config:
    name = given.get("profile")
    profile = recipe_values(name, has_gpu=device.type == "cuda") if name else None
    card = CPU_SETTINGS
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found = match_card(facts.name, facts.total_memory / GIB)
        card = found.settings if found else {}
    return resolve(given, content["config"] if content else None, profile, card)


def _check_output(config: Config, resumed_from: Path | None, latest: bool) -> None:
    """Raise UserError where the output folder cannot be written or holds another run.

    With --resume_from latest records without a checkpoint are those of this run, stopped before it saved one.
    """
    folder = Path(config.run.output_dir)
    nearest = nearest_existing(folder)
    if not nearest.is_dir():
        where = "is a file" if nearest == folder else f"lies in {nearest}, which is a file"
        raise UserError(f"--output_dir {folder} {where}: name a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(
            f"--output_dir {folder} cannot be written ({nearest}: {error.strerror}): "
            "mend its permissions or name another folder"
        ) from None
    if resumed_from and resumed_from.parent.resolve() == folder.resolve():
        return
    if list_checkpoints(folder) or (not latest and (folder / METRICS_NAME).exists()):
        raise UserError(
            f"--output_dir {folder} holds another run: name a new folder, or go on with it: "
            f"{latest_command(folder)}"
        )


def _check_stages(config, stages, position, train_names, processes) -> None:
    """Raise UserError where a stage to come cannot make a single step."""
    if not train_names:
        raise DataError(
            f"--data_path {config.data.data_path} leaves no image to train on after --val_split "
            f"{config.data.val_split}: add images, or use --val_split 0"
        )
    for stage in stages:
        if stage.end_epoch <= position.epoch:
            continue
        check_image_size(stage.image_size, config.model)
        check_discriminator(stage.image_size, config.loss)
        step_images = stage.batch_size * config.run.accumulation_steps * processes.world
        if len(train_names) < step_images:
            factors = f"{config.run.accumulation_steps} accumulation x {processes.world} processes"
            raise DataError(
                f"--batch_size {stage.batch_size} (x {factors}) is more than the {len(train_names)} training "
                "images: lower --batch_size or add images"
            )
        probe(train_dataset(config, train_names, stage.image_size))


def _perceptual(config: Config, processes: Processes, dtype: torch.dtype):
    """LPIPS where it is in the loss; its weights are fetched by one process and then found by all."""
    loss = config.loss
    if loss.perceptual_weight == 0:
        return None
    if loss.perceptual_net != "random":
        if processes.is_main:
            find_trunk_weights(loss.perceptual_net, loss.perceptual_weights)
        processes.wait()
    elif processes.is_main:
        say("WARNING: --perceptual_net random: LPIPS has random weights; its values compare with no other")
    return build_perceptual(loss.perceptual_net, loss.perceptual_weights, dtype, processes.device)


def _build_state(config, processes, dtype, source: VaeFile | None) -> TrainingState:
    state = begin_state(config, processes.device, fp16=dtype == torch.float16)
    if source is not None:
        load_weights(state.autoencoder, source.weights)
        if state.ema is not None:
            state.ema.load_state_dict(state.autoencoder.state_dict())
        if config.optim.train_part == "decoder" and source.scaling_factor is not None:
            state.latent_scaling = source.scaling_factor, source.shift_factor
    return state


def _networks(
    config: Config, processes: Processes, state: TrainingState, perceptual, dtype: torch.dtype, tell
) -> tuple[Networks, bool]:
    """What a step runs, compiled where that is asked for and can be, and whether it is."""
    reason = can_compile(processes.device) if config.speed.use_torch_compile else ""
    if reason:
        tell(f"--use_torch_compile: {reason}; training goes on without it, only slower")
    compiled = reason is None
    if compiled:
        for module in filter(None, (state.autoencoder, state.discriminator, perceptual)):
            compile_in_place(module)
    discriminator = processes.wrap(state.discriminator) if state.discriminator is not None else None
    networks = Networks(
        processes.wrap(state.autoencoder), discriminator, perceptual, dtype, config.speed.channels_last
    )
    return networks, compiled
