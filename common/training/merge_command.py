"""The command `merge`, which the benchmarks with adapters share. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from common.command_line import Parser
from common.model.shapes import ModelShape
from common.training.arguments import weights_of

ABOUT = """Merge trained adapters into the base weights and write the result as a new checkpoint.

Each weight becomes W + (alpha / rank) * B @ A, rounded once to the dtype of the checkpoint.
"""


def merge_parser(benchmark: str) -> Parser:
    """Return the parser. Its arguments are the paths base, adapter and out."""
    example = f"{benchmark} merge --adapter RUN --out merged"
    parser = Parser(f"{benchmark} merge", ABOUT, [example])
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="base checkpoint in safetensors, with fused (qkv_proj) or separate projections "
        "(default: the folder that adapter_config.json names)",
    )
    parser.add_argument(
        "--adapter", type=Path, required=True, metavar="DIR", help="a run, or its adapter/"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    return parser


def merge_adapters(
    options: argparse.Namespace,
    models: Mapping[ModelShape, int] | None = None,
    left_out: tuple[str, ...] = (),
    add: Callable[[Path, Path], object] | None = None,
) -> None:
    """Merge the adapters that `options` name. `models`, `left_out`: see `merged_adapter.merge`.

    `add`: adds files to the new folder, its second argument. The first is the adapter's folder.
    """
    from common.model.merged_adapter import merge  # needs torch, which --help must not

    if options.base:
        weights = weights_of(options.base, options.adapter)
    else:
        weights = weights_of(options.adapter)
    adapter = weights.adapter or options.adapter
    added = partial(add, adapter) if add else None
    merge(weights.model, adapter, options.out, models, left_out, added)
