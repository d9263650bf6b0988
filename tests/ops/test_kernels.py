"""The Triton kernels in the interpreter and on a GPU, and the launch shapes that a GPU supports."""

import itertools

import pytest
import torch

from tests.harness.interpreter import interpreted
from tests.harness.operations import SHARED_MEMORY_BYTES
from vae.ops.library import norm_blocks, power_of_two, rms_blocks, row_tile

TILES_BYTES = 2 * 2 * 4  # of an element: two tiles of two tensors in fp32


@pytest.mark.slow
def test_kernels_equal_their_references_in_the_interpreter():
    done = interpreted("tests.harness.kernel_checks")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.gpu
def test_kernels_equal_their_references_on_a_gpu():
    from tests.harness import kernel_checks

    assert kernel_checks.check_all("cuda", thorough=True) > 90


@pytest.mark.gpu
def test_gpu_tensors_select_the_kernels():
    from vae.losses import feature_distance
    from vae.ops import attention, norm

    h = torch.zeros(1, 8, 4, 4, device="cuda").to(memory_format=torch.channels_last)
    assert norm.backend(h).__name__ == "vae.ops.norm_triton"
    assert norm.backend(h.double()) is None
    assert norm.backend(h, norm.Norm(h, None, 0, 0.0)).__name__ == "vae.ops.rms_norm_triton"
    assert attention.backend(h).__name__ == "vae.ops.attention_triton"
    assert feature_distance.backend(h).__name__ == "vae.losses.feature_distance_triton"


@pytest.mark.gpu
def test_norm_beyond_two_to_the_31_elements():
    from vae.ops.norm import Norm, group_norm_silu, normalize_backward

    h = torch.empty(1, 4096, 4100, 128, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2).normal_()
    assert h.numel() > 2**31
    ones, zeros = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    out = group_norm_silu(h, ones, zeros, 32, 1e-6)
    expected = torch.nn.functional.silu(h[:, :, -3:].float())  # mean and rstd are 0 and 1 within 1e-3
    torch.testing.assert_close(out[:, :, -3:].float(), expected, rtol=2e-2, atol=2e-2)
    statistics = torch.stack((torch.zeros(1, 32, device="cuda"), torch.ones(1, 32, device="cuda")))
    norm = Norm(ones, zeros, 32, 1e-6, silu=False)
    grad, *_ = normalize_backward(h, h, statistics, norm)  # unit = grad: the gradient is 0
    assert grad[:, :, -3:].abs().max() < 2e-2


def test_norm_blocks_cover_all_elements_within_shared_memory():
    sides = (1, 3, 17, 64, 255, 1024, 4099)
    widths = [(4, 2), (12, 3), (96, 32), (128, 32), (192, 32), (384, 32), (512, 32), (512, 1), (768, 32)]
    for batch, (channels, groups), side in itertools.product((1, 2, 3, 64), widths, sides):
        blocks = norm_blocks(batch, channels, side * side, groups, total=340)
        assert blocks.rows == power_of_two(blocks.rows)
        assert blocks.columns == power_of_two(blocks.channels)
        assert blocks.channels % (channels // groups) == 0
        assert blocks.channels % 8 == 0 or groups < 32 or channels < 128  # loads of 16 bytes
        assert blocks.groups >= blocks.channels // (channels // groups)
        others = (blocks.column_blocks - 1) * blocks.channels
        assert others < channels <= others + blocks.channels
        per_program = blocks.tiles_per_program * blocks.rows
        assert blocks.programs * per_program >= side * side > (blocks.programs - 1) * per_program
        assert blocks.tiles * blocks.rows >= side * side > (blocks.tiles - 1) * blocks.rows
        assert TILES_BYTES * blocks.rows * blocks.columns <= SHARED_MEMORY_BYTES
        assert (
            max(blocks.column_blocks, batch) < 65_536
        )  # the limit of a CUDA grid's second and third dimension


def test_rms_blocks_cover_all_elements_within_shared_memory():
    for channels, pixels in itertools.product((1, 96, 192, 384, 1000, 4096), (1, 255, 4096, 2**24)):
        blocks = rms_blocks(channels, pixels, most=340)
        assert blocks.columns == power_of_two(channels)
        assert blocks.rows * blocks.tiles >= pixels > blocks.rows * (blocks.tiles - 1)
        assert blocks.programs * blocks.tiles_per_program >= blocks.tiles
        assert (blocks.programs - 1) * blocks.tiles_per_program < blocks.tiles
        assert TILES_BYTES * blocks.rows * blocks.columns <= SHARED_MEMORY_BYTES


def test_row_tiles_cover_whole_rows_within_shared_memory():
    for columns in (1, 3, 64, 384, 512, 768, 2047, 2048, 4096, 16_384):
        tile = row_tile(columns)
        assert tile.columns >= columns
        assert 1 <= tile.num_warps <= 32
        assert 4 * tile.rows * tile.columns <= SHARED_MEMORY_BYTES  # even if a layout change used it
