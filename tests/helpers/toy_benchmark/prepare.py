"""Data of `toy_benchmark`: sequences that count upwards from a random token."""

from __future__ import annotations

import sys
from pathlib import Path

from common.command_line import Parser, program
from toy_benchmark.rules import MINIATURE, TRAIN_FILE, VALIDATION_FILE


def miniature(data_dir: Path) -> None:
    import numpy as np

    random = np.random.default_rng(1)
    vocab_size = MINIATURE.shape.vocab_size
    data_dir.mkdir(parents=True, exist_ok=True)
    for name, count in (
        (TRAIN_FILE, MINIATURE.train_samples),
        (VALIDATION_FILE, MINIATURE.eval_samples),
    ):
        first = random.integers(vocab_size, size=(count, 1))
        rows = (first + np.arange(MINIATURE.sequence_length + 1)) % vocab_size
        np.save(data_dir / name, rows.astype(np.int32))


def parser(benchmark: str = "toy_benchmark") -> Parser:
    parser = Parser(f"{benchmark} prepare", __doc__)
    parser.add_argument("command", choices=("miniature",))
    parser.add_argument("--data-dir", type=Path, required=True, help="where the data will be")
    return parser


main = program(parser, lambda args: miniature(args.data_dir))

if __name__ == "__main__":
    sys.exit(main())
