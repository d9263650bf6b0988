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
from vae.ops.kernel_check import TOLERANCE, run_tests
from vae.ops.library import REPLACED, runs_kernels
from vae.step import Networks, StepInputs, compute_gradients
from vae.update import UpdateState, apply_update

STEP_TOLERANCE = 2**-3  # about twenty rounded layers, forward and backward

TINY = ModelConfig(channels=(16, 32), layers_per_block=1, norm_groups=4, z_channels=4)
PIXELS_ONLY = LossConfig(perceptual_weight=0.0, kl_weight=1e-4)
Function = Callable[..., Tensor]


def applies(name: str, device: torch.device) -> bool:
    """Whether this computation exists on the device: Triton kernels run only on a card."""
    return name != "triton" or runs_kernels(device)


def low_precision(device: torch.device) -> torch.dtype:
    """The dtype that --mixed_precision selects on this device."""
    return getattr(torch, precision_support(device).mixed_dtype)


def run_compile(device: torch.device) -> tuple[float, float]:
    """torch.compile of a convolution, a norm and an activation: results and gradients in fp32."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(F.group_norm(F.conv2d(x, weight, padding=1), 4))

    compiled = torch.compile(block, dynamic=False)
    torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        return compare(compiled, block, ((2, 8, 16, 16), (8, 8, 3, 3)), device)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def compare(
    function: Function, reference: Function, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[float, float]:
    """Results and input gradients of `function` in fp32, compared with those of `reference` in fp64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    computed = _with_gradients(function, [t.to(device) for t in inputs])
    expected = _with_gradients(reference, [t.double() for t in inputs])
    return max(_relative(a, b) for a, b in zip(computed, expected, strict=True)), TOLERANCE[torch.float32]


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


def run_step(device: torch.device) -> tuple[float, float]:
    """One optimizer step of a tiny VAE in two micro-batches: its gradients compared with fp32 on the CPU."""
    expected, _ = _tiny_step(torch.device("cpu"), torch.float32)
    gradients, changed = _tiny_step(device, low_precision(device))
    if not changed:
        raise RuntimeError("the step changed no weight: a gradient was not finite")
    return _relative(gradients, expected), STEP_TOLERANCE


def _with_gradients(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def _relative(computed: Tensor, expected: Tensor) -> float:
    expected = expected.double().cpu()
    difference = (computed.detach().double().cpu() - expected).norm() / expected.norm()
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
    gradients = [p.grad.float().flatten().cpu() for p in autoencoder.parameters() if p.grad is not None]
    before = next(autoencoder.parameters()).detach().clone()
    apply_update([optimizer], UpdateState.begin(device, fp16=False), OptimConfig(), fp16=False, empty=False)
    return torch.cat(gradients), not torch.equal(before, next(autoencoder.parameters()))


KERNELS: dict[str, Callable[[torch.device], tuple[float, float]]] = {
    "triton": run_triton,
    "step": run_step,
    "compile": run_compile,
}
