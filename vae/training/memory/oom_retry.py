"""Repeat a step that ran out of memory: with smaller micro-batches, then at a higher recompute level."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from vae.training.distributed import Distributed
from vae.training.memory.cuda_graph import StepGraph, Sums


@dataclass
class StepSettings:
    """How a step is computed. It changes if memory runs out; nothing here changes the gradient."""

    micro_batch: int
    recompute: str
    may_recompute_more: bool  # --recompute auto
    graph: StepGraph | None = None  # of a single process; None: steps run without one
    out_of_memory: int = 0  # how often memory ran out, in steps and validations

    def next_recompute(self) -> str | None:
        """The next recompute level, which needs less memory, or None if it may not be chosen."""
        if not self.may_recompute_more or self.recompute == RECOMPUTE[-1]:
            return None
        return RECOMPUTE[RECOMPUTE.index(self.recompute) + 1]


class _OutOfMemoryElsewhereError(Exception):
    """Another process ran out of memory in this step, so all processes repeat it.

    `single_image`: whether its largest micro-batch was one image.
    """

    def __init__(self, single_image: bool):
        super().__init__()
        self.single_image = single_image


class OomRetry:
    """Computes the gradients of steps; if memory runs out, all processes repeat the step with less."""

    def __init__(
        self, networks: Networks, dist: Distributed, settings: StepSettings, resume_command: str
    ) -> None:
        self.networks, self.dist, self.settings = networks, dist, settings
        self._resume_command = resume_command
        self._in_shared_pass = False

    def gradients(self, inputs: StepInputs) -> Sums:
        """Compute the gradients of a step; returns the sums of the losses over its images."""
        return self._repeated(inputs, backward=True)

    def losses(self, inputs: StepInputs) -> Sums:
        """The sums of the losses, without adversarial ones; nothing else is computed."""
        return self._repeated(inputs, backward=False)

    def _repeated(self, inputs: StepInputs, backward: bool) -> Sums:
        dist, settings = self.dist, self.settings
        while True:
            self._in_shared_pass = False
            sizes = micro_batch_sizes(len(inputs.images), settings.micro_batch, dist.world_size > 1)
            message = ""
            try:
                return self._computed(inputs, sizes, backward)
            except _OutOfMemoryElsewhereError as elsewhere:
                failed_here, single_image = False, elsewhere.single_image
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed_here, single_image = True, max(sizes) == 1
                message = _library_message(error)
            # Not within the except clause: there, the exception keeps the tensors of the step alive.
            settings.out_of_memory += 1
            if self.release_graph():
                continue
            if failed_here:
                can_notify = not self._in_shared_pass or dist.world_size == 1
                if can_notify:
                    dist.all_reduce_scalars(1, single_image)
                if not can_notify or (single_image and settings.next_recompute() is None):
                    line = _out_of_memory(settings, max(sizes))
                    raise UserError(f"{line} and resume with: {self._resume_command}{message}")
            self._reduce_memory(max(sizes), single_image)

    def _computed(self, inputs: StepInputs, sizes: list[int], backward: bool) -> Sums:
        if not backward:
            return forward_losses(self.networks, inputs, sizes, self._shared_pass)
        if self.settings.graph:
            return self.settings.graph.gradients(self.networks, inputs, sizes)
        return compute_gradients(self.networks, inputs, sizes, self._shared_pass)

    @contextmanager
    def _shared_pass(self) -> Iterator[None]:
        failed, failed_on_one = self.dist.all_reduce_scalars(0, 0)  # 0: this process has not run out
        if failed > 0:
            raise _OutOfMemoryElsewhereError(failed_on_one > 0)
        self._in_shared_pass = True  # from here on, the other processes wait for this one's gradients
        yield
        self._in_shared_pass = False

    def release_graph(self) -> bool:
        """End the CUDA graph, whose memory is its own; whether this freed any."""
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

    def _reduce_memory(self, largest: int, single_image: bool) -> None:
        """Halve this process's `largest` micro-batch; from one image, recompute more.

        Smaller micro-batches come first: they add no arithmetic, and one image of training size keeps a GPU
        busy.
        """
        settings, autoencoder = self.settings, unwrapped(self.networks.autoencoder)
        assert isinstance(autoencoder, AutoencoderKL)
        self.free_memory()
        if single_image:
            settings.recompute = settings.next_recompute() or settings.recompute
            set_recompute(autoencoder, settings.recompute)
            lowered = (
                f"--recompute {settings.recompute} from here on; same batch and gradients, more arithmetic"
            )
        else:
            settings.micro_batch = max(1, min(largest, settings.micro_batch) // 2)
            lowered = f"micro-batch lowered to {settings.micro_batch}; same batch and gradients, more passes"
        console.info(f"out of memory: {lowered}")


def _out_of_memory(settings: StepSettings, largest: int) -> str:
    """The error if no setting needs less memory, or if the other processes cannot be notified."""
    next_level = settings.next_recompute()
    if largest > 1:
        remedy = "lower --micro_batch_size"
    elif next_level:  # several processes with one image each: their only pass is the shared one
        remedy = f"use --recompute {next_level}"
    elif settings.recompute != RECOMPUTE[-1]:
        remedy = "use --recompute auto"
    else:
        remedy = "lower --image_size"
    return f"out of memory with --micro_batch_size {largest} --recompute {settings.recompute}: {remedy}"


def _library_message(error: RuntimeError) -> str:
    """The message of a library other than PyTorch's allocator, whose cause may be something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    return f" (reported as: {str(error).strip().splitlines()[0]})"
