"""Write the newest checkpoint of a run for other programs.

RUN is the directory of a run with --checkpoint, which may still be running. The result is a
checkpoint of Hugging Face, or with LoRA an adapter in peft's format, as at the end of a run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, program


def parser(benchmark: str = "open_llama") -> Parser:
    parser = Parser(f"{benchmark} export", __doc__, ["open_llama export results/open_llama/RUN"])
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder (default: RUN/exported_step_<number>)"
    )
    return parser


def work(options: argparse.Namespace) -> None:
    from open_llama.exported_weights import export  # needs torch, which --help must not

    export(options)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
