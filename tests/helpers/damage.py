"""Damage files."""

from pathlib import Path


def flip(path: Path, position: int) -> None:
    """Flip the lowest bit of the byte at `position`."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
