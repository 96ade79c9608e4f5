"""Write a model as a Hugging Face safetensors checkpoint: weights, their index, and config.json.

Tensors are written one after another, so host memory holds a copy of at most one tensor.
checkpoint_reader.py describes the format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.atomic_write import in_progress, naming, sync, write_whole
from common.errors import ConfigError, WeightsError
from common.model.checkpoint_names import CONFIG, FUSED, INDEX, config_of, parts_of
from common.model.families import CONTEXT, TOKENS
from common.model.llama import Llama
from common.model.shapes import ModelShape

NAMES = {  # dtype of torch -> name in safetensors
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
}


@torch.no_grad()
def write_checkpoint(
    model: Llama,
    folder: Path,
    *,
    files: int = 3,
    layout: str = FUSED,
    dtype: torch.dtype | None = None,
    entries: Mapping[str, object] | None = None,
    on_tensor: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Write a model without adapters to `folder` and return the paths of the files.

    Writes at most `files` files of weights, config.json with a LlamaConfig or Qwen3Config, and
    last the index.

    `layout`: FUSED as in MLCommons' copy, or ORDINARY for `LlamaForCausalLM.from_pretrained`.
    `dtype`: dtype of the stored weights (default: the parameters' dtype).
    `entries`: entries of config.json, which replace those from `llama_config`.
    `on_tensor`: called before each tensor is written.

    Raises OSError if writing fails, for example on a full disk, and WeightsError if a weight is not
    finite.
    """
    dtype = dtype or model.embedding.weight.dtype
    tensors = _tensors(model, layout)
    for name, rows in tensors.items():
        require_finite(name, rows)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: rows.numel() * dtype.itemsize for name, rows in tensors.items()}
    groups = groups_of_equal_size(sizes, files)
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        path = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(path, {name: tensors[name] for name in names}, dtype, on_tensor)
        paths.append(path)
        weight_map.update(dict.fromkeys(names, path.name))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    config = llama_config(model.shape, model.max_sequence_length, dtype) | dict(entries or {})
    for name, content in ((CONFIG, config), (INDEX, index)):
        write_json(folder / name, content)
        paths.append(folder / name)
    return paths


def require_new(folder: Path) -> None:
    """Raise ConfigError if `folder` exists, or if another process is writing it."""
    do = "name a new directory, or remove this one"
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists", "nothing is overwritten", do)
    for path in in_progress(folder):
        why = f"a running process writes it as {path.name}"
        raise ConfigError(f"{folder} is being written", why, "name a new directory, or wait")


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise WeightsError if an element of a tensor is NaN or infinite."""
    # One pass without a copy. Both results are NaN if an element is.
    extremes = torch.aminmax(tensor.detach()) if tensor.numel() else ()
    if not all(math.isfinite(value) for value in extremes):
        raise WeightsError(
            f"{name} has NaN or infinite elements",
            "the run diverged, or the file is damaged",
            "use an earlier checkpoint, or train again with a lower learning rate",
        )


def write_json(path: Path, content: dict) -> None:
    """Write a JSON object atomically. Raises OSError."""
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n")


def _tensors(model: Llama, layout: str) -> dict[str, Tensor]:
    """Return views of the parameters as tensors of the checkpoint, in the order of the forward."""
    tensors: dict[str, Tensor] = {}
    for name, parts in parts_of(model.shape, layout).items():
        views = model.get_parameter(name).split([part.rows for part in parts])
        for part, view in zip(parts, views, strict=True):
            tensors[part.name] = view
    return tensors


def write_file(
    path: Path,
    tensors: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    on_tensor: Callable[[], object] = lambda: None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file and sync it to the disk.

    `dtype`: dtype of all stored tensors (default: for each tensor its own).

    Raises OSError.
    """
    # transformers requires this metadata.
    header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
    begin = 0
    for name, rows in tensors.items():
        kind = dtype or rows.dtype
        end = begin + rows.numel() * kind.itemsize
        header[name] = {
            "dtype": NAMES[kind],
            "shape": list(rows.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    with naming(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for rows in tensors.values():
            on_tensor()
            on_host = rows.to("cpu", dtype or rows.dtype).contiguous()
            file.write(on_host.view(torch.uint8).numpy().data)
        sync(file)  # some file systems report a full disk only here


def groups_of_equal_size(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Split the names, in order, into at most `count` non-empty groups of about equal bytes."""
    share = sum(sizes.values()) / count
    done = 0
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and done >= share * len(groups):
            groups.append([])
        groups[-1].append(name)
        done += size
    return groups


def llama_config(shape: ModelShape, max_sequence_length: int, dtype: torch.dtype) -> dict:
    """Return the content of config.json: the fields of transformers' LlamaConfig.

    IDs of special tokens are None, because the tokenizer defines them.
    """
    kind = "Qwen3" if shape.qk_norm else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **config_of(shape),
        CONTEXT: max_sequence_length,
        "hidden_act": "silu",
        "mlp_bias": False,
        **dict.fromkeys(TOKENS),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
