"""Optimizer steps beside the same steps in fp64 on the CPU: losses of four steps, gradients of the first one.

Both have the same weights, images and noise. Each variant is a way in which the trainer runs.
"""

import gc
import math
from dataclasses import replace
from typing import Any

import torch

from benchmarks.comparison.ours import WAN_OPTIONS, Ours, Work
from benchmarks.on_card.result import LATE, Result, first_line, flags
from vae.config.model_options import ModelConfig
from vae.config.options import SpeedConfig
from vae.ops.library import KERNEL_KEYS, REPLACED
from vae.step import compute_gradients
from vae.system.script import end_process
from vae.training.cuda_graph import StepGraph
from vae.training.precision import set_backends
from vae.update import UpdateState, apply_update

STEPS = 4
GRAPH_STEPS = 6  # the fourth one is captured
VARIANT_SECONDS = 8.0  # that must be left to start one
# Relative differences: of a loss, of all gradients, of the worst gradient. About three times those of a small
# network on a CPU, which runs none of our kernels (fp16 2e-3, 4e-2, 7e-2; bf16 1e-3, 9e-2, 2e-1); in fp32
# more (7e-6, 3e-6, 4e-6), because a card adds in another order.
TOLERANCE = {
    "fp32": (1e-4, 1e-3, 1e-2),
    "tf32": (5e-3, 5e-2, 2e-1),
    "fp16": (1e-2, 1.2e-1, 4e-1),
    "bf16": (3e-2, 2.5e-1, 6e-1),
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NEGLIGIBLE = 1e-4  # of the length of all gradients: a shorter one repeats the rounding of others
# The first word is a dtype; then arguments of Ours, or "graph", "torch" (kernels), "adversarial", "wan"
VARIANTS: dict[str, dict[str, Any]] = {
    **{dtype: {} for dtype in ("bf16", "fp16", "fp32", "tf32")},
    **{f"{dtype} graph": {"graph": True} for dtype in ("bf16", "fp16")},
    **{f"{dtype} recompute all": {"recompute": "all"} for dtype in ("fp32", "bf16")},
    "bf16 passes of one": {"micro_batch": 1},
    **{f"{dtype} {kind}": {kind: True} for kind in ("adversarial", "wan") for dtype in ("fp32", "bf16")},
    "bf16 torch kernels": {"torch": True},
    "bf16 NCHW": {"channels_last": False},
    "bf16 compiled": {"compiled": True},
}
Steps = tuple[list[dict[str, float]], dict[str, torch.Tensor]]  # losses of each step; gradients of the first


def build_work(small: bool, adversarial: bool = False, wan: bool = False) -> Work:
    model: dict[str, Any] = {"init": "default"} | (WAN_OPTIONS if wan else {})
    if small:
        model |= {"channels": (32, 64), "layers_per_block": 1} | ({} if wan else {"norm_groups": 8})
    return Work(32 if small else 64, 2, adversarial=adversarial, model=ModelConfig(**model))


def run_steps(side: Ours, steps: int, *, fp16: bool = False, graph: bool = False) -> Steps:
    """Losses of each step, and the gradients of the first one without the loss scale, in fp64 on the CPU."""
    side.update = UpdateState.begin(side.inputs.noise.device, fp16=fp16)
    runner = StepGraph() if graph else None
    losses = []
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        inputs = replace(side.inputs, loss_scale=side.update.loss_scale)
        compute = runner.gradients if runner else compute_gradients
        result = compute(side.networks, inputs, side.sizes)
        if not gradients:
            scale = side.update.loss_scale.double().cpu()
            parameters = side.networks.autoencoder.named_parameters()
            gradients = {name: p.grad.double().cpu() / scale for name, p in parameters if p.grad is not None}
        apply_update(side.optimizers, side.update, side.optim, fp16=fp16, empty=False)
        losses.append({name: value.double().item() for name, value in result.losses.items()})
    if runner and not runner.is_captured:
        raise RuntimeError("the CUDA graph was not captured")
    return losses, gradients


def differences(found: Steps, expected: Steps) -> tuple[float, float, float, str]:
    """Relative: the largest of a loss, that of all gradients, that of the worst gradient, and its name."""
    loss = 0.0
    for mine, other in zip(found[0], expected[0], strict=False):  # a graph has more steps
        relative = [abs(mine[name] - other[name]) / max(abs(other[name]), 1e-6) for name in other]
        loss = max(loss, *(value if math.isfinite(value) else math.inf for value in relative))
    lengths = {name: gradient.norm().item() for name, gradient in expected[1].items()}
    errors = {name: (found[1][name] - gradient).norm().item() for name, gradient in expected[1].items()}
    errors = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    total = math.hypot(*lengths.values())
    of_each = {name: errors[name] / length for name, length in lengths.items() if length > NEGLIGIBLE * total}
    worst = max(of_each, key=lambda name: of_each[name])
    return loss, math.hypot(*errors.values()) / total, of_each[worst], worst


def measure(name: str, work: Work, device: torch.device, expected: Steps, options: dict[str, Any]) -> dict:
    """The row of a variant; an error of the driver, a compiler or a kernel is its problem."""
    dtype = name.split()[0]
    graph = options.pop("graph", False)
    set_backends(SpeedConfig(enable_tf32=dtype != "fp32"))
    REPLACED.clear()
    REPLACED.update(KERNEL_KEYS if options.pop("torch", False) else ())
    try:
        side = Ours(work, device, DTYPES[dtype], **options)
        found = run_steps(side, GRAPH_STEPS if graph else STEPS, fp16=dtype == "fp16", graph=graph)
    except Exception as error:
        return {"variant": name, "verdict": "WRONG", "shown": first_line(error)}
    *numbers, parameter = differences(found, expected)
    is_right = all(number < most for number, most in zip(numbers, TOLERANCE[dtype], strict=True))
    shown = " ".join(f"{number:.0e}" for number in numbers)
    if not is_right:
        shown += f" ({parameter}), not below {TOLERANCE[dtype]}"
    verdict = "ok" if is_right else "WRONG"
    return {"variant": name, "verdict": verdict, "shown": shown, "differences": numbers, "losses": found[0]}


def summarize(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The line and the verdict: the differences of each variant, those that are wrong on their own lines."""
    right, wrong, late = ([r for r in rows if r["verdict"] == v] for v in ("ok", "WRONG", "not reached"))
    line = f"{len(right)} of {len(rows)} right (differences of a loss, of all gradients, of the worst one): "
    line += ", ".join(f"{row['variant']} {row['shown']}" for row in right)
    line += "".join(f"\n   WRONG {row['variant']}: {row['shown']}" for row in wrong)
    line += f"\n   not reached: {', '.join(row['variant'] for row in late)}" if late else ""
    return line, "WRONG" if wrong or not right else LATE if late else "ok"


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="VARIANT")
    options = parser.parse_args()
    result = Result(options)
    device = torch.device(options.device)
    references: dict[str, Steps] = {}
    for name in options.only:
        variant = dict(VARIANTS[name])
        if device.type == "cpu" and variant.keys() & {"graph", "torch"}:
            continue
        if result.seconds_left() < VARIANT_SECONDS:
            result.add({"variant": name, "verdict": "not reached"})
        else:
            kind = {key: variant.pop(key) for key in ("adversarial", "wan") if key in variant}
            work = build_work(options.small, **kind)
            if (key := repr(work)) not in references:
                references[key] = run_steps(Ours(work, torch.device("cpu"), torch.float64), STEPS)
            result.add(measure(name, work, device, references[key], variant))
        result.write(*summarize(result.rows))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
    end_process(0)
