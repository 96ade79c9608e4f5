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
    head.output.weight              lm_head.weight                              the same

MLCommons' fused projection has all rows of Q, then K, then V, as ours, and not Megatron's interleaved groups. So each of our parameters is
one tensor of the checkpoint or several, concatenated along dimension 0.
"""

from __future__ import annotations

from typing import NamedTuple

from common.model.shapes import ModelShape

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FUSED, ORDINARY = "fused", "ordinary"


class Part(NamedTuple):
    """A tensor of the checkpoint; it is the next `rows` rows of one of our parameters."""

    name: str
    rows: int


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of all parameters of a model without adapters."""
    hidden, ffn, vocab = shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "qkv": (shape.qkv_size, hidden),
        "o": (hidden, hidden),
        "ffn_norm": (hidden,),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    blocks = {f"blocks.{layer}.{name}.weight": size for layer in range(shape.num_layers) for name, size in block.items()}
    return {"embedding.weight": (vocab, hidden), **blocks, "head.norm.weight": (hidden,), "head.output.weight": (vocab, hidden)}


def parts_of(name: str, shape: ModelShape, layout: str) -> list[Part]:
    """The tensors of the checkpoint that, concatenated, are our parameter `name`."""
    hidden, ffn, vocab = shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size
    outside_blocks = {
        "embedding.weight": [Part("model.embed_tokens.weight", vocab)],
        "head.norm.weight": [Part("model.norm.weight", hidden)],
        "head.output.weight": [Part("lm_head.weight", vocab)],
    }
    if name in outside_blocks:
        return outside_blocks[name]
    _, layer, kind, _ = name.split(".")
    keys = shape.num_kv_heads * shape.head_dim
    split = [Part("self_attn.q_proj", hidden), Part("self_attn.k_proj", keys), Part("self_attn.v_proj", keys)]
    in_block = {
        "attention_norm": [Part("input_layernorm", hidden)],
        "qkv": split if layout == ORDINARY else [Part("self_attn.qkv_proj", shape.qkv_size)],
        "o": [Part("self_attn.o_proj", hidden)],
        "ffn_norm": [Part("post_attention_layernorm", hidden)],
        "gate_up": [Part("mlp.gate_proj", ffn), Part("mlp.up_proj", ffn)],
        "down": [Part("mlp.down_proj", hidden)],
    }
    return [Part(f"model.layers.{layer}.{part.name}.weight", part.rows) for part in in_block[kind]]


def tensor_shapes(shape: ModelShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors that a checkpoint of this layout must have."""
    return {part.name: (part.rows, *size[1:]) for name, size in parameter_shapes(shape).items() for part in parts_of(name, shape, layout)}
