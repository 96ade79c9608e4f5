"""Load the base weights from files into the parameters of a model and into a FrozenBase.

Each rank reads its own rows of the FrozenBase. Rows of our parameters are contiguous bytes of the
files. A few threads read them with `preadv` into one buffer of CHUNK bytes each and convert them on
the target's device. Host memory is therefore threads x CHUNK for a model of any size.

The files are not memory-mapped, because page faults are served one by one, while a few threads with
large reads saturate an NVMe drive. Also, a failing disk would kill the process with SIGBUS.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.atomic_write import naming
from common.errors import StorageError
from common.model.checkpoint_files import refuse
from common.model.checkpoint_names import parts_of
from common.model.checkpoint_reader import (
    STORED_DTYPES,
    Checkpoint,
    StoredTensor,
    check_hashes,
    open_checkpoint,
)
from common.model.llama import Llama
from common.model.shapes import ModelShape
from common.sharding.frozen_base import FrozenBase
from common.sharding.processes import thread_count

CHUNK = 64 << 20  # bytes read at a time


@dataclass(frozen=True)
class LoadReport:
    """Layout, duration and bytes of a load on this rank."""

    layout: str
    seconds: float  # headers and SHA-256 included
    bytes: int  # bytes that this rank read, without headers and hashing


def load_base(
    model: Llama,
    folder: Path,
    manifest: Path | None = None,
    frozen: FrozenBase | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Load the safetensors checkpoint in `folder` into `model` and `frozen`.

    `model`: all parameters except adapters (names with `.lora_`) are filled. They are bf16 or fp32,
        on any device.
    `manifest`: file of `prepare write-manifest`. If given, the SHA-256 of every file is checked.
    `frozen`: this rank's rows are filled.
    `on_layer`: called with the number of layers of `frozen` that are filled, and of all layers.

    Every rank calls this function and reads all parameters of `model`. The checkpoint is checked
    before the first weight is read.

    Raises WeightsError if the checkpoint does not fit the model, and StorageError if reading fails.
    """
    start = time.monotonic()
    checkpoint = open_checkpoint(Path(folder), model.shape)
    if manifest is not None:
        check_hashes(checkpoint, Path(manifest), next(model.parameters()).device)
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    reads: list[Read] = []
    for name, target in parameters.items():
        reads += _reads(name, 0, target, checkpoint, model.shape)
    size = _execute(reads)
    if frozen is not None:
        size += _fill(frozen, checkpoint, model.shape, on_layer)
    return LoadReport(checkpoint.layout, time.monotonic() - start, size)


def load_weights(
    model: Llama, folder: Path, set_weight: Callable[[torch.nn.Parameter, Tensor], None]
) -> LoadReport:
    """Call `set_weight(parameter, full)` for each weight of the safetensors checkpoint in `folder`.

    `full` is the whole weight in fp32, on the parameter's device, one at a time. The checkpoint is
    checked before the first weight is read. Every rank calls this function and reads all weights.

    Raises WeightsError if the checkpoint does not fit the model, and StorageError if reading fails.
    """
    start = time.monotonic()
    checkpoint = open_checkpoint(Path(folder), model.shape)
    size = 0
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        size += _execute(list(_reads(name, 0, full, checkpoint, model.shape)))
        full += 0.0  # turn -0.0 into 0.0, as in `init_weights`
        set_weight(parameter, full)
    return LoadReport(checkpoint.layout, time.monotonic() - start, size)


def _fill(
    frozen: FrozenBase,
    checkpoint: Checkpoint,
    shape: ModelShape,
    on_layer: Callable[[int, int], None] | None,
) -> int:
    """Fill `frozen` layer by layer and return the bytes read.

    The next layer is read while one is added, so at most two unquantized layers exist at a time.
    """

    def read(layer: int) -> tuple[dict[str, Tensor], int]:
        shards: dict[str, Tensor] = {}
        reads: list[Read] = []
        for name in frozen.matrices:
            first, rows, columns = frozen.shard_rows(name)
            shards[name] = torch.empty(
                rows,
                columns,
                dtype=torch.bfloat16 if frozen.in_fp8 else frozen.dtype,
                device=frozen.device,
            )
            reads += _reads(f"blocks.{layer}.{name}.weight", first, shards[name], checkpoint, shape)
        return shards, _execute(reads)

    total = 0
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(read, 0)
        for layer in range(shape.num_layers):
            shards, size = pending.result()
            if layer + 1 < shape.num_layers:
                pending = pool.submit(read, layer + 1)
            frozen.add_layer(layer, shards)
            total += size
            if on_layer:
                on_layer(layer + 1, shape.num_layers)
    frozen.finalize()
    return total


@dataclass(frozen=True)
class Read:
    """Rows of a stored tensor to be copied."""

    stored: StoredTensor
    first: int  # number of the first row
    target: Tensor  # [rows, ...]

    @property
    def row_bytes(self) -> int:
        return self.stored.bytes // self.stored.shape[0]

    def chunks(self) -> Iterator[Read]:
        """Split the read into reads of at most CHUNK bytes, or of one row if that is larger."""
        rows = max(1, CHUNK // self.row_bytes)
        for first in range(0, len(self.target), rows):
            yield Read(self.stored, self.first + first, self.target[first : first + rows])


def _reads(
    name: str, first: int, target: Tensor, checkpoint: Checkpoint, shape: ModelShape
) -> Iterator[Read]:
    """Yield the reads of rows [first, first + len(target)) of parameter `name`.

    Rows of `target` beyond the parameter's last one are not changed.
    """
    begin = 0
    for part in parts_of(shape, checkpoint.layout)[name]:
        low = max(first, begin)
        high = min(first + len(target), begin + part.rows)
        if low < high:
            yield Read(
                checkpoint.tensors[part.name], low - begin, target[low - first : high - first]
            )
        begin += part.rows


def _execute(reads: list[Read]) -> int:
    """Execute all reads with several threads, in the order of the files, and return the bytes read.

    Raises StorageError, WeightsError.
    """
    if not reads:  # with more ranks than rows, some ranks have none
        return 0
    reads = sorted(reads, key=lambda read: (read.stored.file, read.stored.offset, read.first))
    device = reads[0].target.device
    files: dict[Path, int] = {}
    local = threading.local()

    # A thread has its own current device. Without this, pinning memory would open a context on
    # GPU 0 for every rank.
    def use_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @torch.no_grad()
    def copy(read: Read) -> int:
        size = len(read.target) * read.row_bytes
        if not hasattr(local, "buffer") or len(local.buffer) < size:
            local.buffer = torch.empty(
                max(size, CHUNK), dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
        # The copies below must be synchronous, because the next read of this thread overwrites the
        # buffer.
        raw = local.buffer[:size]
        offset = read.stored.offset + read.first * read.row_bytes
        _read_exactly(files[read.stored.file], read.stored.file, raw, offset)
        rows = raw.view(STORED_DTYPES[read.stored.dtype]).view(read.target.shape)
        if rows.dtype != read.target.dtype:
            rows = rows.to(device)  # convert on the device, which is faster than on the host
        read.target.copy_(rows)
        return size

    chunks = (chunk for read in reads for chunk in read.chunks())
    try:
        for path in dict.fromkeys(read.stored.file for read in reads):
            files[path] = os.open(path, os.O_RDONLY)
        with ThreadPoolExecutor(thread_count(), initializer=use_device) as pool:
            return sum(pool.map(copy, chunks))
    except OSError as error:
        raise StorageError(
            f"{error.filename}: {error.strerror}",
            "the file cannot be read",
            "check the disk or the mount",
        ) from error
    finally:
        for file in files.values():
            os.close(file)


def _read_exactly(file: int, path: Path, raw: Tensor, offset: int) -> None:
    """Fill `raw`, uint8 [n], with the bytes at `offset`. Raises OSError, WeightsError."""
    view = memoryview(raw.numpy().data)
    done = 0
    while done < len(view):  # one call reads at most 2 GiB
        with naming(path):
            size = os.preadv(file, [view[done:]], offset + done)
        if not size:
            refuse(
                f"{path}: ends at byte {offset + done}",
                "it became shorter while it was read",
                "make sure that nothing writes to it, and start again",
            )
        done += size
