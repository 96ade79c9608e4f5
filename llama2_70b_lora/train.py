"""Timed run of `llama2_70b_lora`: build the objects and pass them to the loop. One process per GPU,
started by torchrun.

    python -m llama2_70b_lora.train --run-dir DIR --data-dir DIR --config-name NAME --seed N
        --device cuda|cpu

The process reads DIR/config.toml, which the launcher wrote, and the base weights from $MODEL, or
from DATADIR/base if MODEL is unset. It builds the objects and loads the base, warms up on synthetic
tokens, starts the clock and opens the data. At the end it saves the adapters in DIR/adapter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.data.prefetch import Prefetcher
from common.errors import RunError
from common.kernels.attention import attention_backends
from common.kernels.fp8 import fp8_dtypes
from common.model.checkpoint_loader import LoadReport, load_base
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
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import DTYPES, build
from common.training.digest import fingerprint
from common.training.loop import pad_for_ranks
from common.training.reports import Reports
from common.training.run import Run
from common.training.schedules import cosine_to_zero
from llama2_70b_lora.data import next_token_labels, read_rows, train_batches
from llama2_70b_lora.rules import BENCHMARK, Config, Rules, rules_of
from llama2_70b_lora.weights_help import weights_help


def assemble(
    config: Config,
    rules: Rules,
    processes: Processes,
    seed: int,
    load: Callable[[Llama, FrozenBase], object],
) -> tuple[Assembly, FrozenBase]:
    """Assemble adapters that train, on a frozen base that `load` fills.

    The FrozenBase holds the matrices of the blocks. The other frozen weights, embedding, norms and
    head (1.05 GB at 70B in bf16), are whole on every rank. Sharding them would save less than a
    gigabyte, for two collectives in every pass.
    """
    shape, kernels, device = rules.shape, config.kernels, processes.device
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
    adapters = AdapterSettings(rules.lora_rank, rules.lora_alpha, rules.lora_dropout)

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


def base_folder(config: Config, data_dir: Path) -> tuple[Path, Path | None]:
    """Return the folder of the base weights, and the manifest with their SHA-256 if there is one
    (`prepare write-manifest`).
    """
    folder = (
        data_dir / "base"
        if config.miniature
        else Path(os.environ.get("MODEL") or data_dir / "base")
    )
    manifest = folder / "manifest.json"
    return folder, manifest if manifest.is_file() else None


def base_fingerprints(model: Llama, base: FrozenBase) -> list[int]:
    """Return a hash of each frozen tensor's bits on this rank."""
    return [
        fingerprint(tensor)
        for tensor in (*(p for p in model.parameters() if not p.requires_grad), *base.tensors())
    ]


def high_priority_compute(config: Config) -> bool:
    """Return whether the compute stream gets a high priority: never, as only gathers of a sharded
    base run concurrently.
    """
    return False


def run(run: Run, reports: Reports) -> None:
    """Do a timed run on one rank, from the first line of the log to the last."""
    config, data_dir, seed = run.config, run.data_dir, run.seed
    assert isinstance(config, Config)
    rules = rules_of(config)
    processes = timed_run.start(run, reports, high_priority_compute(config))
    timed_run.log_submission(run, reports.log, rules, rules.train_samples)
    torch.manual_seed(seed + processes.rank)  # for the dropout, which must differ between the ranks
    # as large as the loop, and not needed after this call
    from common.training.self_test import before_a_run

    with attention_backends(processes.device.type, DTYPES[config.precision]):
        before_a_run(config, rules, processes, reports)
        loads: list[LoadReport] = []
        folder, manifest = base_folder(config, data_dir)

        def load(model: Llama, base: FrozenBase) -> None:
            with weights_help():
                loads.append(load_base(model, folder, manifest, base))

        assembly, base = assemble(config, rules, processes, seed, load)
        before = base_fingerprints(assembly.model, base)
        reports.phase_done("init", base_bytes=loads[0].bytes, base_seconds=loads[0].seconds)
        lr_at = cosine_to_zero(
            config.opt_base_learning_rate, config.opt_learning_rate_training_steps
        )
        open_tokens = partial(open_data, config, rules, data_dir, seed, processes)
        save = partial(save_adapter, run, reports, assembly.model, rules, base, before)
        timed_run.train(run, reports, assembly, rules, lr_at, processes, open_tokens, save)


def open_data(
    config: Config, rules: Rules, data_dir: Path, seed: int, processes: Processes, step: int
) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Return the training micro-batches from `step` on, read ahead, and the evaluation set on the
    device.

    Call it after the clock has started.
    """
    rows = read_rows(data_dir, "train", rules)
    pairs = train_batches(
        rows,
        seed,
        config.global_batch_size,
        config.micro_batch_size,
        processes.rank,
        processes.world_size,
        step,
    )
    validation = next_token_labels(read_rows(data_dir, "validation", rules))
    return Prefetcher(pairs, processes.device), pad_for_ranks(
        validation, processes, config.eval_micro_batch_size
    )


def save_adapter(
    run: Run,
    reports: Reports,
    model: Llama,
    rules: Rules,
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
            rules.shape,
            rules.lora_rank,
            rules.lora_alpha,
            rules.lora_dropout,
        )


def assemble_random(config: Config, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble on a random base, for speed measurements."""
    return assemble(config, rules, processes, seed, load_random)[0]


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


if __name__ == "__main__":
    timed_run.main(sys.argv[1:], BENCHMARK, Config, run)
