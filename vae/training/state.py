"""Everything that training changes, and its form in a checkpoint: plain data and tensors."""

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vae.config.options import Config
from vae.interop.checkpoint_file import CheckpointContent, Snapshot
from vae.interop.latent_statistics import LatentConstants
from vae.interop.vae_files import VaeFile, load_weights
from vae.interop.writing import normalize_latents
from vae.model.autoencoder import AutoencoderKL
from vae.model.diffusers_autoencoder import build_autoencoder
from vae.model.discriminator import Discriminator
from vae.model.initialization import initialize, initialize_decoder
from vae.optimizers import Optimizers, build_optimizers
from vae.training.provenance import Identity
from vae.training.stages import Position, Stage, first_stages
from vae.training.validation import History
from vae.update import UpdateState


@dataclass
class TrainingState:
    """Networks, optimizers and running values of a run, on their device, and how far the run is."""

    autoencoder: AutoencoderKL
    ema: AutoencoderKL | None
    discriminator: Discriminator | None
    optimizers: Optimizers
    update: UpdateState
    running_sq_norms: (
        torch.Tensor
    )  # (2,) squared norms of the reconstruction and adversarial gradients (step.py)
    running_moments: torch.Tensor  # (3, Z) of the latents: vae/losses/variance.py
    stages: list[Stage]
    stage: Stage  # the one that trains; after its last step, until the next one begins
    fp16: bool  # whether gradients are multiplied by a loss scale
    overflows_fp16: bool = False  # activations do: the run computes in another precision
    activation_scale: float = 1.0  # with which they do not: vae/model/activation_scale.py
    position: Position = field(default_factory=Position)
    history: History = field(default_factory=History)
    latent_constants: LatentConstants | None = None  # of a frozen encoder from its file, or given ones
    identity: Identity = field(default_factory=Identity)
    # Not in checkpoints: divergences by the first epoch of a stage, and what this command has done.
    divergences_by_stage: dict[int, int] = field(default_factory=dict)
    begun_at: Position = field(default_factory=Position)
    is_changing: bool = False  # within a step's update or a restoration: weights and position do not agree
    validated_step: int = -1  # optimizer step of the last validation
    last_validation: dict[str, float] = field(default_factory=dict)  # metrics
    noise_reported: bool = False  # that the noise of the posterior hides the latents
    rejected: int = 0  # unusable training images of the epoch; each comes once in it
    most_rejected: int = 0  # of one epoch

    @property
    def eval_model(self) -> AutoencoderKL:
        """The weights that are validated and exported: the EMA if there is one."""
        return self.ema if self.ema is not None else self.autoencoder

    @property
    def divergences(self) -> int:
        """The number of divergences of the stage; each one halves its learning rates."""
        return self.divergences_by_stage.get(self.stage.first_epoch, 0)

    def apply_given_scaling(self, config: Config) -> None:
        """Replace the scaling of the latents by that of --scaling_factor, if it is given."""
        model = config.model
        if model.scaling_factor is not None:
            known = self.latent_constants or LatentConstants()
            self.latent_constants = known._replace(
                scaling=model.scaling_factor, shift=model.shift_factor or 0.0
            )

    def advance(self, images: int) -> None:
        """Count an optimizer step of this many images, whose update is complete."""
        self.position.step += 1
        self.position.images_in_epoch += images
        self.position.images += images
        self.is_changing = False

    def leave_fp16(self) -> None:
        """Continue without a loss scale, and also after a resume."""
        self.fp16, self.overflows_fp16 = False, True
        self.update.loss_scale = torch.ones_like(self.update.loss_scale)

    def update_ema(self, decay: float) -> None:
        """Move the EMA weights towards the current weights."""
        if self.ema is None:
            return
        with torch.no_grad():  # the current weights require gradients: the update would extend a graph
            ema: list[torch.Tensor] = list(self.ema.parameters())
            weights: list[torch.Tensor] = list(self.autoencoder.parameters())
            torch._foreach_lerp_(ema, weights, 1 - decay)

    def is_finite(self) -> bool:
        """Whether all weights, moments and running values are finite. This synchronizes the device."""
        networks = filter(None, (self.autoencoder, self.ema, self.discriminator))
        tensors = [parameter.detach() for network in networks for parameter in network.parameters()]
        for optimizer in self.optimizers.all:
            tensors += [moment for values in optimizer.state.values() for moment in values.values()]
        tensors += [self.running_sq_norms, self.running_moments]
        return not (~torch.stack(torch._foreach_norm(tensors, torch.inf)).isfinite()).any()


def begin_state(
    config: Config, device: torch.device, fp16: bool, source: VaeFile | None = None
) -> TrainingState:
    """Build the state before the first step of a new run, on `device`.

    The weights are drawn from --seed, or those of the VAE file of --init_from.
    """
    layout = torch.channels_last if config.speed.channels_last else torch.contiguous_format
    autoencoder = build_autoencoder(config.model)
    has_warm_start = source is None and config.model.family == "kl"
    initialize(autoencoder, config.model.init if has_warm_start else "default", config.run.seed)
    autoencoder.to(device).to(memory_format=layout)
    if config.optim.train_part == "decoder":
        autoencoder.freeze_encoder()
    discriminator = None
    if config.loss.adversarial_weight > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            discriminator = Discriminator(config.loss.disc_channels, config.loss.disc_layers)
        discriminator.to(device).to(memory_format=layout)
    stages = first_stages(config)
    state = TrainingState(
        autoencoder=autoencoder,
        ema=copy.deepcopy(autoencoder).requires_grad_(False) if config.optim.ema_decay > 0 else None,
        discriminator=discriminator,
        optimizers=build_optimizers(autoencoder, discriminator, config.optim, config.loss),
        update=UpdateState.begin(device, fp16),
        running_sq_norms=torch.zeros(2, device=device),
        running_moments=torch.zeros(3, config.model.z_channels, device=device),
        stages=stages,
        stage=stages[0],
        fp16=fp16,
    )
    if source is not None and config.optim.train_part == "decoder" and source.constants.is_known:
        state.latent_constants = source.constants
    state.apply_given_scaling(config)
    if source is not None:
        load_weights(autoencoder, source.weights)
        if not source.has_decoder and config.model.decoder:
            normalize_latents(autoencoder, state.latent_constants)
        elif not source.has_decoder and not config.model.is_tiny:  # whose decoder is no linear codec
            initialize_decoder(autoencoder)
        if state.ema is not None:
            state.ema.load_state_dict(autoencoder.state_dict())
    return state


def checkpoint_content(
    state: TrainingState, config: dict[str, Any], samples: dict[str, Any], begun_from: str
) -> CheckpointContent:
    """Return the content of a checkpoint; the tensors are those of the state, not copies."""
    return {
        **snapshot(state),
        "run": asdict(state.identity),
        "config": config,
        "stages": [asdict(stage) for stage in state.stages],
        "provenance": samples,
        "begun_from": begun_from,
        "torch_version": str(torch.__version__),
    }


def snapshot(state: TrainingState) -> Snapshot:
    """Collect what `restore` needs. The tensors are those of the state, not copies."""
    ema = state.ema
    discriminator = state.discriminator
    constants = state.latent_constants
    return {
        "model": state.autoencoder.state_dict(),
        "ema": ema.state_dict() if ema is not None else None,
        "discriminator": discriminator.state_dict() if discriminator is not None else None,
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers.all],
        "update": asdict(state.update),
        "fp16": state.fp16,
        "overflows_fp16": state.overflows_fp16,
        "activation_scale": state.activation_scale,
        "latent_scaling": list(constants[:2]) if constants else None,
        "latent_channels": constants.channels if constants else None,
        "running_sq_norms": state.running_sq_norms,
        "running_moments": state.running_moments,
        "position": asdict(state.position),
        "history": asdict(state.history),
    }


def restore(state: TrainingState, content: Snapshot) -> None:
    """Load a snapshot, which every checkpoint contains, into a state of the same configuration."""
    state.autoencoder.load_state_dict(content["model"])
    if state.ema is not None:
        state.ema.load_state_dict(content["ema"] or content["model"])
    if state.discriminator is not None and content["discriminator"] is not None:
        state.discriminator.load_state_dict(content["discriminator"])
    of_autoencoder, *of_discriminator = content["optimizers"]
    _restore_optimizer(state.optimizers.autoencoder, of_autoencoder)
    if state.optimizers.discriminator is not None and of_discriminator:
        _restore_optimizer(state.optimizers.discriminator, of_discriminator[0])
    device = state.running_sq_norms.device
    # Copies: a tensor of the content keeps the file mapped, and Windows replaces and removes no mapped file.
    for name, value in content["update"].items():
        if name in ("nonfinite_streak", "nonfinite_total") or (state.fp16 and content["fp16"]):
            setattr(state.update, name, value.to(device, copy=True))  # a loss scale exists in fp16 only
    state.overflows_fp16 |= content["overflows_fp16"]
    state.running_sq_norms = content["running_sq_norms"].to(device, copy=True)
    state.running_moments = content["running_moments"].to(device, copy=True)
    channels = content["latent_channels"] or {}  # none: its file had none
    of_channels = (tuple(channels.get(name, ())) for name in ("latents_mean", "latents_std"))
    scaling = content["latent_scaling"]
    state.latent_constants = LatentConstants(*scaling, *of_channels) if scaling else None
    state.position = Position(**content["position"])
    state.history = History(**content["history"])
    state.validated_step = -1
    state.rejected = 0
    state.last_validation = {}


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load saved moments, and keep the learning rate, betas and decay of this command.

    The moments get the memory layout of their parameter, because --channels_last may have changed.
    Every tensor is a copy: load_state_dict would share those that fit, and steps would change `saved`.
    """
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    saved["param_groups"] = [{**group, "params": old["params"]} for group, old in groups]
    optimizer.load_state_dict(saved)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            values[name] = value.clone() if name == "step" else torch.empty_like(parameter).copy_(value)
