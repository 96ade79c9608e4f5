"""Merge trained adapters into the base weights and write the result as a new checkpoint.

Each weight becomes W + (alpha / rank) * B @ A, rounded once to the dtype of the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, program
from common.model.merge_command import merge_parser
from llama2_70b_lora.rules import DIVISIONS


def parser(benchmark: str = "llama2_70b_lora") -> Parser:
    """Return the parser of `merge`."""
    return merge_parser(benchmark, __doc__ or "")


def work(options: argparse.Namespace) -> None:
    """Merge the adapters that `options` name."""
    from common.model.merged_adapter import merge  # needs torch, which --help must not

    models = {}
    manifests = []
    for rules in DIVISIONS:
        models[rules.shape] = rules.sequence_length
        manifests += [Path(name).name for name in rules.base_files]
    merge(options.base, options.adapter, options.out, models, left_out=manifests)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
