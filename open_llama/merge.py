"""Merge trained adapters into the base weights and write the result as a new checkpoint.

Each weight becomes W + (alpha / rank) * B @ A, rounded once to the dtype of the checkpoint.
"""

from __future__ import annotations

import argparse
import sys

from common.command_line import Parser, program
from common.model.merge_command import merge_parser


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser of `merge`."""
    return merge_parser(benchmark, __doc__ or "")


def work(options: argparse.Namespace) -> None:
    """Merge the adapters that `options` name."""
    from common.model.merged_adapter import merge  # needs torch, which --help must not

    merge(options.base, options.adapter, options.out)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
