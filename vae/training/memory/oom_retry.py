"""Repeat a step that ran out of memory: with smaller micro-batches, then at a higher recompute level."""

from contextlib import AbstractContextManager, nullcontext
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
    trained_networks,
)
from vae.system import console
from vae.system.errors import UserError
from vae.training.distributed import Distributed
from vae.training.gradient_sum import GradientSum
from vae.training.memory.cuda_graph import StepGraph, Sums


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
    """Computes the gradients of steps; a process whose memory runs out repeats the step with less."""

    def __init__(
        self,
        networks: Networks,
        dist: Distributed,
        settings: StepSettings,
        resume_command: str,
        gradient_sum: GradientSum | None = None,
    ) -> None:
        """`gradient_sum`: of all processes, if there are several."""
        self.networks, self.dist, self.settings = networks, dist, settings
        self.gradient_sum = gradient_sum or GradientSum([], 1)
        self._resume_command = resume_command

    def gradients(self, inputs: StepInputs) -> Sums:
        """Compute the gradients of a step; returns the sums of the losses over its images."""
        return self._repeated(inputs, backward=True)

    def sum_gradients(self, adversarial: bool) -> None:
        """Replace the gradients by their means over all processes; `adversarial`: those of both networks."""
        trained = trained_networks(self.networks)
        self.gradient_sum.finish(trained if adversarial else trained[:1])

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
                raise UserError(f"{line} and resume with: {self._resume_command}{message}")
            self._reduce_memory(max(sizes))

    def _computed(self, inputs: StepInputs, sizes: list[int], backward: bool) -> Sums:
        if not backward:
            return forward_losses(self.networks, inputs, sizes)
        if self.settings.graph:
            return self.settings.graph.gradients(self.networks, inputs, sizes, self.gradient_sum)
        return compute_gradients(self.networks, inputs, sizes, self.gradient_sum.last_pass)

    def beside_graph(self) -> AbstractContextManager[None]:
        """A context for work between two steps: it uses the memory of the CUDA graph, if there is one.

        Nothing that is allocated on the device may outlive the context.
        """
        return self.settings.graph.memory() if self.settings.graph else nullcontext()

    def release_graph(self) -> bool:
        """End the CUDA graph; whether this freed memory."""
        graph, self.settings.graph = self.settings.graph, None
        released = graph is not None and graph.is_captured
        del graph
        if released:
            self.free_memory()
            self._report("training continues without a CUDA graph, only slower")
        return released

    def free_memory(self) -> None:
        """Delete the gradients of a failed step, and return unused memory to the device."""
        clear_gradients(self.networks)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _report(self, change: str) -> None:
        """Print from the process whose memory ran out."""
        where = f" in process {self.dist.rank}" if self.dist.world_size > 1 else ""
        report = console.info if self.dist.is_main else console.error
        report(f"out of memory{where}: {change}")

    def _reduce_memory(self, largest: int) -> None:
        """Halve this process's `largest` micro-batch; from one image, recompute more.

        Smaller micro-batches come first: they add no arithmetic, and one image of training size keeps a GPU
        busy.
        """
        settings, autoencoder = self.settings, self.networks.autoencoder
        assert isinstance(autoencoder, AutoencoderKL)
        self.free_memory()
        if largest == 1:
            settings.recompute = settings.next_recompute() or settings.recompute
            set_recompute(autoencoder, settings.recompute)
            lowered = (
                f"--recompute {settings.recompute} from here on; same batch and gradients, more arithmetic"
            )
        else:
            settings.micro_batch = max(1, min(largest, settings.micro_batch) // 2)
            lowered = f"micro-batch lowered to {settings.micro_batch}; same batch and gradients, more passes"
        self._report(lowered)


def _out_of_memory(settings: StepSettings) -> str:
    """The error if no setting needs less memory."""
    remedy = "use --recompute auto" if settings.recompute != RECOMPUTE[-1] else "lower --image_size"
    return f"out of memory with --micro_batch_size 1 --recompute {settings.recompute}: {remedy}"


def _library_message(error: RuntimeError) -> str:
    """The message of a library other than PyTorch's allocator, whose cause may be something else."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    return f" (reported as: {str(error).strip().splitlines()[0]})"
