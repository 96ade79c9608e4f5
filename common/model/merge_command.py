"""Command line of `merge`, which the benchmarks with adapters share. Standard library only."""

from __future__ import annotations

from pathlib import Path

from common.command_line import Parser


def merge_parser(benchmark: str, about: str) -> Parser:
    """Return the parser. Its arguments are the paths base, adapter and out."""
    example = f"{benchmark} merge --base BASE --adapter RUN/adapter --out merged"
    parser = Parser(f"{benchmark} merge", about, [example])
    parser.add_argument(
        "--base",
        type=Path,
        required=True,
        metavar="DIR",
        help="base checkpoint in safetensors, with fused (qkv_proj) or separate projections",
    )
    parser.add_argument(
        "--adapter", type=Path, required=True, metavar="DIR", help="adapter directory of a run"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    return parser
