"""Write a model as a Hugging Face safetensors checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.model.checkpoint_names import CONFIG, FUSED, INDEX, parts_of
from common.model.llama import Llama


@torch.no_grad()
def save_base(model: Llama, folder: Path, *, shards: int = 3, layout: str = FUSED, dtype: torch.dtype | None = None) -> list[Path]:
    """Write a model without adapters to `folder`; returns the files: at most `shards` shards, the index, and config.json of a LlamaConfig.

    `layout`: FUSED as MLCommons', ORDINARY for `LlamaForCausalLM.from_pretrained`. `dtype`: of the files, by default the parameters'. All
    tensors are in host memory at once: for models such as the miniature's.
    """
    if model.shape.rope_scaling is not None or model.shape.qk_norm:
        raise ValueError("only Llama 2 can be written: this model scales its rotation frequencies, or norms its query and key heads")
    tensors = {}
    for name, parameter in model.named_parameters():
        parts = parts_of(model.shape, layout)[name]
        for part, rows in zip(parts, parameter.split([part.rows for part in parts]), strict=True):
            tensors[part.name] = rows.to("cpu", dtype or rows.dtype).clone()  # the format refuses two tensors that share memory
    folder.mkdir(parents=True, exist_ok=True)
    groups = _groups({name: tensor.nbytes for name, tensor in tensors.items()}, shards)
    files, weight_map = [], {}
    for number, names in enumerate(groups, start=1):
        file = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library makes it readable for its owner only
        files.append(file)
        weight_map.update(dict.fromkeys(names, file.name))
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    for name, content in ((CONFIG, _llama_config(model, next(iter(tensors.values())).dtype)), (INDEX, index)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return [*files, folder / CONFIG, folder / INDEX]


def _groups(sizes: dict[str, int], count: int) -> list[list[str]]:
    """The names in their order, cut into at most `count` groups of about equal bytes, none of them empty."""
    share, done = sum(sizes.values()) / count, 0
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and done >= share * len(groups):
            groups.append([])
        groups[-1].append(name)
        done += size
    return groups


def _llama_config(model: Llama, dtype: torch.dtype) -> dict:
    """The fields of transformers' LlamaConfig."""
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.shape.tied_embedding,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
