"""The command `llama2_70b_lora merge`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, program
from common.training.merge_command import merge_adapters, merge_parser
from llama2_70b_lora.rules import DIVISIONS


def parser(benchmark: str = "llama2_70b_lora") -> Parser:
    """Return the parser of `merge`."""
    return merge_parser(benchmark)


def work(options: argparse.Namespace) -> None:
    """Merge adapters into a base that may have MLCommons' files, which lack config.json."""
    models = {rules.shape: rules.sequence_length for rules in DIVISIONS}
    manifests = tuple(Path(name).name for rules in DIVISIONS for name in rules.base_files)
    merge_adapters(options, models, manifests)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
