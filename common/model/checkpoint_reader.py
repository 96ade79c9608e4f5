"""Find and check a Hugging Face safetensors checkpoint before a byte of its weights is read.

safetensors format (github.com/huggingface/safetensors, README): u64 little endian N; N bytes of JSON, name -> dtype, shape,
data_offsets [begin, end) relative to byte 8 + N; then the data, without holes. Nothing in it can execute code.
"""

from __future__ import annotations

import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from common.data.manifest import Manifest, sha256_of
from common.errors import WeightsError
from common.model.checkpoint_names import CONFIG, FUSED, INDEX, ORDINARY, config_of, tensor_shapes
from common.model.shapes import ModelShape
from common.sharding.processes import thread_count

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}  # name in safetensors -> torch
IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # computed from rope_theta; in old files
FETCH_AGAIN = "fetch the checkpoint again"
CHECK_MODEL = "check that it is the right model, without biases and adapters"


@dataclass(frozen=True)
class StoredTensor:
    """`bytes` bytes from byte `offset` of `file`. `dtype`: its name in safetensors."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `layout`: "fused" or "ordinary", see checkpoint_names."""

    folder: Path
    layout: str
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]


def open_checkpoint(folder: Path, shape: ModelShape) -> Checkpoint:
    """Read and check the headers of the checkpoint in `folder`, not its data: a fraction of a second. Raises WeightsError.

    Checked: headers and file sizes, that the index names no other tensors, the layout, names, shapes and dtypes of all tensors, and config.json if there
    is one, because head counts, norm epsilon and rotation base do not show in the shapes.
    """
    tensors, files = read_tensors(folder)
    layout = (
        FUSED if any(name.endswith(".self_attn.qkv_proj.weight") for name in tensors) else ORDINARY
    )
    _check_tensors(folder, tensors, tensor_shapes(shape, layout), layout)
    _check_config(folder / CONFIG, shape)
    return Checkpoint(folder, layout, tensors, files)


def read_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Name -> place of all tensors in the safetensors files of `folder`, and these files.

    Raises WeightsError where there are none, where two have the same tensor, or where an index names tensors that none has.
    """
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        why = (
            "reading a pickle can execute code"
            if any(folder.glob("*.bin"))
            else "the base weights should be in this folder"
        )
        refuse(f"{folder}: has no safetensors files", why, f"check the path, or {FETCH_AGAIN}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                what = f"{file}: {name} is in {tensors[name].file.name} too"
                refuse(
                    what,
                    "the folder has files of two checkpoints",
                    "move those away that you do not need",
                )
            tensors[name] = stored
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        missing = (
            [name for name in weight_map if name not in tensors]
            if isinstance(weight_map, dict)
            else [INDEX]
        )
        if missing:
            what = f"{folder}: {len(missing)} tensors of {INDEX} are in no file: {some(missing)}"
            refuse(what, "a file is missing, or the index is damaged", FETCH_AGAIN)
    return tensors, files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of a safetensors file. Raises WeightsError if its header and its size disagree."""
    try:
        with path.open("rb") as file:
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            with safe_open(
                path, framework="numpy"
            ):  # the library checks the header: JSON, dtypes, shapes, offsets, holes, file size
                header = json.loads(file.read(length))
    except OSError as error:
        refuse(
            f"{path}: cannot be read: {error.strerror or error}",
            "it is a shard of the base weights",
            "check the file and the disk",
        )
    except (SafetensorError, ValueError) as error:
        refuse(
            f"{path}: no valid safetensors file: {error}",
            "it is incomplete, damaged or of another kind",
            FETCH_AGAIN,
        )
    header.pop("__metadata__", None)
    places = {name: (entry, 8 + length, *entry["data_offsets"]) for name, entry in header.items()}
    return {
        name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
        for name, (entry, data, begin, end) in places.items()
    }


def _check_tensors(
    folder: Path,
    tensors: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    layout: str,
) -> None:
    if missing := [name for name in expected if name not in tensors]:
        what = f"{folder}: {len(missing)} of {len(expected)} tensors are missing: {some(missing)}"
        refuse(
            what,
            f"the {layout} layout of this model needs them",
            f"{CHECK_MODEL}; or {FETCH_AGAIN}",
        )
    for name, stored in tensors.items():
        if name not in expected:
            if not IGNORED.fullmatch(name):
                why = f"this model in the {layout} layout has {len(expected)} tensors, and not this one"
                refuse(f"{stored.file}: unknown tensor {name}", why, CHECK_MODEL)
        elif stored.shape != expected[name]:
            what = f"{stored.file}: {name}: expected shape {list(expected[name])}, got {list(stored.shape)}"
            refuse(what, "this is a model of another size, or the file is damaged", CHECK_MODEL)
        elif stored.dtype not in DTYPES:
            what = f"{stored.file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {stored.dtype}"
            refuse(
                what,
                "quantized weights need scales, which are not read here",
                "use the checkpoint in bf16",
            )


def _check_config(path: Path, shape: ModelShape) -> None:
    """That the model computes what config.json says; keys that are not in it are not checked."""
    if not path.exists():
        return
    config = read_json(path)
    rope = config.get("rope_parameters")  # where transformers 5 has rope_theta
    config |= rope if isinstance(rope, dict) else {}
    for key, value in config_of(shape).items():
        if config.get(key) is not None and config[key] != value:
            what = f"{path}: {key} is {config[key]!r}, this model has {value!r}"
            refuse(what, "the same weights would compute something else", CHECK_MODEL)


def check_sizes(checkpoint: Checkpoint, manifest_path: Path) -> Manifest:
    """That the manifest has every file with its size. Raises WeightsError."""
    manifest = Manifest.read(manifest_path)
    for file in checkpoint.files:
        facts = manifest.files.get(file.name)
        if facts is None or facts.sha256 is None:
            do = "write a manifest of a copy that you trust"
            refuse(
                f"{manifest_path}: has no SHA-256 of {file.name}",
                "the manifest is of another checkpoint, or incomplete",
                do,
            )
        if facts.size not in (None, size := file.stat().st_size):
            what = f"{file}: expected {facts.size} bytes by {manifest_path}, got {size}"
            refuse(what, "it is not the file in the manifest", FETCH_AGAIN)
    return manifest


def check_hashes(checkpoint: Checkpoint, manifest_path: Path, device: torch.device) -> None:
    """Compare size and SHA-256 of every file with the manifest. Each rank hashes a part of the files; all ranks get the result.

    `device`: for the collective. Raises WeightsError on every rank if a file differs or is not in the manifest.
    """
    manifest = check_sizes(checkpoint, manifest_path)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    differs = torch.zeros(len(checkpoint.files), dtype=torch.int32)
    own = range(rank, len(checkpoint.files), world)
    with ThreadPoolExecutor(thread_count()) as pool:  # hashing releases the GIL
        for number, digest in zip(
            own, pool.map(sha256_of, [checkpoint.files[number] for number in own]), strict=True
        ):
            differs[number] = digest != manifest.files[checkpoint.files[number].name].sha256
    if dist.is_initialized():
        summed = differs.to(device)
        dist.all_reduce(summed)
        differs = summed.cpu()
    if wrong := [
        file.name for file, flag in zip(checkpoint.files, differs.tolist(), strict=True) if flag
    ]:
        what = f"{checkpoint.folder}: the SHA-256 of {some(wrong)} differs from {manifest_path}"
        refuse(what, "the file is damaged or changed", FETCH_AGAIN)


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        refuse(
            f"{path}: cannot be read: {error.strerror}",
            "it belongs to the weights",
            "check the path and the disk",
        )
    except (ValueError, RecursionError) as error:
        refuse(f"{path}: no valid JSON: {error}", "the file is damaged", FETCH_AGAIN)
    if not isinstance(content, dict):
        refuse(f"{path}: no JSON object", "the file is damaged or of another kind", FETCH_AGAIN)
    return content


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse(what: str, why: str, do: str) -> NoReturn:
    raise WeightsError(what, why, do)
