"""Merge trained adapters into the base weights and write the result as a new checkpoint.

Each weight becomes W + (alpha / rank) * B @ A, rounded once to the dtype of the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, program


def parser(benchmark: str = "llama2_70b_lora") -> Parser:
    example = f"{benchmark} merge --base BASE --adapter RUN/adapter --out merged"
    parser = Parser(f"{benchmark} merge", __doc__, [example])
    parser.add_argument(
        "--base",
        type=Path,
        required=True,
        metavar="DIR",
        help="base checkpoint in safetensors, with fused (qkv_proj) or separate projections",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        required=True,
        metavar="DIR",
        help="adapter directory of a run",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    return parser


def work(options: argparse.Namespace) -> None:
    from llama2_70b_lora.merged_weights import merge  # needs torch, which --help must not

    merge(options.base, options.adapter, options.out)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
