"""Save trained adapters in the format of `peft`, for other programs.

The format follows peft 0.21: `PeftModel.save_pretrained` and `LoraConfig`.

We train one adapter on the fused query, key and value projection, A [rank, hidden] and
B [qkv_size, rank], and one on the output projection. In `peft`, q_proj, k_proj and v_proj have an
adapter each. All three get the same A, and each gets its rows of B.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from common.atomic_write import new_folder
from common.errors import StorageError, WeightsError
from common.model.checkpoint_names import ADAPTER_CONFIG
from common.model.checkpoint_writer import require_finite
from common.model.shapes import ModelShape

WEIGHTS = "adapter_model.safetensors"
SPLIT = ("q_proj", "k_proj", "v_proj")
OUTPUT = "o_proj"
# Plain LoRA, W + alpha / rank * B A, without the variants that peft supports.
PLAIN_LORA = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "bias": "none",
    "target_modules": [*SPLIT, OUTPUT],
}
# Values of other entries of peft's LoraConfig that change no number of a trained adapter. None,
# False, and empty lists, tables and texts never change one either.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "init_lora_weights": (True, "gaussian"),  # others change the base
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}
# Entries that may have any value. `merged_adapter.read_adapter` reads r and lora_alpha.
DESCRIPTION = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "peft_version",
    "r",
    "revision",
)


def is_plain(key: str, value: object) -> bool:
    """Return whether an entry of adapter_config.json leaves an adapter plain LoRA.

    Its modules are the four projections of the attention, in any order.
    """
    if key in DESCRIPTION:
        return True
    if key == "target_modules":
        return isinstance(value, list) and {*map(str, value)} == {*SPLIT, OUTPUT}
    if key in ("peft_type", "bias"):
        return value == PLAIN_LORA[key]
    # "in" would take 0 for False, and layers_to_transform 0 is the first layer.
    is_empty = value is None or value is False or value in ([], {}, "")
    return is_empty or value in (PLAIN_LORA.get(key), *NEUTRAL.get(key, ()))


def require_adapter(folder: Path) -> None:
    """Raise WeightsError unless `folder` holds an adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        why = f"an adapter is a folder with {ADAPTER_CONFIG} and {WEIGHTS}"
        raise WeightsError(f"{folder}: no {ADAPTER_CONFIG}", why, "name the adapter/ of a run")


def save_peft_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shape: ModelShape,
    rank: int,
    alpha: int,
    dropout: float,
    base: Path,
    add: Callable[[Path], object] | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into the new `folder`.

    The folder exists only when all files are complete. Tensors keep their dtype.

    `tensors`: for each block N:
        `blocks.N.qkv.lora_a` [rank, hidden]
        `blocks.N.qkv.lora_b` [qkv_size, rank], with the rows of Q, K, V in this order
        `blocks.N.o.lora_a` [rank, attention_size]
        `blocks.N.o.lora_b` [hidden, rank]
    `base`: folder of the base weights, from which peft's `AutoPeftModelForCausalLM` loads them.
    `add`: adds files to the new folder.

    Raises FileExistsError if `folder` exists, because adapters are never overwritten, and
    WeightsError if an element is not finite. Raises StorageError if writing fails, and then leaves
    no files.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists")
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    config = PLAIN_LORA | {
        "base_model_name_or_path": str(base.absolute()),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
    }
    data = save(peft_tensors(tensors, shape), metadata={"format": "pt"})
    try:
        with new_folder(folder) as new:
            (new / WEIGHTS).write_bytes(data)
            (new / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            if add:
                add(new)
    except OSError as error:
        raise StorageError(
            f"the adapter was not saved in {folder}: {error.strerror or error}",
            f"it needs {len(data) / 1e6:.0f} MB of free space on a writable disk",
            "free space, or check the disk, before the next run",
        ) from error


def peft_tensors(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the adapters under peft's names, on the CPU. Raises KeyError if one is missing."""
    query = shape.num_heads * shape.head_dim
    key_value = shape.num_kv_heads * shape.head_dim
    renamed: dict[str, Tensor] = {}
    for layer in range(shape.num_layers):
        a = tensors[f"blocks.{layer}.qkv.lora_a"]
        b = tensors[f"blocks.{layer}.qkv.lora_b"]
        parts = dict(zip(SPLIT, b.split([query, key_value, key_value]), strict=True))
        pairs = {name: (a, rows) for name, rows in parts.items()}
        pairs[OUTPUT] = (tensors[f"blocks.{layer}.o.lora_a"], tensors[f"blocks.{layer}.o.lora_b"])
        for name, pair in pairs.items():
            for letter, tensor in zip("AB", pair, strict=True):
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{letter}.weight"
                # A copy each, because two names in the file must not share memory.
                renamed[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return renamed
