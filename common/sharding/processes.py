"""The process group of a run: the rank, groups and device of this process."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import ConfigError
from common.kernels.architecture import high_priority
from common.machine.host import cpu_count
from common.sharding.context_parallel import ALONE, ContextGroup, context_group


@dataclass(frozen=True)
class Processes:
    """The rank, groups and device of this process."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # see `mesh_of`
    context: ContextGroup = ALONE  # the ranks that share each sequence

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that read different sequences."""
        return self.world_size // self.context.size

    @property
    def data_rank(self) -> int:
        """Number of this rank's group."""
        return self.rank // self.context.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place, and return it."""
        dist.all_reduce(tensor)
        return tensor

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks of this node, over which weights are sharded."""
        return self.mesh.get_group("shard") if self.mesh.ndim > 1 else self.mesh.get_group()

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, one on each node. None if there is one node."""
        return self.mesh.get_group("replicate") if self.mesh.ndim > 1 else None

    def barrier(self) -> None:
        """Wait for all ranks, and for all work on their devices."""
        # Not dist.barrier, for which NCCL has to guess the device.
        self.sum(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def high_priority_compute(config: RunConfig, rules: Rules) -> bool:
    """Return whether compute kernels run on a high-priority stream (see `start_processes`).

    They do if no NCCL kernel runs at the same time, because NCCL must not wait for compute. With
    copy engines, or on one GPU, only kernels that add gradients run at the same time. There, high
    priority saved 10 of 2,120 ms a step (copy engines) and 12 of 5,440 ms (one GPU) on H200s. With
    a frozen base they never do: the gathers of a sharded base and the transposes of a replicated
    one run at the same time. With context parallelism, keys and values are gathered.
    """
    if rules.lora_rank or config.context_parallel > 1:
        return False
    return config.reduce_scatter == "copy_engine" or config.world_size == 1


def start_processes(
    device_type: str,
    timeout_s: float,
    high_priority_compute: bool = False,
    context_parallel: int = 1,
) -> Processes:
    """Join the process group of torchrun, or create a group of one process without torchrun.

    `device_type`: "cpu" or "cuda".
    `timeout_s`: timeout of collectives in seconds.
    `high_priority_compute`: launch this thread's kernels on a high-priority stream, so that kernels
        of side streams only fill idle multiprocessors. Ignored on AMD GPUs (`high_priority`).
    `context_parallel`: ranks that share each sequence. It divides the ranks of a node.
    """
    # torch 2.13 renames collectives. Older versions have only the old names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, local_rank)
        torch.cuda.set_device(device)
        if high_priority_compute and (priority := high_priority(device)):
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=priority))
    backend = "nccl" if device_type == "cuda" else "gloo"
    alone = "RANK" not in os.environ
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            store=dist.HashStore() if alone else None,
            rank=0 if alone else -1,  # -1: read it from torchrun's environment
            world_size=1 if alone else -1,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device_type == "cuda" else None,
        )
    mesh = mesh_of(device_type, world_size, local_world_size)
    context = context_group(rank, world_size, context_parallel, timeout_s)
    return Processes(rank, world_size, device, mesh, context)


def require_world_size(processes: Processes, expected: int) -> None:
    """Raise ConfigError unless the number of processes is `expected`, as in the config."""
    started = processes.world_size
    if started != expected:
        plural = "es" if started > 1 else ""
        raise ConfigError(
            f"{started} process{plural} started, but the config is for {expected}",
            "gradients would be accumulated for another number of processes, "
            "and the global batch would not be the one in the log",
            "start it with ./run_and_time.sh, or change nodes and gpus_per_node",
        )


def thread_count() -> int:
    """Return the number of threads with which a rank reads, hashes or draws weights.

    It is the rank's share of the CPUs that the job may use, but at least 2 and at most 8.
    """
    # The rank may be bound to its share. Its parent, which starts all ranks of the node, is not.
    share = cpu_count(pid=os.getppid()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(2, min(8, share, cpu_count()))


def mesh_of(device_type: str, world_size: int, ranks_per_node: int) -> DeviceMesh:
    """Return the mesh of all ranks.

    On one node it is ("data",), and weights are sharded over all ranks. On several nodes it is
    ("replicate", "shard") of size (nodes, ranks per node): weights and optimizer state are sharded
    within a node and replicated over the nodes. Gathers then use only the fast links within a node,
    and only sharded gradients are sent between nodes.
    """
    if world_size == ranks_per_node:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))
    return init_device_mesh(
        device_type,
        (world_size // ranks_per_node, ranks_per_node),
        mesh_dim_names=("replicate", "shard"),
    )


def max_over_ranks(values: list[float], processes: Processes) -> list[float]:
    """Return the maximum of each value over the ranks."""
    most = torch.tensor(values, dtype=torch.float64, device=processes.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def of_all_ranks(value: Any) -> list:
    """Return `value` of every rank, in the order of the ranks, or [value] without other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
