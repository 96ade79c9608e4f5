"""Assemble a Llama with adapters that train on a frozen base, and save the adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import RunError
from common.kernels.fp8 import fp8_dtypes
from common.model.fused_lora_block import FusedLoraBlock
from common.model.linear_layers import linear_layers
from common.model.llama import Head, Llama
from common.model.lora import AdapterSettings, adapter_parameters, init_adapters
from common.model.peft_adapter import save_peft_adapter
from common.sharding.activation_offload import ActivationOffloader, layers_to_offload
from common.sharding.frozen_base import FrozenBase
from common.sharding.optimizer import UPDATES
from common.sharding.processes import Processes
from common.sharding.replicated import ReplicatedOptimizer
from common.training.assembly import Assembly
from common.training.build import DTYPES, build
from common.training.digest import fingerprint
from common.training.reports import Reports
from common.training.run import Run


def assemble_lora(
    config: RunConfig,
    rules: Rules,
    adapters: AdapterSettings,
    processes: Processes,
    seed: int,
    load: Callable[[Llama, FrozenBase], object],
) -> tuple[Assembly, FrozenBase]:
    """Assemble adapters that train, on a frozen base that `load` fills.

    The FrozenBase holds the matrices of the blocks. The other frozen weights, embedding, norms and
    head (1.05 GB at 70B in bf16), are whole on every rank. Sharding them would save less than a
    gigabyte, for two collectives in every pass.
    """
    shape = rules.shape
    kernels = config.kernels
    device = processes.device
    dtype = None if config.linear_format.stores_fp8 else DTYPES[config.precision]
    base = FrozenBase(
        shape,
        processes,
        kernels=kernels,
        storage=config.frozen_base,
        dtype=dtype,
        timeout_s=config.hang_timeout_s,
    )
    linear = linear_layers(config.linear_format)
    read_base = linear.frozen_base(base)
    offloaded = (
        layers_to_offload(config.offload_layers, shape.num_layers)
        if config.offload_layers
        else set()
    )
    gate_up = (config.micro_batch_size * rules.sequence_length, 2 * shape.ffn_hidden_size)
    offloader = (
        ActivationOffloader(len(offloaded), gate_up, fp8_dtypes(device)[0], device)
        if offloaded
        else None
    )

    def layers() -> tuple[list[FusedLoraBlock], Head]:
        blocks = [
            FusedLoraBlock(
                shape, layer, read_base, kernels, adapters, linear, offloader, layer in offloaded
            )
            for layer in range(shape.num_layers)
        ]
        return blocks, Head(shape, kernels)

    def optimizer(model: Llama) -> ReplicatedOptimizer:
        trained = adapter_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        return ReplicatedOptimizer(
            trained.values(), processes, UPDATES[rules.opt_name](rules, kernels, torch.float32)
        )

    def weights(model: Llama, optimizer: object) -> None:
        load(model, base)
        init_adapters(model, seed)

    passes = [
        base.start_pass,
        *([lambda training: offloader.start_pass()] if offloader is not None else []),
    ]
    assembly = build(
        config,
        shape,
        rules.sequence_length,
        device,
        linear=linear,
        layers=layers,
        optimizer=optimizer,
        weights=weights,
        before_each_pass=passes,
    )
    return assembly, base


@torch.no_grad()
def load_random(model: Llama, base: FrozenBase) -> None:
    """Draw the whole base from N(0, 0.02), one layer at a time."""
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    for layer in range(base.num_layers):
        sizes = {name: base.shard_rows(name)[1:] for name in base.matrices}
        shards = {
            name: torch.empty(size, dtype=torch.bfloat16, device=base.device).normal_(0.0, 0.02)
            for name, size in sizes.items()
        }
        base.add_layer(layer, shards)
    base.finalize()


def base_fingerprints(model: Llama, base: FrozenBase) -> list[int]:
    """Return a hash of each frozen tensor's bits on this rank."""
    return [
        fingerprint(tensor)
        for tensor in (*(p for p in model.parameters() if not p.requires_grad), *base.tensors())
    ]


def save_adapter(
    run: Run,
    reports: Reports,
    model: Llama,
    adapters: AdapterSettings,
    base: FrozenBase,
    base_before: list[int],
) -> None:
    """Verify that the base is unchanged, and save the adapter in peft's format, after the clock has
    stopped.

    Raises RunError if the base changed.
    """
    unchanged = base_fingerprints(model, base) == base_before
    reports.events.write("base", unchanged=unchanged, tensors=len(base_before))
    if not unchanged:
        raise RunError(
            "the frozen base changed during training",
            "its bits differ from those loaded",
            "this is a defect: report it",
        )
    if run.rank == 0:
        # A failure from here on does not affect the run.
        reports.heartbeat.write(reports.step, "save")
        tensors = {
            name: parameter.detach().cpu() for name, parameter in adapter_parameters(model).items()
        }
        save_peft_adapter(
            run.run_dir / "adapter",
            tensors,
            model.shape,
            adapters.rank,
            adapters.alpha,
            adapters.dropout,
        )
