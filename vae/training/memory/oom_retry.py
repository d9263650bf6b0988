"""Repeat a step that ran out of memory: with smaller micro-batches, then at a higher recompute level.

With several processes, whose backward passes sum gradients together, all end and start again with less.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from vae.config.options import RECOMPUTE
from vae.device import is_out_of_memory
from vae.model.autoencoder import AutoencoderKL
from vae.model.recompute import set_recompute
from vae.step import (
    Networks,
    StepInputs,
    clear_gradients,
    compute_gradients,
    forward_losses,
    micro_batch_sizes,
    unwrapped,
)
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import read_json, read_marker, write_json
from vae.training.distributed import Distributed
from vae.training.memory.cuda_graph import StepGraph, Sums
from vae.training.run_folder import resume_command


@dataclass
class StepSettings:
    """How a step is computed. It changes if memory runs out; nothing here changes the gradient."""

    micro_batch: int
    recompute: str
    may_recompute_more: bool  # --recompute auto
    graph: StepGraph | None = None  # None: steps run without one
    out_of_memory: int = 0  # how often memory ran out, in steps and validations

    def next_recompute(self) -> str | None:
        """The next recompute level, which needs less memory, or None if it may not be chosen."""
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
    ) -> None:
        """`folder`: of the run. `image_size`: of its stage."""
        self.networks = networks
        self.dist = dist
        self.settings = settings
        self._folder = folder
        self._image_size = image_size

    def gradients(self, inputs: StepInputs) -> Sums:
        """Compute the gradients of a step; returns the sums of the losses over its images."""
        return self._repeated(inputs, backward=True)

    def losses(self, inputs: StepInputs) -> Sums:
        """The sums of the losses, without adversarial ones; nothing else is computed."""
        return self._repeated(inputs, backward=False)

    def _repeated(self, inputs: StepInputs, backward: bool) -> Sums:
        settings = self.settings
        while True:
            sizes = micro_batch_sizes(len(inputs.images), settings.micro_batch)
            try:
                return self._computed(inputs, sizes, backward)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                message = _library_message(error)
            # Not within the except clause: there, the exception keeps the tensors of the step alive.
            settings.out_of_memory += 1
            if self.release_graph():
                continue
            if max(sizes) == 1 and settings.next_recompute() is None:
                line = _out_of_memory(settings)
                raise UserError(f"{line} and resume with: {resume_command(self._folder)}{message}")
            change = self._reduce_memory(max(sizes))
            if self.dist.world_size > 1:
                raise self._start_again(message)
            console.info(f"out of memory: {change}")

    def _computed(self, inputs: StepInputs, sizes: list[int], backward: bool) -> Sums:
        if not backward:
            return forward_losses(self.networks, inputs, sizes)
        if self.settings.graph:
            return self.settings.graph.gradients(self.networks, inputs, sizes)
        return compute_gradients(self.networks, inputs, sizes)

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
        """What ends all processes; the lowered settings are stored for their next start."""
        settings = self.settings
        line = f"out of memory in process {self.dist.rank}{message}: all processes end"
        flags = f"--micro_batch_size {settings.micro_batch} --recompute {settings.recompute}"
        if read_marker(self._folder) is None:  # the run has not begun
            return UserError(f"{line}: start them with {flags}")
        Lowered(self._image_size, settings.micro_batch, settings.recompute).write(self._folder)
        return UserError(
            f"{line}, and use {flags} when they start again, by torchrun --max_restarts or with: "
            f"{resume_command(self._folder)}"
        )


def _out_of_memory(settings: StepSettings) -> str:
    """The error if no setting needs less memory."""
    remedy = "use --recompute auto" if settings.recompute != RECOMPUTE[-1] else "lower --image_size"
    return f"out of memory with --micro_batch_size 1 --recompute {settings.recompute}: {remedy}"


def _library_message(error: RuntimeError) -> str:
    """The message of a library other than PyTorch's allocator, whose cause may be something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    return f" (reported as: {str(error).strip().splitlines()[0]})"


# ---- settings for the next start, with several processes ---------------------------------------------------
LOWERED_NAME = "lowered_memory.json"


class Lowered(NamedTuple):
    """The settings of a step that needs less memory, in the stage with this image size."""

    image_size: int
    micro_batch: int
    recompute: str

    def write(self, folder: Path) -> None:
        """Write them into the folder of a run; OSError if that fails."""
        write_json(folder / LOWERED_NAME, self._asdict())

    def limit(self, micro_batch: int, recompute: str) -> tuple[int, str]:
        """The smaller micro-batch, and the recompute level that needs less memory."""
        return min(micro_batch, self.micro_batch), max(recompute, self.recompute, key=RECOMPUTE.index)


def read_lowered(folder: Path, image_size: int) -> Lowered | None:
    """The settings in the folder of a run for this image size, if memory ran out with it."""
    try:
        lowered = Lowered(**read_json(folder / LOWERED_NAME))
    except FileNotFoundError:
        return None
    return lowered if lowered.image_size == image_size else None
