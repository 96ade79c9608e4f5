"""Write the newest checkpoint of a run as Hugging Face weights, or with LoRA as a peft adapter.

RUN is the directory of a run with a checkpoint, or a folder of runs, of which the newest one is
meant. It may still be running. The format is the one that a run saves at its end. The
tokenizer is copied from DATADIR (default: the folder of the run's data).
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.command_line import Parser, imported, program


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser of `export`."""
    parser = Parser(f"{benchmark} export", __doc__, ["open_llama export results/open_llama/RUN"])
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder (default: RUN/exported_step_<number>)"
    )
    return parser


main = program(parser, imported("open_llama.exported_weights:export"))

if __name__ == "__main__":
    sys.exit(main())
