"""Evaluate a model alone: `./run_and_time.sh open_llama eval MODEL --data PREFIX [--adapter DIR]`.

The loss is that of training: the mean over the first sequences of the token file of each one's mean
natural-log cross entropy. One GPU computes in bf16, a CPU in fp32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, count, program


def parser(benchmark: str = "open_llama") -> Parser:
    example = "open_llama eval RUN/model --data data/docs/validation --sequence-length 256"
    parser = Parser(f"{benchmark} eval", __doc__, [example])
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a checkpoint of Hugging Face"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PREFIX", help="token file, without .bin"
    )
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="adapters of LoRA on the model")
    parser.add_argument(
        "--sequence-length", type=count, default=1024, metavar="N", help="tokens (default: 1024)"
    )
    parser.add_argument(
        "--sequences", type=count, metavar="N", help="the first N sequences (default: all)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    return parser


def work(options: argparse.Namespace) -> None:
    from open_llama.evaluation import measure  # needs torch, which --help must not

    measure(options)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
