"""The step on a CPU with the memory that it has on a GPU, so that the two can be compared."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from vae.losses import feature_distance
from vae.ops import attention, norm

# elements of a temporary tensor: small beside the peak
OF_NORMS, OF_FEATURES = 2**12, 2**14


@contextmanager
def memory_of_a_gpu() -> Iterator[None]:
    """LPIPS and norms use almost no temporaries, as on a GPU, and attention has the blocks of a GPU."""
    of_device = attention.attention_blocks

    def of_a_gpu(
        batch: int, tokens: int, channels: int, _device: str, has_gradient: bool = True
    ) -> tuple[int, int]:
        return of_device(batch, tokens, channels, "cuda", has_gradient)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(feature_distance, "CPU_PIECE_ELEMENTS", OF_FEATURES))
        stack.enter_context(mock.patch.object(norm, "CPU_PART_ELEMENTS", OF_NORMS))
        stack.enter_context(mock.patch.object(attention, "attention_blocks", of_a_gpu))
        yield
