"""Launch shapes of our Triton kernels: how a tensor is cut, and the shared memory that a program needs.

Plain arithmetic, so memory can be counted and the shapes tested without Triton and without a GPU.
"""

from typing import NamedTuple

# CUDA C++ programming guide, table of compute capabilities: the most shared memory of one block on sm_120
# (RTX 50), 99 KiB. Hopper and the data-centre Blackwells have 227 KiB.
SHARED_MEMORY_BYTES = 101_376

# 4096 elements on 8 warps are 16 per thread: in bf16 two loads of 16 bytes, the widest loads. Compiled
# (Triton 3.9) for sm_90 and sm_120, the norm kernels use 35 to 123 registers per thread without spilling. At
# 123 registers two programs share an SM, each with 16 KiB of loads in flight. Speed not measured yet.
TILE_ELEMENTS = 4096
NUM_WARPS = 8

# Programs that share one reduction: with 8 warps each they fill the 132 SMs of an H200 and the 170 of an RTX
# 5090 with about 48 to 64 warps per SM. The same number on every card, so every card sums in the same order.
REDUCTION_PROGRAMS = 1024

# Consecutive channels of a tile in channels_last layout: 128 in bf16 are 256 bytes, two full transactions.
NHWC_COLUMNS = 128
# In contiguous layout a tile is long in pixels; 8 channels keep its reduction over pixels in few warps.
NCHW_COLUMNS = 8

MERGE_TILE_ELEMENTS = 2048  # of two tensors at once, on NUM_WARPS warps: 8 elements of each per thread

# One row of an attention block of 2048 keys on 4 warps.
ROW_TILE_ELEMENTS = 2048


class NormBlocks(NamedTuple):
    """How norm kernels cut (pixels, channels) of each image into tiles, and assign tiles to programs."""

    rows: int  # pixels of a tile, a power of two
    columns: int  # channels of a tile, a power of two
    column_blocks: int
    tiles: int  # tiles of one image along its pixels
    tiles_per_program: int  # in a reduction
    programs: int  # of a reduction, along the pixels: the number of partial results per image and channel

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound for one program: two tiles in fp32, if a reduction over rows exchanges whole tiles."""
        return 2 * 4 * self.rows * self.columns


def norm_blocks(batch: int, channels: int, pixels: int, channels_last: bool) -> NormBlocks:
    """Tiles of TILE_ELEMENTS; reductions over about REDUCTION_PROGRAMS programs in total."""
    columns = min(NHWC_COLUMNS if channels_last else NCHW_COLUMNS, power_of_two(channels))
    rows = min(TILE_ELEMENTS // columns, max(16, power_of_two(pixels)))
    column_blocks = -(-channels // columns)
    tiles = -(-pixels // rows)
    wanted = max(1, REDUCTION_PROGRAMS // (batch * column_blocks))
    tiles_per_program = -(-tiles // wanted)
    programs = -(-tiles // tiles_per_program)
    return NormBlocks(rows, columns, column_blocks, tiles, tiles_per_program, programs)


def merge_tile(group_channels: int) -> tuple[int, int]:
    """(partial results, channels) that a merging program processes at once, powers of two."""
    columns = power_of_two(group_channels)
    return max(1, MERGE_TILE_ELEMENTS // columns), columns


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


class RowTile(NamedTuple):
    """Whole rows of a matrix that one program processes at once."""

    rows: int  # a power of two
    columns: int  # a power of two, at least the matrix's width
    num_warps: int

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound for one program: one fp32 value of each row from each warp, to reduce the rows."""
        return 4 * self.rows * self.num_warps


def row_tile(columns: int) -> RowTile:
    """2048 elements or one row, 16 elements per thread; at most 32 warps for one long row."""
    padded = power_of_two(columns)
    rows = max(1, ROW_TILE_ELEMENTS // padded)
    return RowTile(rows, padded, num_warps=max(1, min(32, rows * padded // (16 * 32))))
