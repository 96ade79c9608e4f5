"""Write a checkpoint with the trained adapters merged into its weights.

Each weight becomes W + (alpha / rank) * B @ A, computed in fp32 and rounded once to the
checkpoint's dtype. The base is a Hugging Face safetensors checkpoint with fused (`qkv_proj`,
MLCommons') or ordinary projections. Merging is for export only. Training never adds B @ A to W: the
updates of single steps are far below half a unit in the last place of W and would be rounded away.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.data.preparation import say
from common.errors import ConfigError
from common.model.checkpoint_reader import (
    DTYPES,
    StoredTensor,
    read_json,
    read_tensors,
    refuse,
    some,
)
from common.model.peft_adapter import CONFIG, OUTPUT, PLAIN_LORA, SPLIT, WEIGHTS
from llama2_70b_lora.weights_help import weights_help

FUSED = "qkv_proj"
# not copied: these would be the weights before the merge
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
)
ANOTHER_BASE = "use the base that the adapter was trained on"

# Weight -> modules of the adapter whose products B A are concatenated and added to it.
Updates = dict[str, tuple[str, ...]]


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Merge the adapter in `adapter` into the checkpoint in `base`, and write the result to `out`,
    which must not exist.

    One shard is processed at a time. That needs memory for the largest shard (5 GB in the MLCommons
    checkpoint), its merged weights and one fp32 product. Everything is checked before anything is
    written, and `out` gets its name when it is complete. Configuration and tokenizer are copied.

    Raises ConfigError if `out` exists, WeightsError if base or adapter is damaged or they do not
    fit each other.
    """
    rank, scale, tensors = _read_adapter(adapter)
    with weights_help():
        weights, shards = read_tensors(base)
    updates = _updates(weights, tensors, rank)
    partial = out.with_name(out.name + ".partial")
    for folder in (out, partial):
        if folder.exists():
            raise ConfigError(
                f"{folder} exists",
                "a merge never overwrites",
                "name a new directory, or remove this one",
            )
    partial.mkdir(parents=True)
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, partial / path.name)
    for number, shard in enumerate(shards, start=1):
        say(f"shard {number} of {len(shards)}: {shard.name}")
        _merge_shard(shard, partial / shard.name, updates, tensors, scale)
    partial.rename(out)


def _merge_shard(
    shard: Path, target: Path, updates: Updates, tensors: dict[str, Tensor], scale: float
) -> None:
    merged: dict[str, Tensor] = {}
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            weight = file.get_tensor(name)
            if name in updates:
                products = [
                    tensors[f"{module}.lora_B"].float() @ tensors[f"{module}.lora_A"].float()
                    for module in updates[name]
                ]
                weight = weight.float().add_(torch.cat(products), alpha=scale).to(weight.dtype)
            merged[name] = weight
        metadata = file.metadata()
    save_file(merged, target, metadata=metadata)


def _read_adapter(folder: Path) -> tuple[int, float, dict[str, Tensor]]:
    """Return rank, alpha / rank, and the tensors by names like
    `model.layers.N.self_attn.q_proj.lora_A`.
    """
    config, path = read_json(folder / CONFIG), folder / WEIGHTS
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        refuse(
            f"{folder / CONFIG}: r is {rank!r}, lora_alpha {alpha!r}",
            "both must be numbers",
            "save the adapter again",
        )
    plain = PLAIN_LORA | {
        key: config.get(key)
        for key in ("r", "lora_alpha", "lora_dropout", "base_model_name_or_path")
    }
    if other := [
        f"{key} {value}" for key, value in config.items() if key not in plain or value != plain[key]
    ]:
        refuse(
            f"{folder / CONFIG}: cannot merge {some(other)}",
            "a training run here saves no such adapter",
            "merge it with peft",
        )
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        refuse(f"{path}: {error}", "the adapter cannot be read", "save the adapter again")
    return (
        rank,
        alpha / rank,
        {
            name.removeprefix("base_model.model.").removesuffix(".weight"): loaded[name]
            for name in loaded
        },
    )


def _updates(weights: dict[str, StoredTensor], tensors: dict[str, Tensor], rank: int) -> Updates:
    """Return the weights of the base that change, with the modules that change them.

    Raises WeightsError unless the adapter has all of their modules and no others, of the right
    shapes.
    """
    updates: Updates = {}
    for weight in weights:
        parent, _, leaf = weight.removesuffix(".weight").rpartition(".")
        if leaf in (FUSED, *SPLIT, OUTPUT):
            updates[weight] = tuple(
                f"{parent}.{name}" for name in (SPLIT if leaf == FUSED else (leaf,))
            )
    expected = {
        f"{module}.lora_{letter}"
        for modules in updates.values()
        for module in modules
        for letter in "AB"
    }
    if expected != tensors.keys():
        odd = sorted(expected ^ tensors.keys())
        refuse(
            f"adapter and base do not fit: only one of them has {some(odd)}",
            "each projection needs its A and B",
            ANOTHER_BASE,
        )
    for weight, modules in updates.items():
        stored = weights[weight]
        sizes = [
            (*tensors[f"{module}.lora_B"].shape, *tensors[f"{module}.lora_A"].shape)
            for module in modules
        ]
        inner = {(rank, rank, *stored.shape[1:])}
        if (
            stored.dtype not in DTYPES
            or sum(size[0] for size in sizes) != stored.shape[0]
            or {size[1:] for size in sizes} != inner
        ):
            what = (
                f"the adapter of {weight} has rank {rank} and B and A of {sizes};"
                f" the weight in the base is {stored.dtype} {stored.shape}"
            )
            refuse(what, f"it must be rows x columns in {', '.join(DTYPES)}", ANOTHER_BASE)
    return updates
