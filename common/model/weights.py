"""The frozen base: Hugging Face safetensors shards, streamed into a model of which this rank may own only a part.

Two layouts are read, told apart by the names in the files' headers. They differ in the attention's input projection only:

    ours                            MLCommons' "fused-qkv" copy                 ordinary Hugging Face
    embedding.weight                model.embed_tokens.weight                   the same
    blocks.N.attention_norm.weight  model.layers.N.input_layernorm.weight       the same
    blocks.N.qkv.weight             model.layers.N.self_attn.qkv_proj.weight    .q_proj, .k_proj, .v_proj
    blocks.N.o.weight               model.layers.N.self_attn.o_proj.weight      the same
    blocks.N.ffn_norm.weight        model.layers.N.post_attention_layernorm.weight  the same
    blocks.N.gate_up.weight         model.layers.N.mlp.gate_proj, .up_proj      the same
    blocks.N.down.weight            model.layers.N.mlp.down_proj.weight         the same
    head.norm.weight                model.norm.weight                           the same
    head.output.weight              lm_head.weight                              the same

The fused projection is a plain stack of all rows of Q, then K, then V (not Megatron's interleaved groups), which is our own order:
every tensor of ours is one or several of theirs on top of each other. So the rows that a rank owns, [first, last) of dimension 0,
are runs of whole rows in their files, and each run is one range of bytes.

Those ranges are read with `preadv` into a fixed buffer per thread, converted to the parameter's dtype on its device, and nothing
else is ever held: host memory stays at THREADS x CHUNK whatever the model's size. Not through a memory map: a failing disk would
then kill the process with SIGBUS, and its page faults are served one by one, where a few threads of large reads saturate an NVMe.

safetensors format (github.com/huggingface/safetensors, README): u64 little endian N; N bytes of JSON, name -> dtype, shape,
data_offsets [begin, end) relative to byte 8 + N; then the data, without holes. Nothing here can execute what it reads.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.data.manifest import Manifest, sha256_of
from common.errors import StorageError, WeightsError
from common.model.fused_block import fused_llama
from common.model.llama import Llama
from common.model.shapes import ModelShape
from common.sharding.frozen_base import FrozenBase

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # safetensors' word -> torch
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
TOLERATED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed from rope_theta; old files carry it
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
MAX_THREADS = 8  # per rank
CHUNK = 64 << 20  # bytes read at a time
AGAIN = "fetch the checkpoint again: python -m llama2_70b_lora.prepare fetch"


class Source(NamedTuple):
    """One tensor of the checkpoint, and that it makes up the next `rows` rows of one of ours."""

    name: str
    rows: int


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `bytes` from byte `offset` of `file` on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Read:
    """Rows of a stored tensor that go to rows of a local parameter."""

    stored: Stored
    first: int  # row in the stored tensor
    rows: int
    target: Tensor  # exactly these rows of the parameter's local part: [rows, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint: layout "fused" or "ordinary", its tensors by name, and its files."""

    folder: Path
    layout: str
    tensors: dict[str, Stored]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class LoadReport:
    """What a load took on this rank."""

    layout: str
    check_s: float  # headers, and SHA-256 where a manifest was given
    seconds: float  # all in all
    bytes: int  # read from the files into the model by this rank; without the headers and what was hashed
    peak_host_bytes: int  # of resident memory, since the process began


def load_base(model: Llama, folder: Path, manifest: Path | None = None, frozen: FrozenBase | None = None) -> LoadReport:
    """Fill all parameters of `model` but the adapters (names with `.lora_`) from the safetensors checkpoint in `folder`.

    `frozen`: what holds the matrices of the blocks where they are no parameters; it is filled too, each rank reading its share of rows.

    Parameters are whole, or sharded on dimension 0 as `fully_shard` does; bf16 or fp32, on any device; every rank calls this, and
    reads its own rows only. Everything is checked before the first byte is copied (see `open_checkpoint`). With a `manifest`,
    as `prepare write-manifest` makes it, the SHA-256 of every file too; the ranks share the hashing.

    Raises WeightsError where the checkpoint is not what the model needs, StorageError where the disk fails.
    """
    began = time.monotonic()
    checkpoint = open_checkpoint(Path(folder), model.shape)
    if manifest is not None:
        check_hashes(checkpoint, Path(manifest), next(model.parameters()).device)
    check_s = time.monotonic() - began
    reads = [read for name, parameter in _base_parameters(model) for read in _reads(name, parameter, checkpoint, model.shape)]
    read_bytes = _stream(reads)
    if frozen is not None:
        read_bytes += _fill(frozen, checkpoint, model.shape)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return LoadReport(checkpoint.layout, check_s, time.monotonic() - began, read_bytes, peak)


def _base_parameters(model: Llama) -> Iterator[tuple[str, Tensor]]:
    """Every parameter to load, under the name that it has without adapters: an adapter's frozen linear is its `.base`."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base.", "."), parameter.detach()


# ---- names


def sources(name: str, shape: ModelShape, layout: str) -> list[Source]:
    """The tensors of the checkpoint that, stacked, are our parameter `name`."""
    hidden, ffn, vocab = shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size
    keys = shape.num_kv_heads * shape.head_dim
    outside = {
        "embedding.weight": [Source("model.embed_tokens.weight", vocab)],
        "head.norm.weight": [Source("model.norm.weight", hidden)],
        "head.output.weight": [Source("lm_head.weight", vocab)],
    }
    if name in outside:
        return outside[name]
    _, number, part, _ = name.split(".")
    split = [Source("self_attn.q_proj", hidden), Source("self_attn.k_proj", keys), Source("self_attn.v_proj", keys)]
    inside = {
        "attention_norm": [Source("input_layernorm", hidden)],
        "qkv": split if layout == "ordinary" else [Source("self_attn.qkv_proj", shape.qkv_size)],
        "o": [Source("self_attn.o_proj", hidden)],
        "ffn_norm": [Source("post_attention_layernorm", hidden)],
        "gate_up": [Source("mlp.gate_proj", ffn), Source("mlp.up_proj", ffn)],
        "down": [Source("mlp.down_proj", hidden)],
    }
    return [Source(f"model.layers.{number}.{source.name}.weight", source.rows) for source in inside[part]]


def expected_shapes(shape: ModelShape, layout: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors that a checkpoint of this layout must have."""
    with torch.device("meta"):
        model = fused_llama(shape, 1)
    return {
        source.name: (source.rows, *parameter.shape[1:])
        for name, parameter in model.named_parameters()
        for source in sources(name, shape, layout)
    }


# ---- checks


def open_checkpoint(folder: Path, shape: ModelShape) -> Checkpoint:
    """Read and check the headers of the checkpoint in `folder`, not its data: a fraction of a second.

    Checked: the index, names and number of the shards, each header, each file's size against its header, the layout, that all
    tensors are there and no unknown ones, their shapes and dtypes, and config.json where there is one (head counts, norm epsilon and
    rotation base cannot be seen in the shapes). Raises WeightsError.
    """
    weight_map, files = _find_files(folder)
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                _refuse(f"{file}: {name} is in {tensors[name].file.name} as well", "each tensor must be in one shard", AGAIN)
            tensors[name] = stored
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            _refuse(f"{folder / file_name}: {name} is not in it", f"{INDEX} says so", AGAIN)
    layout = _layout(folder, tensors)
    _check_tensors(folder, tensors, expected_shapes(shape, layout), layout)
    _check_config(folder / CONFIG, shape)
    return Checkpoint(folder, layout, tensors, tuple(files))


def _find_files(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """(tensor name -> shard name, empty for a single file; the shards). Opens the index only."""
    try:
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        _refuse(f"{folder}: cannot be read: {error.strerror}", "the base weights should be in this folder", "check the path, or " + AGAIN)
    if INDEX in present and SINGLE in present:
        _refuse(f"{folder}: has both {INDEX} and {SINGLE}", "they may be two checkpoints", "move the one aside that is not meant")
    if SINGLE in present:
        return {}, [folder / SINGLE]
    if INDEX not in present:
        _refuse_without_index(folder, present)
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        _refuse(f"{folder / INDEX}: has no weight_map of tensor names to file names", "the file is damaged or of another kind", AGAIN)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or Path(name).suffix != ".safetensors":
            why = (
                "pickled weights can execute code when read" if Path(name).suffix in PICKLES else "a shard is a .safetensors file beside it"
            )
            _refuse(f"{folder / INDEX}: names {name!r} as a shard: refused", why, "take the safetensors version of the checkpoint")
    missing = [name for name in names if name not in present]
    if missing:
        _refuse(f"{folder}: {len(missing)} of {len(names)} shards are missing: {_some(missing)}", "the download is incomplete", AGAIN)
    return weight_map, [folder / name for name in names]


def _refuse_without_index(folder: Path, present: set[str]) -> NoReturn:
    pickles = sorted(name for name in present if Path(name).suffix in PICKLES)
    if pickles:
        what = f"{folder}: holds pickled weights only ({_some(pickles)}): refused"
        _refuse(what, "a pickle can execute code when it is read", "take the safetensors version of the checkpoint")
    shards = sorted(name for name in present if name.endswith(".safetensors"))
    why = f"there are {len(shards)} shards ({_some(shards)}) without their index" if shards else "there are no safetensors files"
    _refuse(f"{folder}: has neither {INDEX} nor {SINGLE}", why, "check the path, or " + AGAIN)


def read_header(path: Path) -> dict[str, Stored]:
    """Name -> place of every tensor of a safetensors file, after checking that header and file size agree. Raises WeightsError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                _refuse(f"{path}: {size} bytes, with a header of {length}", "the file is cut off, or no safetensors file", AGAIN)
            header = json.loads(file.read(length))
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}", "it is a shard of the base weights", "check the file and the disk")
    except (ValueError, RecursionError) as error:
        _refuse(f"{path}: its header is no JSON: {error}", "the file is damaged, or no safetensors file", AGAIN)
    data = 8 + length
    try:
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, data, entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _refuse(f"{path}: its header is not safetensors': {error!r}", "the file is damaged or of another kind", AGAIN)
    end = data
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if stored.offset != end:
            _refuse(f"{path}: {name} begins at byte {stored.offset}, expected {end}", "tensors must follow each other without holes", AGAIN)
        end += stored.bytes
    if end != size:
        _refuse(f"{path}: expected {end} bytes by its header, got {size}", "the file is cut off or damaged", AGAIN)
    return tensors


def _stored(path: Path, data: int, entry: dict) -> Stored:
    """One entry of a header. Raises KeyError, TypeError or ValueError if it contradicts itself; other dtypes are left to `_check_tensors`."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise ValueError(f"shape {shape}, data_offsets {begin, end}")
    dtype = entry["dtype"]
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    return Stored(path, dtype, shape, data + begin, end - begin)


def _layout(folder: Path, tensors: Iterable[str]) -> str:
    parts = {name.rsplit(".", 2)[-2] for name in tensors if ".self_attn." in name}
    fused, ordinary = "qkv_proj" in parts, parts & {"q_proj", "k_proj", "v_proj"}
    if fused and ordinary:
        found = f"qkv_proj and {', '.join(sorted(ordinary))}"
        _refuse(
            f"{folder}: mixes two layouts ({found})", "files of two checkpoints are in one folder, or a conversion stopped halfway", AGAIN
        )
    if not fused and not ordinary:
        names = _some(sorted(tensors))
        _refuse(f"{folder}: no attention projections found; it has {names}", "this is no Llama in Hugging Face's names", AGAIN)
    return "fused" if fused else "ordinary"


def _check_tensors(folder: Path, tensors: dict[str, Stored], expected: dict[str, tuple[int, ...]], layout: str) -> None:
    if missing := [name for name in expected if name not in tensors]:
        what = f"{folder}: {len(missing)} of {len(expected)} tensors are missing: {_some(missing)}"
        _refuse(what, f"the {layout} layout of this model needs them", "check that it is the right model, or " + AGAIN)
    for name, stored in tensors.items():
        if name not in expected:
            if not TOLERATED.fullmatch(name):
                why = f"this model in the {layout} layout has {len(expected)} tensors, and this is none of them"
                _refuse(
                    f"{stored.file}: unknown tensor {name}", why, "check that it is the right model: Llama 2 70B, no biases, no adapters"
                )
        elif stored.shape != expected[name]:
            what = f"{stored.file}: {name}: expected shape {list(expected[name])}, got {list(stored.shape)}"
            _refuse(what, "this is a model of another size, or the file is damaged", "check that it is the right model")
        elif stored.dtype not in DTYPES:
            what = f"{stored.file}: {name}: expected a dtype of {', '.join(DTYPES)}, got {stored.dtype}"
            _refuse(what, "quantized weights lack their scales here, and would be a different model", "take the checkpoint in bf16")


def _check_config(path: Path, shape: ModelShape) -> None:
    """What config.json states must be what the model computes with; what it leaves out is not checked."""
    if not path.exists():
        return
    config = _read_json(path)
    rope = config.get("rope_parameters")  # transformers 5 moved rope_theta in there
    expected: dict[str, object] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    if isinstance(rope, dict):
        config = {**config, **rope}
    for key, value in expected.items():
        if config.get(key) is not None and config[key] != value:
            why = "the same weights would compute something else with it"
            _refuse(f"{path}: {key} is {config[key]!r}, this model has {value!r}", why, "check that it is the right model")


def check_sizes(checkpoint: Checkpoint, manifest_path: Path) -> Manifest:
    """That the manifest knows every file, and its size. Raises WeightsError."""
    manifest = Manifest.read(manifest_path)
    for file in checkpoint.files:
        facts = manifest.files.get(file.name)
        if facts is None or facts.sha256 is None:
            do = "write one of a copy that you trust: python -m llama2_70b_lora.prepare write-manifest"
            _refuse(f"{manifest_path}: has no SHA-256 of {file.name}", "the manifest is of another checkpoint, or incomplete", do)
        if facts.size not in (None, size := file.stat().st_size):
            _refuse(
                f"{file}: expected {facts.size} bytes by {manifest_path}, got {size}", "it is another file than the one recorded", AGAIN
            )
    return manifest


def check_hashes(checkpoint: Checkpoint, manifest_path: Path, device: torch.device) -> None:
    """Compare every file's size and SHA-256 with the manifest; each rank hashes its share, and all of them learn the outcome.

    `device`: where collectives work. Raises WeightsError on every rank if one file differs or is not in the manifest.
    """
    manifest = check_sizes(checkpoint, manifest_path)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    differs = torch.zeros(len(checkpoint.files), dtype=torch.int32)
    mine = range(rank, len(checkpoint.files), world)
    with ThreadPoolExecutor(_threads()) as pool:  # hashing lets go of Python's lock
        for number, digest in zip(mine, pool.map(sha256_of, [checkpoint.files[number] for number in mine]), strict=True):
            differs[number] = digest != manifest.files[checkpoint.files[number].name].sha256
    if dist.is_initialized():
        summed = differs.to(device)
        dist.all_reduce(summed)
        differs = summed.cpu()
    if wrong := [file.name for file, flag in zip(checkpoint.files, differs.tolist(), strict=True) if flag]:
        _refuse(f"{checkpoint.folder}: the SHA-256 of {_some(wrong)} differs from {manifest_path}", "the file is damaged or changed", AGAIN)


# ---- reading


def _reads(name: str, parameter: Tensor, checkpoint: Checkpoint, shape: ModelShape) -> Iterator[Read]:
    """What this rank must read for one parameter."""
    return _reads_of_rows(name, *local_rows(parameter), checkpoint, shape)


def _reads_of_rows(name: str, first: int, local: Tensor, checkpoint: Checkpoint, shape: ModelShape) -> Iterator[Read]:
    """Reads of the rows from `first` on into `local`: their overlap with each of the tensors stacked in parameter `name`."""
    last, begin = first + len(local), 0
    for source in sources(name, shape, checkpoint.layout):
        low, high = max(first, begin), min(last, begin + source.rows)
        if low < high:
            yield Read(checkpoint.tensors[source.name], low - begin, high - low, local[low - first : high - first])
        begin += source.rows


def _fill(frozen: FrozenBase, checkpoint: Checkpoint, shape: ModelShape) -> int:
    """Hand `frozen` one layer after the other, and read the next one meanwhile: bf16 exists of two layers only. Returns the bytes read."""

    def read(layer: int) -> tuple[dict[str, Tensor], int]:
        shares: dict[str, Tensor] = {}
        reads: list[Read] = []
        for name in frozen.matrices:
            first, rows, columns = frozen.shard_rows(name)
            shares[name] = torch.empty(rows, columns, dtype=torch.bfloat16, device=frozen.device)
            reads += _reads_of_rows(f"blocks.{layer}.{name}.weight", first, shares[name], checkpoint, shape)
        return shares, _stream(reads) if reads else 0  # with more ranks than rows some have none

    read_bytes = 0
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(read, 0)
        for layer in range(shape.num_layers):
            shares, size = coming.result()
            if layer + 1 < shape.num_layers:
                coming = ahead.submit(read, layer + 1)
            frozen.add_layer(layer, shares)
            read_bytes += size
    frozen.finalize()
    return read_bytes


def local_rows(parameter: Tensor) -> tuple[int, Tensor]:
    """(number of the first row that this rank owns, its local part). Rows are those of dimension 0.

    Raises ValueError for a tensor sharded in another way than `fully_shard` does by default.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter
    local = parameter.to_local()
    sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not sharded:
        return 0, local
    if len(sharded) > 1 or not parameter.placements[sharded[0]].is_shard(0):
        raise ValueError(f"rows of a tensor placed as {parameter.placements} are not contiguous")
    ranks, rank = parameter.device_mesh.size(sharded[0]), parameter.device_mesh.get_local_rank(sharded[0])
    first = min(rank * -(-parameter.shape[0] // ranks), parameter.shape[0])  # as torch.chunk: the last shards may be short or empty
    return first, local


def _threads() -> int:
    return max(2, min(MAX_THREADS, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _stream(reads: list[Read]) -> int:
    """Do all `reads`, in the order of the files, some at a time; returns the bytes read."""
    pieces = [piece for read in sorted(reads, key=lambda r: (r.stored.file, r.stored.offset, r.first)) for piece in _pieces(read)]
    reader, device = _Reader(), reads[0].target.device

    def use_device() -> None:  # per thread: pinning would otherwise open a context on GPU 0, for every rank
        if device.type == "cuda":
            torch.cuda.set_device(device)

    try:
        with ThreadPoolExecutor(_threads(), initializer=use_device) as pool:
            return sum(pool.map(reader.copy, pieces))
    finally:
        reader.close()


def _pieces(read: Read) -> Iterator[Read]:
    """The same, in pieces of at most CHUNK bytes, or of one row if that is larger."""
    row_bytes = read.stored.bytes // read.stored.shape[0]
    rows = max(1, CHUNK // row_bytes)
    for first in range(0, read.rows, rows):
        target = read.target[first : first + rows]
        yield Read(read.stored, read.first + first, len(target), target)


@dataclass
class _Reader:
    """The open files, and one buffer per thread."""

    files: dict[Path, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    own: threading.local = field(default_factory=threading.local)

    @torch.no_grad()
    def copy(self, piece: Read) -> int:
        """Read one piece and put it where it belongs. Returns its bytes. Raises StorageError, WeightsError."""
        stored, target = piece.stored, piece.target
        row_bytes = stored.bytes // stored.shape[0]
        wanted = piece.rows * row_bytes
        raw = self._buffer(wanted, pinned=target.is_cuda)
        self._fill(stored.file, raw, stored.offset + piece.first * row_bytes)
        rows = raw.view(DTYPES[stored.dtype]).view(target.shape)
        # Travels in the file's dtype and is converted where it arrives; without a conversion there is no second copy on the device.
        target.copy_(rows if rows.dtype == target.dtype else rows.to(target.device))
        return wanted

    def _buffer(self, wanted: int, pinned: bool) -> Tensor:
        """uint8 [wanted] of this thread's buffer, which the next call will overwrite: the copies above are synchronous."""
        buffer = getattr(self.own, "buffer", None)
        if buffer is None or len(buffer) < wanted:
            buffer = self.own.buffer = torch.empty(wanted if buffer is None else max(wanted, CHUNK), dtype=torch.uint8, pin_memory=pinned)
        return buffer[:wanted]

    def _fill(self, path: Path, raw: Tensor, offset: int) -> None:
        view, got = memoryview(raw.numpy().data), 0
        try:
            file = self._open(path)
            while got < len(view):  # one call reads at most 2 GiB
                part = os.preadv(file, [view[got:]], offset + got)
                if not part:
                    _refuse(
                        f"{path}: ends at byte {offset + got}",
                        "it became shorter while it was read",
                        "let nothing write to it, and start again",
                    )
                got += part
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror}", f"reading at byte {offset + got} failed", "check the disk or the mount"
            ) from error

    def _open(self, path: Path) -> int:
        with self.lock:
            if path not in self.files:
                self.files[path] = os.open(path, os.O_RDONLY)
            return self.files[path]

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)


# ---- writing


@torch.no_grad()
def save_base(model: Llama, folder: Path, *, shards: int = 3, layout: str = "fused", dtype: torch.dtype | None = None) -> list[Path]:
    """Write a whole (unsharded) model without adapters to `folder` as a Hugging Face checkpoint; returns its files.

    `shards` safetensors files of about equal size, the index, and config.json of a LlamaConfig; `layout` "fused" (MLCommons') or
    "ordinary" (`LlamaForCausalLM.from_pretrained` reads it); `dtype`: stored in, by default what the parameters have. For models
    that fit into memory, such as the miniature's.
    """
    if model.shape.rope_scaling is not None:
        raise ValueError("only Llama 2 is written: this model scales its rotation frequencies")
    tensors = dict(_split(model, layout, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    groups = _groups({name: tensor.nbytes for name, tensor in tensors.items()}, shards)
    files, weight_map = [], {}
    for number, names in enumerate(groups, start=1):
        file = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library makes it readable for its owner only
        files.append(file)
        weight_map.update(dict.fromkeys(names, file.name))
    stored_dtype = next(iter(tensors.values())).dtype
    _write_json(folder / CONFIG, _llama_config(model, stored_dtype))
    _write_json(folder / INDEX, {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map})
    return [*files, folder / CONFIG, folder / INDEX]


def _split(model: Llama, layout: str, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(their name, tensor) of everything, on the CPU."""
    for name, parameter in _base_parameters(model):
        parts = sources(name, model.shape, layout)
        for source, rows in zip(parts, parameter.split([source.rows for source in parts]), strict=True):
            yield source.name, rows.to("cpu", dtype or rows.dtype).clone()  # a clone: the file format takes no two names for one memory


def _groups(sizes: dict[str, int], count: int) -> list[list[str]]:
    """The names in their order, cut into at most `count` runs of about equal bytes, none of them empty."""
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
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}", "it belongs to the base weights", "check the file and the disk")
    except (ValueError, RecursionError) as error:
        _refuse(f"{path}: no JSON: {error}", "the file is damaged", AGAIN)
    if not isinstance(content, dict):
        _refuse(f"{path}: no JSON object", "the file is damaged or of another kind", AGAIN)
    return content


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse(what: str, why: str, do: str) -> NoReturn:
    raise WeightsError(what, why, do)
