"""One Llama for every benchmark and the miniature, built from a ModelShape.

Legend of tensor names: B batch, S sequence, D hidden, H query heads, K key/value heads.
The query, key and value projections are one matrix (rows: all of Q, then K, then V), and so are gate and up (gate first):
one large product instead of three or two. The file knows nothing of sharding, precision or recompute: see parallel.py.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from common.kernels import swiglu
from common.kernels.attention import causal_attention
from common.kernels.cross_entropy import cross_entropy
from common.kernels.rms_norm import rms_norm
from common.kernels.rope import rope, rope_tables
from common.shapes import ModelShape


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return rms_norm(x_BSD, self.weight, self.eps)


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward."""

    def __init__(self, shape: ModelShape, kernels: str, fp8_swiglu_input: bool):
        super().__init__()
        self.shape = shape
        self.swiglu = swiglu.ENGINES[kernels][fp8_swiglu_input]
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False)
        self.o = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.down(self.swiglu(self.gate_up(self.ffn_norm(x_BSD))))

    def attention(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = self.qkv(x_BSD).unflatten(-1, (heads + 2 * kv_heads, head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return self.o(causal_attention(rope(q, cos, sin), rope(k, cos, sin), v).flatten(2))


class Head(nn.Module):
    """Final norm, output projection (not tied to the embedding) and loss."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.output(self.norm(x_BSD))
        return logits if labels_BS is None else cross_entropy(logits, labels_BS)


class Llama(nn.Module):
    cos: Tensor  # fp32 [max_sequence_length, head_dim / 2]
    sin: Tensor

    def __init__(self, shape: ModelShape, max_sequence_length: int, kernels: str = "reference", fp8_swiglu_input: bool = False):
        """`kernels`: the engine of the ops that have several, "reference" or "triton". `fp8_swiglu_input`: see kernels/swiglu.py."""
        super().__init__()
        self.shape = shape
        self.max_sequence_length = max_sequence_length
        self.recompute_layers = 0  # the first so many blocks recompute their activations in backward; parallel.py sets it
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape, kernels, fp8_swiglu_input) for _ in range(shape.num_layers))
        self.head = Head(shape)
        self.make_rope_tables("cpu")

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
        x_BSD = self.embedding(tokens_BS)
        for number, block in enumerate(self.blocks):
            if number < self.recompute_layers and torch.is_grad_enabled():
                x_BSD = checkpoint(block, x_BSD, cos, sin, use_reentrant=False)
            else:
                x_BSD = block(x_BSD, cos, sin)
        return self.head(x_BSD, labels_BS)


def init_weights(model: Llama, seed: int, std: float) -> None:
    """Fill a materialised (possibly sharded) model: N(0, std), output projections of each block N(0, std/sqrt(2L)), norms 1.

    Source: NeMo's `init_method_std` 0.02 and Megatron's scaled initialisation of the residual outputs (GPT-2, section 2.3).
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
        copy_into(parameter, full)

    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, parameters))


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
