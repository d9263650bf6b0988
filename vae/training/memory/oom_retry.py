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
from vae.training.memory.cuda_graph import StepGraph


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


def gradients_with_oom_retry(
    networks: Networks,
    inputs: StepInputs,
    settings: StepSettings,
    dist: Distributed,
    resume_command: str,
    backward: bool = True,
) -> dict[str, torch.Tensor]:
    """Compute the step's gradients; if memory runs out, all processes repeat the step with less.

    Without `backward`, the losses alone are measured.
    """
    while True:
        in_shared_pass = False

        @contextmanager
        def shared_pass() -> Iterator[None]:
            nonlocal in_shared_pass
            failed, failed_on_one = dist.all_reduce_scalars(0, 0)  # 0: this process has not run out
            if failed > 0:
                raise _OutOfMemoryElsewhereError(failed_on_one > 0)
            in_shared_pass = True  # from here on, the other processes wait for this one's gradients
            yield
            in_shared_pass = False

        sizes = micro_batch_sizes(len(inputs.images), settings.micro_batch, dist.world_size > 1)
        message = ""
        try:
            if not backward:
                return forward_losses(networks, inputs, sizes, shared_pass)
            if settings.graph:
                return settings.graph.gradients(networks, inputs, sizes)
            return compute_gradients(networks, inputs, sizes, shared_pass)
        except _OutOfMemoryElsewhereError as elsewhere:
            failed_here, single_image = False, elsewhere.single_image
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed_here, single_image = True, max(sizes) == 1
            message = _library_message(error)
        # Not within the except clause: there, the exception keeps the tensors of the step alive.
        settings.out_of_memory += 1
        if release_graph(settings, networks):
            continue
        if failed_here:
            can_notify = not in_shared_pass or dist.world_size == 1
            if can_notify:
                dist.all_reduce_scalars(1, single_image)
            if not can_notify or (single_image and settings.next_recompute() is None):
                line = _out_of_memory(settings, max(sizes))
                raise UserError(f"{line} and resume with: {resume_command}{message}")
        _reduce_memory(settings, networks, max(sizes), single_image)


def release_graph(settings: StepSettings, networks: Networks) -> bool:
    """End the CUDA graph, whose memory is its own; whether this freed any."""
    released, settings.graph = settings.graph is not None and settings.graph.is_captured, None
    if released:
        free_memory(networks)
        console.info("out of memory: training continues without a CUDA graph, only slower")
    return released


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


def _reduce_memory(settings: StepSettings, networks: Networks, largest: int, single_image: bool) -> None:
    """Clear the gradients and halve this process's `largest` micro-batch; from one image, recompute more.

    Smaller micro-batches come first: they add no arithmetic, and one image of training size keeps a GPU busy.
    """
    autoencoder = unwrapped(networks.autoencoder)
    assert isinstance(autoencoder, AutoencoderKL)
    free_memory(networks)
    if single_image:
        settings.recompute = settings.next_recompute() or settings.recompute
        set_recompute(autoencoder, settings.recompute)
        lowered = f"--recompute {settings.recompute} from here on; same batch and gradients, more arithmetic"
    else:
        settings.micro_batch = max(1, min(largest, settings.micro_batch) // 2)
        lowered = f"micro-batch lowered to {settings.micro_batch}; same batch and gradients, more passes"
    console.info(f"out of memory: {lowered}")


def free_memory(networks: Networks) -> None:
    """Delete the gradients of the failed step, and return unused memory to the device."""
    clear_gradients(networks)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
