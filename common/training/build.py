"""How a model is made ready for the GPUs, in one visible order: recompute, compile, shard.

Two ways to shard, `RunConfig.weights_stay_whole` says which: common/sharding/zero.py, or torch's FSDP2.
Compile comes before sharding, so that each compiled block is whole and FSDP's hooks stay outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.config import RunConfig
from common.model.llama import Llama
from common.model.shapes import ModelShape
from common.sharding.symmetric_memory import Mailboxes
from common.sharding.zero import WeightShards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: RunConfig, shape: ModelShape, sequence_length: int) -> Llama:
    """The model as the config wants it computed, where the caller's default device is (meta)."""
    return Llama(
        shape,
        sequence_length,
        kernels=config.kernels,
        fp8_swiglu_input=config.fp8_swiglu_input,
        fused_blocks=config.fused_blocks,
        fp8_recipe=config.fp8_recipe if config.fp8 else "",
        fp8_head=config.fp8_head,
        fp8_engine=config.fp8,
    )


def prepare(model: Llama, config: RunConfig, mesh: DeviceMesh, replicated: Iterable[nn.Parameter] = ()) -> Llama:
    """Change `model` (on the meta device) in place; afterwards `materialize` gives it memory.

    `replicated` parameters stay whole on every rank and are not gathered; their gradients are the optimizer's affair. All others:
    weights are kept and updated in fp32, one shard per rank, and gathered in `config.precision` for computing. Gradients are
    reduced in `config.reduce_precision` after every micro-batch and accumulated in fp32 shards: that costs more traffic than
    one reduction per step, hidden behind the backward, and saves a whole unsharded gradient. On a mesh of several nodes
    ("replicate", "shard") the shards are those of a node, and each micro-batch's are averaged over the nodes as well.
    """
    model.recompute_layers = config.recompute_layers
    if config.compile:
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
        if config.kernels == "reference":  # the Triton head has nothing to fuse
            model.head.compile(fullgraph=True, dynamic=False)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.precision], reduce_dtype=DTYPES[config.reduce_precision], cast_forward_inputs=False
    )
    whole = set(replicated)
    if not whole and config.weights_stay_whole:
        model.to(DTYPES[config.precision])  # the masters are fp32: `shard_weights`
        return model
    if whole.issuperset(model.parameters()):
        return model  # nothing to shard: no gathers, no hooks
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward, ignored_params=whole)
    return model


def shard_weights(model: Llama, config: RunConfig, mesh: DeviceMesh) -> None:
    """After `materialize`: give each rank its masters, where the weights stay whole. Their values are undefined."""
    if config.weights_stay_whole:
        modules = [model.embedding, *model.blocks, model.head]
        mailboxes = Mailboxes if config.transport == "copy_engine" else None
        model.weight_shards = WeightShards(modules, mesh, DTYPES[config.reduce_precision], config.kernels, mailboxes)


def materialize(model: Llama, device: torch.device) -> None:
    """Give a meta model memory on `device`; its weights are undefined until they are initialized or loaded."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torch 2.9 moves shards that are shorter than others to new memory when it first gathers them. Whoever held on to the old,
            # such as an optimizer, would train something that nobody reads.
            module.unshard()
            module.reshard()
    model.make_rope_tables(device)
    if model.scaling is not None:
        model.scaling.allocate(device)
    if model.transformer_engine is not None:
        model.transformer_engine.allocate()


def mark_micro_batch(model: Llama, is_last: bool, reshard_after_forward: bool) -> None:
    """Between the micro-batches of a step weights do not change: keep them gathered, unless memory asks for it."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last or reshard_after_forward)
