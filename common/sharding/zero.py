"""ZeRO-2 (Rajbhandari et al., arXiv:1910.02054): master weights, gradient reduction, optimizer step
and weight gather in one object.

Every rank computes with the whole of each weight W [rows, ...], the module's parameter, in the
compute precision. For 1 / n of the rows it also holds the fp32 master, the fp32 gradient and the
optimizer's state. One step has three parts. During backward, gradients are reduce-scattered and
added to this rank's fp32 gradient. The update rule changes the master and rounds it into this
rank's rows of W. An all-gather sends these rows to the other ranks.

The shards of W are contiguous in W's own memory, in rank order, as collectives require. So a
reduction reads the gradient where the matrix product wrote it, and a gather writes the weight where
the product reads it. FSDP2 packs a module's parameters into one buffer and out again. That took 45
ms of a step of 2,177 ms (8B in FP8 on two H200, docs/log.md). Reductions and gathers run on a side
stream. A module's gradients are reduced during the rest of the backward, and its weights are
gathered while the modules before it compute.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from common.errors import ConfigError
from common.kernels import accumulate
from common.sharding.optimizer import MakeUpdate, claim, state_tensors
from common.sharding.processes import Processes
from common.sharding.reduce_scatter import NcclReduceScatter, ReduceScatter, Shard

# Number of modules whose gradients are being reduced while one more computes. Their memory is not
# free yet.
MAX_IN_FLIGHT = 2

# Environment variable: 0, or -1 for a high priority. `throughput settings` times both.
STREAM_PRIORITY = "ZERO_STREAM_PRIORITY"


def stream_priority() -> int:
    """Return the priority of the reduction's stream. Raises ConfigError if it is not 0 or -1."""
    text = os.environ.get(STREAM_PRIORITY, "0")
    if text not in ("0", "-1"):
        raise ConfigError(
            f"{STREAM_PRIORITY}={text}",
            "CUDA and HIP have two priorities: 0, and -1 for high",
            "set one of them, or unset it",
        )
    return int(text)


@dataclass
class Bucket:
    """A module whose weights are communicated together."""

    shards: list[Shard]
    missing: int  # gradients that have not arrived yet in this backward
    # recorded when the weights are whole; None: they are whole
    gathered: torch.cuda.Event | None = None


class ZeroOptimizer:
    """Applies an update rule to the shards, and is the only one to update the parameters of
    `modules`.

    Their `.grad` is None whenever no backward is running.
    """

    sharded = True

    def __init__(
        self,
        modules: Sequence[nn.Module],
        processes: Processes,
        make_update: MakeUpdate,
        kernels: str,
        reduce_scatter: Callable[[list[list[Shard]]], ReduceScatter],
    ):
        """Shard the parameters and create their update rule.

        `modules`: in the order of the forward, already in memory; together they have every
            parameter.
        `make_update`: creates the update rule of the masters.
        `reduce_scatter`: creates the reduction from the shards of each module. On several nodes the
            shards are those of one node (processes.mesh).

        Raises ValueError if another optimizer owns a parameter. Weights are undefined until
        `set_weight` and `gather`.
        """
        self.group = processes.shard_group
        self.world_size = processes.world_size
        self.rank = self.group.rank()
        self.ranks = self.group.size()
        self.device = processes.device
        self.shard_of: dict[nn.Parameter, Shard] = {}
        self.buckets = [self._bucket(module) for module in modules]
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards]
        claim([shard.parameter for shard in self.shards], self)
        # It may move weights, so it is created before the update rule sees them.
        self.reduce_scatter = reduce_scatter([bucket.shards for bucket in self.buckets])
        local = [shard.local for shard in self.shards]
        self.add_rows = accumulate.ADD_ROWS[kernels]
        self.update = make_update(self.weights, local)
        self.stream = (
            torch.cuda.Stream(self.device, priority=stream_priority())
            if self.device.type == "cuda"
            else None
        )
        self.in_flight: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    @property
    def weights(self) -> list[Tensor]:
        """Master weights, fp32 [this rank's rows, ...]."""
        return [shard.master for shard in self.shards]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Unsharded parameters, [rows, ...] each, in the order of `weights`."""
        return [shard.parameter for shard in self.shards]

    def state_tensors(self) -> list[Tensor]:
        return state_tensors(self.update)

    def reset_state(self) -> None:
        """Reset gradients and the optimizer's state to their values before the first step."""
        for shard in self.shards:
            shard.gradient = None
        self.update.reset()

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Set the master to its rows of the full weight. Call `gather` after the last weight."""
        shard = self.shard_of[parameter]
        rows = full[self.rank * len(shard.master) : (self.rank + 1) * len(shard.master)]
        shard.master.zero_()  # also zeroes the padding rows
        shard.master[: len(rows)].copy_(rows)
        shard.filled = True

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the parameters from all ranks' masters. Raises RuntimeError if one is unset."""
        if missing := [shard for shard in self.shards if not shard.filled]:
            raise RuntimeError(
                f"{len(missing)} of {len(self.shards)} weights were never set: "
                "use set_weight, not the module's parameter"
            )
        torch._foreach_copy_(
            [shard.local for shard in self.shards], [shard.master for shard in self.shards]
        )
        self._start_gather()

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Finish the reduction, clip, update and start the gather, after the last backward.

        Returns the global L2 norm of the gradients before clipping, fp32 [] on the device. If it is
        not finite, nothing is updated.
        """
        self.finish_reduction()
        present = [
            shard.gradient
            for shard in self.shards
            if shard.gradient is not None and shard.gradient.numel()
        ]
        squares = torch.nn.utils.get_total_norm(present).square()
        # not over all ranks: the ranks of another node hold the same shards
        dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        self.update.update([shard.gradient for shard in self.shards], norm, learning_rate)
        for shard in self.shards:
            shard.gradient = None
        self._start_gather()
        return norm

    # Setting up.

    def _bucket(self, module: nn.Module) -> Bucket:
        # A tied embedding belongs to its first module. autograd sums the gradients of all its uses
        # before it calls the hook below.
        shards = [
            self._shard(parameter)
            for parameter in module.parameters()
            if parameter not in self.shard_of
        ]
        bucket = Bucket(shards, missing=len(shards))
        module.register_forward_pre_hook(lambda module, args: self._before_forward(bucket))
        # torch keeps a parameter's hooks where the garbage collector cannot see them, so objects
        # they refer to would never be freed. The module's hook, which the collector sees, keeps
        # this object alive as long as the model can run.
        optimizer = weakref.proxy(self)
        arrived = weakref.proxy(bucket)
        for shard in shards:
            self.shard_of[shard.parameter] = shard
            shard.parameter.register_post_accumulate_grad_hook(
                lambda parameter: optimizer._gradient_arrived(arrived)
            )
        return bucket

    def _shard(self, parameter: nn.Parameter) -> Shard:
        rows = -(-len(parameter) // self.ranks)
        padded = parameter.data
        if rows * self.ranks != len(parameter):
            padded = parameter.data.new_zeros(rows * self.ranks, *parameter.shape[1:])
            parameter.data = padded[: len(parameter)]
        local = padded[self.rank * rows : (self.rank + 1) * rows]
        return Shard(parameter, padded, local, torch.zeros_like(local, dtype=torch.float32))

    # Weights.

    def _start_gather(self) -> None:
        """Start the gather and return at once. A module's forward waits for its own weights."""
        if self.ranks == 1:
            return
        for bucket in self.buckets:
            with self._side_stream("gather"):
                self.reduce_scatter.gather(bucket.shards)
            if self.stream:
                bucket.gathered = self.stream.record_event()

    def _before_forward(self, bucket: Bucket) -> None:
        if bucket is self.buckets[len(self.buckets) // 4]:
            # The last bucket of the previous micro-batch started so long ago that nothing waits.
            self._finish_last_bucket()
        if bucket is self.buckets[len(self.buckets) // 2]:
            # Frees its gradients, 1.4 GiB at the 8B, before the head, where memory peaks.
            self.finish_reduction()
        if bucket.gathered is not None:
            torch.cuda.current_stream(self.device).wait_event(bucket.gathered)
            bucket.gathered = None

    # Gradients.

    def _gradient_arrived(self, bucket: Bucket) -> None:
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.missing = len(bucket.shards)
            self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        gradients = []
        for shard in bucket.shards:
            assert shard.parameter.grad is not None
            gradients.append(shard.parameter.grad)
            shard.parameter.grad = None
        with self._side_stream("reduce"):
            reduce = self._add_rows if gradients[0].is_sparse else self.reduce_scatter.start
            self._hold(reduce(bucket.shards, gradients))
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def _add_rows(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        """Reduce an embedding's sparse gradient.

        Each rank receives the tokens and rows of all ranks, and adds those that belong to its
        shard.
        """
        (shard,) = shards
        (gradient,) = gradients
        ids = gradient._indices()[0]
        rows = gradient._values()
        if self.world_size > 1:
            own = (ids, rows)
            ids, rows = (
                part.new_empty(self.world_size * len(part), *part.shape[1:]) for part in (ids, rows)
            )
            dist.all_gather_into_tensor(ids, own[0])
            dist.all_gather_into_tensor(rows, own[1])
        total = torch.zeros_like(shard.master) if shard.gradient is None else shard.gradient
        shard.gradient = self.add_rows(
            total, ids, rows, self.rank * len(shard.master), self.world_size
        )
        return gradients

    @torch.no_grad()
    def _finish_last_bucket(self) -> None:
        with self._side_stream("reduce"):
            self._hold(self.reduce_scatter.finish())

    def finish_reduction(self) -> None:
        """Finish the reduction: the fp32 gradients are then complete for the current stream."""
        self._finish_last_bucket()
        while self.in_flight:
            self._wait_for_oldest()

    def _hold(self, gradients: list[Tensor]) -> None:
        """Keep tensors alive until the side stream has finished all work enqueued so far."""
        if self.stream and gradients:
            self.in_flight.append((self.stream.record_event(), gradients))

    def _wait_for_oldest(self) -> None:
        done, _ = self.in_flight.popleft()
        torch.cuda.current_stream(self.device).wait_event(done)

    @contextmanager
    def _side_stream(self, what: str) -> Iterator[None]:
        """Run the block on the collectives' stream after all work so far. On a CPU: at once."""
        with record_function(f"zero::{what}"):
            if self.stream is None:
                yield
                return
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield


def make_reduce_scatter(
    backend: str,
    processes: Processes,
    dtype: torch.dtype,
    kernels: str,
    modules: Sequence[Sequence[Shard]],
) -> ReduceScatter:
    """Return the reduction of gradients.

    `backend`: "nccl" or "copy_engine".
    `dtype`: dtype of the sent values.
    `modules`: the shards of each module.
    """
    engine = accumulate.ENGINES[kernels]
    if backend == "nccl" or processes.shard_group.size() == 1:
        return NcclReduceScatter(processes.shard_group, processes.node_group, dtype, engine)
    # Imported only if a config selects it: most runs neither read nor need this file.
    from common.sharding.copy_engine import CopyEngineReduceScatter, SymmetricBuffers

    make_buffers = partial(SymmetricBuffers, processes.shard_group, processes.device)
    return CopyEngineReduceScatter(make_buffers, modules, dtype, engine)
