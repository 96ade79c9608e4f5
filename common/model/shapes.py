"""Shapes of Llama models, with their numbers of parameters and FLOPs.

Standard library only, because the launcher and `plan` use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotation frequencies.

    Source: Llama 3.1 model card; `rope_type: llama3` in Hugging Face.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs per token by the format that computes them. A multiply-add is 2 FLOPs."""

    linears: float  # linear layers of the blocks, in the format that the config key `linear` names
    others: float  # attention, adapters and head, never in FP8

    @property
    def total(self) -> float:
        return self.linears + self.others


@dataclass(frozen=True)
class ModelShape:
    """Sizes and variants of a Llama-like model.

    The number of query heads must be a multiple of the number of key heads, and the head dimension
    even. Without `explicit_head_dim`, the hidden size must be a multiple of the number of heads.
    Otherwise ValueError is raised.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_base: float
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    # None: hidden_size / num_heads. The property `head_dim` is computed from this field, so that
    # replace(shape, hidden_size=...) changes it.
    explicit_head_dim: int | None = None
    qk_norm: bool = False  # RMSNorm of each query and key head, before the rotation (Qwen3)
    tied_embedding: bool = False  # the head's projection is the embedding's weight

    def __post_init__(self):
        if self.explicit_head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"the head dimension {self.head_dim} is odd")

    @cached_property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.explicit_head_dim or self.hidden_size // self.num_heads

    @property
    def attention_size(self) -> int:
        """Width of all query heads, and of attention's output."""
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def matrix_parameters(self) -> int:
        """Weights of the four matrices of one block."""
        return self.hidden_size * (self.qkv_size + self.attention_size + 3 * self.ffn_hidden_size)

    @property
    def layer_parameters(self) -> int:
        """Weights of one block: four matrices, two norms, and with `qk_norm` two head norms."""
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return self.matrix_parameters + 2 * self.hidden_size + head_norms

    @property
    def matmul_parameters(self) -> int:
        """Weights that each token is multiplied by: all linear layers of blocks, and the head."""
        return self.num_layers * self.matrix_parameters + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights: blocks, final norm, embedding and head. A tied embedding counts once."""
        tables = 1 if self.tied_embedding else 2
        return (
            self.num_layers * self.layer_parameters
            + self.hidden_size  # final norm
            + tables * self.vocab_size * self.hidden_size
        )

    def attention_flops_per_token(self, sequence_length: int) -> int:
        """Return the FLOPs of causal attention, forward and backward: 6*L*S*H.

        Only half of the S x S scores is computed. The backward counts twice as much as the forward.
        H is the width of all query heads, which is the hidden size unless the shape has
        `explicit_head_dim`.
        """
        return 6 * self.num_layers * sequence_length * self.attention_size

    def training_flops(self, sequence_length: int, lora_rank: int = 0) -> TokenFlops:
        """Return the FLOPs per token of training, without recomputation.

        Training of all weights, `lora_rank` 0: 6*N + 6*L*S*H, where N is `matmul_parameters`.
        Source: PaLM, arXiv:2204.02311, appendix B, with causal attention halved. LoRA:
        4*N + 6*N_lora + 6*L*S*H. Frozen weights have no gradient, so they take part in two matrix
        products instead of three.
        """
        per_weight = 4 if lora_rank else 6
        head = self.vocab_size * self.hidden_size
        return TokenFlops(
            linears=per_weight * self.num_layers * self.matrix_parameters,
            others=per_weight * head
            + 6 * self.lora_parameters(lora_rank)
            + self.attention_flops_per_token(sequence_length),
        )

    def lora_parameters(self, rank: int) -> int:
        """Return the weights of A and B of all adapters: fused qkv and output projections."""
        qkv = self.hidden_size + self.qkv_size
        output = self.attention_size + self.hidden_size
        return self.num_layers * rank * (qkv + output)


LLAMA31_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    rope_base=500000.0,
    rope_scaling=RopeScaling(),
)
LLAMA2_70B = ModelShape(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_heads=64,
    num_kv_heads=8,
    vocab_size=32000,
    rope_base=10000.0,
)
# The toy model that both benchmarks train on a CPU.
MINIATURE = ModelShape(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=2048,
    rope_base=10000.0,
)
