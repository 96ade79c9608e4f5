"""Time in which the GPUs of a step only wait for the links between them. Standard library only.

The traffic is what common/sharding/zero.py sends: per micro-batch a reduce-scatter within the node
and an all-reduce between nodes, per step an all-gather within the node. GPUs that share sequences
also send keys, values and their gradients (common/sharding/context_parallel.py).
"""

from __future__ import annotations

from common.config import RunConfig
from common.estimate.memory import BYTES, recomputed_layers
from common.estimate.workload import Workload
from common.gpu_kinds import GpuKind

# GPUs of one host: 4 on the trays of GB200 and GB300, 8 elsewhere.
ON_TRAYS = ("GB200", "GB300")
RACK = 72  # GPUs that NVLink connects across trays
# GB/s in one direction that all links of a GPU in the node offer, from data sheets.
LINK_PEAKS = {
    "NVLink 4": 450.0,
    "NVLink 5": 900.0,
    "AMD Infinity Fabric (XGMI)": 448.0,  # MI300X: 7 links of 64; later kinds have faster ones
}
# Share of the links' peak that collectives reach: 316.4 GB/s, all-reduce on 2 H200
# (docs/results.md). Assumed for every kind and for the network.
LINK_SHARE = 316.4 / 450.0
NETWORK_GB_S = 50.0  # per GPU between nodes: one network card of 400 Gbit/s for each GPU, assumed
BACKWARD_SHARE = 2 / 3  # share of the backward in the time of a forward and backward
# Architecture -> compute units that RCCL's kernels occupy while they send: its default number of
# channels (rccl#1596). Elsewhere the efficiencies of the GPU kinds include what NCCL and RCCL take.
OCCUPIED_UNITS = {"gfx950": 112}


def node_seconds(config: RunConfig, work: Workload, kind: GpuKind) -> float:
    """Return the time of a pre-training pass's reduction, and of a step's gather, in the node.

    Both take equally long.
    """
    in_node = LINK_PEAKS[kind.interconnect] * LINK_SHARE * 1e9
    values = BYTES[config.precision] * work.shape.num_parameters
    return (1 - 1 / config.gpus_per_node) * values / in_node


def context_seconds(config: RunConfig, work: Workload, kind: GpuKind) -> float:
    """Return the time in which the GPUs of a step wait for keys, values and their gradients.

    Half of them is exposed, in each forward and in the backward of each layer.
    """
    if config.context_parallel == 1:
        return 0.0
    shape = work.shape
    values = 2 * shape.num_kv_heads * shape.head_dim * BYTES[config.precision]
    received = (1 - 1 / config.context_parallel) * values * work.sequence_length
    layers = 2 * shape.num_layers + recomputed_layers(config, work)
    passes = config.gradient_accumulation_steps * config.micro_batch_size
    in_node = LINK_PEAKS[kind.interconnect] * LINK_SHARE * 1e9
    return passes * layers * received / 2 / in_node


def occupied_seconds(config: RunConfig, work: Workload, kind: GpuKind) -> float:
    """Return the time that a step loses because collectives occupy compute units.

    It is the share of occupied units, for as long as a pre-training step's collectives take. With
    LoRA nothing computes beside them.
    """
    if work.lora_rank or kind.arch not in OCCUPIED_UNITS:
        return 0.0
    share = OCCUPIED_UNITS[kind.arch] / kind.compute_units
    return share * (config.gradient_accumulation_steps + 1) * node_seconds(config, work, kind)


def exposed_seconds(
    config: RunConfig, work: Workload, kind: GpuKind, compute_s: float, network_gb_s: float
) -> float:
    """Return the part of a step in which a GPU waits for links.

    `compute_s`: seconds of the step's arithmetic, or of its launches if they take longer.
    `network_gb_s`: per GPU between nodes.

    In pre-training, collectives overlap with the arithmetic. The GPU waits for the last module's
    reduction, for the first module's gather, and for traffic that takes longer than the arithmetic
    beside it. With LoRA it waits for the whole all-reduce of the adapters' gradients. For GPUs that
    share sequences, the time of `context_seconds` is added.
    """
    context_s = context_seconds(config, work, kind)
    gpus = config.gpus_per_node
    nodes = config.nodes
    shape = work.shape
    modules = shape.num_layers + 2  # the blocks, embedding and head
    in_node = LINK_PEAKS[kind.interconnect] * LINK_SHARE * 1e9
    in_rack = kind.name in ON_TRAYS and config.world_size <= RACK
    between = in_node if in_rack else network_gb_s * LINK_SHARE * 1e9
    if work.lora_rank:
        # Every rank holds all adapters. Their fp32 gradients are summed once per step.
        values = 4 * shape.lora_parameters(work.lora_rank)
        reduce_s = 2 * (1 - 1 / gpus) * values / in_node
        reduce_s += 2 * (1 - 1 / nodes) * values / gpus / between
        return reduce_s + context_s
    values = BYTES[config.precision] * shape.num_parameters
    gather_s = node_seconds(config, work, kind)
    reduce_s = gather_s + 2 * (1 - 1 / nodes) * values / gpus / between
    passes = config.gradient_accumulation_steps
    pass_s = compute_s / passes
    # The first reduction starts with the first backward, and the first gather is needed at once.
    behind_reductions_s = compute_s - pass_s * (1 - BACKWARD_SHARE)
    late_reduction_s = max(0.0, passes * reduce_s - behind_reductions_s)
    late_gather_s = max(0.0, gather_s - pass_s * (1 - BACKWARD_SHARE))
    return late_reduction_s + late_gather_s + (reduce_s + gather_s) / modules + context_s
