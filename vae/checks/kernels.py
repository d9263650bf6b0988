"""The computations that training depends on, each run on the device and compared with a reference.

Each function returns (difference, tolerance). The difference is relative, in the Euclidean norm, and the
largest over all results and gradients. References are computed in fp32 or fp64 on the CPU.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vae.config.options import LossConfig, ModelConfig, OptimConfig
from vae.device import precision_support
from vae.losses.terms import build_terms
from vae.model.autoencoder import AutoencoderKL, downsampling
from vae.ops.attention import attention, attention_reference
from vae.ops.kernel_check import TOLERANCE, run_tests
from vae.ops.library import REPLACED, compile_cache_tag, runs_kernels
from vae.step import Networks, StepInputs, UpdateState, apply_update, compute_gradients

STEP_TOLERANCE = 2**-3  # about twenty rounded layers, forward and backward

TINY = ModelConfig(channels=(16, 32), layers_per_block=1, norm_groups=4, z_channels=4)
PIXELS_ONLY = LossConfig(perceptual_weight=0.0, kl_weight=1e-4)


def applies(name: str, device: torch.device) -> bool:
    """Whether this computation exists on the device: Triton kernels run only on a card."""
    return name != "triton" or runs_kernels(device)


def low_precision(device: torch.device) -> torch.dtype:
    """The dtype that --mixed_precision selects on this device."""
    return getattr(torch, precision_support(device).fast_dtype)


def run_matmul(device: torch.device) -> tuple[float, float]:
    """A matrix product whose sides are not multiples of 8, forward and backward, in low precision."""
    dtype = low_precision(device)
    a, b = _random((67, 129), (129, 65), seed=0)
    return _compare(lambda x, y: x @ y, (a, b), device, dtype), TOLERANCE[dtype]


def run_conv(device: torch.device) -> tuple[float, float]:
    """A 3x3 convolution with odd image sizes, forward and backward, in low precision."""
    dtype = low_precision(device)
    x, weight = _random((2, 24, 19, 21), (40, 24, 3, 3), seed=1)
    return _compare(lambda x, w: F.conv2d(x, w, padding=1), (x, weight), device, dtype), TOLERANCE[dtype]


def run_channels_last(device: torch.device) -> tuple[float, float]:
    """The same in channels_last layout, which the result must keep."""
    dtype = low_precision(device)
    x, weight = _random((2, 24, 16, 16), (32, 24, 3, 3), seed=2)

    def conv(x: Tensor, w: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return F.conv2d(x, w, padding=1)
        last = torch.channels_last
        out = F.conv2d(x.contiguous(memory_format=last), w.contiguous(memory_format=last), padding=1)
        if not out.is_contiguous(memory_format=last):
            raise RuntimeError("a convolution did not keep the channels_last layout")
        return out

    return _compare(conv, (x, weight), device, dtype), TOLERANCE[dtype]


def run_triton(device: torch.device) -> tuple[float, float]:
    """Every Triton kernel compared with its PyTorch reference, in low precision and in fp32.

    Broken kernels are replaced, as in training, so the computations after this one are those of training.
    """
    outcomes = list(run_tests(device, [low_precision(device), torch.float32]))
    broken = [outcome for outcome in outcomes if outcome.is_broken]
    REPLACED.update(outcome.key for outcome in broken)
    if broken:
        raise RuntimeError("; ".join(map(str, broken)))
    worst = max(outcomes, key=lambda outcome: outcome.difference / TOLERANCE[outcome.key.dtype])
    return worst.difference, TOLERANCE[worst.key.dtype]


def run_attention(device: torch.device) -> tuple[float, float]:
    """The model's attention compared with the plain formula, forward and backward, in low precision."""
    dtype = low_precision(device)
    q, k, v = _random((2, 65, 32), (2, 65, 32), (2, 65, 32), seed=3)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attention_reference if q.dtype == torch.float64 else attention)(q, k, v)

    return _compare(run, (q, k, v), device, dtype), TOLERANCE[dtype]


def run_step(device: torch.device) -> tuple[float, float]:
    """One optimizer step of a tiny VAE in two micro-batches: its gradients compared with fp32 on the CPU."""
    dtype = low_precision(device)
    expected, _ = _tiny_step(torch.device("cpu"), torch.float32)
    found, changed = _tiny_step(device, dtype)
    if not changed:
        raise RuntimeError("the step changed no weight: a gradient was not finite")
    return _relative(found, expected), STEP_TOLERANCE


def run_compile(device: torch.device) -> tuple[float, float]:
    """torch.compile of a convolution, a norm and an activation, forward and backward, in fp32."""
    x, weight = _random((2, 8, 16, 16), (8, 8, 3, 3), seed=4)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.group_norm(F.conv2d(x, w, padding=1), 4))

    compiled = torch.compile(block, dynamic=False)
    torch.compiler.config.cache_key_tag = compile_cache_tag()

    def run(x: Tensor, w: Tensor) -> Tensor:
        return (block if x.dtype == torch.float64 else compiled)(x, w)

    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        return _compare(run, (x, weight), device, torch.float32), TOLERANCE[torch.float32]
    finally:
        torch.backends.cudnn.allow_tf32 = before


KERNELS: dict[str, Callable[[torch.device], tuple[float, float]]] = {
    "matmul": run_matmul,
    "conv": run_conv,
    "channels_last": run_channels_last,
    "triton": run_triton,
    "attention": run_attention,
    "step": run_step,
    "compile": run_compile,
}


def _random(*shapes: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _compare(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: torch.device, dtype: torch.dtype
) -> float:
    """Largest relative difference of the result and the input gradients from fp64 on the CPU."""
    found = _with_gradients(function, [t.to(device, dtype) for t in inputs])
    expected = _with_gradients(function, [t.double() for t in inputs])
    return max(_relative(a, b) for a, b in zip(found, expected, strict=True))


def _with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def _relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.double().cpu()
    difference = (found.detach().double().cpu() - expected).norm() / expected.norm()
    return float(difference) if torch.isfinite(difference) else float("inf")


def _tiny_step(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """All gradients of one seeded step in one vector, and whether the update changed the weights."""
    torch.manual_seed(0)
    autoencoder = AutoencoderKL(TINY).to(device)
    networks = Networks(autoencoder, None, build_terms(PIXELS_ONLY, dtype, device), dtype, channels_last=True)
    generator = torch.Generator().manual_seed(5)
    latent = 32 // downsampling(TINY)
    inputs = StepInputs(
        images=torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=generator).to(device),
        noise=torch.randn(3, TINY.z_channels, latent, latent, generator=generator).to(device),
        image_share=1 / 3,
        loss_scale=torch.ones((), device=device),
        adversarial_factor=None,
    )
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=1e-3, fused=True)
    compute_gradients(networks, inputs, [2, 1])
    gradients = []
    for parameter in autoencoder.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad.float().flatten().cpu())
    before = next(autoencoder.parameters()).detach().clone()
    apply_update([optimizer], UpdateState.begin(device, fp16=False), OptimConfig(), fp16=False, empty=False)
    return torch.cat(gradients), not torch.equal(before, next(autoencoder.parameters()))
