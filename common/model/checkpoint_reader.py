"""Find and check a Hugging Face safetensors checkpoint before its weights are read.

A safetensors file (github.com/huggingface/safetensors, README) has these parts in this order:

    N, the size of the header, u64, little endian
    N bytes of JSON: for each tensor name its dtype, its shape and its data_offsets [begin, end),
        which are relative to byte 8 + N
    the data, without holes

Reading it cannot execute code.
"""

from __future__ import annotations

import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from common.data.manifest import Manifest, sha256_of
from common.errors import ConfigError, listed
from common.model.checkpoint_files import FETCH_AGAIN, index_of, refuse, weight_files
from common.model.checkpoint_names import (
    CONFIG,
    EMBEDDING,
    FUSED,
    INDEX,
    ORDINARY,
    OUTPUT_HEAD,
    config_of,
    tensor_shapes,
)
from common.model.families import shape_of
from common.model.shapes import ModelShape
from common.paths import open_regular
from common.sharding.processes import thread_count
from common.terminal import Progress

STORED_DTYPES = {  # name in safetensors -> dtype of torch
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
# Tensors of old files that are not read, because they follow from rope_theta.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
COMPARED_BYTES = 1 << 24  # read at a time
CHECK_MODEL = "check that it is the right model, without biases and adapters"


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file."""

    file: Path
    dtype: str  # name in safetensors
    shape: tuple[int, ...]
    offset: int  # of its first byte
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were checked."""

    folder: Path
    layout: str  # "fused" or "ordinary" (checkpoint_names.py)
    tensors: dict[str, StoredTensor]  # by name
    files: tuple[Path, ...]


def open_checkpoint(folder: Path, shape: ModelShape) -> Checkpoint:
    """Check the checkpoint in `folder` against `shape`, without reading its weights.

    Checks headers and file sizes, that no tensor of the index is missing, and the layout, names,
    shapes and dtypes of all tensors. Also checks config.json if there is one, because the shapes do
    not show the head counts, the norms' epsilon, and the base and scaling of the rotation. Takes a
    fraction of a second.

    If the model's output head is tied to the embedding, a stored head must be equal to the
    embedding, bit for bit. Both are then read, and the head is left out of the result.

    Raises WeightsError.
    """
    tensors, files = read_tensors(folder)
    fused = any(name.endswith(".self_attn.qkv_proj.weight") for name in tensors)
    layout = FUSED if fused else ORDINARY
    stored_head = tensors.pop(OUTPUT_HEAD, None) if shape.tied_embedding else None
    _check_tensors(folder, tensors, tensor_shapes(shape, layout), layout)
    _check_config(folder / CONFIG, shape)
    if stored_head and not _equal(stored_head, tensors[EMBEDDING]):
        refuse(
            f"{stored_head.file}: {OUTPUT_HEAD} differs from {EMBEDDING}",
            "in this model the output head is tied to the embedding, so they must be equal",
            f"set tie_word_embeddings to false in {CONFIG} if the head was trained separately, "
            f"or {FETCH_AGAIN}",
        )
    return Checkpoint(folder, layout, tensors, files)


def read_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Return (tensors by name, files) of the checkpoint in `folder` (see `weight_files`).

    Raises WeightsError if there are no such files, if two of them have the same tensor, or if an
    index names tensors that no file has.
    """
    files = weight_files(folder)
    if not files:
        why = "the base weights should be in this folder"
        if any(folder.glob("*.bin")):
            why = "*.bin files are not read: reading a pickle can execute code"
        elif "~" in folder.parts:
            why = "~ is not expanded in this path: write out the home directory"
        refuse(f"{folder}: has no safetensors files", why, f"check the path, or {FETCH_AGAIN}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                refuse(
                    f"{file}: {name} is also in {tensors[name].file.name}",
                    "the folder has files of two checkpoints",
                    "move the files that you do not need to another folder",
                )
            tensors[name] = stored
    if (folder / INDEX).exists():
        missing = [name for name in index_of(folder) if name not in tensors]
        if missing:
            refuse(
                f"{folder}: {len(missing)} tensors of {INDEX} are in no file: {listed(missing)}",
                "a file is missing, or the index is damaged",
                FETCH_AGAIN,
            )
    return tensors, files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises WeightsError if the file cannot be read, or if its header is invalid or does not fit its
    size.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(8)
            length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            # safe_open checks the header: JSON, dtypes, shapes, offsets, holes, file size.
            with safe_open(path, framework="numpy"):
                header = json.loads(file.read(length))
    except OSError as error:
        refuse(
            f"{path}: cannot be read: {error.strerror or error}",
            "it is a shard of the base weights",
            "check the file and the disk",
        )
    except (SafetensorError, ValueError) as error:
        refuse(
            f"{path}: not a valid safetensors file: {error}",
            "it is incomplete, damaged or in another format",
            FETCH_AGAIN,
        )
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        offset = 8 + length + begin
        shape = tuple(entry["shape"])
        tensors[name] = StoredTensor(path, entry["dtype"], shape, offset, end - begin)
    return tensors


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        for done in range(0, first.bytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, first.bytes - done)
            if one.read(size) != other.read(size):
                return False
    return True


def _check_tensors(
    folder: Path,
    tensors: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    layout: str,
) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        refuse(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing: {listed(missing)}",
            f"the {layout} layout of this model needs them; the files have {listed(tensors)}",
            f"{CHECK_MODEL}; or {FETCH_AGAIN}",
        )
    for name, stored in tensors.items():
        if name not in expected:
            if not IGNORED.fullmatch(name):
                refuse(
                    f"{stored.file}: unknown tensor {name}",
                    f"it is not among the {len(expected)} tensors of this model's {layout} layout",
                    CHECK_MODEL,
                )
        elif stored.shape != expected[name]:
            refuse(
                f"{stored.file}: {name}: expected shape {list(expected[name])}, "
                f"got {list(stored.shape)}",
                "this is a model of another size, or the file is damaged",
                CHECK_MODEL,
            )
        elif stored.dtype not in STORED_DTYPES:
            refuse(
                f"{stored.file}: {name}: unsupported dtype {stored.dtype}, "
                f"expected one of {', '.join(STORED_DTYPES)}",
                "quantized weights need scales, which are not read here",
                "use the checkpoint in bf16",
            )


def _check_config(path: Path, shape: ModelShape) -> None:
    """Raise WeightsError if config.json exists and does not describe the model."""
    if not path.exists():
        return
    try:
        stored = config_of(shape_of(str(path)))
    except ConfigError as error:
        refuse(error.what, error.why, error.do)
    for key, value in config_of(shape).items():
        if stored[key] != value:
            refuse(
                f"{path}: {key} is {stored[key]!r}, this model has {value!r}",
                "the same weights would compute something else",
                CHECK_MODEL,
            )


def check_sizes(checkpoint: Checkpoint, manifest_path: Path) -> Manifest:
    """Return the manifest at `manifest_path`, after checking it and the sizes of all files.

    Raises WeightsError if the manifest lacks the SHA-256 of a file, or if a size differs.
    """
    manifest = Manifest.read(manifest_path)
    for file in checkpoint.files:
        expected = manifest.files.get(file.name)
        if expected is None or expected.sha256 is None:
            refuse(
                f"{manifest_path}: has no SHA-256 of {file.name}",
                "the manifest is of another checkpoint, or incomplete",
                "write a manifest of a copy that you trust",
            )
        size = file.stat().st_size
        if expected.size not in (None, size):
            refuse(
                f"{file}: expected {expected.size} bytes by {manifest_path}, got {size}",
                "it is not the file in the manifest",
                FETCH_AGAIN,
            )
    return manifest


def check_hashes(checkpoint: Checkpoint, manifest_path: Path, device: torch.device) -> None:
    """Compare size and SHA-256 of every file with the manifest.

    Each rank hashes a part of the files, and all ranks get the result.

    `device`: device on which the ranks exchange results.

    Raises WeightsError on every rank if a file differs or is not in the manifest.
    """
    manifest = check_sizes(checkpoint, manifest_path)
    files = checkpoint.files
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    differs = torch.zeros(len(files), dtype=torch.int32)  # 1 for a file that differs
    own = range(rank, len(files), world_size)
    with ThreadPoolExecutor(thread_count()) as pool:  # hashing releases the GIL
        digests = pool.map(sha256_of, [files[number] for number in own])
        with Progress("SHA-256", len(own), "files", is_shown=rank == 0) as progress:
            for number, digest in zip(own, digests, strict=True):
                differs[number] = digest != manifest.files[files[number].name].sha256
                progress.advance(1)
    if dist.is_initialized():
        summed = differs.to(device)
        dist.all_reduce(summed)
        differs = summed.cpu()
    wrong = [file.name for file, flag in zip(files, differs.tolist(), strict=True) if flag]
    if wrong:
        refuse(
            f"{checkpoint.folder}: the SHA-256 of {listed(wrong)} differs from {manifest_path}",
            "the file is damaged or changed",
            FETCH_AGAIN,
        )
