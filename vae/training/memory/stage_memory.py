"""The memory of a stage: planned before it begins, measured while it runs."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vae.config.options import Config, SpeedConfig
from vae.memory.available import CUDA_RESERVE, available_bytes
from vae.memory.plan import StepMemory, choose_step, reserve_bytes, stage_spec, step_memory
from vae.memory.plan_table import describe_step, features_note
from vae.ops.library import REPLACED, KernelKey, runs_kernels
from vae.system import console
from vae.system.errors import UserError
from vae.system.host import GIB
from vae.training.distributed import Distributed
from vae.training.memory.cuda_graph import StepGraph
from vae.training.memory.oom_retry import LOWERED_NAME, StepSettings, read_lowered
from vae.training.output.logbook import Logbook
from vae.training.stages import Stage
from vae.training.state import TrainingState

# From here on, the kernels of a pass take longer than the host needs to start them: for one image an H100
# needs 165 ms, and the host 28 (docs/cluster.md); at 512 px it needs 38.
GRAPH_BELOW_PX = 1024
FULL_CARD = 64 * 2**20  # free bytes; --vram_margin leaves more on every card
# Counted on the null GPU (tests.null_gpu.steps), one image without recomputation
MANY_LAUNCHES = "norms without Triton kernels (5 times as many launches at 256 px, 8 at 1024, 19 at 2048)"


@dataclass(frozen=True)
class StagePlan:
    """The predicted memory of a stage's step as it was chosen, and the bytes that were available."""

    memory: StepMemory
    available: int
    cuda_graph: bool = False
    torch_norms: bool = False  # on a card, norms run as many PyTorch operations instead of Triton kernels

    @property
    def predicted(self) -> int:
        """Bytes that the stage is expected to reserve."""
        return self.memory.predicted(self.available)

    def step_settings(self, speed: SpeedConfig) -> StepSettings:
        """How the first step of the stage is computed."""
        return StepSettings(
            self.memory.micro_batch,
            self.memory.recompute,
            may_recompute_more=speed.recompute == "auto",
            graph=StepGraph() if self.cuda_graph else None,
        )


def plan_stage(
    config: Config, stage: Stage, dtype: torch.dtype, dist: Distributed, activation_scale: float = 1.0
) -> StagePlan:
    """Choose how the steps of a stage run; UserError if not even one image fits."""
    device = dist.device
    speed = config.speed
    is_gpu = device.type == "cuda"
    reserve = reserve_bytes(config, is_gpu=is_gpu)
    spec = stage_spec(config, stage.image_size, stage.batch_size, dtype, reserve, dist.world_size)
    spec = replace(spec, activation_scale=activation_scale)
    available = int(available_bytes(device) * speed.vram_margin)
    memory = choose_step(spec, available, speed.micro_batch_size, speed.recompute)
    folder = Path(config.run.output_dir)
    if lowered := read_lowered(folder, stage.image_size):
        micro_batch, level = lowered.limit(memory.micro_batch, memory.recompute)
        memory = step_memory(replace(spec, recompute=level), micro_batch)
        console.info(
            f"note: memory ran out at {stage.image_size} px before, so {folder / LOWERED_NAME} limits the "
            f"plan to --micro_batch_size {micro_batch} --recompute {level}; remove it to plan anew"
        )
    graph = uses_cuda_graph(config.speed, stage.image_size, dist, config.data.buckets)
    kernels = speed.channels_last and runs_kernels(device) and KernelKey("norm", dtype) not in REPLACED
    return StagePlan(memory, available, graph, torch_norms=is_gpu and not kernels)


def uses_cuda_graph(speed: SpeedConfig, image_size: int, dist: Distributed, buckets: int = 0) -> bool:
    """Whether steps run as CUDA graphs; UserError if --cuda_graph cannot be applied.

    By default they do below GRAPH_BELOW_PX. On Windows, PyTorch before 2.13 cannot free the memory of a
    capture that fails. `buckets`: of --buckets; a graph has one shape. Several processes run without graphs.
    """
    if dist.world_size > 1:
        if speed.cuda_graph:
            raise UserError(f"--cuda_graph is for one process, and there are {dist.world_size}: remove it")
        return False
    if buckets > 1:
        if speed.cuda_graph:
            raise UserError(f"--cuda_graph has one shape, --buckets {buckets} several: remove one")
        return False
    possible = dist.device.type == "cuda"
    frees_failed_captures = sys.platform != "win32" or torch.__version__ >= (2, 13)
    if speed.cuda_graph and not possible:
        raise UserError("--cuda_graph needs a CUDA device: remove the flag")
    if speed.cuda_graph is not None:
        return speed.cuda_graph
    is_host_bound = image_size < GRAPH_BELOW_PX
    return possible and is_host_bound and frees_failed_captures and not speed.profile_steps


def memory_limit(plans: Iterable[StagePlan]) -> int:
    """Bytes that a run may reserve: what is available, or what the settings of the user need."""
    return max(max(plan.available, plan.memory.total) for plan in plans)


def plan_line(plan: StagePlan, image_size: int, local_images: int, micro_batch_size: str) -> str:
    """The plan as `check_compatibility.py --plan` prints it; with a warning line if it may not fit."""
    passes = describe_step(plan.memory, local_images) + ", CUDA graph" * plan.cuda_graph
    passes += f", {MANY_LAUNCHES}" * plan.torch_norms
    line = (
        f"{image_size} px, batch {local_images} as {passes}: predicted peak "
        f"{plan.predicted / GIB:.2f} GiB of {plan.available / GIB:.1f} GiB that may be used"
    )
    if note := features_note(plan.memory, local_images):
        line += f"\n{note}"
    if plan.memory.total <= plan.available:
        return line
    return (
        f"{line}\nWARNING: --micro_batch_size {micro_batch_size} exceeds the available memory: the run may "
        "run out of memory: --micro_batch_size auto chooses a size that fits"
    )


def low_memory_warning(device: torch.device, planned: int) -> str | None:
    """A warning if other programs have taken GPU memory that the plan needs. It does not synchronize."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    missing = planned - CUDA_RESERVE - free - torch.cuda.memory_reserved(device)
    is_full = sys.platform == "win32" and free < FULL_CARD  # there, the driver refuses no memory
    if missing <= 0 and not is_full:
        return None
    slow = "the driver uses main memory instead, and steps take many times as long"
    result = slow if sys.platform == "win32" else "a step may run out of memory"
    return (
        f"{free / GIB:.1f} GiB of GPU memory are free, less than the plan of {planned / GIB:.1f} GiB needs: "
        f"{result}: end other programs that use the GPU"
    )


def reset_memory_peaks(device: torch.device) -> None:
    """Reset a GPU's statistics, so that they describe the stage that begins."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def memory_peaks(device: torch.device) -> dict[str, float]:
    """GiB: the peaks of the stage on a GPU; on a CPU, the largest size of the process since it started."""
    if device.type == "cuda":
        return {
            "memory_peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
        }
    if sys.platform == "win32":
        return {}
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS and KiB on Linux
    return {"memory_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


def _memory_line(predicted_gib: float, peaks: dict[str, float], settings_changed: bool = False) -> str:
    """The predicted and the measured peak. The size of a CPU process does not measure the step."""
    line = f"memory  predicted peak {predicted_gib:.2f} GiB"
    if settings_changed:
        line += " (before memory ran out and the settings were lowered)"
    if "memory_reserved_gib" in peaks:
        reserved = peaks["memory_reserved_gib"]
        difference = reserved / predicted_gib - 1
        return f"{line}, measured {reserved:.2f} GiB reserved on the GPU ({difference:+.1%})"
    if "memory_peak_gib" in peaks:
        line += f"; the process used at most {peaks['memory_peak_gib']:.2f} GiB, including libraries and data"
    return f"{line} (only a GPU measures the step alone)"


def record_memory(logbook: Logbook, state: TrainingState, plan: StagePlan, settings: StepSettings) -> None:
    """Record and print the stage's measured memory peaks beside the predicted one."""
    planned = plan.memory
    device = state.running_sq_norms.device
    predicted = plan.predicted / GIB
    peaks = memory_peaks(device)
    record: dict[str, float | str] = {
        "image_size": state.stage.image_size,
        "micro_batch": settings.micro_batch,
        "recompute": settings.recompute,
        "predicted_peak_gib": predicted,
        **peaks,
    }
    logbook.record("memory", state.position.step, record)
    changed = (settings.recompute, settings.micro_batch) != (planned.recompute, planned.micro_batch)
    console.info(_memory_line(predicted, peaks, changed))
