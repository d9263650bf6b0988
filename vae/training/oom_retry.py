"""A step that does not fit the memory is taken again with less: smaller passes, then more recomputation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vae.config.errors import UserError
from vae.config.options import RECOMPUTE
from vae.device import is_out_of_memory
from vae.step import StepInputs, compute_gradients, micro_batch_sizes
from vae.training.checkpoints import latest_command
from vae.training.logbook import say
from vae.training.setup import Run


class OutOfMemoryElsewhereError(Exception):
    """Another process ran out of memory in this step: all take it again together.

    `single` says whether that was with a single image.
    """

    def __init__(self, single: bool):
        super().__init__()
        self.single = single


def gradients_within_memory(run: Run, inputs: StepInputs) -> dict[str, torch.Tensor]:
    """Gradients of the step; where memory runs out, all processes take it again, with less."""
    while True:
        together = False

        @contextmanager
        def shared_pass() -> Iterator[None]:
            nonlocal together
            failed, single = run.processes.sum_numbers(0, 0)
            if failed > 0:
                raise OutOfMemoryElsewhereError(single > 0)
            together = True  # from here the others wait for this process's gradients
            yield
            together = False

        try:
            sizes = micro_batch_sizes(len(inputs.images), run.micro_batch, run.processes.world > 1)
            return compute_gradients(run.networks, inputs, sizes, run.config.loss, shared_pass)
        except OutOfMemoryElsewhereError as elsewhere:
            failed_here, single = False, elsewhere.single
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed_here, single = True, max(sizes) == 1
        # outside the except clause: the exception holds the frames, and they the memory
        if failed_here:
            _tell_the_others(run, max(sizes), together and run.processes.world > 1)
        _take_less_memory(run, max(sizes), single)


def _tell_the_others(run: Run, largest: int, together: bool) -> None:
    """Let all processes take the step again; UserError where nothing smaller is left or they cannot hear."""
    single = largest == 1
    if not together:
        run.processes.sum_numbers(1, single)
    if together or (single and _next_rung(run) is None):
        options = f"--micro_batch_size {largest} --recompute {run.recompute}"
        fixed = run.config.speed.recompute != "auto" and run.recompute != RECOMPUTE[-1]
        remedy = "lower --image_size"
        if single and fixed:
            remedy = "take --recompute auto"
        elif not single:
            remedy = "lower --micro_batch_size"
        elif _next_rung(run):  # several processes, an image each: their only pass is the one they share
            remedy = f"take --recompute {_next_rung(run)}"
        command = latest_command(run.output_dir)
        raise UserError(f"out of memory with {options}: {remedy} and go on with: {command}")


def _next_rung(run: Run) -> str | None:
    """The next smaller rung of the ladder, where the choice is ours and there is one."""
    if run.config.speed.recompute != "auto" or run.recompute == RECOMPUTE[-1]:
        return None
    return RECOMPUTE[RECOMPUTE.index(run.recompute) + 1]


def _take_less_memory(run: Run, largest: int, single: bool) -> None:
    """Halve the passes of this process's `largest`; where a `single` image was too much, recompute more.

    Smaller passes first: they cost no arithmetic, and a card is busy with one image of training size.
    """
    for optimizer in run.state.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if run.processes.device.type == "cuda":
        torch.cuda.empty_cache()
    if single:
        run.use(_next_rung(run) or run.recompute, run.micro_batch)
        lowered = f"--recompute {run.recompute} from here on; same batch and gradients, more arithmetic"
    else:
        run.use(run.recompute, max(1, min(largest, run.micro_batch) // 2))
        lowered = f"micro-batch lowered to {run.micro_batch}; same batch and gradients, more passes"
    if run.processes.is_main:
        say(f"out of memory: {lowered}")
