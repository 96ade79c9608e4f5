"""The command `open_llama merge`."""

from __future__ import annotations

import sys

from common.command_line import Parser, program
from common.training.merge_command import merge_adapters, merge_parser


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser of `merge`."""
    return merge_parser(benchmark)


main = program(parser, merge_adapters)

if __name__ == "__main__":
    sys.exit(main())
