"""The memory of one step, predicted by running it on the meta device; the rung and micro-batch it allows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from vae.config.errors import UserError
from vae.config.options import RECOMPUTE, LossConfig, ModelConfig
from vae.host import GIB
from vae.losses.perceptual import build_perceptual
from vae.memory.live_bytes import LiveBytes
from vae.model.autoencoder import AutoencoderKL, downsampling
from vae.model.discriminator import Discriminator
from vae.model.recompute import set_recompute
from vae.step import Networks, StepInputs, compute_gradients

ADAM_COPIES = 2  # both moments, in the parameters' fp32


@dataclass(frozen=True)
class StepSpec:
    """All that decides how much memory one step takes, but the micro-batch."""

    model: ModelConfig
    loss: LossConfig
    image_size: int
    batch: int  # images per step of one process, accumulation included
    dtype: torch.dtype
    channels_last: bool
    ema: bool  # a second copy of the weights for validation
    processes: int = 1  # several hold the gradients once more while they sum them
    train_part: str = "all"  # or "decoder", whose encoder keeps no activations, gradients or moments
    recompute: str = "none"  # rung of the ladder in vae.model.recompute
    reserve: int = 0  # bytes beside all tensors: available.reserve_bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step at a rung and micro-batch: what stays between steps, and the most on top of it."""

    recompute: str
    micro_batch: int
    resident: int  # weights, their average, AdamW's moments, LPIPS, the batch
    working: int  # gradients, activations and all else that lives for a part of the step
    reserve: int
    flops: float  # floating-point operations of one image, forward and backward, LPIPS included

    @property
    def total(self) -> int:
        return self.resident + self.working + self.reserve


def step_memory(spec: StepSpec, micro_batch: int) -> StepMemory:
    """Predicted bytes and arithmetic of the step, by running its real code on tensors without data."""
    micro_batch = min(micro_batch, spec.batch)
    resident, working, flops = _count(replace(spec, reserve=0), micro_batch)
    return StepMemory(spec.recompute, micro_batch, resident, working, spec.reserve, flops)


@lru_cache(maxsize=64)
def _count(spec: StepSpec, micro_batch: int) -> tuple[int, int, float]:
    meta = torch.device("meta")
    with meta:
        autoencoder = AutoencoderKL(spec.model)
        set_recompute(autoencoder, spec.recompute)
        if spec.train_part == "decoder":
            autoencoder.freeze_encoder()
        adversarial = spec.loss.adversarial_weight > 0
        discriminator = None
        if adversarial:
            discriminator = Discriminator(spec.loss.disc_channels, spec.loss.disc_layers)
    perceptual = None
    if spec.loss.perceptual_weight > 0:
        net = "vgg" if spec.loss.perceptual_net == "random" else spec.loss.perceptual_net
        perceptual = build_perceptual(net, None, spec.dtype, meta)
    networks = Networks(autoencoder, discriminator, perceptual, spec.dtype, spec.channels_last)
    passes = min(2, -(-spec.batch // micro_batch))  # the second pass already carries whole gradients
    images = micro_batch * passes
    latent = spec.image_size // downsampling(spec.model)
    inputs = StepInputs(
        images=torch.empty(images, 3, spec.image_size, spec.image_size, dtype=torch.uint8, device=meta),
        noise=torch.empty(images, spec.model.z_channels, latent, latent, device=meta),
        image_share=1.0,
        loss_scale=torch.ones((), device=meta),
        adversarial_factor=torch.ones((), device=meta) if adversarial else None,
    )
    with LiveBytes() as counter:
        compute_gradients(networks, inputs, [micro_batch] * passes, spec.loss)
    working = counter.peak
    if adversarial:  # the discriminator's block runs last, on the reconstructions of all passes
        pixels = inputs.images.numel() // images * spec.dtype.itemsize
        working += pixels * max(0, spec.batch - images)
    weights = _bytes(autoencoder)
    others = _bytes(discriminator) if discriminator else 0
    trained = others + sum(p.nbytes for p in autoencoder.parameters() if p.requires_grad)
    resident = weights + others + trained * ADAM_COPIES + (weights if spec.ema else 0)
    resident += trained if spec.processes > 1 else 0
    resident += _bytes(perceptual) if perceptual is not None else 0
    resident += (inputs.images.nbytes + inputs.noise.nbytes) // images * spec.batch
    return resident, working, counter.flops / images


def _bytes(module: torch.nn.Module) -> int:
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def choose_step(spec: StepSpec, available: int, micro_batch: str, recompute: str) -> StepMemory:
    """The step's memory at the rung and micro-batch that are asked for, or found where they are "auto".

    auto is the fastest rung at which the passes asked for, or else single images, fit into `available`
    bytes, and then the largest micro-batch. A number is taken as it is. Raises UserError where not even one
    image fits. `spec.recompute` is not read.
    """
    best = fastest_rung(spec, available, 1 if micro_batch == "auto" else int(micro_batch), recompute)
    if micro_batch != "auto":
        return best
    if best.total > available:
        raise _too_large(spec, best, available, recompute)
    return _largest_micro_batch(replace(spec, recompute=best.recompute), available)


def fastest_rung(spec: StepSpec, available: int, micro_batch: int, recompute: str) -> StepMemory:
    """The step at the fastest rung that fits, or the smallest where none does; `recompute`: auto or one."""
    found = []
    for rung in RECOMPUTE if recompute == "auto" else (recompute,):
        found.append(step_memory(replace(spec, recompute=rung), micro_batch))
        if found[-1].total <= available:
            return found[-1]
    return min(found, key=lambda memory: memory.total)


def _too_large(spec: StepSpec, best: StepMemory, available: int, recompute: str) -> UserError:
    remedy = "lower --image_size" if recompute in ("auto", RECOMPUTE[-1]) else "take --recompute auto"
    return UserError(
        f"--image_size {spec.image_size} needs {best.total / GIB:.1f} GiB for a single image with "
        f"--recompute {best.recompute}, and {available / GIB:.1f} GiB may be used: {remedy}, or try it with "
        "--micro_batch_size 1"
    )


def _largest_micro_batch(spec: StepSpec, available: int) -> StepMemory:
    """The most images per pass that fit, of which one does."""
    whole = step_memory(spec, spec.batch)  # alone in that no pass finds gradients of an earlier one
    if whole.total <= available:
        return whole
    most = _largest(lambda micro_batch: step_memory(spec, micro_batch).total, available, spec.batch)
    return step_memory(spec, most)


def _largest(total: Callable[[int], int], available: int, limit: int) -> int:
    """The largest count from 1 up to below `limit` whose total fits, of which 1 does.

    Totals are a straight line but for bends where another moment of the step becomes the fullest: each
    guess lies on the line through what is counted already, so four counts are the rule.
    """
    fits, too_many = 1, limit
    while too_many - fits > 1:
        other = too_many if too_many < limit else fits + 1
        slope = max(1, (total(other) - total(fits)) // (other - fits))
        guess = fits + (available - total(fits)) // slope
        guess = min(max(guess, fits + 1), too_many - 1)
        if total(guess) <= available:
            fits = guess
        else:
            too_many = guess
    return fits
