"""The command `open_llama merge`."""

from __future__ import annotations

import argparse
import sys

from common.command_line import Parser, program
from common.training.merge_command import merge_adapters, merge_parser
from open_llama.tokenizer import copy_tokenizer


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser of `merge`."""
    return merge_parser(benchmark)


def merge(options: argparse.Namespace) -> None:
    """Merge adapters into the base. The result has their tokenizer and chat template."""
    merge_adapters(options, add=copy_tokenizer)


main = program(parser, merge)

if __name__ == "__main__":
    sys.exit(main())
