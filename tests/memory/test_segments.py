"""The model of PyTorch's allocator by hand; tests/null_gpu/test_steps.py compares it with PyTorch."""

from vae.memory.live_bytes import (
    CUBLAS_WORKSPACE,
    CUDNN_WORKSPACE,
    LARGE_PAGE,
    MIB,
    SMALL_PAGE,
    Allocator,
    reserved_bytes,
)


def test_pages_are_reserved_once_and_never_returned():
    allocator = Allocator()
    allocator.replay([(1, 1), (2, 3 * MIB), (3, LARGE_PAGE)])
    assert allocator.reserved == SMALL_PAGE + 2 * LARGE_PAGE
    allocator.replay([(2, 0), (3, 0), (4, 2 * LARGE_PAGE)])  # the gaps of 2, 3 and the rest are joined
    assert allocator.reserved == SMALL_PAGE + 2 * LARGE_PAGE


def test_a_tensor_gets_the_smallest_gap_that_fits_and_gaps_between_tensors_remain():
    a, b, c, d, e = 100 * MIB, 20 * MIB, 60 * MIB, 20 * MIB, 50 * MIB
    allocator = Allocator()
    allocator.replay(enumerate((a, b, c, d)))
    allocator.replay([(0, 0), (2, 0), (4, e)])  # into the gap of 60 MiB, not of 100
    assert allocator.reserved == a + b + c + d
    allocator.replay([(5, a)])  # still free
    assert allocator.reserved == a + b + c + d
    allocator.replay([(6, 20 * MIB)])  # 10 MiB are left
    assert allocator.reserved == a + b + c + d + LARGE_PAGE


def test_moments_fill_gaps_between_gradients():
    """A tensor of 60 MiB that is freed, between two gradients of 20 MiB."""
    events = [(1, 20 * MIB), (2, 60 * MIB), (3, 20 * MIB), (2, 0)]
    with_moments = reserved_bytes(events, resident=100 * MIB + 4 * 20 * MIB, moments=2)
    without = reserved_bytes(events, resident=100 * MIB, moments=0)
    assert without == -(-(CUBLAS_WORKSPACE + 200 * MIB) // LARGE_PAGE) * LARGE_PAGE + CUDNN_WORKSPACE
    # three moments are in the gap, so the tensor of the second step needs another place
    assert with_moments == without + 80 * MIB
