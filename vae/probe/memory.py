"""The memory of a step of the network, counted on the meta device, and the micro-batch that fits."""

from functools import lru_cache

import torch

from vae.memory.live_bytes import LiveBytes
from vae.memory.plan import ADAM_COPIES, META
from vae.probe.network import LatentClassifier, NetworkShape, forward_of
from vae.probe.training import add_gradients
from vae.system.errors import UserError
from vae.system.host import GIB

BATCH_COPIES = 3  # in fp32: standardized, cropped or erased, mixed


@lru_cache(maxsize=64)
def step_bytes(shape: NetworkShape, dtype: torch.dtype, micro_batch: int) -> tuple[int, int]:
    """Predicted bytes of an optimizer step, whose real code runs on tensors without data.

    First of weights, averaged weights, AdamW's moments and the batch; then of the rest, at its peak.
    """
    with META:
        model = LatentClassifier(shape, *torch.zeros(2, 1, shape.channels, 1, 1))
        latents = torch.zeros(micro_batch, shape.channels, shape.side, shape.side)
        shares = torch.zeros(micro_batch, shape.classes)
    model.to(memory_format=torch.channels_last)
    batch, forward = shape.recipe.batch_size, forward_of(model, dtype)
    with LiveBytes() as counter:
        for _ in range(min(2, -(-batch // micro_batch))):  # later passes are like the second
            add_gradients(forward, latents, shares, shape.recipe.label_smoothing, batch)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return weights * (2 + ADAM_COPIES) + BATCH_COPIES * latents[0].nbytes * batch, counter.peak


def choose_micro_batch(
    shape: NetworkShape, dtype: torch.dtype, available: int, requested: str
) -> tuple[int, int]:
    """The micro-batch, and the bytes of a step; for "auto" with as few passes as fit, a power of 2 of them.

    UserError if a single image does not fit with "auto".
    """
    batch = shape.recipe.batch_size
    if requested != "auto":
        micro_batch = min(int(requested), batch)
        return micro_batch, sum(step_bytes(shape, dtype, micro_batch))
    for power in range(batch.bit_length() + 1):
        micro_batch = -(-batch // 2**power)
        needed = sum(step_bytes(shape, dtype, micro_batch))
        if needed <= available:
            return micro_batch, needed
    raise UserError(
        f"--probe_widths {' '.join(map(str, shape.recipe.widths))} needs {needed / GIB:.1f} GiB for a single "
        f"image, and {available / GIB:.1f} GiB may be used: give smaller widths"
    )
