"""The tensors of a Hugging Face Llama checkpoint that make up our parameters.

Two layouts exist, which differ only in the input projection of the attention:

    ours                            MLCommons' "fused-qkv" copy: "fused"        Hugging Face: "ordinary"
    embedding.weight                model.embed_tokens.weight                   the same
    blocks.N.attention_norm.weight  model.layers.N.input_layernorm.weight       the same
    blocks.N.qkv.weight             model.layers.N.self_attn.qkv_proj.weight    .q_proj, .k_proj, .v_proj
    blocks.N.o.weight               model.layers.N.self_attn.o_proj.weight      the same
    blocks.N.ffn_norm.weight        model.layers.N.post_attention_layernorm.weight  the same
    blocks.N.gate_up.weight         model.layers.N.mlp.gate_proj, .up_proj      the same
    blocks.N.down.weight            model.layers.N.mlp.down_proj.weight         the same
    head.norm.weight                model.norm.weight                           the same
    head.output.weight              lm_head.weight                              the same; absent where tied to the embedding
    blocks.N.rotation.q_norm.weight model.layers.N.self_attn.q_norm.weight      the same, and k_norm, in models with these norms

MLCommons' fused projection has all rows of Q, then K, then V, as ours, and not Megatron's interleaved groups. So each of our parameters is
one tensor of the checkpoint or several, concatenated along dimension 0.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from common.model.shapes import ModelShape

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FUSED, ORDINARY = "fused", "ordinary"


class Part(NamedTuple):
    """A tensor of the checkpoint; its rows are the next ones of one of our parameters."""

    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]


@cache
def parts_of(shape: ModelShape, layout: str) -> dict[str, list[Part]]:
    """Our name of each parameter of a model without adapters -> the tensors of the checkpoint that, concatenated, are that parameter."""
    hidden, ffn, keys = (
        shape.hidden_size,
        shape.ffn_hidden_size,
        shape.num_kv_heads * shape.head_dim,
    )
    split = {"q_proj": shape.attention_size, "k_proj": keys, "v_proj": keys}
    projections = split if layout == ORDINARY else {"qkv_proj": shape.qkv_size}
    block = {
        "attention_norm": [Part("input_layernorm", (hidden,))],
        "qkv": [Part(f"self_attn.{name}", (rows, hidden)) for name, rows in projections.items()],
        "o": [Part("self_attn.o_proj", (hidden, shape.attention_size))],
        "ffn_norm": [Part("post_attention_layernorm", (hidden,))],
        "gate_up": [Part(f"mlp.{name}", (ffn, hidden)) for name in ("gate_proj", "up_proj")],
        "down": [Part("mlp.down_proj", (hidden, ffn))],
    }
    if shape.qk_norm:
        block |= {
            f"rotation.{name}": [Part(f"self_attn.{name}", (shape.head_dim,))]
            for name in ("q_norm", "k_norm")
        }
    found = {"embedding.weight": [Part("model.embed_tokens.weight", (shape.vocab_size, hidden))]}
    for layer in range(shape.num_layers):
        for name, parts in block.items():
            found[f"blocks.{layer}.{name}.weight"] = [
                Part(f"model.layers.{layer}.{part.name}.weight", part.shape) for part in parts
            ]
    found["head.norm.weight"] = [Part("model.norm.weight", (hidden,))]
    if not shape.tied_embedding:
        found["head.output.weight"] = [Part("lm_head.weight", (shape.vocab_size, hidden))]
    return found


def config_of(shape: ModelShape) -> dict[str, object]:
    """What config.json says of the model, under the names of transformers' LlamaConfig."""
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "attention_bias": False,
        "tie_word_embeddings": shape.tied_embedding,
    }


def tensor_shapes(shape: ModelShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors that a checkpoint of this layout must have."""
    return {part.name: part.shape for parts in parts_of(shape, layout).values() for part in parts}
