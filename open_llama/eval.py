"""Print the loss and the perplexity of a model on a token file.

The loss is the natural-log cross entropy per token, averaged over each sequence and then over the
sequences, as in training. The sequences are cut from one stream of all documents, also for a model
that was trained with one_document_per_sequence. For data of `prepare chat`, a sequence is a
conversation, and the loss is the mean over the tokens of all answers. A GPU computes in bf16, a CPU
in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.command_line import Parser, imported, program
from common.training.arguments import MODEL_HELP
from common.values import count


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser of `eval`."""
    example = "open_llama eval RUN --data data/docs/validation"
    parser = Parser(f"{benchmark} eval", __doc__, [example])
    parser.add_argument("model", type=Path, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="path of the token file, without .bin",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="LoRA adapters for the model, or a run with them",
    )
    parser.add_argument(
        "--sequence-length",
        type=count,
        metavar="N",
        help="tokens per sequence (default: the length used by the run next to the model or "
        "adapter, else 1024, or the model's context if that is smaller)",
    )
    parser.add_argument(
        "--sequences",
        type=count,
        metavar="N",
        help="evaluate N sequences, spread evenly over the file (default: all)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to use (default: the GPU if there is one)"
    )
    return parser


main = program(parser, imported("open_llama.evaluation:measure"))

if __name__ == "__main__":
    sys.exit(main())
