"""The memory of an optimizer step of a recipe, counted on the meta device, and the micro-batch that fits."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from vae.classifier.network import LatentClassifier, NetworkShape
from vae.classifier.recipe import add_gradients, forward_of
from vae.memory.live_bytes import LiveBytes
from vae.memory.plan import ADAM_COPIES, META
from vae.system.errors import UserError
from vae.system.host import GIB


@dataclass(frozen=True)
class ClassifierSpec:
    """Everything that decides the memory of a step, except the micro-batch."""

    shape: NetworkShape
    batch: int  # images per optimizer step
    dtype: torch.dtype  # of the layers
    ema: bool
    reserve: int  # bytes that the device needs in addition to all tensors


@dataclass(frozen=True)
class ClassifierMemory:
    """Bytes of a step at a micro-batch."""

    micro_batch: int
    resident: int  # weights, EMA weights, AdamW's moments, the batch
    working: int  # gradients, activations and temporaries at their peak
    reserve: int

    @property
    def total(self) -> int:
        return self.resident + self.working + self.reserve


@lru_cache(maxsize=64)
def classifier_memory(spec: ClassifierSpec, micro_batch: int) -> ClassifierMemory:
    """Predicted bytes of a step: its real code runs on tensors without data."""
    shape = spec.shape
    with META:
        model = LatentClassifier(shape, *torch.zeros(2, 1, shape.channels, 1, 1))
        latents = torch.zeros(micro_batch, shape.channels, shape.side, shape.side, dtype=torch.float16)
        targets = torch.zeros(micro_batch, dtype=torch.int64)
    model.to(memory_format=torch.channels_last)
    passes = min(2, -(-spec.batch // micro_batch))  # later passes are like the second: all gradients exist
    forward = forward_of(model, spec.dtype)
    with LiveBytes() as counter:
        for _ in range(passes):
            add_gradients(forward, latents, targets, smoothing=0.1, batch=spec.batch)
    weights = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    resident = weights * (1 + ADAM_COPIES + spec.ema)
    resident += (latents.nbytes + targets.nbytes) // micro_batch * spec.batch
    return ClassifierMemory(micro_batch, resident, counter.peak, spec.reserve)


def choose_micro_batch(spec: ClassifierSpec, available: int, requested: str) -> ClassifierMemory:
    """The step at the requested micro-batch; for "auto" with as few passes as fit, a power of 2 of them.

    UserError if a single image does not fit with "auto".
    """
    if requested != "auto":
        return classifier_memory(spec, min(int(requested), spec.batch))
    for power in range(spec.batch.bit_length() + 1):
        memory = classifier_memory(spec, -(-spec.batch // 2**power))
        if memory.total <= available:
            return memory
    raise UserError(
        f"--probe_widths {' '.join(map(str, spec.shape.widths))} needs {memory.total / GIB:.1f} GiB for a "
        f"single image, and {available / GIB:.1f} GiB may be used: give smaller widths"
    )
