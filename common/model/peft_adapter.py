"""The trained adapters for other programs, in the format of `peft` (0.21: `PeftModel.save_pretrained` and `LoraConfig`).

We train one adapter on the fused query, key and value projection, A [rank, hidden] and B [query, key and value rows, rank], and one on the
output projection. In `peft` q_proj, k_proj and v_proj have an adapter each: all three get the same A, and their rows of B.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from common.errors import StorageError
from common.model.shapes import ModelShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SPLIT, OUTPUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
PLAIN_LORA = {  # alpha / rank * B @ A, and nothing else
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "inference_mode": True,
    "bias": "none",
    "target_modules": [*SPLIT, OUTPUT],
}


def save_peft_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shape: ModelShape,
    rank: int,
    alpha: int,
    dropout: float,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into the new `folder`, which is there when both are complete, or not at all.

    Raises FileExistsError: adapters are never overwritten; StorageError, and then leaves nothing.

    `tensors`: for every block N, `blocks.N.qkv.lora_a` [rank, hidden], `blocks.N.qkv.lora_b` [qkv_size, rank] with the rows of Q, K,
    V in this order, `blocks.N.o.lora_a` and `blocks.N.o.lora_b` [hidden, rank]; whole tensors, stored in the dtype they have.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists")
    config = PLAIN_LORA | {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    data, partial = (
        save(peft_tensors(tensors, shape), metadata={"format": "pt"}),
        folder.with_name(f"{folder.name}.partial"),
    )
    shutil.rmtree(partial, ignore_errors=True)  # what a kill left
    try:
        partial.mkdir(parents=True)
        (partial / WEIGHTS).write_bytes(data)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        what = f"the adapter was not saved in {folder}: {error.strerror}"
        why = f"it needs {len(data) / 1e6:.0f} MB; the disk is full or read-only"
        raise StorageError(what, why, "free space before the next run") from error


def peft_tensors(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The same adapters under peft's names, on the CPU. Raises KeyError if one is missing."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: dict[str, Tensor] = {}
    for layer in range(shape.num_layers):
        a, b = tensors[f"blocks.{layer}.qkv.lora_a"], tensors[f"blocks.{layer}.qkv.lora_b"]
        parts = dict(zip(SPLIT, b.split([query, key_value, key_value]), strict=True))
        pairs = {name: (a, rows) for name, rows in parts.items()}
        pairs[OUTPUT] = (tensors[f"blocks.{layer}.o.lora_a"], tensors[f"blocks.{layer}.o.lora_b"])
        for name, pair in pairs.items():
            for letter, tensor in zip("AB", pair, strict=True):
                # A copy each: the file format takes no two names for one memory.
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{letter}.weight"
                found[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return found
