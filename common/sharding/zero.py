"""ZeRO-2 (Rajbhandari et al., arXiv:1910.02054): sharded master weights and optimizer state.

Every rank computes with whole weights: the parameter W [rows, ...] of a module, in the compute
precision. For 1 / n of the rows, a rank also holds the fp32 master, the fp32 gradient and the
optimizer's state. A step has three parts:

    reduce    in each backward, a hook on the parameters reduce-scatters the gradients of a module
              and adds this rank's rows to its fp32 gradients
    update    `step` computes the global norm, and the update rule changes the masters and rounds
              them into this rank's rows of W
    gather    an all-gather sends these rows to the other ranks; the next forward of a module waits
              for its weights

Reductions and gathers run on a side stream. A module's gradients are reduced during the rest of the
backward. Its weights are gathered while earlier modules compute.

The shards of W are contiguous in W's own memory, in rank order, as collectives require. So a
reduction reads the gradient where the matrix product wrote it. A gather writes the weight where the
product reads it. FSDP2, in contrast, copies a module's parameters into one buffer and out again.
That took 45 ms of a step of 2,177 ms (8B in FP8 on two H200), and its casts and additions slowed
the kernels beside them: SwiGLU's backward took 600 µs instead of 285.
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
from common.sharding.optimizer import MakeUpdateRule, claim, state_tensors
from common.sharding.processes import Processes
from common.sharding.reduce_scatter import NcclReduceScatter, ReduceScatter, Shard

# Number of modules whose gradients may be in reduction at a time. Their memory is freed only after
# their reduction.
MAX_IN_FLIGHT = 2

# Environment variable: priority of the side stream, 0, or -1 for high. `tune` tries both.
STREAM_PRIORITY = "ZERO_STREAM_PRIORITY"


def stream_priority() -> int:
    """Return the priority of the side stream. Raises ConfigError if it is not 0 or -1."""
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
    """The weights of one module, which are communicated together."""

    shards: list[Shard]
    missing: int  # number of gradients that the current backward has not computed yet
    gathered: torch.cuda.Event | None = None  # end of a gather that a forward must still wait for


class ZeroOptimizer:
    """The optimizer of sharded weights.

    `step` reads the `gradient` of each shard. The `.grad` of a parameter exists only during a
    backward.
    """

    sharded = True

    def __init__(
        self,
        modules: Sequence[nn.Module],
        processes: Processes,
        make_rule: MakeUpdateRule,
        kernels: str,
        reduce_scatter: Callable[[list[list[Shard]]], ReduceScatter],
    ):
        """Shard the parameters and create their update rule.

        `modules`: in the order of the forward, on the device. Together they have all parameters.
        `make_rule`: creates the update rule of the masters.
        `reduce_scatter`: creates the reduction from the shards of each module.

        On several nodes, weights are sharded over the ranks of each node (`mesh_of`). Raises
        ValueError if another optimizer owns a parameter. Weights are undefined until `set_weight`
        and `gather`.
        """
        self.group = processes.shard_group
        self.world_size = processes.world_size
        # In the group, which on several nodes has fewer ranks than the run.
        self.rank = self.group.rank()
        self.ranks = self.group.size()
        self.device = processes.device
        self.shard_of: dict[nn.Parameter, Shard] = {}
        self.buckets = [self._bucket(module) for module in modules]
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards]
        claim([shard.parameter for shard in self.shards], self)
        # The reduction may move the weights to other memory, so it is created before the update
        # rule, which keeps references to them.
        self.reduce_scatter = reduce_scatter([bucket.shards for bucket in self.buckets])
        local = [shard.local for shard in self.shards]
        self.add_rows = accumulate.ADD_ROWS[kernels]
        self.rule = make_rule(self.weights, local)
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
        """Whole parameters, [rows, ...] each, in the order of `weights`."""
        return [shard.parameter for shard in self.shards]

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of the update rule's state."""
        return state_tensors(self.rule)

    def reset_state(self) -> None:
        """Reset gradients and the optimizer's state to their values before the first step."""
        for shard in self.shards:
            shard.gradient = None
        self.rule.reset()

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Set the master of a parameter from the whole weight `full`, of any dtype.

        Call `gather` after the last weight.
        """
        shard = self.shard_of[parameter]
        rows = full[self.rank * len(shard.master) : (self.rank + 1) * len(shard.master)]
        shard.master.zero_()  # also zeroes the padding rows
        shard.master[: len(rows)].copy_(rows)
        shard.filled = True

    @torch.no_grad()
    def gather(self) -> None:
        """Round all masters into the parameters of all ranks.

        Raises RuntimeError if a master was never set.
        """
        unset = [shard for shard in self.shards if not shard.filled]
        if unset:
            raise RuntimeError(
                f"{len(unset)} of {len(self.shards)} weights were never set: "
                "use set_weight, not the module's parameter"
            )
        local = [shard.local for shard in self.shards]
        torch._foreach_copy_(local, self.weights)
        self._start_gather()

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Update the weights. Call it after the last backward of a step.

        Returns the global L2 norm of the gradients before clipping, fp32 [] on the device. If it is
        not finite, nothing is updated.
        """
        self.finish_reduction()
        gradients = [shard.gradient for shard in self.shards]
        present = [gradient for gradient in gradients if gradient is not None]
        squares = torch.nn.utils.get_total_norm(present).square()
        # Over the group only, because the ranks of other nodes hold the same shards.
        dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        self.rule.update(gradients, norm, learning_rate)
        for shard in self.shards:
            shard.gradient = None
        self._start_gather()
        return norm

    # Set-up.

    def _bucket(self, module: nn.Module) -> Bucket:
        """Shard the parameters of a module, and register its hooks."""
        # A tied embedding belongs to the first module that has it. autograd sums the gradients of
        # all its uses before it calls the hook below.
        shards = [
            self._shard(parameter)
            for parameter in module.parameters()
            if parameter not in self.shard_of
        ]
        bucket = Bucket(shards, missing=len(shards))
        module.register_forward_pre_hook(lambda module, args: self._before_forward(bucket))
        # Weak references, because torch keeps the hooks of parameters where the garbage collector
        # does not see them: objects that they refer to would never be freed. The hook of the
        # module, which the collector sees, keeps this object alive as long as the model.
        optimizer = weakref.proxy(self)
        own_bucket = weakref.proxy(bucket)
        for shard in shards:
            self.shard_of[shard.parameter] = shard
            shard.parameter.register_post_accumulate_grad_hook(
                lambda parameter: optimizer._gradient_arrived(own_bucket)
            )
        return bucket

    def _shard(self, parameter: nn.Parameter) -> Shard:
        """Create this rank's shard. Pads the parameter if its rows cannot be divided evenly."""
        rows = -(-len(parameter) // self.ranks)  # per rank, rounded up
        padded = parameter.data
        if rows * self.ranks != len(parameter):
            padded = parameter.data.new_zeros(rows * self.ranks, *parameter.shape[1:])
            parameter.data = padded[: len(parameter)]
        local = padded[self.rank * rows : (self.rank + 1) * rows]
        return Shard(parameter, padded, local, torch.zeros_like(local, dtype=torch.float32))

    # Weights.

    def _start_gather(self) -> None:
        """Enqueue the gathers of all modules. Each module's forward waits for its own weights."""
        if self.ranks == 1:
            return
        for bucket in self.buckets:
            with self._side_stream("gather"):
                self.reduce_scatter.gather(bucket.shards)
            if self.stream:
                bucket.gathered = self.stream.record_event()

    def _before_forward(self, bucket: Bucket) -> None:
        """Wait for the weights of a module.

        A quarter and half of the way through the modules, also finish the previous micro-batch's
        reductions.
        """
        if bucket is self.buckets[len(self.buckets) // 4]:
            # The last reduction started so long ago that this waits for nothing.
            self._finish_last_bucket()
        if bucket is self.buckets[len(self.buckets) // 2]:
            # Free its gradients, 1.4 GiB at the 8B, before the head, where memory peaks.
            self.finish_reduction()
        if bucket.gathered is not None:
            torch.cuda.current_stream(self.device).wait_event(bucket.gathered)
            bucket.gathered = None

    # Gradients.

    def _gradient_arrived(self, bucket: Bucket) -> None:
        """Count a gradient that the backward has computed. After the last one, reduce them all."""
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.missing = len(bucket.shards)  # for the next backward
            self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduction of a module's gradients, and detach them from the parameters."""
        # In each micro-batch. A single reduction a step would save some 20 of 2,091 ms, and one for
        # two micro-batches a third of the bytes (8B, two H200, by calculation). But both need the
        # whole gradient, 16 GB in bf16, and recomputing one layer to make room costs 20 ms.
        gradients = []
        for shard in bucket.shards:
            assert shard.parameter.grad is not None
            gradients.append(shard.parameter.grad)
            shard.parameter.grad = None
        with self._side_stream("reduce"):
            if gradients[0].is_sparse:
                self._hold(self._add_rows(bucket.shards, gradients))
            else:
                self._hold(self.reduce_scatter.start(bucket.shards, gradients))
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self._wait_for_oldest()

    def _add_rows(self, shards: Sequence[Shard], gradients: list[Tensor]) -> list[Tensor]:
        """Reduce the sparse gradient of the embedding, and return `gradients`.

        Each rank receives the token ids and gradient rows of all ranks, and adds the rows that
        belong to its shard.
        """
        (shard,) = shards
        (gradient,) = gradients
        ids = gradient._indices()[0]  # int64 [tokens]
        rows = gradient._values()  # [tokens, hidden]
        if self.world_size > 1:
            ids = self._gathered(ids)
            rows = self._gathered(rows)
        if shard.gradient is None:
            shard.gradient = torch.zeros_like(shard.master)
        first_row = self.rank * len(shard.master)
        shard.gradient = self.add_rows(shard.gradient, ids, rows, first_row, self.world_size)
        return gradients

    def _gathered(self, part: Tensor) -> Tensor:
        """Return `part` of all ranks, concatenated along dimension 0."""
        whole = part.new_empty(self.world_size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part)
        return whole

    @torch.no_grad()
    def _finish_last_bucket(self) -> None:
        """Add the gradients of the reduction that was started last (see `ReduceScatter.finish`)."""
        with self._side_stream("reduce"):
            self._hold(self.reduce_scatter.finish())

    def finish_reduction(self) -> None:
        """Finish all reductions. The current stream may then read the fp32 gradients."""
        self._finish_last_bucket()
        while self.in_flight:
            self._wait_for_oldest()

    def _hold(self, gradients: list[Tensor]) -> None:
        """Keep `gradients` alive until the side stream has finished all work enqueued so far."""
        if self.stream and gradients:
            self.in_flight.append((self.stream.record_event(), gradients))

    def _wait_for_oldest(self) -> None:
        """Make the current stream wait for the oldest reduction, and free its gradients."""
        done, _ = self.in_flight.popleft()
        torch.cuda.current_stream(self.device).wait_event(done)

    @contextmanager
    def _side_stream(self, what: str) -> Iterator[None]:
        """Run the block on the side stream, after all work enqueued on the current stream so far.

        On a CPU, run it at once. `what`: name for profilers.
        """
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
    """Return the implementation of reduce-scatter and gather for `ZeroOptimizer`.

    `backend`: "nccl" or "copy_engine".
    `dtype`: dtype of the sent values.
    `modules`: the shards of each module.
    """
    engine = accumulate.IMPLEMENTATIONS[kernels]
    if backend == "nccl" or processes.shard_group.size() == 1:
        return NcclReduceScatter(processes.shard_group, processes.replicate_group, dtype, engine)
    # Imported only if a config selects them.
    from common.sharding.copy_engine import CopyEngineReduceScatter
    from common.sharding.symmetric_memory import SymmetricBuffers

    make_buffers = partial(SymmetricBuffers, processes.shard_group, processes.device)
    return CopyEngineReduceScatter(make_buffers, modules, dtype, engine)
