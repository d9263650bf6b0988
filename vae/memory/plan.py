"""The memory of one step, predicted by running it on the meta device, and the micro-batch it allows."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vae.config.errors import UserError
from vae.config.options import LossConfig, ModelConfig
from vae.losses.perceptual import build_perceptual
from vae.memory.live_bytes import LiveBytes
from vae.model.autoencoder import AutoencoderKL, downsampling
from vae.model.discriminator import Discriminator
from vae.step import Networks, StepInputs, compute_gradients

GIB = 2**30
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
    averaged: bool  # a second copy of the weights for validation
    processes: int = 1  # several hold the gradients once more while they sum them


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step at a micro-batch: what stays between steps, and the most on top of it within one."""

    micro_batch: int
    resident: int
    working: int

    @property
    def total(self) -> int:
        return self.resident + self.working


def step_memory(spec: StepSpec, micro_batch: int) -> StepMemory:
    """Predicted bytes of the step, by running its real code on tensors without data."""
    micro_batch = min(micro_batch, spec.batch)
    return StepMemory(micro_batch, *_count(spec, micro_batch))


@lru_cache(maxsize=64)
def _count(spec: StepSpec, micro_batch: int) -> tuple[int, int]:
    meta = torch.device("meta")
    with meta:
        autoencoder = AutoencoderKL(spec.model)
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
    trained = weights + (_bytes(discriminator) if discriminator else 0)
    resident = trained * (1 + ADAM_COPIES) + (weights if spec.averaged else 0)
    resident += trained if spec.processes > 1 else 0
    resident += _bytes(perceptual) if perceptual is not None else 0
    resident += (inputs.images.nbytes + inputs.noise.nbytes) // images * spec.batch
    return resident, working


def _bytes(module: torch.nn.Module) -> int:
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def choose_micro_batch(spec: StepSpec, available: int, wanted: str) -> StepMemory:
    """The step's memory at the micro-batch `wanted` (a number), or for "auto" at the largest that fits.

    Raises UserError where not even one image fits into `available` bytes.
    """
    if wanted != "auto":
        return step_memory(spec, int(wanted))
    one = step_memory(spec, 1)
    if one.total > available:
        raise UserError(
            f"--image_size {spec.image_size} needs {one.total / GIB:.1f} GiB for a single image, and "
            f"{available / GIB:.1f} GiB may be used: lower --image_size, or try it with --micro_batch_size 1"
        )
    whole = step_memory(spec, spec.batch)  # alone in that no pass finds gradients of an earlier one
    if whole.total <= available or spec.batch <= 2:
        return whole if whole.total <= available else one
    per_image = max(1, step_memory(spec, 2).total - one.total)
    guess = 1 + (available - one.total) // per_image
    best = step_memory(spec, min(spec.batch - 1, guess))
    while best.total > available:
        best = step_memory(spec, best.micro_batch - 1)
    while best.micro_batch < spec.batch - 1:
        larger = step_memory(spec, best.micro_batch + 1)
        if larger.total > available:
            break
        best = larger
    return best
