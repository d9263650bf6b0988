"""Everything that training changes, in one place, and its form in a checkpoint: plain data and tensors."""

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vae.config.options import Config, LossConfig, OptimConfig
from vae.model.autoencoder import AutoencoderKL
from vae.model.discriminator import Discriminator
from vae.model.initialization import initialize
from vae.step import UpdateState
from vae.training.stages import Position, Stage


@dataclass
class History:
    """What validations have found so far."""

    best: dict[str, float] = field(default_factory=dict)  # metrics of the best validation, with its epoch
    best_checkpoint: str | None = None  # file name of the saved epoch with the best PSNR
    best_checkpoint_psnr: float | None = None
    without_gain: int = 0  # validations since the best one, for --early_stopping
    start_psnr: float | None = None  # dB before the stage's first step; None once a worse one has been said


@dataclass
class TrainingState:
    """Networks, optimizers and running values of a run, on their device."""

    autoencoder: AutoencoderKL
    ema: AutoencoderKL | None
    discriminator: Discriminator | None
    optimizers: list[torch.optim.Optimizer]  # the autoencoder's, then the discriminator's
    update: UpdateState
    running_sq_norms: torch.Tensor  # (2,) of reconstruction and adversarial gradients
    position: Position
    history: History
    fp16: bool  # whether gradients carry a loss scale
    latent_scaling: tuple[float, float] | None = None  # scaling and shift that belong to a frozen encoder

    @property
    def shipped(self) -> AutoencoderKL:
        """The weights that are validated and shipped: the averaged ones where there are any."""
        return self.ema if self.ema is not None else self.autoencoder


def begin_state(config: Config, device: torch.device, fp16: bool) -> TrainingState:
    """The state before the first step: weights drawn from --seed, on `device`."""
    layout = torch.channels_last if config.speed.channels_last else torch.contiguous_format
    autoencoder = AutoencoderKL(config.model)
    initialize(autoencoder, config.model.init, config.run.seed)
    autoencoder.to(device, memory_format=layout)
    if config.optim.train_part == "decoder":
        autoencoder.freeze_encoder()
    discriminator = None
    if config.loss.adversarial_weight > 0:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.run.seed)
            discriminator = Discriminator(config.loss.disc_channels, config.loss.disc_layers)
        discriminator.to(device, memory_format=layout)
    return TrainingState(
        autoencoder=autoencoder,
        ema=copy.deepcopy(autoencoder).requires_grad_(False) if config.optim.ema_decay > 0 else None,
        discriminator=discriminator,
        optimizers=_optimizers(autoencoder, discriminator, config.optim, config.loss),
        update=UpdateState.begin(device, fp16),
        running_sq_norms=torch.zeros(2, device=device),
        position=Position(),
        history=History(),
        fp16=fp16,
    )


def _optimizers(autoencoder, discriminator, optim: OptimConfig, loss: LossConfig):
    def adamw(module, learning_rate):
        betas = (optim.beta1, optim.beta2)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, learning_rate, betas, weight_decay=optim.weight_decay, fused=True)

    found = [adamw(autoencoder, optim.learning_rate)]
    if discriminator is not None:
        found.append(adamw(discriminator, loss.disc_learning_rate))
    return found


def checkpoint_content(
    state: TrainingState, config: dict[str, Any], stages: list[Stage], fingerprint: str
) -> dict[str, Any]:
    """What a checkpoint holds: plain data and tensors only, so that loading it can run no code."""
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
        "position": asdict(state.position),
        "history": asdict(state.history),
        "config": config,
        "stages": [asdict(stage) for stage in stages],
        "data_fingerprint": fingerprint,
        "torch_version": str(torch.__version__),
    }


def restore(state: TrainingState, content: dict[str, Any]) -> None:
    """Put the content of a checkpoint into a state built with the same configuration."""
    state.autoencoder.load_state_dict(content["model"])
    if state.ema is not None:
        state.ema.load_state_dict(content["ema"] or content["model"])
    if state.discriminator is not None and content["discriminator"] is not None:
        state.discriminator.load_state_dict(content["discriminator"])
    for optimizer, saved in zip(state.optimizers, content["optimizers"], strict=False):
        saved["param_groups"] = _own_settings(optimizer, saved["param_groups"])
        optimizer.load_state_dict(saved)
        _take_layout(optimizer)
    device = state.running_sq_norms.device
    for name, value in content["update"].items():
        if name in ("nonfinite_streak", "nonfinite_total") or (state.fp16 and content["fp16"]):
            setattr(state.update, name, value.to(device))  # a loss scale belongs to fp16 alone
    state.running_sq_norms = content["running_sq_norms"].to(device)
    state.latent_scaling = tuple(content["latent_scaling"]) if content.get("latent_scaling") else None
    state.position = Position(**content["position"])
    state.history = History(**content["history"])


def _take_layout(optimizer: torch.optim.Optimizer) -> None:
    """Moments in their parameter's memory layout: --channels_last may differ from the command that saved."""
    for parameter, moments in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = torch.empty_like(parameter).copy_(moments[name])


def _own_settings(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Learning rate, betas and decay of this command, not of the one that saved; parameters as saved."""
    return [
        {**group, "params": old["params"]} for group, old in zip(optimizer.param_groups, saved, strict=True)
    ]
