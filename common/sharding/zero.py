"""Weights that each rank keeps whole for computing and a part of for updating: the sharding of pre-training.

Of each weight W [rows, ...] a rank holds W itself in the precision of computing, the module's parameter; and of its own rows, 1 / n of them,
the fp32 master with gradient and moments (the stages 1 and 2 of ZeRO, Rajbhandari et al., arXiv:1910.02054).

A weight's rows are its memory in order: the ranks' shares lie in it one after another, as collectives want them. So a reduction reads the
gradient where the product left it, and a gather writes the weight where the product reads it; FSDP2, which packs a module's parameters
into one buffer and out again, spent 45 ms of a step of 2,177 on that (8B in FP8 on two H200, docs/log.md). Both run beside the
computing, on a stream of their own: a module's gradients while the backward goes on, its weights while the modules before it compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from common.kernels import accumulate
from common.sharding.reduce_scatter import ByCollectives, ByMail, Reduction, as_one
from common.sharding.symmetric_memory import Mailboxes

IN_FLIGHT = 2  # modules whose gradients are being reduced while a third computes: their memory waits for it


@dataclass
class Weight:
    parameter: nn.Parameter  # [rows, ...], whole
    memory: Tensor  # the same, with rows added until the ranks divide them
    mine: Tensor  # this rank's rows of `memory`
    master: nn.Parameter  # fp32, as `mine`; its gradient is the mean over the ranks, added up over the micro-batches


@dataclass
class Unit:
    """A module whose weights travel together."""

    weights: list[Weight]
    missing: int  # weights that have no gradient yet, in this backward
    gathered: torch.cuda.Event | None = None  # when its weights are whole; None: they are


class WeightShards:
    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype,
        kernels: str,
        mailboxes: Callable[[dist.ProcessGroup, int, torch.device], Mailboxes] | None = None,
    ):
        """`modules`, in the order of the forward, have memory already; together they have all parameters, each one once. On a mesh of several
        nodes ("replicate", "shard") the shards are those of a node, and the reduced gradients are averaged over the nodes.
        Gradients are reduced by collectives or, on one node, through `mailboxes`.
        """
        self.group = mesh.get_group("shard") if mesh.ndim > 1 else mesh.get_group()
        nodes = mesh.get_group("replicate") if mesh.ndim > 1 else None
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.by_parameter: dict[nn.Parameter, Weight] = {}
        self.units: list[Unit] = []
        for module in modules:
            weights = [self._cut(parameter) for parameter in module.parameters()]
            unit = Unit(weights, missing=len(weights))
            self.units.append(unit)
            module.register_forward_pre_hook(lambda module, args, unit=unit: self._await(unit))
            for weight in unit.weights:
                self.by_parameter[weight.parameter] = weight
                weight.parameter.register_post_accumulate_grad_hook(partial(self._arrived, unit))
        self.device = self.units[0].weights[0].memory.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.in_flight: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self.reduction: Reduction
        if mailboxes is None or self.ranks == 1:
            self.reduction = ByCollectives(self.group, nodes, reduce_dtype, accumulate.ENGINES[kernels])
        else:
            assert nodes is None
            num_bytes = max(ByMail.num_bytes([weight.master for weight in unit.weights], self.ranks, reduce_dtype) for unit in self.units)
            self.reduction = ByMail(mailboxes(self.group, num_bytes, self.device), reduce_dtype, accumulate.ENGINES[kernels])

    @property
    def masters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        return [weight.master for unit in self.units for weight in unit.weights]

    @property
    def mine(self) -> list[Tensor]:
        """For each of `masters` its rows of the weight."""
        return [weight.mine for unit in self.units for weight in unit.weights]

    def fill(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Set the master to its rows of `full`, which has all of the weight's; `gather` then makes the weight."""
        master = self.by_parameter[parameter].master.detach()
        rows = full[self.rank * len(master) : (self.rank + 1) * len(master)]
        master.zero_()  # rows that were added
        master[: len(rows)].copy_(rows)

    @torch.no_grad()
    def gather(self, rounded: bool = False) -> None:
        """Make the weights of the masters, on all ranks. Returns at once; a module's forward waits for its own.

        `rounded`: this rank's rows have been written already, by an optimizer that was given `mine`.
        """
        for unit in self.units:
            if not rounded:
                torch._foreach_copy_([weight.mine for weight in unit.weights], [weight.master for weight in unit.weights])
            if self.ranks == 1:
                continue
            with self._beside("gather"), as_one(self.group):
                for weight in unit.weights:
                    dist.all_gather_into_tensor(weight.memory, weight.mine, group=self.group)
            if self.stream:
                unit.gathered = self.stream.record_event()

    def backward_done(self) -> None:
        """After the last backward of a step: the masters' gradients are there for the current stream."""
        self._finish()
        while self.in_flight:
            self._finish_oldest()

    def _cut(self, parameter: nn.Parameter) -> Weight:
        rows = -(-len(parameter) // self.ranks)
        memory = parameter.data
        if rows * self.ranks != len(parameter):
            memory = parameter.data.new_zeros(rows * self.ranks, *parameter.shape[1:])
            parameter.data = memory[: len(parameter)]
        mine = memory[self.rank * rows : (self.rank + 1) * rows]
        return Weight(parameter, memory, mine, nn.Parameter(torch.zeros_like(mine, dtype=torch.float32)))

    def _await(self, unit: Unit) -> None:
        if unit is self.units[len(self.units) // 4]:
            self._finish()  # of the last micro-batch: under way for so long that nobody waits
        if unit is self.units[len(self.units) // 2]:
            self.backward_done()  # its gradients' memory, 1.4 GiB at the 8B, is wanted at the head, where memory peaks
        if unit.gathered is not None:
            torch.cuda.current_stream(self.device).wait_event(unit.gathered)
            unit.gathered = None

    def _arrived(self, unit: Unit, parameter: nn.Parameter) -> None:
        unit.missing -= 1
        if unit.missing == 0:
            unit.missing = len(unit.weights)
            self._reduce(unit)

    @torch.no_grad()
    def _reduce(self, unit: Unit) -> None:
        gradients = []
        for weight in unit.weights:
            assert weight.parameter.grad is not None
            gradients.append(weight.parameter.grad)
            weight.parameter.grad = None
        with self._beside("reduce"):
            self._in_flight(self.reduction.start([weight.master for weight in unit.weights], gradients))
        if len(self.in_flight) > IN_FLIGHT:
            self._finish_oldest()

    @torch.no_grad()
    def _finish(self) -> None:
        with self._beside("reduce"):
            self._in_flight(self.reduction.finish())

    def _in_flight(self, gradients: list[Tensor]) -> None:
        """Their memory is free when the stream of the collectives is through with what it has been given so far."""
        if self.stream and gradients:
            self.in_flight.append((self.stream.record_event(), gradients))

    def _finish_oldest(self) -> None:
        done, _ = self.in_flight.popleft()
        torch.cuda.current_stream(self.device).wait_event(done)

    @contextmanager
    def _beside(self, what: str) -> Iterator[None]:
        """On the stream of the collectives, behind all that the current one has been given; on a CPU, at once."""
        with record_function(f"weight_shards::{what}"):
            if self.stream is None:
                yield
                return
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield
