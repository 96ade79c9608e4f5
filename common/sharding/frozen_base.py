"""Frozen weights of a LoRA run: the matrices of the blocks in FP8, bf16 or fp32.

In FP8, each matrix is quantized once, while it is loaded. The forward reads W [N, K] and the
backward W^T [K, N]. Both are the same bytes in a different order, because the whole matrix has one
scale. `storage` defines what each rank stores:

    sharded           1/n of W and 1/n of W^T of every layer; the node's n ranks all-gather one
                      layer at a time
    replicated        W of every layer, and W^T of the first `transposed_layers`; any other W^T is
                      computed shortly before its layer's backward
    replicated_both   W and W^T of every layer

On two H200s, replicated trained the 70B at 3,012 tok/s/GPU and sharded at 2,939. Gathers by copy
engines reached 2,968 and were deleted. Computing W^T takes 0.45 ms of a layer's 33.

In bf16 and fp32, the products of both passes read W, and W^T does not exist. Neither does it in FP8
on a GPU whose products accept every layout (kernels/fp8.py).

The matrices of a layer are contiguous in one buffer, which is cut into n equal parts regardless of
matrix boundaries. So a gather is one collective. Gathers and transposes run on a side stream, up to
NUM_BUFFERS - 1 layers ahead, in the order of layers in a pass (layer_prefetch.py). A layer that is
requested out of order is correct, but not prefetched. All ranks request layers in the same order,
and prefetching does not depend on the progress of a GPU, so the collectives of the ranks match.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import FROZEN_BASE_STORAGE
from common.kernels import fp8, quantize, transpose
from common.kernels.fp8 import QuantizedTensor, Quantizer
from common.model.shapes import ModelShape
from common.sharding.layer_prefetch import (
    COLUMNWISE,
    ROWWISE,
    LayerKey,
    PrefetchBuffers,
    pass_order,
)
from common.sharding.processes import Processes
from common.sharding.side_stream import make_side_stream

NUM_BUFFERS = 3  # one for the layer that computes, two for prefetched layers: 0.86 GB each at 70B
# A matrix starts at a multiple of this many bytes. FP8 products need 16, a cache line has 128.
ALIGNMENT = 256


class MatrixSlice(NamedTuple):
    """Position of a matrix W [rows, columns] in its layer, equal in both orientations."""

    offset: int  # in bytes
    rows: int
    columns: int

    def view(self, layer: Tensor, orientation: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix in `layer`, uint8 [layer bytes]; transposed if COLUMNWISE."""
        end = self.offset + self.rows * self.columns * dtype.itemsize
        values = layer[self.offset : end].view(dtype)
        if orientation == ROWWISE:
            return values.view(self.rows, self.columns)
        return values.view(self.columns, self.rows)


def layer_layout(
    shape: ModelShape, num_shards: int, itemsize: int
) -> tuple[dict[str, MatrixSlice], int]:
    """Return (name -> slice of each matrix of a layer, the layer's size in bytes).

    `itemsize`: bytes per value.

    The size is a multiple of `num_shards` x ALIGNMENT.
    """
    hidden = shape.hidden_size
    ffn = shape.ffn_hidden_size
    sizes = {
        "qkv": (shape.qkv_size, hidden),
        "o": (hidden, shape.attention_size),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    slices = {}
    end = 0
    for name, (rows, columns) in sizes.items():
        slices[name] = MatrixSlice(end, rows, columns)
        end = _round_up(end + rows * columns * itemsize, ALIGNMENT)
    return slices, _round_up(end, num_shards * ALIGNMENT)


def _round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def node_group(processes: Processes, timeout_s: float) -> dist.ProcessGroup:
    """Return a new process group of this node's ranks, used only for gathers.

    With their own communicator, gathers do not wait for other collectives.
    """
    own = None
    for ranks in processes.mesh.mesh.reshape(-1, processes.mesh.size(-1)).tolist():
        # Every rank must create every group.
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if processes.rank in ranks:
            own = group
    assert own is not None
    return own


class FrozenBase:
    """The qkv, o, gate_up and down matrices of every layer.

    Call `add_layer` for every layer, then `finalize`. After that the weights never change.
    """

    def __init__(
        self,
        shape: ModelShape,
        processes: Processes,
        *,
        kernels: str = "reference",
        storage: str = "sharded",
        transposed_layers: int = 0,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
    ):
        """Allocate storage and prefetch buffers.

        `kernels`: "reference" or "triton".
        `storage`: see the docstring of the module; on one GPU, "sharded" means "replicated".
        `transposed_layers`: number of layers whose W^T is stored, with "replicated".
        `dtype`: torch.bfloat16 or torch.float32; None for the device's FP8 e4m3.
        `timeout_s`: timeout of a gather in seconds.
        """
        assert storage in FROZEN_BASE_STORAGE and dtype in (None, torch.bfloat16, torch.float32)
        self.device = processes.device
        self.num_layers = shape.num_layers
        self.in_fp8 = dtype is None
        self.dtype = fp8.fp8_dtypes(self.device)[0] if dtype is None else dtype
        self.quantize = quantize.IMPLEMENTATIONS[kernels]
        self.transpose = transpose.IMPLEMENTATIONS[kernels]
        self.group = node_group(processes, timeout_s)
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        self.num_shards = self.ranks if storage == "sharded" else 1
        self.matrices, self.layer_bytes = layer_layout(shape, self.num_shards, self.dtype.itemsize)
        # Whether the backward reads W^T.
        self.reads_transpose = self.in_fp8 and not fp8.takes_every_layout(self.device)
        self.transposed_layers = 0
        if self.reads_transpose:
            self.transposed_layers = min(transposed_layers, self.num_layers)
            if self.num_shards > 1 or storage == "replicated_both":
                self.transposed_layers = self.num_layers
        computes_transpose = self.reads_transpose and self.transposed_layers < self.num_layers
        # W of all layers, then W^T of the first ones. Zeros, so that the padding of a layer, and
        # its hash, is the same in every run.
        size = (self.num_layers + self.transposed_layers, self.layer_bytes // self.num_shards)
        self.stored = torch.zeros(size, dtype=torch.uint8, device=self.device)
        # cuBLASLt reads inverse scales at multiples of 16 bytes.
        self.inverse_scales = torch.zeros(
            self.num_layers, len(self.matrices), 4, dtype=torch.float32, device=self.device
        )[..., :1]
        self.buffers = None
        if self.num_shards > 1 or computes_transpose:
            memories = [
                torch.empty(self.layer_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(NUM_BUFFERS)
            ]
            fetch = self._gather if self.num_shards > 1 else self._transpose
            self.buffers = PrefetchBuffers(memories, fetch, make_side_stream(self.device))
        self.start_pass(training=True)

    # Loading.

    def shard_rows(self, name: str) -> tuple[int, int, int]:
        """Return (first row, rows, columns) of this rank's argument of `add_layer` for a matrix.

        The rows may extend beyond the last row of the matrix.
        """
        matrix = self.matrices[name]
        rows = math.ceil(matrix.rows / self.ranks)
        return self.rank * rows, rows, matrix.columns

    @torch.no_grad()
    def add_layer(self, layer: int, shards: dict[str, Tensor]) -> None:
        """Quantize a layer if the base is in FP8, and store the part that `storage` defines.

        `shards`: name -> this rank's rows of each matrix, float [rows, columns] of `shard_rows`.

        This is a collective of the node's ranks. Each rank assembles one whole matrix at a time:
        0.94 GB in bf16 at 70B.
        """
        for number, (name, matrix) in enumerate(self.matrices.items()):
            own = shards[name]
            full = own.new_empty(self.ranks * own.shape[0], matrix.columns)
            dist.all_gather_into_tensor(
                full.view(torch.uint8), own.contiguous().view(torch.uint8), group=self.group
            )
            full = full[: matrix.rows]
            if not self.in_fp8:
                self._store(LayerKey(ROWWISE, layer), full.to(self.dtype), matrix.offset)
                continue
            quantizer = Quantizer(weight=True, transposed=layer < self.transposed_layers)
            quantizer.dtype = self.dtype
            quantizer.state = torch.zeros(4, device=self.device)
            quantized = self.quantize(full, quantizer)
            assert quantized.inverse_scale is not None
            self.inverse_scales[layer, number] = quantized.inverse_scale
            self._store(LayerKey(ROWWISE, layer), quantized.rowwise, matrix.offset)
            if quantized.columnwise is not None:
                self._store(LayerKey(COLUMNWISE, layer), quantized.columnwise, matrix.offset)

    def _store(self, key: LayerKey, matrix: Tensor, offset: int) -> None:
        """Store this rank's part of a matrix that begins at byte `offset` of its layer."""
        stored = self._stored(key)
        data = matrix.view(torch.uint8).view(-1)
        begin = self.rank * len(stored) if self.num_shards > 1 else 0
        low = max(begin, offset)
        high = min(begin + len(stored), offset + len(data))
        if low < high:
            stored[low - begin : high - begin] = data[low - offset : high - offset]

    def finalize(self) -> None:
        """Wait until all weights are stored. Call it after the last `add_layer`.

        The side stream that reads the weights later does not wait for the stream that stores them.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> list[Tensor]:
        """Return the inverse scales, and this rank's bytes of each layer and orientation."""
        return [self.inverse_scales, *self.stored]

    # Reading.

    def start_pass(self, training: bool) -> None:
        """Set the expected order of layers. Call it before layer 0 of each pass."""
        self.order = pass_order(self.num_layers, training, self.backward_orientation)
        self.position = 0

    @property
    def backward_orientation(self) -> int:
        """Orientation of the matrices that the backward reads."""
        return COLUMNWISE if self.reads_transpose else ROWWISE

    def forward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return name -> W rowwise [N, K], in FP8 with its inverse scale. Valid until `release`."""
        return self._weights(LayerKey(ROWWISE, layer))

    def backward_weights(self, layer: int) -> dict[str, QuantizedTensor]:
        """Return name -> matrix for dgrad. Valid until `release`.

        If FP8 products need W^T, it is `columnwise` [K, N], and `rowwise` is empty. Otherwise it is
        W rowwise [N, K].
        """
        return self._weights(LayerKey(self.backward_orientation, layer))

    def release(self, layer: int) -> None:
        """Release this layer's weights. Call it once all kernels that read them are enqueued."""
        if self.buffers is not None:
            self.buffers.release(layer)

    def _weights(self, key: LayerKey) -> dict[str, QuantizedTensor]:
        layer = self._layer(key)
        inverse_scales = self.inverse_scales[key.layer]
        weights = {}
        named = zip(self.matrices.items(), inverse_scales, strict=True)
        for (name, matrix), inverse_scale in named:
            values = matrix.view(layer, key.orientation, self.dtype)
            if key.orientation == COLUMNWISE:
                weights[name] = QuantizedTensor(values.new_empty(0, 0), values, inverse_scale)
            elif self.in_fp8:
                weights[name] = QuantizedTensor(values, None, inverse_scale)
            else:
                weights[name] = QuantizedTensor(values)
        return weights

    def _layer(self, key: LayerKey) -> Tensor:
        """Return a layer, uint8 [layer bytes], and prefetch the next ones.

        The compute stream may read it.
        """
        if self.buffers is None:
            return self._stored(key)
        upcoming = self._upcoming(key)
        if not self.is_stored(key):
            return self.buffers.acquire(key, upcoming)
        self.buffers.prefetch(upcoming)
        return self._stored(key)

    def _stored(self, key: LayerKey) -> Tensor:
        """Return this rank's bytes of a layer that it stores in this orientation."""
        return self.stored[key.layer + self.num_layers * (key.orientation == COLUMNWISE)]

    def is_stored(self, key: LayerKey) -> bool:
        """Return whether this rank stores the layer whole, so that nothing is fetched."""
        return self.num_shards == 1 and (
            key.orientation == ROWWISE or key.layer < self.transposed_layers
        )

    def _upcoming(self, key: LayerKey) -> list[LayerKey]:
        """Advance the position in the pass to just after `key`. Return the next layers to fetch."""
        count = len(self.order)
        for step in range(count):
            position = (self.position + step) % count
            if self.order[position] == key:
                self.position = (position + 1) % count
                break
        # The first layers of the next pass follow the last ones of this pass.
        following = [self.order[(self.position + step) % count] for step in range(NUM_BUFFERS - 1)]
        return [ahead for ahead in following if not self.is_stored(ahead)]

    def _gather(self, key: LayerKey, out: Tensor) -> None:
        """Gather a layer that is sharded over the node's ranks."""
        dist.all_gather_into_tensor(out, self._stored(key), group=self.group)

    def _transpose(self, key: LayerKey, out: Tensor) -> None:
        """Write W^T of a layer whose W this rank stores."""
        layer = self._stored(LayerKey(ROWWISE, key.layer))
        for matrix in self.matrices.values():
            self.transpose(
                matrix.view(layer, ROWWISE, torch.uint8), matrix.view(out, COLUMNWISE, torch.uint8)
            )
