"""The other side: diffusers' AutoencoderKL in the step of its trainer, implemented from its formulas.

Source: examples/research_projects/autoencoderkl/train_autoencoderkl.py of huggingface/diffusers. The loss of
a step, with sums over the N values of an image: sum(|recon - target|) + N * scale * LPIPS + kl_scale * KL,
mean over the images. Then clipping at 1, AdamW, and a copy of the logged terms to the host.

Differences from the script, so that both sides do the same work:
- LPIPS has a gradient. The script computes it under no_grad, so it has no effect on training.
- The linear weights of LPIPS are frozen. The script accumulates gradients for them and does not use them.
- The noise of the posterior is an input instead of drawn.
- Gradients are set to None, as in the script with --set_grads_to_none.
- Before the discriminator starts, the script already runs it at each step, and computes two gradients at the
  last layer, for a term of weight 0. These are omitted, except if both sides are adversarial.
- The script computes the loss of the discriminator without a backward. Here it has a backward.

With --mixed_precision bf16, the script casts the weights to bf16. It calls encode and decode without the
wrapper that would enable autocast: this is the variant `bf16`. The variant `autocast` has fp32 weights under
autocast, as an error message of the script requires. Both are measured.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import lpips
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from benchmarks.comparison.ours import PERCEPTUAL_SCALE, Ours, Work
from vae.interop.writing import diffusers_config
from vae.losses.perceptual import lpips_of


@dataclass(frozen=True)
class Variant:
    """A configuration of their step."""

    name: str
    weights: torch.dtype = torch.bfloat16
    autocast: bool = False
    channels_last: bool = False
    compiled: bool = False
    mode: str | None = None  # of torch.compile
    fused: bool = False  # AdamW; the script uses PyTorch's default
    checkpointing: bool = False
    one_forward: bool = False  # adversarial: both networks learn from one forward; the script needs two


FASTEST_MODE = "max-autotune-no-cudagraphs"  # of torch.compile
FP64 = Variant("fp64", torch.float64)  # to check that both sides do the same work
AUTOCAST = Variant("autocast", torch.float32, autocast=True)
BF16 = Variant("bf16")
BF16_CHANNELS_LAST = Variant("bf16 channels_last", channels_last=True)
BF16_COMPILED = Variant("bf16 compile", compiled=True)
BF16_CHANNELS_LAST_COMPILED = Variant("bf16 channels_last compile", channels_last=True, compiled=True)
# The fastest flags that are known for it. TORCHINDUCTOR_LOOP_REINDEXING_AFTER_FUSION=1, which upsampling with
# GroupNorm and SiLU needs, is PyTorch's default since it exists (2.14).
BF16_BEST_COMPILED = Variant(
    "bf16 channels_last compile max-autotune, LPIPS too, fused AdamW",
    channels_last=True,
    compiled=True,
    mode=FASTEST_MODE,
    fused=True,
)
AUTOCAST_CHECKPOINTING = Variant("autocast checkpointing", torch.float32, autocast=True, checkpointing=True)
BF16_CHECKPOINTING = Variant("bf16 checkpointing", checkpointing=True)


class Theirs:
    """Their networks with our weights, optimizers, and one batch of `work`."""

    def __init__(self, work: Work, device: torch.device, variant: Variant, ours: Ours | None = None):
        """Weights are copied from `ours`, or from a new one with the same seed."""
        source = ours or Ours(work, device, torch.float32)
        self.work, self.device, self.variant = work, device, variant
        self.vae = build_vae(work, source, device, variant)
        self.perceptual = build_lpips(source, device, variant.weights) if work.perceptual else None
        if self.perceptual is not None and variant.mode is not None:
            self.perceptual.compile(dynamic=False, mode=variant.mode)
        self.layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        # The batch of the loader: contiguous floats; its workers decode and scale.
        self.images = source.inputs.images.float() / 127.5 - 1
        self.noise = source.inputs.noise.to(variant.weights)
        self.discriminator = None
        if work.adversarial:
            self.discriminator = patch_discriminator().to(device, variant.weights, memory_format=self.layout)
        if device.type != "meta":
            self.optimizer = _adamw(self.vae, variant.fused)
            self.disc_optimizer = _adamw(self.discriminator, variant.fused) if work.adversarial else None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Forward, losses and backward of the autoencoder; returns the loss terms, means over images."""
        with self.precision():
            loss, terms, _ = self.losses()
        loss.backward()
        return terms

    def step(self) -> None:
        """One whole step of their trainer; with a discriminator, the two iterations that train both."""
        with self.precision():
            loss, terms, recon = self.losses()
        for term in (loss, *terms.values()):
            term.detach().item()  # for their log
        loss.backward()
        _update(self.vae, self.optimizer)
        if self.discriminator is not None:
            self._discriminator_iteration(recon.detach() if self.variant.one_forward else None)

    def clear(self) -> None:
        """Delete the gradients."""
        self.vae.zero_grad(set_to_none=True)

    def _forward(self) -> tuple[torch.Tensor, Any, torch.Tensor]:
        targets = self.images.to(self.variant.weights, memory_format=self.layout)  # (B, 3, H, W)
        posterior = self.vae.encode(targets).latent_dist
        latents = posterior.mean + posterior.std * self.noise  # (B, Z, H/f, W/f)
        return targets, posterior, self.vae.decode(latents).sample

    def losses(self) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """The loss of the autoencoder, its terms as means over images, and the reconstructions."""
        targets, posterior, recon = self._forward()
        batch, pixels = len(targets), targets[0, 0].numel()
        kl_scale = self.work.loss.kl_weight * self.work.values / pixels  # theirs sums over values
        nll = F.l1_loss(recon.float(), targets.float(), reduction="none")
        terms = {"reconstruction": nll.sum() / (batch * self.work.values)}
        if self.perceptual is not None:
            perceptual = self.perceptual(recon, targets)  # (B, 1, 1, 1)
            nll = nll + PERCEPTUAL_SCALE * perceptual
            terms["perceptual"] = perceptual.float().mean()
        nll = nll.sum() / batch
        kl = posterior.kl().sum() / batch
        terms["kl"] = kl / pixels
        loss = nll + kl_scale * kl
        if self.discriminator is not None:
            adversarial = -self.discriminator(recon).float().mean()
            loss = loss + self._adaptive_weight(nll, adversarial) * adversarial
            terms["adversarial"] = adversarial
        return loss, terms, recon

    def _adaptive_weight(self, nll: torch.Tensor, adversarial: torch.Tensor) -> torch.Tensor:
        """Ratio of both gradients at the last layer of the decoder; it needs two backwards of this layer."""
        last = self.vae.decoder.conv_out.weight
        (of_nll,) = torch.autograd.grad(nll, last, retain_graph=True)
        (of_adversarial,) = torch.autograd.grad(adversarial, last, retain_graph=True)
        return (of_nll.norm() / (of_adversarial.norm() + 1e-4)).clamp(0, 1e4).detach()

    def _discriminator_iteration(self, recon: torch.Tensor | None) -> None:
        with self.precision():
            if recon is None:
                targets, _, recon = self._forward()
            else:
                targets = self.images.to(self.variant.weights, memory_format=self.layout)
            real, fake = self.discriminator(targets), self.discriminator(recon.detach())
            loss = 0.5 * (F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean())
        for term in (loss, real.mean(), fake.mean()):
            term.detach().item()
        self.disc_optimizer.zero_grad(set_to_none=True)  # remove the gradients of the generator's pass
        loss.backward()
        _update(self.discriminator, self.disc_optimizer)

    def precision(self) -> AbstractContextManager:
        """The context in which their forward runs: autocast, CUDA's rules on meta, or none."""
        if self.device.type == "meta":
            return CudaRules(self.variant.autocast)
        if self.variant.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()


def build_vae(work: Work, source: Ours, device: torch.device, variant: Variant) -> AutoencoderKL:
    """Their model with our weights, loaded by name."""
    config = diffusers_config(work.model, work.image_size, 1.0, 0.0)
    with torch.device("meta"):
        vae = AutoencoderKL.from_config(config)
    if device.type != "meta":
        vae.to_empty(device=device)
        vae.load_state_dict(source.networks.autoencoder.state_dict())
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    nn.Module.to(vae, dtype=variant.weights, memory_format=layout)
    vae.train()
    if variant.checkpointing:
        vae.enable_gradient_checkpointing()
        if device.type == "meta":  # recomputation in backward needs CUDA's rules too
            rules = partial(CudaRules, variant.autocast)
            again = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), rules()))
            vae.enable_gradient_checkpointing(again)
    if variant.compiled:
        vae.encoder.compile(dynamic=False, mode=variant.mode)
        vae.decoder.compile(dynamic=False, mode=variant.mode)
    return vae


def build_lpips(source: Ours, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The network of the lpips package with our weights."""
    perceptual = lpips_of(source.networks.terms)
    assert perceptual is not None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package uses a deprecated call of torchvision
        package = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False)
    if device.type != "meta":
        package.to_empty(device=device)
        with torch.no_grad():
            trunk = [weight for part in perceptual.slices for weight in part.parameters()]
            for mine, other in zip(trunk, package.net.parameters(), strict=True):
                other.copy_(mine)
            for index, layer in enumerate(package.lins):
                layer.model[-1].weight.copy_(getattr(perceptual, f"linear{index}").view(1, -1, 1, 1))
    package.scaling_layer.shift = perceptual.shift.clone()
    package.scaling_layer.scale = perceptual.scale.clone()
    return package.to(dtype).requires_grad_(False).eval()


def patch_discriminator(width: int = 64, layers: int = 3) -> nn.Sequential:
    """The PatchGAN of pix2pix (Isola et al. 2017) that their script uses, with batch norm."""
    widths = [width * min(2**i, 8) for i in range(layers + 1)]
    parts = [nn.Conv2d(3, widths[0], 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    for index, (before, after) in enumerate(pairwise(widths), start=1):
        stride = 2 if index < layers else 1
        parts += [nn.Conv2d(before, after, 4, stride, 1, bias=False), nn.BatchNorm2d(after)]
        parts += [nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*parts, nn.Conv2d(widths[-1], 1, 4, 1, 1))


def _adamw(module: nn.Module, fused: bool) -> torch.optim.Optimizer:
    """AdamW with the defaults of the script."""
    return torch.optim.AdamW(module.parameters(), 4.5e-6, (0.9, 0.999), 1e-8, 1e-2, fused=fused or None)


def _update(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ---- CUDA's rules on the meta device -----------------------------------------------------------------------
# Autocast and attention, to count the memory of their step there. Autocast does not support meta tensors. On
# meta tensors, their attention would allocate the whole score matrix, but the CUDA kernel does not; and
# PyTorch's meta implementation of this kernel omits the scratch buffers of its launcher. The lists are those
# in PyTorch's documentation of mixed precision, as far as this model and LPIPS need them; tests compare them
# with autocast.
TO_BF16 = {torch.conv2d, F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.baddbmm}
TO_FP32 = {F.group_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.exp, Tensor.exp, F.l1_loss, F.softmax}
SUM_IN_FP32 = {torch.sum, Tensor.sum}

# The backward of the memory-efficient kernel as PyTorch launches it for heads wider than 128, from compute
# capability 8.0 on: tiles of 128 queries by 64 keys, and a maximum number of splits of the keys. Source:
# attention_backward.cu and mem_eff_attention/kernel_backward.h of aten/src/ATen/native/transformers/cuda.
TILE_KEYS = 64
MOST_KEY_SPLITS = 200
WIDE_HEAD = 128


class CudaRules(TorchFunctionMode):
    """Inside this mode, operations use CUDA's attention and, if requested, the dtypes of bf16 autocast."""

    def __init__(self, autocast: bool):
        super().__init__()
        self.autocast = autocast
        self._cast_weights: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        if self.autocast:
            if func in TO_BF16 or attends:
                args, kwargs = self._cast(args, kwargs, torch.bfloat16)
            elif func in TO_FP32:
                args, kwargs = self._cast(args, kwargs, torch.float32)
            elif func in SUM_IN_FP32 and args[0].is_floating_point():
                kwargs = {"dtype": torch.float32, **kwargs}
        if attends:
            return MemoryEfficientAttention.apply(*args[:3])
        return func(*args, **kwargs)

    def _cast(self, args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
        return tuple(self._one(value, dtype) for value in args), {
            name: self._one(value, dtype) for name, value in kwargs.items()
        }

    def _one(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if dtype == torch.bfloat16 and value.is_leaf and value.requires_grad:  # autocast caches these
            if id(value) not in self._cast_weights:
                self._cast_weights[id(value)] = value.to(dtype)
            return self._cast_weights[id(value)]
        return value.to(dtype)

    def __exit__(self, *exception: Any) -> None:
        self._cast_weights.clear()
        super().__exit__(*exception)


class MemoryEfficientAttention(torch.autograd.Function):
    """CUDA's kernel for wide heads on meta tensors, with the scratch buffers of its backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, heads, N, C) each and back."""
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        results = forward(query, key, value, None, compute_log_sumexp=True)
        ctx.save_for_backward(query, key, value, *results)
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *results = ctx.saved_tensors
        scratch = torch.empty(backward_scratch_bytes(query), dtype=torch.uint8, device="meta")
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        grads = backward(grad, query, key, value, None, *results, 0.0, wanted)[:3]
        del scratch
        return grads


def backward_scratch_bytes(query: Tensor) -> int:
    """Bytes that the launcher of the backward allocates besides the three gradients; as many keys as queries.

    These are the gradient of the queries in fp32, because tiles of keys are added to it. For dtypes below
    fp32 and wide heads, there are also gradients of keys and values: one tile per split of the keys.
    """
    batch, heads, tokens, width = query.shape
    elements = batch * heads * tokens * width
    if query.dtype != torch.float32 and width > WIDE_HEAD:
        splits = min(-(-tokens // TILE_KEYS), max(1, MOST_KEY_SPLITS // (batch * heads)))
        elements += batch * heads * 2 * splits * TILE_KEYS * width
    return 4 * elements


# ---- The check before any timing ---------------------------------------------------------------------------
IMAGE_SIZE = 64
# Networks compute in fp64; the remaining difference is from the images and the L1 term, fp32 on both sides.
TOLERANCE = 1e-6


class DifferentWorkError(Exception):
    """The two sides compute different results, so their times must not be compared."""


def check_same_work(device: torch.device, work: Work | None = None) -> dict[str, Any]:
    """Relative differences of one step in fp64 with the same weights, images and noise.

    Raises DifferentWorkError if one is above TOLERANCE.
    """
    work = work or Work(IMAGE_SIZE)
    differences = _differences(work, device)
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise DifferentWorkError(f"{name} differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return {
        "image_size": work.image_size,
        "dtype": "fp64",
        "tolerance": TOLERANCE,
        "relative_differences": {name: float(f"{value:.2e}") for name, value in differences.items()},
    }


def _differences(work: Work, device: torch.device) -> dict[str, float]:
    ours = Ours(work, device, torch.float64)
    theirs = Theirs(work, device, FP64, ours)
    with torch.no_grad():
        images, noise = theirs.images.double(), theirs.noise
        posterior = theirs.vae.encode(images).latent_dist
        other_recon = theirs.vae.decode(posterior.mean + posterior.std * noise).sample
        recon = ours.networks.autoencoder(images, noise)[0]
    mine = {name: value / work.batch for name, value in ours.gradients().items()}
    other = theirs.gradients()
    found = {"reconstructions": _relative(recon, other_recon)}
    for name in other:
        found[f"{name} losses"] = _relative(mine[name], other[name].detach())
    my_grads = dict(ours.networks.autoencoder.named_parameters())
    pairs = [(my_grads[name].grad, p.grad / work.values) for name, p in theirs.vae.named_parameters()]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    length = torch.stack([b.norm() for _, b in pairs]).norm()
    found["gradients"] = _share(difference, length)
    return found


def _relative(value: torch.Tensor, other: torch.Tensor) -> float:
    return _share((value - other).norm(), other.norm())


def _share(difference: torch.Tensor, length: torch.Tensor) -> float:
    """A difference in relation to a length; 0 if there is none, also for a length of 0."""
    return (difference / length).item() if difference != 0 else 0.0
