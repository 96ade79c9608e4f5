"""Assemble a benchmark's model, state of linear layers, optimizer and weights, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from common.config import RunConfig
from common.model.linear_layers import LinearLayers
from common.model.llama import Head, Llama
from common.model.shapes import ModelShape
from common.training.assembly import Assembly

if TYPE_CHECKING:  # a name that exists only for type checkers
    from common.training.assembly import Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Trained = TypeVar("Trained", bound="Optimizer")


def build(
    config: RunConfig,
    shape: ModelShape,
    sequence_length: int,
    device: torch.device,
    *,
    linear: LinearLayers,
    layers: Callable[[], tuple[Sequence[nn.Module], Head]],
    optimizer: Callable[[Llama], Trained],
    weights: Callable[[Llama, Trained], object],
    before_each_pass: Sequence[Callable[[bool], None]] = (),
) -> Assembly:
    """Build the model on the meta device, allocate it, create the optimizer and fill the weights.

    `linear`: the linear layers' format, shared by all blocks.
    `layers`: creates the blocks and the head.
    `optimizer`: creates the optimizer, which shards the trained weights or takes them whole.
    `weights`: fills all weights, by the optimizer's `set_weight` if it holds masters.
    `before_each_pass`: functions that are called with `model.training` before each forward, of a
        micro-batch or of an evaluation.
    """
    with torch.device("meta"), default_dtype(DTYPES[config.precision]):
        model = Llama(shape, sequence_length, *layers())
    model.to_empty(device=device)
    model.tie_embedding()
    model.make_rope_tables(device)
    linear.allocate(device)
    for start_pass in (linear.start_pass, *before_each_pass):
        model.register_forward_pre_hook(
            lambda model, _, start_pass=start_pass: start_pass(model.training)
        )
    # A sparse gradient of the embedding (kernels/accumulate.py) has one row for each token of all
    # ranks' micro-batches, a dense one has `vocab_size` rows. Sparse is used up to twice as many
    # rows, because a dense gradient must also be zeroed and accumulated. A tied embedding shares
    # its gradient with the head, which is dense.
    tokens = config.world_size * config.micro_batch_size * sequence_length
    model.embedding.sparse = tokens <= 2 * shape.vocab_size and not shape.tied_embedding
    trained_by = optimizer(model)
    weights(model, trained_by)
    return Assembly(model, trained_by, linear)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype for modules created inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
