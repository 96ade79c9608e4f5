"""The process group: rank and groups of this process, and sums over all ranks."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import ConfigError


@dataclass(frozen=True)
class Processes:
    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # ("data",) on one node; ("replicate", "shard") on several, see mesh_of

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that together hold each sharded tensor once: those of this node."""
        return self.mesh.get_group("shard") if self.mesh.ndim > 1 else self.mesh.get_group()

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same shard, one on each node. None on one node."""
        return self.mesh.get_group("replicate") if self.mesh.ndim > 1 else None

    def barrier(self) -> None:
        # An all-reduce works the same on gloo and NCCL. dist.barrier makes NCCL guess the device.
        self.sum(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def start_processes(
    device_type: str, timeout_s: float, high_priority_compute: bool = False
) -> Processes:
    """Join the group that torchrun describes in the environment, or create a group of one without
    torchrun.

    `timeout_s`: timeout of collectives in seconds.
    `high_priority_compute`: launch this thread's kernels on a high-priority stream of an NVIDIA
        GPU, so that kernels of side streams only fill idle multiprocessors. HIP ignores it: there a
        high priority is one more hardware queue, and ROCm 10 has none.
    """
    # torch 2.13 renames collectives, and 2.9 has only the old names
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = (
        torch.device(device_type, local_rank)
        if device_type == "cuda"
        else torch.device(device_type)
    )
    if device_type == "cuda":
        torch.cuda.set_device(device)
        if high_priority_compute and torch.version.hip is None:
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
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
    return Processes(
        rank,
        world_size,
        device,
        mesh_of(device_type, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))),
    )


def require_world_size(processes: Processes, expected: int) -> None:
    """Raise ConfigError if the number of processes is not `expected`, the config's number."""
    started = processes.world_size
    if started != expected:
        plural = "es" if started > 1 else ""
        raise ConfigError(
            f"{started} process{plural} started, but the config is for {expected}",
            "gradients would be accumulated for another number, "
            "and the global batch would not be the one in the log",
            "start it with ./run_and_time.sh, or change nodes and gpus_per_node",
        )


def thread_count() -> int:
    """Return the number of threads in which a rank reads, hashes or draws weights.

    It is the rank's share of the host's cores, from 2 to 8.
    """
    return max(2, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def mesh_of(device_type: str, world_size: int, ranks_per_node: int) -> DeviceMesh:
    """Return a mesh ("data",) on one node, or ("replicate", "shard") of (nodes, ranks per node) on
    several.

    On one node, weights are sharded over all ranks. On several, weights and optimizer states are
    sharded within a node and replicated over the nodes. Gathers then stay on the fast links inside
    a node, and only sharded gradients travel between nodes.
    """
    if world_size == ranks_per_node:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))
    return init_device_mesh(
        device_type,
        (world_size // ranks_per_node, ranks_per_node),
        mesh_dim_names=("replicate", "shard"),
    )
