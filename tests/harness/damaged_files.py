"""Damage to files."""

from pathlib import Path


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of the byte at `position`."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
