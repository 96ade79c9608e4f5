"""Options of each measurement: the function of its name adds them to a parser.

Standard library only, so that --help and the check of a command line need no torch.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from common import benchmarks
from common.command_line import complete
from common.model.families import FAMILIES
from common.values import count, existing_path, minutes
from throughput.gpt_sizes import SIZES, STAND_INS
from throughput.shared_options import ByDevice, add, counts

TINY = "miniature"  # shape of the benchmarks' miniatures, for a CPU
GPT_STEPS = ByDevice(10, 3)  # default number of timed steps of a GPT


def gemm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp8"),
        help="measure only this precision (default: all)",
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=shape_of,
        metavar="MxKxN",
        help="measure only this shape, such as 8192x8192x8192; can be repeated (default: seven "
        "shapes)",
    )


def shape_of(text: str) -> tuple[int, ...]:
    """Parse a shape of a product: three numbers with x, * or a comma between them."""
    try:
        m, k, n = map(count, re.split("[x*,]", text.lower()))
    except (argparse.ArgumentTypeError, ValueError):  # not a size, or not three of them
        raise argparse.ArgumentTypeError(f"'{text}' is not a shape such as 128x256x512") from None
    return m, k, n


def llama(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"one of {', '.join(FAMILIES)}, {TINY}, or a Hugging Face config.json of type llama, "
        f"mistral or qwen3 (default: llama3.1-8b, on a CPU {TINY})",
    )
    complete(model, [*FAMILIES, TINY])
    parser.add_argument(
        "--lora", action="store_true", help="freeze the base and train adapters of rank 16"
    )
    parser.add_argument("--layers", type=count, metavar="N", help="use only the first N layers")
    add(
        parser,
        "precision",
        seq={
            "default": ByDevice(8192, 128),
            "help": "tokens per sequence (default: %(default)s)",
        },
        batch={
            "help": "sequences per GPU and step, or max for the largest that fits "
            "(default: the benchmark's, or max)"
        },
    )
    add(parser, "gpus", warmup={"default": 3}, steps={"default": 10})
    parser.add_argument(
        "--search",
        type=minutes,
        metavar="MINUTES",
        help="first search for the fastest settings of the same step, for at most MINUTES",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --search: continue the newest search in LOGDIR for the same model, commit, "
        "packages and GPUs",
    )


def mlp(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "warmup",
        batch={
            "type": count,
            "default": 256,
            "metavar": "N",
            "help": "samples per step (default: %(default)s)",
        },
        steps={"default": ByDevice(100, 5)},
    )


def gpt(parser: argparse.ArgumentParser) -> None:
    _gpt_model(parser, "one of {} (default: all; on a CPU " + " and ".join(STAND_INS) + ")")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="measure batches 1, 2, 4, ... up to the largest that fits",
    )
    add(parser, "batch", "seq", warmup={"default": 3}, steps={"default": GPT_STEPS})


def _gpt_model(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --model, a size of GPT. `text`: its help, with {} for the sizes."""
    sizes = ", ".join(SIZES)
    known = (*SIZES, *STAND_INS)
    parser.add_argument("--model", choices=known, metavar="NAME", help=text.format(sizes))


def scaling(parser: argparse.ArgumentParser) -> None:
    _gpt_model(parser, "GPT to train, one of {} (default: the largest up to 7b that fits)")
    numbers = {
        "default": None,
        "help": "numbers of GPUs to measure (default: 1, 2, 4 and 8, as far as there are GPUs)",
    }
    add(
        parser,
        "precision",
        "seq",
        gpus=numbers,
        batch={"type": count, "metavar": "N", "help": "batch of the GPT per GPU"},
    )
    add(parser, warmup={"default": 3}, steps={"default": GPT_STEPS})


def flux(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "gpus",
        batch={
            "default": ByDevice(10, 2),
            "help": "images per GPU, or max for the largest that fits (default: %(default)s)",
        },
        warmup={"default": 2},
        steps={"default": 8},
    )
    parser.add_argument(
        "--resolution",
        type=count,
        default=ByDevice(512, 64),
        metavar="N",
        help="side of the image in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=counts,
        metavar="D,S",
        help="number of double and single blocks (default: 19,38, or 12,24 if these do not fit)",
    )
    parser.add_argument(
        "--recompute",
        type=int,
        metavar="N",
        help="recompute the first N blocks in the backward (default: all)",
    )


def suite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure fewer models and batches (three minutes on one H200, two on a CPU)",
    )
    add(
        parser,
        "device",
        gpus={
            "default": None,
            "help": "numbers of GPUs to measure (default: 1, 2, 4, ... and all GPUs)",
        },
    )
    parser.add_argument(
        "--save-baseline",
        type=Path,
        metavar="FILE",
        help="save the measured rows to a new file, for a later --against",
    )
    parser.add_argument(
        "--against",
        metavar="FILE|GPU",
        help="compare each row with a saved baseline, or with the known numbers of a GPU kind",
    )
    parser.add_argument(
        "--tolerance",
        type=percentage,
        metavar="PERCENT",
        help="with --against: how far below the baseline a row may be (default: the row's limit in "
        "throughput/limits.json)",
    )


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        type=existing_path,
        metavar="DIR",
        help="directories of results, or of two profiles; the first is the reference",
    )


def tiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--benchmark", choices=benchmarks.closed(), default=benchmarks.measured_in("full")
    )
    parser.add_argument(
        "--micro-batch",
        type=count,
        metavar="N",
        help="sequences per micro-batch (default: 2, or 1 for LoRA)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="OP",
        help="time only ops whose name contains OP, such as attention or RoPE",
    )


def percentage(text: str) -> float:
    """Parse an option such as 3% and return it as a fraction."""
    if not re.fullmatch(r"\d+(\.\d+)?%", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage such as 3%")
    return float(text[:-1]) / 100
