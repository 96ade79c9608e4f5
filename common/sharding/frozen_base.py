"""The frozen base of a LoRA run: the matrices of the blocks, in FP8 alone or in bf16, and where a block gets them from.

Each matrix is quantized once, while it is loaded, with one scale for all of it, and never exists in bf16 again. Forward reads W [N, K]
and backward W^T [K, N]; with a tensor scale the one is the other with its bytes in other places. How they are kept:

    sharded           both layouts, each rank 1 / n of either's bytes, gathered from the node's GPUs one pass at a time (n > 1)
    replicated        W whole on each rank; a layer's W^T is made from it as backward needs it
    replicated_both   W and W^T whole on each rank: nothing is moved

In bf16 products read W in either direction: there is one layout, W, for both passes.

One layer of one layout is one run of bytes, cut evenly without regard to where a matrix ends: a gather is one copy per rank. It goes to
one of SLOTS buffers, on a stream of its own, up to SLOTS - 1 layers before the layer computes. The order in which a step asks for
layers is known, so what comes next is too; whatever comes out of turn is served as well, only not ahead of time.

Every rank asks in the same order, and nothing here depends on how far its GPU has come: so collectives meet on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import HOLDINGS, TRANSPORTS
from common.kernels import fp8, transpose
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.shapes import ModelShape
from common.sharding.processes import Processes
from common.sharding.side_stream import Stream, beside
from common.sharding.symmetric_memory import reach, symmetric_empty

SLOTS = 3  # the layer that computes, and two on their way: 0.86 GB each at 70B
ALIGNMENT = 256  # bytes; FP8 products want 16, memory is happiest with whole lines
FORWARD, BACKWARD = 0, 1  # layouts: rows [N, K], columns [K, N]


class Key(NamedTuple):
    """What a block asks for."""

    layout: int
    layer: int


class Place(NamedTuple):
    """One matrix W [rows, columns] within the bytes of a layer; in both layouts it begins at the same byte."""

    offset: int
    rows: int
    columns: int

    def of(self, memory: Tensor, layout: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """View of `memory`, the bytes of a layer, as [rows, columns], or [columns, rows] in the backward layout."""
        shape = (self.rows, self.columns) if layout == FORWARD else (self.columns, self.rows)
        return memory[self.offset : self.offset + self.rows * self.columns * dtype.itemsize].view(dtype).view(shape)


def places(shape: ModelShape, shards: int, itemsize: int = 1) -> tuple[dict[str, Place], int]:
    """Where the matrices of a layer lie, with `itemsize` bytes per value, and its bytes: a multiple of `shards` x ALIGNMENT."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    matrices = {"qkv": (shape.qkv_size, hidden), "o": (hidden, hidden), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
    found, end = {}, 0
    for name, (rows, columns) in matrices.items():
        found[name] = Place(end, rows, columns)
        end = _up(end + rows * columns * itemsize, ALIGNMENT)
    return found, _up(end, shards * ALIGNMENT)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ---- how a layer's bytes come together

Fetch = Callable[[Key, Tensor], None]  # fill uint8 [bytes of a layer] on the current stream


def node_group(processes: Processes, timeout_s: float) -> dist.ProcessGroup:
    """A group of this node's ranks for the gathers alone: on a communicator of their own they wait for no other collective."""
    mine = None
    for ranks in processes.mesh.mesh.reshape(-1, processes.mesh.size(-1)).tolist():
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))  # every rank must make every group
        mine = group if processes.rank in ranks else mine
    assert mine is not None
    return mine


class CollectiveFetch:
    """all-gather: NCCL or RCCL, which take some of the GPU's multiprocessors; gloo on a CPU."""

    def __init__(self, held: Tensor, group: dist.ProcessGroup):
        self.held, self.group = held, group

    def __call__(self, key: Key, out: Tensor) -> None:
        dist.all_gather_into_tensor(out, self.held[key], group=self.group)


class CopyEngineFetch:
    """Each rank copies its peers' shares out of their memory: the GPU's copy engines do it, and no multiprocessor is taken.

    Nobody waits for anybody: `held` never changes after `FrozenBase.loaded`. Each begins with another peer, so that not all read from one.
    """

    def __init__(self, held: Tensor, group: dist.ProcessGroup):
        """`held`: of `symmetric_empty`, of the same shape on all ranks of `group`. Raises ConfigError where peers cannot be read."""
        self.handle, self.peers = reach(held, group)

    def __call__(self, key: Key, out: Tensor) -> None:
        shares = out.view(len(self.peers), -1)
        for peer, held in self.peers.items():
            shares[peer].copy_(held[key], non_blocking=True)


class TransposeFetch:
    """The backward layout of a layer whose forward layout is here."""

    def __init__(self, held: Tensor, layout: dict[str, Place], kernels: str):
        self.held, self.places, self.transpose = held, layout, transpose.ENGINES[kernels]

    def __call__(self, key: Key, out: Tensor) -> None:
        layer = self.held[FORWARD, key.layer]
        for place in self.places.values():
            self.transpose(place.of(layer, FORWARD), place.of(out, BACKWARD))


# ---- the ring


@dataclass
class Slot:
    memory: Tensor  # uint8 [bytes of a layer]
    key: Key | None = None  # what it holds, or will once `ready` has come
    in_use: bool = False  # a block has it
    ready: Any = None
    free: Any = None  # the end of what last read it


class Ring:
    """Layers on their way and at work. `fetch` fills a slot, on `stream`; a slot is written to again only after its release."""

    def __init__(self, slots: list[Tensor], fetch: Fetch, stream: Stream):
        self.slots, self.fetch, self.stream = [Slot(memory) for memory in slots], fetch, stream

    def take(self, key: Key, coming: list[Key]) -> Tensor:
        """The bytes of `key`, for the compute stream until `release`; `coming` are fetched meanwhile, as far as there is room."""
        slot = self._find(key) or self._start(key, self._room(coming) or self._room([]))
        if slot is None:
            raise RuntimeError(f"no slot for layer {key.layer}: {len(self.slots)} layers are in use and none was released")
        self.stream.wait(slot.ready)
        slot.in_use = True
        self.prepare(coming)
        return slot.memory

    def prepare(self, coming: list[Key]) -> None:
        """Fetch what is not here yet of `coming`, the most urgent first, until there is no room."""
        for ahead in coming:
            if self._find(ahead) is None and self._start(ahead, self._room(coming)) is None:
                return

    def release(self, layer: int) -> None:
        for slot in self.slots:
            if slot.in_use and slot.key is not None and slot.key.layer == layer:
                slot.in_use, slot.free = False, self.stream.mark()

    def _find(self, key: Key) -> Slot | None:
        return next((slot for slot in self.slots if slot.key == key), None)

    def _room(self, coming: list[Key]) -> Slot | None:
        """A slot to write to: none that a block has, and none with what is `coming`."""
        return next((slot for slot in self.slots if not slot.in_use and slot.key not in coming), None)

    def _start(self, key: Key, slot: Slot | None) -> Slot | None:
        if slot is not None:
            slot.key, memory = key, slot.memory
            slot.ready = self.stream.run(lambda: self.fetch(key, memory), after=slot.free)
        return slot


def schedule(num_layers: int, recompute_layers: int, training: bool, backward_layout: int = BACKWARD) -> list[Key]:
    """What one pass over the model asks for, in order: an evaluation, or a micro-batch forward and backward."""
    forward = [Key(FORWARD, layer) for layer in range(num_layers)]
    if not training:
        return forward
    backward = []
    for layer in reversed(range(num_layers)):
        again = [Key(FORWARD, layer)] if layer < recompute_layers else []
        backward += [*again, Key(backward_layout, layer)]
    return forward + backward


# ---- the base


class FrozenBase:
    """qkv, o, gate_up and down of every layer. First `hold` every layer, then `loaded`; from then on nothing in it changes."""

    def __init__(
        self,
        shape: ModelShape,
        processes: Processes,
        *,
        kernels: str = "reference",
        holding: str = "sharded",
        transport: str = "nccl",
        recompute_layers: int = 0,
        timeout_s: float = 600.0,
        in_fp8: bool = True,
    ):
        """`holding`: one of HOLDINGS, see above; sharded on one GPU is replicated. `transport`: one of TRANSPORTS. `timeout_s`: of a gather.
        `in_fp8`: else in bf16, of which "replicated" and "replicated_both" are the same.
        """
        assert holding in HOLDINGS and transport in TRANSPORTS
        device, num_layers = processes.device, shape.num_layers
        self.device, self.num_layers, self.recompute_layers = device, num_layers, recompute_layers
        self.dtype = fp8.fp8_dtypes(device)[0] if in_fp8 else torch.bfloat16
        self.in_fp8, self.backward_layout = in_fp8, BACKWARD if in_fp8 else FORWARD
        self.quantize = fp8.ENGINES[kernels]
        self.node = node_group(processes, timeout_s)
        self.ranks, self.rank = self.node.size(), self.node.rank()
        self.shards = self.ranks if holding == "sharded" else 1
        self.places, self.layer_bytes = places(shape, self.shards, self.dtype.itemsize)
        both = in_fp8 and (self.shards > 1 or holding == "replicated_both")
        self.layouts = (FORWARD, BACKWARD) if both else (FORWARD,)
        held_shape = (len(self.layouts), num_layers, self.layer_bytes // self.shards)
        pulls = self.shards > 1 and transport == "copy_engine"
        self.held = symmetric_empty(held_shape, device) if pulls else torch.empty(held_shape, dtype=torch.uint8, device=device)
        self.held.zero_()  # what pads a layer is the same in every run
        # cuBLASLt reads scales at multiples of 16 bytes.
        self.scales = torch.empty(num_layers, len(self.places), 4, dtype=torch.float32, device=device)[..., :1]
        self.ring = None
        if self.shards > 1 or (in_fp8 and not both):
            fetch: Fetch = TransposeFetch(self.held, self.places, kernels)
            if self.shards > 1:
                fetch = CopyEngineFetch(self.held, self.node) if pulls else CollectiveFetch(self.held, self.node)
            slots = [torch.empty(self.layer_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
            self.ring = Ring(slots, fetch, beside(device))
        self.begin(training=True)

    # Filling.

    def share(self, name: str) -> tuple[int, int, int]:
        """(first row, rows, columns) of a matrix that this rank brings to `hold`. The last ranks' may reach beyond the matrix."""
        place = self.places[name]
        rows = math.ceil(place.rows / self.ranks)
        return self.rank * rows, rows, place.columns

    @torch.no_grad()
    def hold(self, layer: int, shares: dict[str, Tensor]) -> None:
        """Quantize a layer, if it is to be FP8, and keep this rank's part of it. `shares`: name -> [rows, columns] as `share` says, float, on the device.

        Every rank of the node calls this with its own rows, and has each whole matrix for a moment: 0.94 GB in bf16 at 70B.
        """
        for number, (name, place) in enumerate(self.places.items()):
            mine = shares[name]
            full = mine.new_empty(self.ranks * mine.shape[0], place.columns)
            dist.all_gather_into_tensor(full.view(torch.uint8), mine.contiguous().view(torch.uint8), group=self.node)
            if not self.in_fp8:
                self._keep(self.held[FORWARD, layer], full[: place.rows].to(self.dtype).view(-1).view(torch.uint8), place.offset)
                continue
            quantizer = Quantizer(weight=True)
            quantizer.dtype, quantizer.state = self.dtype, torch.zeros(4, device=self.device)
            operand = self.quantize(full[: place.rows], quantizer)
            assert operand.columnwise is not None and operand.scale is not None
            self.scales[layer, number] = operand.scale
            for layout, matrix in zip(self.layouts, (operand.rowwise, operand.columnwise), strict=False):
                self._keep(self.held[layout, layer], matrix.view(torch.uint8).view(-1), place.offset)

    def _keep(self, held: Tensor, matrix: Tensor, offset: int) -> None:
        """Copy from a matrix that begins at byte `offset` of its layer what falls into this rank's share, `held`."""
        begin = (self.rank if self.shards > 1 else 0) * len(held)
        low, high = max(begin, offset), min(begin + len(held), offset + len(matrix))
        if low < high:
            held[low - begin : high - begin] = matrix[low - offset : high - offset]

    def loaded(self) -> None:
        """All ranks have held all layers: from here on peers may read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.node)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> list[Tensor]:
        """All that this rank keeps, in pieces of a layer."""
        return [self.scales, *(self.held[layout, layer] for layout in self.layouts for layer in range(self.num_layers))]

    # Giving.

    def begin(self, training: bool) -> None:
        """A pass over the model begins, at layer 0: a micro-batch forward and backward, or an evaluation's forward."""
        self.expected = schedule(self.num_layers, self.recompute_layers, training, self.backward_layout)
        self.position = 0

    def forward_operands(self, layer: int) -> dict[str, QuantizedTensor]:
        """name -> rows [N, K], in FP8 with their scale, until `release`."""
        memory = self._bytes(Key(FORWARD, layer))
        return {
            name: QuantizedTensor(place.of(memory, FORWARD, self.dtype), None, scale if self.in_fp8 else None)
            for (name, place), scale in zip(self.places.items(), self.scales[layer], strict=True)
        }

    def backward_operands(self, layer: int) -> dict[str, QuantizedTensor]:
        """name -> columns [K, N] with their scale, rows being empty; in bf16 rows [N, K] again. Until `release`."""
        if not self.in_fp8:
            return self.forward_operands(layer)
        memory = self._bytes(Key(BACKWARD, layer))
        nothing = memory.new_empty(0, 0).view(self.dtype)
        return {
            name: QuantizedTensor(nothing, place.of(memory, BACKWARD, self.dtype), scale)
            for (name, place), scale in zip(self.places.items(), self.scales[layer], strict=True)
        }

    def release(self, layer: int) -> None:
        """What the current stream has been given so far is all that reads this layer's operands."""
        if self.ring is not None:
            self.ring.release(layer)

    def _bytes(self, key: Key) -> Tensor:
        coming = self._coming(key)
        if self.ring is None:
            return self.held[key]
        if not self._is_here(key):
            return self.ring.take(key, coming)
        self.ring.prepare(coming)
        return self.held[key]

    def _is_here(self, key: Key) -> bool:
        return self.shards == 1 and key.layout in self.layouts

    def _coming(self, key: Key) -> list[Key]:
        """What will be asked for after `key` and has to be fetched. What is out of turn moves the place in the schedule to itself."""
        order, count = self.expected, len(self.expected)
        from_here = (at % count for at in range(self.position, self.position + count))
        at = next((at for at in from_here if order[at] == key), None)
        if at is not None:
            self.position = (at + 1) % count
        following = (order[(self.position + step) % count] for step in range(SLOTS - 1))
        return [ahead for ahead in following if not self._is_here(ahead)]
