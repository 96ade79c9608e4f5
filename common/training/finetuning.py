"""Fine-tune a Llama by LoRA: adapters train on a frozen base, and are saved at the end.

A benchmark calls `start` and `log_submission` of timed_run.py, and then `finetune`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.benchmarks import Rules
from common.config import RunConfig
from common.errors import CheckFailed, WeightsError
from common.kernels.fp8 import fp8_dtypes
from common.model.checkpoint_loader import LoadReport, load_base
from common.model.checkpoint_names import ADAPTER_FOLDER
from common.model.fused_lora_block import FusedLoraBlock
from common.model.linear_layers import linear_layers
from common.model.llama import Head, Llama
from common.model.lora import AdapterSettings, adapter_parameters, init_adapters
from common.model.peft_adapter import save_peft_adapter
from common.model.precision import DTYPES
from common.sharding.activation_offload import ActivationOffloader, layers_to_offload
from common.sharding.frozen_base import FrozenBase
from common.sharding.optimizer import UPDATE_RULES
from common.sharding.processes import Processes
from common.sharding.replicated import ReplicatedOptimizer
from common.training import timed_run
from common.training.assembly import Assembly
from common.training.build import build
from common.training.digest import fingerprint
from common.training.reports import Reports
from common.training.run import Run, frozen_weights_folder


def finetune(
    run: Run,
    reports: Reports,
    rules: Rules,
    processes: Processes,
    lr_at: Callable[[int], float],
    open_data: timed_run.OpenData,
    padding: float = 0.0,
    add_files: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Load the base, train adapters and save them: the stages of a run after `log_submission`.

    `lr_at`, `open_data`, `padding`: see `timed_run.train`.
    `add_files`: adds files to the folder of the saved adapters. Called on rank 0.
    """
    folder = frozen_weights_folder(run)
    assert folder is not None, "adapters have a frozen base"
    loads: list[LoadReport] = []  # one entry, which `load` adds

    def load(model: Llama, base: FrozenBase) -> None:
        loads.append(load_frozen_base(reports, rules, folder, model, base))

    with timed_run.self_tested(run, reports, rules, processes):
        assembly, base = assemble_lora(run.config, rules, processes, run.seed, load)
        before = base_fingerprints(assembly.model, base)
        reports.phase_done("init", base_bytes=loads[0].bytes, base_seconds=loads[0].seconds)

        def save() -> None:
            save_adapter(run, reports, rules, assembly.model, base, before, folder)
            if run.rank == 0:
                add_files(run.run_dir / ADAPTER_FOLDER)

        timed_run.train(run, reports, assembly, rules, lr_at, processes, open_data, save, padding)


def load_frozen_base(
    reports: Reports, rules: Rules, folder: Path, model: Llama, base: FrozenBase
) -> LoadReport:
    """Load the base weights in `folder`, with a heartbeat for each layer.

    The SHA-256 of the files is checked if the folder has a manifest (see `prepare write-manifest`).
    Raises WeightsError for missing or damaged weights.
    """
    manifest = folder / "manifest.json"
    on_layer = partial(reports.heartbeat.write, 0, "loading")
    try:
        return load_base(model, folder, manifest if manifest.is_file() else None, base, on_layer)
    except WeightsError as error:
        error.do += f"; {rules.missing_weights_help}"
        raise


def assemble_random(config: RunConfig, rules: Rules, processes: Processes, seed: int) -> Assembly:
    """Assemble adapters on a random base, to measure the speed of steps."""
    return assemble_lora(config, rules, processes, seed, load_random)[0]


def assemble_lora(
    config: RunConfig,
    rules: Rules,
    processes: Processes,
    seed: int,
    load_frozen: Callable[[Llama, FrozenBase], object],
) -> tuple[Assembly, FrozenBase]:
    """Assemble a model with adapters that train, its optimizer and its frozen base.

    `seed`: seed of the adapters.
    `load_frozen`: fills the frozen base and the other frozen weights of the model.

    The FrozenBase holds the matrices of the blocks. The other frozen weights, that is embedding,
    norms and head (1.05 GB at 70B in bf16), are whole on every rank. Sharding them would save less
    than a gigabyte and need two collectives in every pass.
    """
    shape = rules.shape
    kernels = config.kernels
    adapters = AdapterSettings(rules.lora_rank, rules.lora_alpha, rules.lora_dropout)
    base = _frozen_base(config, rules, processes)
    linear = linear_layers(config.linear_format)
    frozen_weights = linear.frozen_base(base)
    offloader, offloaded = _offloader(config, rules, processes.device)

    def make_layers() -> tuple[list[FusedLoraBlock], Head]:
        blocks = []
        for layer in range(shape.num_layers):
            offloads = layer in offloaded
            blocks.append(
                FusedLoraBlock(
                    shape,
                    layer,
                    frozen_weights,
                    kernels,
                    adapters,
                    linear,
                    offloader,
                    offloads,
                    processes.context,
                )
            )
        return blocks, Head(shape, kernels)

    def fill_weights(model: Llama, optimizer: object) -> None:
        load_frozen(model, base)
        init_adapters(model, seed)

    def start_pass(training: bool) -> None:
        base.start_pass(training)
        if offloader is not None:
            offloader.start_pass()

    assembly = build(
        config,
        shape,
        rules.sequence_length,
        processes,
        linear=linear,
        make_layers=make_layers,
        make_optimizer=partial(_adapter_optimizer, config, rules, processes),
        fill_weights=fill_weights,
        before_each_pass=[start_pass],
    )
    return assembly, base


def _frozen_base(config: RunConfig, rules: Rules, processes: Processes) -> FrozenBase:
    """Allocate the frozen base of this config."""
    return FrozenBase(
        rules.shape,
        processes,
        kernels=config.kernels,
        storage=config.frozen_base,
        transposed_layers=config.transposed_layers,
        dtype=None if config.linear_format.in_fp8 else DTYPES[config.precision],
        timeout_s=config.hang_timeout_s,
    )


def _adapter_optimizer(
    config: RunConfig, rules: Rules, processes: Processes, model: Llama
) -> ReplicatedOptimizer:
    """Freeze all parameters but the adapters, and create the optimizer of the adapters."""
    trained = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    make_rule = UPDATE_RULES[rules.opt_name](rules, config.kernels, torch.float32)
    return ReplicatedOptimizer(trained.values(), processes, make_rule)


def _offloader(
    config: RunConfig, rules: Rules, device: torch.device
) -> tuple[ActivationOffloader | None, set[int]]:
    """Return (offloader of the inputs of SwiGLU, layers that use it).

    Without such layers, the offloader is None.
    """
    if not config.offload_layers:
        return None, set()
    layers = layers_to_offload(config.offload_layers, rules.shape.num_layers)
    if not layers:
        return None, set()
    tokens = config.micro_batch_size * rules.sequence_length // config.context_parallel
    e4m3, _ = fp8_dtypes(device)
    gate_up = (tokens, 2 * rules.shape.ffn_hidden_size)
    return ActivationOffloader(len(layers), gate_up, e4m3, device), layers


@torch.no_grad()
def load_random(model: Llama, base: FrozenBase) -> None:
    """Draw all frozen weights with a standard deviation of 0.02, one layer at a time."""
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    for layer in range(base.num_layers):
        shards = {}
        for name in base.matrices:
            _, rows, columns = base.shard_rows(name)
            shard = torch.empty(rows, columns, dtype=torch.bfloat16, device=base.device)
            shards[name] = shard.normal_(0.0, 0.02)
        base.add_layer(layer, shards)
    base.finalize()


def base_fingerprints(model: Llama, base: FrozenBase) -> list[int]:
    """Return a hash of each frozen tensor's bits on this rank."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return [fingerprint(tensor) for tensor in (*frozen, *base.tensors())]


def save_adapter(
    run: Run,
    reports: Reports,
    rules: Rules,
    model: Llama,
    base: FrozenBase,
    base_before: list[int],
    base_folder: Path,
) -> None:
    """Save the adapters in the format of peft, after run_stop.

    `base_before`: `base_fingerprints` before training.
    `base_folder`: folder of the base weights, which the saved adapters name.

    Raises CheckFailed if the frozen base has changed since then.
    """
    unchanged = base_fingerprints(model, base) == base_before
    reports.events.write("base", unchanged=unchanged, tensors=len(base_before))
    if not unchanged:
        raise CheckFailed(
            "the frozen base changed during training",
            "its bits differ from those that were loaded",
            "this is an internal error: please report it",
        )
    if run.rank == 0:
        reports.saving()
        tensors = {
            name: parameter.detach().cpu() for name, parameter in adapter_parameters(model).items()
        }
        save_peft_adapter(
            run.run_dir / ADAPTER_FOLDER,
            tensors,
            model.shape,
            rules.lora_rank,
            rules.lora_alpha,
            rules.lora_dropout,
            base_folder,
        )
