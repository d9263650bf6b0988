"""The memory of a stage: planned before it begins, measured while it runs, and reduced if it runs out."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vae.config.options import RECOMPUTE, Config, SpeedConfig
from vae.device import is_out_of_memory
from vae.memory.available import CUDA_RESERVE, available_bytes
from vae.memory.plan import StepMemory, choose_step, reserve_bytes, stage_spec, step_memory
from vae.memory.plan_table import describe_step, features_note
from vae.model.autoencoder import AutoencoderKL, set_recompute
from vae.step import (
    Networks,
    StepInputs,
    StepResult,
    clear_gradients,
    compute_gradients,
    micro_batch_sizes,
    unwrapped,
)
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_json, read_marker, write_json
from vae.system.host import GIB
from vae.training.cuda_graph import StepGraph
from vae.training.distributed import Distributed
from vae.training.logbook import Logbook
from vae.training.stages import Stage
from vae.training.state import TrainingState


@dataclass
class StepSettings:
    """Settings of the steps, which change if memory runs out; none of them changes the gradient."""

    micro_batch: int
    recompute: str
    may_recompute_more: bool  # --recompute auto
    graph: StepGraph | None = None  # None: steps run without one
    out_of_memory: int = 0  # how often memory ran out, in steps and validations

    def next_recompute(self) -> str | None:
        """Return the next recompute level, which needs less memory, or None if it may not be chosen."""
        if not self.may_recompute_more or self.recompute == RECOMPUTE[-1]:
            return None
        return RECOMPUTE[RECOMPUTE.index(self.recompute) + 1]


class OomRetry:
    """Computes the gradients of steps; a single process whose memory runs out repeats the step with less."""

    def __init__(
        self,
        networks: Networks,
        dist: Distributed,
        settings: StepSettings,
        folder: Path,
        image_size: int,
        resume_command: str = "",
    ) -> None:
        """`folder` and `resume_command`: of the run. `image_size`: of its stage."""
        self.networks = networks
        self.dist = dist
        self.settings = settings
        self._folder = folder
        self._image_size = image_size
        self.resume_command = resume_command

    def gradients(self, inputs: StepInputs) -> StepResult:
        """Compute the gradients of a step."""
        settings = self.settings
        while True:
            sizes = micro_batch_sizes(len(inputs.images), settings.micro_batch)
            try:
                compute = settings.graph.gradients if settings.graph else compute_gradients
                return compute(self.networks, inputs, sizes)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = _library_message(error)
            # Not within the except clause: there, the exception keeps the tensors of the step alive.
            settings.out_of_memory += 1
            if self.release_graph():
                continue
            if max(sizes) == 1 and settings.next_recompute() is None:
                remedy = (
                    "use --recompute auto" if settings.recompute != RECOMPUTE[-1] else "lower --image_size"
                )
                raise UserError(
                    f"out of memory with --micro_batch_size 1 --recompute {settings.recompute}: {remedy} and "
                    f"resume with: {self.resume_command}{message}"
                )
            change = self._reduce_memory(max(sizes))
            if self.dist.world_size > 1:
                raise self._start_again(message)
            console.info(f"out of memory: {change}")

    def end_graph(self) -> None:
        """Free the memory of the CUDA graph for other work between two steps; later steps capture another."""
        if self.settings.graph:
            self.settings.graph.end()

    def release_graph(self) -> bool:
        """End the CUDA graph; whether this freed memory."""
        graph, self.settings.graph = self.settings.graph, None
        released = graph is not None and graph.is_captured
        del graph
        if released:
            self.free_memory()
            console.info("out of memory: training continues without a CUDA graph, only slower")
        return released

    def free_memory(self) -> None:
        """Delete the gradients of a failed step, and return unused memory to the device."""
        clear_gradients(self.networks)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _reduce_memory(self, largest: int) -> str:
        """Halve the `largest` micro-batch; from one image, recompute more. Returns the change in words.

        Smaller micro-batches come first: they add no arithmetic, and one image of training size keeps a GPU
        busy.
        """
        settings = self.settings
        autoencoder = unwrapped(self.networks.autoencoder)
        assert isinstance(autoencoder, AutoencoderKL)
        self.free_memory()
        if largest == 1:
            settings.recompute = settings.next_recompute() or settings.recompute
            set_recompute(autoencoder, settings.recompute)
            return f"--recompute {settings.recompute} from here on; same batch and gradients, more arithmetic"
        settings.micro_batch = max(1, min(largest, settings.micro_batch) // 2)
        return f"micro-batch lowered to {settings.micro_batch}; same batch and gradients, more passes"

    def _start_again(self, message: str) -> UserError:
        """Return the error that ends all processes, and store the lowered settings for their next start."""
        settings = self.settings
        line = f"out of memory in process {self.dist.rank}{message}: all processes end"
        flags = f"--micro_batch_size {settings.micro_batch} --recompute {settings.recompute}"
        if read_marker(self._folder) is None:  # the run has not begun
            return UserError(f"{line}: start them with {flags}")
        lowered = {"micro_batch": settings.micro_batch, "recompute": settings.recompute}
        write_json(self._folder / LOWERED_NAME, {"image_size": self._image_size, **lowered})
        return UserError(
            f"{line}, and use {flags} when they start again, by torchrun --max_restarts or with: "
            f"{self.resume_command}"
        )


def _library_message(error: RuntimeError) -> str:
    """Quote the message of a library other than PyTorch's allocator: its cause may be something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    return f" (reported as: {str(error).strip().splitlines()[0]})"


# ---- settings for the next start, with several processes -----------------------------------------------


LOWERED_NAME = "lowered_memory.json"


def read_lowered(folder: Path, image_size: int) -> dict[str, Any] | None:
    """Read the settings in the folder of a run for this image size, if memory ran out with it."""
    path = folder / LOWERED_NAME
    lowered = read_json(path) if path.exists() else {}
    return lowered if lowered.get("image_size") == image_size else None


# From here on, the kernels of a pass take longer than the host needs to start them: for one image an H100
# needs 165 ms, and the host 28 (docs/cluster.md); at 512 px it needs 38.
GRAPH_BELOW_PX = 1024
FULL_CARD = 64 * 2**20  # free bytes; --vram_margin leaves more on every card


@dataclass(frozen=True)
class StagePlan:
    """The predicted memory of a stage's step as it was chosen, and the bytes that were available."""

    memory: StepMemory
    available: int
    cuda_graph: bool = False

    @property
    def predicted(self) -> int:
        """Bytes that the stage is expected to reserve."""
        return self.memory.predicted(self.available)

    def step_settings(self, speed: SpeedConfig) -> StepSettings:
        """Return the settings of the first step of the stage."""
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
    reserve = reserve_bytes(config, is_gpu=device.type == "cuda")
    spec = stage_spec(config, stage.image_size, stage.batch_size, dtype, reserve, dist.world_size)
    spec = replace(spec, activation_scale=activation_scale)
    available = int(available_bytes(device) * speed.vram_margin)
    memory = choose_step(spec, available, speed.micro_batch_size, speed.recompute)
    folder = Path(config.run.output_dir)
    if lowered := read_lowered(folder, stage.image_size):
        micro_batch = min(memory.micro_batch, lowered["micro_batch"])
        level = max(memory.recompute, lowered["recompute"], key=RECOMPUTE.index)
        memory = step_memory(replace(spec, recompute=level), micro_batch)
        console.info(
            f"note: memory ran out at {stage.image_size} px before, so {folder / LOWERED_NAME} limits the "
            f"plan to --micro_batch_size {micro_batch} --recompute {level}; remove it to plan anew"
        )
    graph = uses_cuda_graph(config.speed, stage.image_size, dist, config.data.buckets)
    return StagePlan(memory, available, graph)


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
    """Return the bytes that a run may reserve: what is available, or what the settings of the user need."""
    return max(max(plan.available, plan.memory.total) for plan in plans)


def plan_line(plan: StagePlan, image_size: int, local_images: int, micro_batch_size: str) -> str:
    """Return the plan as `check_compatibility.py --plan` prints it, with a warning if it may not fit."""
    passes = describe_step(plan.memory, local_images) + ", CUDA graph" * plan.cuda_graph
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
    """Measure the peaks of the stage on a GPU, or the largest size of the process on a CPU, in GiB."""
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
    line = f"memory  predicted peak {predicted:.2f} GiB"
    if (settings.recompute, settings.micro_batch) != (planned.recompute, planned.micro_batch):
        line += " (before memory ran out and the settings were lowered)"
    if reserved := peaks.get("memory_reserved_gib"):
        line += f", measured {reserved:.2f} GiB reserved on the GPU ({reserved / predicted - 1:+.1%})"
    elif size := peaks.get("memory_peak_gib"):
        line += f"; the process used at most {size:.2f} GiB, including libraries and data"
    console.info(line)
