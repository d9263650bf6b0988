"""The memory of one step, predicted on the meta device, and the recompute level and micro-batch that fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count

import torch

from vae.config.model_options import ModelConfig
from vae.config.options import RECOMPUTE, Config, LossConfig
from vae.interop.teacher import terms_of
from vae.losses.terms import LossTerms
from vae.losses.variance import needs_statistics
from vae.memory.available import CUDA_RESERVE
from vae.memory.live_bytes import CUBLAS_WORKSPACE, LiveBytes, reserved_bytes
from vae.model.activation_scale import scale_activations
from vae.model.autoencoder import set_recompute
from vae.model.diffusers_autoencoder import build_autoencoder
from vae.model.discriminator import Discriminator
from vae.optimizers import muon_update, parameter_groups
from vae.step import Networks, StepInputs, compute_gradients, trained_networks
from vae.system.errors import UserError
from vae.system.host import GIB

META = torch.device("meta")
ADAM_COPIES = 2  # both moments, in the parameters' fp32
MUON_COPIES = 1
# By --gradient_dtype: DistributedDataParallel's buckets, and those rounded to bf16 of two steps, because
# PyTorch's thread for NCCL frees them up to 0.1 s later
BUCKET_COPIES = {"fp32": 1.0, "bf16": 2.0}
# Of the features of a convolution: for more elements than 32-bit integers count, cuDNN offers 10 to 16 plans
# instead of about 40 (pytorch issues 141831 and 117736).
MAX_FEATURES = 2**31 - 1


@dataclass(frozen=True)
class StepSpec:
    """Everything that decides the memory of one step, except the micro-batch."""

    model: ModelConfig
    loss: LossConfig
    image_size: int
    batch: int  # images per step of one process, accumulation included
    dtype: torch.dtype
    channels_last: bool
    ema: bool  # a second copy of the weights for validation
    gradient_copies: float = 0.0  # that several processes need to sum the gradients
    train_part: str = "all"  # "decoder": the encoder has no stored activations, gradients or moments
    optimizer: str = "adamw"  # "muon": one moment of the hidden weights, and scratch memory of the update
    recompute: str = "none"  # recompute level, see vae.model.autoencoder
    activation_scale: float = 1.0  # another one: the step keeps scaled copies of weights
    reserve: int | None = 0  # bytes in addition to all tensors, or None on a card: reserve_bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step at a recompute level and micro-batch."""

    recompute: str
    micro_batch: int
    resident: int  # between steps: weights, EMA weights, moments, LPIPS, the batch
    working: int  # the peak within the step on top of them: gradients, activations and temporaries
    reserve: int
    flops: float  # floating-point operations of one image, forward and backward, LPIPS included
    reserved: int = 0  # on a card: what PyTorch reserves for the tensors if there is no limit
    features: int = 0  # elements of the largest features of a convolution, of one image

    @property
    def max_micro_batch(self) -> int:
        """The most images that MAX_FEATURES allows; 0 if one image exceeds it."""
        return MAX_FEATURES // max(1, self.features)

    @property
    def total(self) -> int:
        return self.resident + self.working + self.reserve

    def predicted(self, available: int) -> int:
        """On a card, what PyTorch reserves: it frees unused memory before it exceeds `available`.

        On a CPU, and if more than `available` is needed: `total`.
        """
        return min(self.reserved, available) if self.reserved and self.total <= available else self.total


def stage_spec(
    config: Config,
    image_size: int,
    batch_size: int,
    dtype: torch.dtype,
    reserve: int | None,
    world_size: int = 1,
) -> StepSpec:
    """The spec of a stage's step: crops of `image_size` px, `batch_size` of them per batch.

    `reserve`: of `reserve_bytes`.
    """
    return StepSpec(
        model=config.model,
        loss=config.loss,
        image_size=image_size,
        batch=batch_size * config.run.accumulation_steps,
        dtype=dtype,
        channels_last=config.speed.channels_last,
        ema=config.optim.ema_decay > 0,
        gradient_copies=0.0 if world_size == 1 else BUCKET_COPIES[config.speed.gradient_dtype],
        train_part=config.optim.train_part,
        optimizer=config.optim.optimizer,
        reserve=reserve,
    )


def reserve_bytes(config: Config, *, is_gpu: bool) -> int | None:
    """Bytes that a run needs in main memory in addition to the tensors of a step; None on a card."""
    if is_gpu:
        return None
    return checkpoint_bytes(config) if config.run.background_save else 0


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint's tensors, which --background_save copies into main memory."""
    spec = stage_spec(config, 0, 0, torch.float32, 0)
    return _resident_bytes(replace(meta_networks(spec), terms=LossTerms()), spec)


def step_memory(spec: StepSpec, micro_batch: int) -> StepMemory:
    """Predicted bytes and FLOPs of the step: its real code runs on tensors without data."""
    micro_batch = min(micro_batch, spec.batch)
    counted = count_step(replace(spec, reserve=0), micro_batch)  # it ignores the reserve
    resident, working, reserved, flops, features = counted
    on_card = spec.reserve is None
    reserve = CUDA_RESERVE if spec.reserve is None else spec.reserve
    return StepMemory(
        spec.recompute,
        micro_batch,
        resident,
        working,
        reserve,
        flops,
        reserved=reserved if on_card else 0,
        features=features,
    )


@lru_cache(maxsize=64)
def count_step(spec: StepSpec, micro_batch: int) -> tuple[int, int, int, float, int]:
    """Resident, working and reserved bytes; per image FLOPs and the largest features of a convolution.

    Cached, because a search repeats its questions.
    """
    networks = meta_networks(spec)
    passes = min(2, -(-spec.batch // micro_batch))  # later passes are like the second: all gradients exist
    images = micro_batch * passes
    inputs = zero_inputs(spec, images, META)
    if spec.gradient_copies:
        _move_to_buckets(networks, passes)
    with LiveBytes(within_kernels=bool(networks.autoencoder.has_torch_layers)) as counter:
        compute_gradients(networks, inputs, [micro_batch] * passes)
    others = 0
    if networks.discriminator is not None:  # it runs last, so the reconstructions of all passes are kept
        pixels = inputs.images.numel() // images * spec.dtype.itemsize
        others = pixels * max(0, spec.batch - images)
    working = max(counter.peak + others, counter.current + _update_bytes(networks, spec))
    resident = _resident_bytes(networks, spec)
    resident += (inputs.images.nbytes + inputs.noise.nbytes) // images * spec.batch
    moments = MUON_COPIES if spec.optimizer == "muon" else ADAM_COPIES
    reserved = reserved_bytes(counter.events, resident + others, moments)
    reserved = max(reserved, resident + working + CUBLAS_WORKSPACE)
    return resident, working, reserved, counter.flops / images, counter.largest_features // micro_batch


def _move_to_buckets(networks: Networks, passes: int) -> None:
    """Replace each gradient in the last pass, as DistributedDataParallel, by a part of its buckets."""

    def moved(calls: Iterator[int], part: torch.Tensor, parameter: torch.Tensor) -> None:
        if next(calls) == passes:
            parameter.grad = part

    for network in trained_networks(networks):
        for parameter in filter(lambda p: p.requires_grad, network.parameters()):
            parameter.register_post_accumulate_grad_hook(
                partial(moved, count(1), torch.empty_like(parameter))
            )


def _update_bytes(networks: Networks, spec: StepSpec) -> int:
    """Scratch memory of the update; that of AdamW is negligible."""
    if spec.optimizer != "muon":
        return 0
    *_, hidden = parameter_groups(networks.autoencoder, "muon")
    with LiveBytes() as counter:
        muon_update(hidden, [torch.empty_like(weight) for weight in hidden], 1.0, 1.0)
    return counter.peak - sum(weight.nbytes for weight in hidden)  # the moments are resident


def meta_networks(spec: StepSpec) -> Networks:
    discriminator = None
    with META:
        autoencoder = build_autoencoder(spec.model)
        if spec.channels_last and autoencoder.has_torch_layers:
            autoencoder.to(memory_format=torch.channels_last)
        set_recompute(autoencoder, spec.recompute)
        if spec.train_part == "decoder":
            autoencoder.freeze_encoder()
        if spec.loss.adversarial_weight > 0:
            discriminator = Discriminator(spec.loss.disc_channels, spec.loss.disc_layers)
    scale_activations(autoencoder, spec.activation_scale)
    terms = terms_of(spec.loss, spec.model.has_posterior, spec.dtype, META)
    return Networks(autoencoder, discriminator, terms, spec.dtype, spec.channels_last)


def zero_inputs(spec: StepSpec, images: int, device: torch.device | str) -> StepInputs:
    """The inputs of a step with so many images, all zero."""
    latent, loss, z_channels = spec.image_size // spec.model.downsampling, spec.loss, spec.model.z_channels
    zeros = partial(torch.zeros, device=device)
    return StepInputs(
        images=zeros(images, spec.model.image_channels, spec.image_size, spec.image_size, dtype=torch.uint8),
        noise=zeros(images, z_channels, latent, latent),
        image_share=1 / images,
        loss_scale=zeros(()),
        adversarial_factor=zeros(()) if loss.adversarial_weight > 0 else None,
        running_moments=zeros(3, z_channels) if needs_statistics(loss) else None,
    )


def _resident_bytes(networks: Networks, spec: StepSpec) -> int:
    """Bytes of weights, EMA weights, moments and the loss' networks."""
    weights = _bytes(networks.autoencoder)
    discriminator = _bytes(networks.discriminator)
    others, ends, *hidden = parameter_groups(networks.autoencoder, spec.optimizer)
    of_adamw = discriminator + sum(parameter.nbytes for parameter in [*others, *ends])
    of_muon = sum(parameter.nbytes for group in hidden for parameter in group)
    resident = weights + discriminator + sum(map(_bytes, networks.terms.networks()))
    resident += of_adamw * ADAM_COPIES + of_muon * MUON_COPIES
    resident += weights if spec.ema else 0
    resident += int((of_adamw + of_muon) * spec.gradient_copies)
    return resident


def _bytes(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


def choose_step(spec: StepSpec, available: int, micro_batch: str, recompute: str) -> StepMemory:
    """The step's memory at the requested recompute level and micro-batch, or at the chosen ones for "auto".

    `recompute` "auto" selects the fastest level at which the requested micro-batch, or one image for "auto",
    fits into `available` bytes; `micro_batch` "auto" then selects the largest that fits. A number is used as
    it is. Raises UserError if a single image does not fit with "auto". `spec.recompute` is not read.
    """
    best = fastest_level(spec, available, 1 if micro_batch == "auto" else int(micro_batch), recompute)
    if micro_batch != "auto":
        return best
    if best.total > available:
        raise _too_large(spec, best, available, recompute)
    return _largest_micro_batch(replace(spec, recompute=best.recompute), available)


def fastest_level(spec: StepSpec, available: int, micro_batch: int, recompute: str) -> StepMemory:
    """The step at the fastest recompute level that fits; if none does, at the one that needs least memory.

    `recompute`: "auto", or the only level to consider.
    """
    steps = []
    for level in RECOMPUTE if recompute == "auto" else (recompute,):
        steps.append(step_memory(replace(spec, recompute=level), micro_batch))
        if steps[-1].total <= available:
            return steps[-1]
    return min(steps, key=lambda memory: memory.total)


def _too_large(spec: StepSpec, best: StepMemory, available: int, recompute: str) -> UserError:
    remedy = "lower --image_size" if recompute in ("auto", RECOMPUTE[-1]) else "use --recompute auto"
    return UserError(
        f"--image_size {spec.image_size} needs {best.total / GIB:.1f} GiB for a single image with "
        f"--recompute {best.recompute}, but only {available / GIB:.1f} GiB may be used: {remedy}, or try "
        "--micro_batch_size 1"
    )


def _largest_micro_batch(spec: StepSpec, available: int) -> StepMemory:
    """The step with the fewest passes that fit, of about equal size; one image must fit.

    Features of convolutions have at most MAX_FEATURES elements, unless those of one image have more.
    """
    whole = step_memory(spec, spec.batch)  # a special case: there are no gradients of an earlier pass
    largest = max(1, whole.max_micro_batch)
    if whole.total <= available and spec.batch <= largest:
        return whole
    limit = min(spec.batch, largest + 1)
    most = largest_count(lambda micro_batch: step_memory(spec, micro_batch).total, available, limit)
    passes = -(-spec.batch // most)
    return step_memory(spec, -(-spec.batch // passes))


def largest_count(total: Callable[[int], int], available: int, limit: int) -> int:
    """The largest count from 1 up to, not including, `limit` whose total fits; 1 must fit.

    Totals are linear except for bends where another moment of the step becomes the peak. Each guess is on the
    line through two known totals, so the search usually needs four totals.
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
