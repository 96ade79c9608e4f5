"""One Llama for every benchmark and the miniature, built from a ModelShape.

Legend of tensor names: B batch, S sequence, D hidden. The file knows nothing of sharding, precision or compilation: see parallel.py.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from common.kernels import cross_entropy
from common.kernels.fp8 import DelayedScaling
from common.kernels.rope import rope_tables
from common.model.block import Block, RMSNorm
from common.model.fp8_linear import Fp8Linear
from common.model.fused_block import FusedBlock
from common.model.shapes import ModelShape
from common.model.te_block import TEBlock, TransformerEngine
from common.sharding.zero import WeightShards


class Head(nn.Module):
    """Final norm, output projection (not tied to the embedding) and loss."""

    def __init__(self, shape: ModelShape, kernels: str, scaling: DelayedScaling | None = None):
        """`scaling`: where FP8 keeps its scales; None computes the projection in the dtype of its weight."""
        super().__init__()
        self.cross_entropy = cross_entropy.ENGINES[kernels]
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels)
        sizes = (shape.hidden_size, shape.vocab_size)
        self.output = nn.Linear(*sizes, bias=False) if scaling is None else Fp8Linear(*sizes, kernels, scaling)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.output(self.norm(x_BSD))
        return logits if labels_BS is None else self.cross_entropy(logits, labels_BS)


class Llama(nn.Module):
    cos: Tensor  # fp32 [max_sequence_length, head_dim / 2]
    sin: Tensor

    def __init__(
        self,
        shape: ModelShape,
        max_sequence_length: int,
        kernels: str = "reference",
        fp8_swiglu_input: bool = False,
        fused_blocks: bool = False,
        fp8_recipe: str = "",
        fp8_engine: str = "torch",
        fp8_head: bool = False,
    ):
        """`kernels`: the engine of the ops that have several, "reference" or "triton". `fp8_swiglu_input`: see kernels/swiglu.py.
        `fused_blocks`: FusedBlock instead of Block; these know FP8, whose recipe is one of kernels/fp8.py or "" for none.
        `fp8_engine` "te": FP8 by TEBlock instead. `fp8_head`: the output projection in FP8 as well.
        """
        super().__init__()
        self.shape = shape
        self.max_sequence_length = max_sequence_length
        self.recompute_layers = 0  # the first so many blocks recompute their activations in backward; parallel.py sets it
        self.scaling = DelayedScaling(fp8_recipe) if fp8_recipe and fp8_engine == "torch" else None
        self.transformer_engine = TransformerEngine(fp8_recipe) if fp8_recipe and fp8_engine == "te" else None
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        make: Callable[[], Block]
        if self.transformer_engine is not None:
            make = partial(TEBlock, shape, kernels, fp8_swiglu_input, self.transformer_engine)
        elif fused_blocks:
            make = partial(FusedBlock, shape, kernels, fp8_swiglu_input, self.scaling)
        else:
            make = partial(Block, shape, kernels, fp8_swiglu_input)
        self.blocks = nn.ModuleList(make() for _ in range(shape.num_layers))
        self.head = Head(shape, kernels, self.scaling if fp8_head else None)
        self.weight_shards: WeightShards | None = None  # parallel.py sets it
        self.make_rope_tables("cpu")

    def trained_tensors(self) -> list[nn.Parameter]:
        """What the optimizer updates: the parameters, whole or sharded by FSDP, or the masters of WeightShards."""
        return list(self.parameters()) if self.weight_shards is None else self.weight_shards.masters

    def scale_tensors(self) -> list[Tensor]:
        """The state of FP8, changed in place by training."""
        if self.transformer_engine is not None:
            return self.transformer_engine.state()
        return [self.scaling.state, self.scaling.history] if self.scaling is not None else []

    def reset_scales(self) -> None:
        """Forget what FP8 has seen, and every cast weight: as before the first step."""
        if self.scaling is not None:
            self.scaling.reset()
        if self.transformer_engine is not None:
            self.transformer_engine.reset()
        self._weights_changed()

    def backward_done(self) -> None:
        """After the last backward of a step: all gradients are there for the optimizer."""
        if self.weight_shards is not None:
            self.weight_shards.backward_done()

    def step_done(self) -> None:
        """After a step of `ClippedAdamW`: the weights are others, and FP8 may choose new scales."""
        if self.weight_shards is not None:
            self.weight_shards.gather(rounded=True)
        if self.scaling is not None:
            self.scaling.step_done()
        self._weights_changed()

    def _weights_changed(self) -> None:
        for module in (*self.blocks, self.head.output):
            if isinstance(module, FusedBlock | Fp8Linear):
                module.weights_changed()

    def make_rope_tables(self, device: torch.device | str) -> None:
        """cos and sin of all positions, on `device`: fp32 and equal on every device. Moving a meta model to memory loses them."""
        cos, sin = rope_tables(self.shape, self.max_sequence_length, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """tokens, labels: int [batch, sequence]; label -100 does not count.

        With labels: (loss_sum, count), fp32 [batch], per sequence. Without: logits [batch, sequence, vocab].
        """
        sequence_length = tokens_BS.shape[1]
        cos, sin = self.cos[:sequence_length], self.sin[:sequence_length]
        if self.scaling is not None:
            self.scaling.record(self.training)
        x_BSD = self.embedding(tokens_BS)
        with self.transformer_engine.region(self.training) if self.transformer_engine is not None else nullcontext():
            for number, block in enumerate(self.blocks):
                if block.recomputes_itself:
                    x_BSD = block(x_BSD, cos, sin, number < self.recompute_layers)
                elif number < self.recompute_layers and torch.is_grad_enabled():
                    x_BSD = checkpoint(block, x_BSD, cos, sin, use_reentrant=False)
                else:
                    x_BSD = block(x_BSD, cos, sin)
        return self.head(x_BSD, labels_BS)


def init_weights(model: Llama, seed: int, std: float) -> None:
    """Fill a materialized (possibly sharded) model: N(0, std), output projections of each block N(0, std/sqrt(2L)), norms 1.

    Source: NeMo's `init_method_std` 0.02 and Megatron's scaled initialization of the residual outputs (GPT-2, section 2.3).
    Each tensor has its own generator, seeded from (seed, name), and is drawn whole on the CPU before a rank takes its shard:
    the weights are equal for any number of ranks and any device. 8.0e9 numbers take some 60 core-seconds, hence the threads.
    """
    residual_std = std / math.sqrt(2 * model.shape.num_layers)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(8, (os.cpu_count() or 1) // local_world))
    parameters = list(model.named_parameters())

    def fill(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        if parameter.ndim == 1:
            full = torch.ones(parameter.shape)
        else:
            generator = torch.Generator().manual_seed(parameter_seed(seed, name))
            scaled = name.endswith((".o.weight", ".down.weight"))
            full = torch.empty(parameter.shape).normal_(0.0, residual_std if scaled else std, generator=generator)
            full += 0.0  # a drawn -0.0 becomes 0.0: a step at learning rate 0 would flip its sign bit (warmup.py compares bits)
        write(parameter, full)

    shards = model.weight_shards
    write = copy_into if shards is None else shards.fill
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, parameters))
    if shards is not None:
        shards.gather()


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one tensor's generator."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


@torch.no_grad()
def copy_into(parameter: Tensor, full: Tensor) -> None:
    """Copy the whole tensor `full` into a plain parameter, or this rank's rows of it into a parameter sharded on dimension 0."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    shard_axis = next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    ranks, rank = parameter.device_mesh.size(shard_axis), parameter.device_mesh.get_local_rank(shard_axis)
    rows = full.chunk(ranks)
    if rank < len(rows):
        parameter.to_local().copy_(rows[rank])
