"""Launch shapes of our Triton kernels: how a tensor is cut, and the shared memory that a program needs.

Plain arithmetic, so memory can be counted and the shapes tested without Triton and without a GPU.
"""

import math
from typing import NamedTuple

# CUDA C++ programming guide, table of compute capabilities: the most shared memory of one block on sm_120
# (RTX 50), 99 KiB. Hopper and the data-centre Blackwells have 227 KiB.
SHARED_MEMORY_BYTES = 101_376

# 4096 elements on 8 warps are 16 per thread: in bf16 two loads of 16 bytes, the widest loads.
TILE_ELEMENTS = 4096
NUM_WARPS = 8

# Programs of a reduction, along pixels, blocks of channels and images: as many as run at once, so none waits
# for another to end. With 128 registers for each of 256 threads, two fill the 65,536 registers of a
# streaming multiprocessor; each keeps two tiles in flight, 32 KiB in bf16 for each multiprocessor, and an
# H200 (4.8 TB/s, 132 multiprocessors, about 0.7 µs) needs 25. Few programs also keep the partial results
# small, which each program of a second kernel reads again. Not measured yet.
PROGRAMS_PER_PROCESSOR = 2
MAX_REGISTERS = 65_536 // (PROGRAMS_PER_PROCESSOR * 32 * NUM_WARPS)
PROCESSORS = 170  # of an RTX 5090, for tensors without a card
REDUCTION_PROGRAMS: int | None = None  # instead of those: benchmarks and tests set it

# Consecutive channels of a tile: 128 in bf16 are 256 bytes, two full transactions.
COLUMNS = 128

# The widest features of the RMS kernels, whose tiles have all channels of a pixel: two tiles of two tensors
# in fp32 are then 64 KiB.
MAX_RMS_CHANNELS = TILE_ELEMENTS

# At least a part of a row of attention scores: 2048 of them on 4 warps.
ROW_TILE_ELEMENTS = 2048


class NormBlocks(NamedTuple):
    """How norm kernels cut (pixels, channels) of each image into tiles, and assign tiles to programs."""

    rows: int  # pixels of a tile, a power of two
    columns: int  # at least `channels`, a power of two
    channels: int  # of a tile: whole groups
    groups: int  # at least the groups of a tile, a power of two
    column_blocks: int
    tiles: int  # tiles of one image along its pixels
    tiles_per_program: int
    programs: int  # along the pixels: the number of partial results per image

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound for one program: two tiles of two tensors in fp32."""
        return 2 * 2 * 4 * self.rows * self.columns


def reduction_programs(processors: int = PROCESSORS) -> int:
    """Programs of a reduction on a card with this number of streaming multiprocessors."""
    return REDUCTION_PROGRAMS or PROGRAMS_PER_PROCESSOR * processors


def norm_blocks(batch: int, channels: int, pixels: int, groups: int, total: int) -> NormBlocks:
    """Tiles of TILE_ELEMENTS with whole groups; about `total` programs."""
    group_channels = channels // groups
    own = min(groups, max(1, COLUMNS // group_channels))
    aligned = 8 // math.gcd(8, group_channels)  # groups whose channels fill loads of 16 bytes in bf16
    own = own // aligned * aligned or own
    columns = power_of_two(own * group_channels)
    rows = max(1, min(TILE_ELEMENTS // columns, max(16, power_of_two(pixels))))
    column_blocks, tiles = -(-groups // own), -(-pixels // rows)
    wanted = max(1, total // (batch * column_blocks))
    tiles_per_program = -(-tiles // wanted)
    programs = -(-tiles // tiles_per_program)
    sizes = (own * group_channels, power_of_two(own), column_blocks, tiles, tiles_per_program, programs)
    return NormBlocks(rows, columns, *sizes)


class RmsBlocks(NamedTuple):
    """How RMS kernels cut (pixels, channels) into tiles, and backward assigns tiles to programs."""

    rows: int  # pixels of a tile, a power of two
    columns: int  # at least the channels, a power of two
    tiles: int
    tiles_per_program: int
    programs: int  # of backward: the number of partial sums

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound for one program: two tiles of two tensors in fp32."""
        return 2 * 2 * 4 * self.rows * self.columns


def rms_blocks(channels: int, pixels: int, most: int) -> RmsBlocks:
    """Tiles of TILE_ELEMENTS, or one pixel; at most `most` programs. `pixels`: of all images."""
    columns = power_of_two(channels)
    rows = max(1, TILE_ELEMENTS // columns)
    tiles = -(-pixels // rows)
    tiles_per_program = -(-tiles // most)
    return RmsBlocks(rows, columns, tiles, tiles_per_program, -(-tiles // tiles_per_program))


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
