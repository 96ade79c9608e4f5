"""Names of the tensors in a Hugging Face Llama checkpoint, and our parameters.

    our parameter                     tensors of the checkpoint
    embedding.weight                  model.embed_tokens.weight
    blocks.N.attention_norm.weight    model.layers.N.input_layernorm.weight
    blocks.N.qkv.weight               model.layers.N.self_attn: see below
    blocks.N.o.weight                 model.layers.N.self_attn.o_proj.weight
    blocks.N.ffn_norm.weight          model.layers.N.post_attention_layernorm.weight
    blocks.N.gate_up.weight           model.layers.N.mlp.gate_proj.weight, .up_proj.weight
    blocks.N.down.weight              model.layers.N.mlp.down_proj.weight
    head.norm.weight                  model.norm.weight
    head.output.weight                lm_head.weight; absent, or equal, if tied to the embedding
    blocks.N.rotation.q_norm.weight   model.layers.N.self_attn.q_norm.weight, only with these norms
    blocks.N.rotation.k_norm.weight   model.layers.N.self_attn.k_norm.weight, only with these norms

Two layouts exist, which differ only in the input projection of the attention:

    "ordinary"   Hugging Face: q_proj.weight, k_proj.weight, v_proj.weight
    "fused"      MLCommons' "fused-qkv" copy: qkv_proj.weight

MLCommons' fused projection has all rows of Q, then K, then V, as ours has. Megatron, in contrast,
interleaves groups of heads. So each of our parameters is one tensor of the checkpoint, or several
tensors concatenated along dimension 0.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from common.model.shapes import ModelShape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
MODEL_FOLDER = "model"  # in the directory of a run
ADAPTER_FOLDER = "adapter"
FUSED = "fused"
ORDINARY = "ordinary"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT_HEAD = "lm_head.weight"


class Part(NamedTuple):
    """A tensor of the checkpoint, whose rows are rows of one of our parameters."""

    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]


@cache
def parts_of(shape: ModelShape, layout: str) -> dict[str, list[Part]]:
    """Return our name of each parameter -> the tensors of the checkpoint, in the order of its rows.

    The model has no adapters.
    """
    hidden = shape.hidden_size
    ffn = shape.ffn_hidden_size
    keys = shape.num_kv_heads * shape.head_dim
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
        block["rotation.q_norm"] = [Part("self_attn.q_norm", (shape.head_dim,))]
        block["rotation.k_norm"] = [Part("self_attn.k_norm", (shape.head_dim,))]
    table = (shape.vocab_size, hidden)
    parameters = {"embedding.weight": [Part(EMBEDDING, table)]}
    for layer in range(shape.num_layers):
        for name, parts in block.items():
            parameters[f"blocks.{layer}.{name}.weight"] = [
                Part(f"model.layers.{layer}.{part.name}.weight", part.shape) for part in parts
            ]
    parameters["head.norm.weight"] = [Part("model.norm.weight", (hidden,))]
    if not shape.tied_embedding:
        parameters["head.output.weight"] = [Part(OUTPUT_HEAD, table)]
    return parameters


def config_of(shape: ModelShape) -> dict[str, object]:
    """Return a model's entries of config.json, with the names of transformers' LlamaConfig."""
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
        "rope_scaling": rope_scaling_of(shape),
    }


def rope_scaling_of(shape: ModelShape) -> dict[str, object] | None:
    """Return a model's entry rope_scaling of config.json, None without scaling."""
    scaling = shape.rope_scaling
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def tensor_shapes(shape: ModelShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of all tensors that a checkpoint of this layout must have."""
    shapes = {}
    for parts in parts_of(shape, layout).values():
        for part in parts:
            shapes[part.name] = part.shape
    return shapes
