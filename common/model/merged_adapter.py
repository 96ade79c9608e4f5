"""Write a checkpoint with trained adapters merged into its weights: the command `merge`.

Each weight becomes W + (alpha / rank) * B @ A, computed in fp32 and rounded once to the
checkpoint's dtype. The base is a Hugging Face safetensors checkpoint with fused (`qkv_proj`, as in
MLCommons' copy) or ordinary projections. The result always has ordinary ones, which
`transformers.AutoModelForCausalLM.from_pretrained` loads.

Merging is for export only. Training never adds B @ A to W: the update of a single step is far below
half a unit in the last place of W, and would be rounded away.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from common.atomic_write import SUFFIX, new_folder
from common.data.preparation import say
from common.errors import listed
from common.model.checkpoint_files import read_json, refuse
from common.model.checkpoint_names import (
    ADAPTER_CONFIG,
    CONFIG,
    FUSED,
    INDEX,
    ORDINARY,
    SINGLE,
    tensor_shapes,
)
from common.model.checkpoint_reader import STORED_DTYPES, StoredTensor, read_tensors
from common.model.checkpoint_writer import (
    NAMES,
    llama_config,
    require_finite,
    require_new,
    write_file,
    write_json,
)
from common.model.peft_adapter import (
    OUTPUT,
    SPLIT,
    WEIGHTS,
    is_plain,
    require_adapter,
)
from common.model.shapes import ModelShape
from common.paths import open_regular

QKV_PROJECTION = "qkv_proj"
# Suffixes of files that are not copied: the weights of the base, modeling code, which may be for
# the fused layout, and files that are being written.
NOT_COPIED = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".py",
    SUFFIX,
)
LARGEST_ALPHA = torch.finfo(torch.float32).max
ANOTHER_BASE = "use the base that the adapter was trained on"

# Weight -> modules of the adapter whose products B A are concatenated and added to it.
Updates = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in peft's format."""

    rank: int
    scale: float  # alpha / rank
    # A [rank, inputs] and B [outputs, rank], by names such as
    # `model.layers.N.self_attn.q_proj.lora_A`.
    tensors: dict[str, Tensor]

    def product(self, module: str) -> Tensor:
        """Return B A of a module in fp32, without the scale."""
        b = self.tensors[f"{module}.lora_B"].float()
        return b @ self.tensors[f"{module}.lora_A"].float()


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    models: Mapping[ModelShape, int] | None = None,
    left_out: Collection[str] = (),
    add: Callable[[Path], object] | None = None,
) -> None:
    """Merge the adapter in `adapter` into the checkpoint in `base`, and write the result to `out`.

    `models`: shape -> sequence length of each model that a base without config.json may be.
    `left_out`: names of files of the base that are not copied.
    `add`: adds files to the new folder.

    Processes one shard at a time, with memory for the largest shard (5 GB in the MLCommons
    checkpoint), its merged weights and one fp32 product. Everything is checked before anything is
    written, and `out` gets its name when it is complete. Configuration and tokenizer are copied.

    Raises ConfigError if `out` exists, and WeightsError if the base or the adapter is damaged, they
    do not fit each other, or a merged weight is not finite. Raises OSError if writing fails. After
    any failure, no files are left.
    """
    stored = read_adapter(adapter)
    weights, shards = read_tensors(base)
    updates = _updates(weights, stored)
    _require_writable(base, weights)
    config = _config(base, weights, models or {})
    require_new(out)
    with new_folder(out) as folder:
        for path in sorted(base.iterdir()):
            if _is_copied(path) and path.name not in left_out:
                shutil.copyfile(path, folder / path.name)
        write_json(folder / CONFIG, config)
        _write_shards(shards, folder, updates, stored)
        if add:
            add(folder)
    say(f"{out}: complete")


def _write_shards(
    shards: Sequence[Path], folder: Path, updates: Updates, adapter: StoredAdapter
) -> None:
    """Write the merged shards of the base to `folder`, and their index if there are several."""
    weight_map: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, start=1):
        say(f"shard {number} of {len(shards)}: {shard.name}")
        merged = _merged(shard, updates, adapter)
        for name, tensor in merged.items():
            require_finite(f"{shard.name}, with the adapter: {name}", tensor)
        write_file(folder / shard.name, merged)
        weight_map.update(dict.fromkeys(merged, shard.name))
        size += sum(tensor.nbytes for tensor in merged.values())
    if [shard.name for shard in shards] != [SINGLE]:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _require_writable(base: Path, weights: dict[str, StoredTensor]) -> None:
    """Raise WeightsError if `write_file` cannot write a tensor of the base."""
    for name, stored in weights.items():
        if stored.dtype not in NAMES.values():
            refuse(
                f"{base}: {name}: unsupported dtype {stored.dtype}",
                f"the merged checkpoint can have {', '.join(NAMES.values())}",
                "use the checkpoint in bf16",
            )


def _is_copied(path: Path) -> bool:
    """Return whether a file of the base is copied: no weights, no code, no hidden files."""
    return path.is_file() and path.suffix not in NOT_COPIED and not path.name.startswith(".")


def _config(base: Path, weights: dict[str, StoredTensor], models: Mapping[ModelShape, int]) -> dict:
    """Return the content of config.json: the base's, without references to modeling code.

    Raises WeightsError if the base has none and its tensors do not match any of `models`.
    """
    path = base / CONFIG
    if path.exists():
        config = read_json(path)
        config.pop("auto_map", None)
        return config
    shapes = {name: stored.shape for name, stored in weights.items()}
    for model, sequence_length in models.items():
        for layout in (FUSED, ORDINARY):
            if shapes == tensor_shapes(model, layout):
                dtype = STORED_DTYPES[next(iter(weights.values())).dtype]
                return llama_config(model, sequence_length, dtype)
    refuse(
        f"{path}: no such file",
        "the shapes of the weights do not tell the number of heads",
        "copy the config.json of the model there",
    )


def _merged(shard: Path, updates: Updates, adapter: StoredAdapter) -> dict[str, Tensor]:
    """Return the tensors of a shard with the adapters added, in the ordinary layout."""
    merged: dict[str, Tensor] = {}
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            weight = file.get_tensor(name)
            if name not in updates:
                merged[name] = weight
                continue
            products = [adapter.product(module) for module in updates[name]]
            total = weight.float().add_(torch.cat(products), alpha=adapter.scale)
            weight = total.to(weight.dtype)
            rows = [product.shape[0] for product in products]
            for module, part in zip(updates[name], weight.split(rows), strict=True):
                merged[f"{module}.weight"] = part
    return merged


def read_adapter(folder: Path) -> StoredAdapter:
    """Read the adapter in a folder that `save_peft_adapter` or peft wrote.

    Raises WeightsError if it cannot be read, if a number in it is not finite, if a tensor is not an
    A or B of its rank, or if peft would compute more than alpha / rank B A.
    """
    require_adapter(folder)
    config = read_json(folder / ADAPTER_CONFIG)
    path = folder / WEIGHTS
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if (
        type(rank) is not int
        or rank < 1
        or not isinstance(alpha, int | float)
        or isinstance(alpha, bool)
        or not abs(alpha) <= LARGEST_ALPHA  # not ">", which is false of NaN
    ):
        refuse(
            f"{folder / ADAPTER_CONFIG}: r is {rank!r}, lora_alpha {alpha!r}",
            "both must be numbers in the range of fp32",
            "save the adapter again",
        )
    unsupported = [f"{key} {value}" for key, value in config.items() if not is_plain(key, value)]
    if unsupported:
        refuse(
            f"{folder / ADAPTER_CONFIG}: cannot merge {listed(unsupported)}",
            "this package saves no such adapters",
            "merge it with peft",
        )
    try:
        with open_regular(path) as file:
            loaded = load(file.read())  # not mapped: a disk that fails would end the process
    except (OSError, SafetensorError) as error:
        refuse(f"{path}: {error}", "the adapter cannot be read", "save the adapter again")
    tensors = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): tensor
        for name, tensor in loaded.items()
    }
    for name, tensor in tensors.items():
        rank_dimension = {"A": 0, "B": 1}.get(name.rpartition(".lora_")[2])
        if rank_dimension is None or tensor.ndim != 2 or tensor.shape[rank_dimension] != rank:
            refuse(
                f"{path}: {name} {list(tensor.shape)} is no matrix A or B of rank {rank}",
                f"rank {rank} is r in {ADAPTER_CONFIG}, and other tensors are not plain LoRA",
                "merge it with peft",
            )
        require_finite(f"{path}: {name}", tensor.float())
    return StoredAdapter(rank, alpha / rank, tensors)


def _updates(weights: dict[str, StoredTensor], adapter: StoredAdapter) -> Updates:
    """Return the weights of the base that change, with the modules that change them.

    Raises WeightsError unless the adapter has exactly these modules, of the right shapes.
    """
    updates: Updates = {}
    for weight in weights:
        parent, _, leaf = weight.removesuffix(".weight").rpartition(".")
        if leaf in (QKV_PROJECTION, *SPLIT, OUTPUT):
            leaves = SPLIT if leaf == QKV_PROJECTION else (leaf,)
            updates[weight] = tuple(f"{parent}.{name}" for name in leaves)
    require_modules(adapter, chain.from_iterable(updates.values()))
    for weight, modules in updates.items():
        _check_shapes(weight, weights[weight], modules, adapter)
    return updates


def require_modules(adapter: StoredAdapter, modules: Iterable[str]) -> None:
    """Raise WeightsError unless the adapter has matrices A and B of exactly these modules."""
    expected = {f"{module}.lora_{matrix}" for module in modules for matrix in "AB"}
    if expected != adapter.tensors.keys():
        unmatched = sorted(expected ^ adapter.tensors.keys())
        refuse(
            f"adapter and base do not fit: only one of them has {listed(unmatched)}",
            "each projection needs its A and B",
            ANOTHER_BASE,
        )


def _check_shapes(
    weight: str, stored: StoredTensor, modules: tuple[str, ...], adapter: StoredAdapter
) -> None:
    """Raise WeightsError unless the products B A of `modules` have the shape of the weight."""
    fits = stored.dtype in STORED_DTYPES
    rows = 0
    sizes = []
    for module in modules:
        b = adapter.tensors[f"{module}.lora_B"].shape
        a = adapter.tensors[f"{module}.lora_A"].shape
        sizes.append((*b, *a))
        fits = fits and a[1:] == stored.shape[1:]
        rows += b[0]
    if not fits or rows != stored.shape[0]:
        refuse(
            f"the adapter of {weight} has B and A of {sizes};"
            f" the weight in the base is {stored.dtype} {stored.shape}",
            f"it must be rows x columns in {', '.join(STORED_DTYPES)}",
            ANOTHER_BASE,
        )
