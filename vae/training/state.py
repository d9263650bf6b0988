"""Everything that training changes, and its form in a checkpoint: plain data and tensors."""

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vae.config.options import Config
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.model.initialization import initialize
from vae.optimizers import build_optimizers
from vae.step import UpdateState
from vae.training.checkpoints.lineage import Lineage
from vae.training.checkpoints.older import KL_UNIT
from vae.training.recovery.stability import Stability
from vae.training.stages import Position, Stage
from vae.training.validation.history import History


@dataclass
class TrainingState:
    """Networks, optimizers and running values of a run, on their device."""

    autoencoder: AutoencoderKL
    ema: AutoencoderKL | None
    discriminator: Discriminator | None
    optimizers: list[torch.optim.Optimizer]  # the autoencoder's, then the discriminator's
    update: UpdateState
    running_sq_norms: torch.Tensor  # (2,) squared norms of the reconstruction and adversarial gradients
    stages: list[Stage]
    position: Position
    history: History
    fp16: bool  # whether gradients are multiplied by a loss scale
    latent_scaling: tuple[float, float] | None = None  # scaling and shift of a frozen encoder
    lineage: Lineage = field(default_factory=Lineage.new)
    # By the first epoch of the stage: for each rollback, a limit of the learning rate (schedule.lowered).
    rollbacks: dict[int, list[float]] = field(default_factory=dict)
    # Not in checkpoints: what this command has done.
    begun_at: Position = field(default_factory=Position)
    stability: Stability = field(default_factory=Stability)
    is_changing: bool = False  # within a step's update or a restoration: weights and position do not agree
    saved_step: int = -1  # optimizer step of the last checkpoint
    validated_step: int = -1  # optimizer step of the last validation
    noise_reported: bool = False  # that the posterior's noise hides the latents
    last_validation: dict[str, float] = field(default_factory=dict)  # metrics
    rejected: set[str] = field(default_factory=set)  # names of unusable training image files

    @property
    def eval_model(self) -> AutoencoderKL:
        """The weights that are validated and exported: the EMA if there is one."""
        return self.ema if self.ema is not None else self.autoencoder

    def update_ema(self, decay: float) -> None:
        """Move the EMA weights towards the current weights."""
        if self.ema is None:
            return
        with torch.no_grad():  # the current weights require gradients: the update would extend a graph
            ema: list[torch.Tensor] = list(self.ema.parameters())
            weights: list[torch.Tensor] = list(self.autoencoder.parameters())
            torch._foreach_lerp_(ema, weights, 1 - decay)


def begin_state(config: Config, device: torch.device, fp16: bool) -> TrainingState:
    """The state before the first step, with weights drawn from --seed, on `device`. It has no stages yet."""
    layout = torch.channels_last if config.speed.channels_last else torch.contiguous_format
    autoencoder = AutoencoderKL(config.model)
    initialize(autoencoder, config.model.init, config.run.seed)
    autoencoder.to(device).to(memory_format=layout)
    if config.optim.train_part == "decoder":
        autoencoder.freeze_encoder()
    discriminator = None
    if config.loss.adversarial_weight > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            discriminator = Discriminator(config.loss.disc_channels, config.loss.disc_layers)
        discriminator.to(device).to(memory_format=layout)
    return TrainingState(
        autoencoder=autoencoder,
        ema=copy.deepcopy(autoencoder).requires_grad_(False) if config.optim.ema_decay > 0 else None,
        discriminator=discriminator,
        optimizers=build_optimizers(autoencoder, discriminator, config.optim, config.loss),
        update=UpdateState.begin(device, fp16),
        running_sq_norms=torch.zeros(2, device=device),
        stages=[],
        position=Position(),
        history=History(),
        fp16=fp16,
    )


def is_finite(state: TrainingState) -> bool:
    """Whether all weights and moments are finite. This synchronizes the device."""
    networks = filter(None, (state.autoencoder, state.ema, state.discriminator))
    tensors = [parameter.detach() for network in networks for parameter in network.parameters()]
    for optimizer in state.optimizers:
        tensors += [moment for values in optimizer.state.values() for moment in values.values()]
    return not (~torch.stack(torch._foreach_norm(tensors, torch.inf)).isfinite()).any()


def checkpoint_content(
    state: TrainingState, config: dict[str, Any], fingerprint: str, contract: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a checkpoint: plain data and tensors only, so that loading it runs no code."""
    ema, discriminator = state.ema, state.discriminator
    return {
        "model": state.autoencoder.state_dict(),
        "ema": ema.state_dict() if ema is not None else None,
        "discriminator": discriminator.state_dict() if discriminator is not None else None,
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "update": asdict(state.update),
        "fp16": state.fp16,
        "latent_scaling": list(state.latent_scaling) if state.latent_scaling else None,
        "running_sq_norms": state.running_sq_norms,
        "run": state.lineage.plain(),
        "rollbacks": copy.deepcopy(state.rollbacks),
        "position": asdict(state.position),
        "history": asdict(state.history),
        "config": config,
        "stages": [asdict(stage) for stage in state.stages],
        "data_fingerprint": fingerprint,
        "contract": contract,
        "kl_unit": KL_UNIT,
        "torch_version": str(torch.__version__),
    }


def restore(state: TrainingState, content: dict[str, Any]) -> None:
    """Load the content of a checkpoint into a state of the same configuration, without stages and lineage."""
    state.autoencoder.load_state_dict(content["model"])
    if state.ema is not None:
        state.ema.load_state_dict(content["ema"] or content["model"])
    if state.discriminator is not None and content["discriminator"] is not None:
        state.discriminator.load_state_dict(content["discriminator"])
    for optimizer, saved in zip(state.optimizers, content["optimizers"], strict=False):
        saved["param_groups"] = _current_settings(optimizer, saved["param_groups"])
        optimizer.load_state_dict(saved)
        _match_layout(optimizer)
    device = state.running_sq_norms.device
    for name, value in content["update"].items():
        if name in ("nonfinite_streak", "nonfinite_total") or (state.fp16 and content["fp16"]):
            setattr(state.update, name, value.to(device))  # a loss scale exists in fp16 only
    state.running_sq_norms = content["running_sq_norms"].to(device)
    state.latent_scaling = tuple(content["latent_scaling"]) if content.get("latent_scaling") else None
    state.rollbacks = copy.deepcopy(content.get("rollbacks", {}))
    state.position = Position(**content["position"])
    state.history = History(**content["history"])


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Store moments in their parameter's memory layout: --channels_last may have changed since the save.

    Every tensor is a copy: load_state_dict would share those that fit, and steps would change the content.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            values[name] = value.clone() if name == "step" else torch.empty_like(parameter).copy_(value)


def _current_settings(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Param groups with this command's learning rate, betas and decay, and the saved parameter indices."""
    return [
        {**group, "params": old["params"]} for group, old in zip(optimizer.param_groups, saved, strict=True)
    ]
