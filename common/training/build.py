"""Build a model, the state of its linear layers, its optimizer and its weights, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from common.config import RunConfig
from common.model.linear_layers import LinearLayers
from common.model.llama import Head, Llama
from common.model.precision import DTYPES, default_dtype
from common.model.shapes import ModelShape
from common.sharding.processes import Processes
from common.training.assembly import Assembly

if TYPE_CHECKING:  # a name that exists only for type checkers
    from common.training.assembly import Optimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound="Optimizer")


def build(
    config: RunConfig,
    shape: ModelShape,
    sequence_length: int,
    processes: Processes,
    *,
    linear: LinearLayers,
    make_layers: Callable[[], tuple[Sequence[nn.Module], Head]],
    make_optimizer: Callable[[Llama], AnyOptimizer],
    fill_weights: Callable[[Llama, AnyOptimizer], object],
    before_each_pass: Sequence[Callable[[bool], None]] = (),
) -> Assembly:
    """Build the model on the meta device, allocate it, create the optimizer and fill the weights.

    `linear`: the linear layers' format, shared by all blocks.
    `make_layers`: creates the blocks and the head.
    `make_optimizer`: creates the optimizer, which shards the trained weights or takes them whole.
    `fill_weights`: fills all weights, by the optimizer's `set_weight` if it holds masters.
    `before_each_pass`: functions that are called before each forward, of a micro-batch or of an
        evaluation. Their argument is whether the model trains.
    """
    config.require_chunks(sequence_length)
    with torch.device("meta"), default_dtype(DTYPES[config.precision]):
        blocks, head = make_layers()
        model = Llama(shape, sequence_length, blocks, head, processes.context)
    device = processes.device
    model.to_empty(device=device)
    model.tie_embedding()
    model.make_rope_tables(device)
    linear.context = processes.context
    linear.allocate(device)

    def start_pass(model: nn.Module, _: object) -> None:
        linear.start_pass(model.training)
        for prepare in before_each_pass:
            prepare(model.training)

    model.register_forward_pre_hook(start_pass)
    model.embedding.sparse = _embedding_gradient_is_sparse(config, shape, sequence_length)
    optimizer = make_optimizer(model)
    fill_weights(model, optimizer)
    return Assembly(model, optimizer, linear)


def _embedding_gradient_is_sparse(
    config: RunConfig, shape: ModelShape, sequence_length: int
) -> bool:
    """Return whether the gradient of the embedding is sparse (kernels/accumulate.py).

    A sparse gradient has one row for each token of all ranks' micro-batches, a dense one has
    `vocab_size` rows. Sparse is used up to twice as many rows, because a dense gradient must also
    be zeroed and accumulated. A tied embedding shares its gradient with the head, which is dense.
    """
    tokens = config.data_ranks * config.micro_batch_size * sequence_length
    return tokens <= 2 * shape.vocab_size and not shape.tied_embedding
