"""The trained adapters for other programs: saved in the format of `peft`, or merged into a checkpoint.

We train one adapter on the fused query, key and value projection, A [rank, hidden] and B [query, key and value rows, rank], and one on the
output projection. In `peft` q_proj, k_proj and v_proj have an adapter each: all three get the same A, and their rows of B.

`merge` writes W + (alpha / rank) * B @ A, computed in fp32 and rounded once to the checkpoint's dtype, for a Hugging Face safetensors
checkpoint with fused (`qkv_proj`, MLCommons') or ordinary projections. Merging is for export only: training never adds B @ A to W, because
the updates of single steps are far below half a unit in the last place of W and would be rounded away.

Formats: peft, `PeftModel.save_pretrained` and `LoraConfig` (0.21); transformers, `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, DataError
from common.model.checkpoint_reader import DTYPES, StoredTensor, read_tensors
from common.model.shapes import ModelShape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED, SPLIT, OUTPUT = "qkv_proj", ("q_proj", "k_proj", "v_proj"), "o_proj"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5")  # not copied: they would be the weights before the merge
# Settings with which the update is not (alpha / rank) * B @ A; a merge that ignored them would be silently wrong.
OTHER_ALGEBRA = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "modules_to_save")

Updates = dict[str, tuple[str, ...]]  # weight -> the modules of the adapter whose products B A are concatenated and added to it


def save_peft_adapter(
    folder: Path, tensors: Mapping[str, Tensor], shape: ModelShape, rank: int, alpha: int, dropout: float, base_name: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into `folder`, which must not have them yet.

    `tensors`: for every block N, `blocks.N.qkv.lora_a` [rank, hidden], `blocks.N.qkv.lora_b` [qkv_size, rank] with the rows of Q, K,
    V in this order, `blocks.N.o.lora_a` and `blocks.N.o.lora_b` [hidden, rank]; whole tensors, stored in the dtype they have.
    `base_name`: path or name of the base model for peft. Raises ConfigError if an adapter is there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists", "adapters are never overwritten", "name a new directory")
    save_file(peft_tensors(tensors, shape), folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "target_modules": [*SPLIT, OUTPUT],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


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
                found[_peft_key(layer, name, letter)] = tensor.detach().to("cpu", copy=True).contiguous()
    return found


def _peft_key(layer: int, name: str, letter: str) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{letter}.weight"


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Write the checkpoint of `base` with the adapter of `adapter` merged into it to `out`, which must not exist.

    One shard at a time: memory for the largest one (5 GB in the MLCommons checkpoint), its merged weights and one fp32 product.
    Everything is checked before anything is written, and `out` gets its name when it is complete. Configuration and tokenizer are copied.
    Raises ConfigError if `out` exists or the adapter is no plain LoRA, WeightsError for a damaged base, DataError if adapter and base disagree.
    """
    scale, tensors = _read_adapter(adapter)
    weights, shards = read_tensors(base)
    updates = _updates(weights, tensors)
    partial = out.with_name(out.name + ".partial")
    for folder in (out, partial):
        if folder.exists():
            raise ConfigError(f"{folder} exists", "a merge never overwrites", "name a new directory, or remove this one")
    partial.mkdir(parents=True)
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, partial / path.name)
    for number, shard in enumerate(shards, start=1):
        print(f"shard {number} of {len(shards)}: {shard.name}", file=sys.stderr, flush=True)
        _merge_shard(shard, partial / shard.name, updates, tensors, scale)
    partial.rename(out)


def _merge_shard(shard: Path, target: Path, updates: Updates, tensors: dict[str, Tensor], scale: float) -> None:
    merged: dict[str, Tensor] = {}
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            weight = file.get_tensor(name)
            if name in updates:
                products = [tensors[f"{module}.lora_B"].float() @ tensors[f"{module}.lora_A"].float() for module in updates[name]]
                weight = weight.float().add_(torch.cat(products), alpha=scale).to(weight.dtype)
            merged[name] = weight
        metadata = file.metadata()
    save_file(merged, target, metadata=metadata)


def _read_adapter(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """alpha / rank, and the tensors as `model.layers.N.self_attn.q_proj.lora_A` and so on."""
    config, path = _read_json(folder / CONFIG), folder / WEIGHTS
    unknown = [key for key in OTHER_ALGEBRA if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unknown:
        kind = ", ".join(unknown) or f"{config.get('peft_type')} with bias {config.get('bias')}"
        raise ConfigError(f"{folder / CONFIG}: cannot merge {kind}", "only plain LoRA adds alpha / rank * B @ A", "merge it with peft")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise DataError(f"{folder / CONFIG}: r is {rank!r}, lora_alpha {alpha!r}", "both must be numbers", "save the adapter again")
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: {error}", "the adapter cannot be read", "save the adapter again") from None
    prefix, suffix = "base_model.model.", ".weight"
    tensors = {}
    for name, tensor in loaded.items():
        short = name.removeprefix(prefix).removesuffix(suffix)
        module, _, letter = short.rpartition(".")
        if f"{prefix}{short}{suffix}" != name or module.rpartition(".")[2] not in (*SPLIT, OUTPUT) or letter not in ("lora_A", "lora_B"):
            raise DataError(
                f"{path}: unknown tensor {name}", "only adapters of q_proj, k_proj, v_proj and o_proj are merged", "merge it with peft"
            )
        if tensor.ndim != 2 or tensor.shape[letter == "lora_B"] != rank:
            raise DataError(f"{path}: {name} is {tuple(tensor.shape)}", f"the rank is {rank} in {CONFIG}", "save the adapter again")
        tensors[short] = tensor
    return alpha / rank, tensors


def _updates(weights: dict[str, StoredTensor], tensors: dict[str, Tensor]) -> Updates:
    """Which weights of the base change. Raises DataError unless each has a complete adapter, and the right shape and dtype."""
    updates: Updates = {}
    for module in sorted({name.rpartition(".")[0] for name in tensors}):
        parent, _, leaf = module.rpartition(".")
        fused = f"{parent}.{FUSED}.weight"
        if leaf in SPLIT and fused in weights:
            updates[fused] = tuple(f"{parent}.{name}" for name in SPLIT)
        else:
            updates[f"{module}.weight"] = (module,)
    for weight, modules in updates.items():
        for name in (f"{module}.lora_{letter}" for module in modules for letter in "AB"):
            if name not in tensors:
                raise DataError(f"the adapter has no {name}", f"{weight} cannot be merged without it", "save the adapter again")
        rows, columns = sum(tensors[f"{m}.lora_B"].shape[0] for m in modules), {tensors[f"{m}.lora_A"].shape[1] for m in modules}
        stored = weights.get(weight)
        if stored is None or stored.shape != (rows, *columns) or stored.dtype not in DTYPES:
            why = f"the base has it as {stored.dtype} {stored.shape}" if stored else "the base does not have it"
            what = f"the adapter is for {weight} of shape {(rows, *columns)} in {', '.join(DTYPES)}"
            raise DataError(what, why, "use the base that the adapter was trained on")
    return updates


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", "it cannot be read", "check the directory's name and contents") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object", "the file is damaged or is something else", "check the directory's contents")
    return content
