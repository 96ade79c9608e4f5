"""Builds the objects of a `llama2_70b_lora` run and hands them to the loop. One process per GPU, started by torchrun.

    python -m llama2_70b_lora.train --run-dir DIR --data-dir DIR --config-name NAME --seed N --device cuda|cpu     a timed run
    python -m llama2_70b_lora.train --bench --config FILE --device cuda|cpu --steps N                              throughput only

A run reads DIR/config.toml, which the launcher wrote, and the base weights from $MODEL, or DATADIR/base without it. Order: load the
base, add adapters, warm up on synthetic tokens, start the clock, open the data. At the end the adapters are saved in DIR/adapter.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from common.config import RunConfig
from common.data.prefetch import Prefetcher
from common.errors import ConfigError, RunError
from common.kernels.attention import attention_backends
from common.kernels.fp8 import DelayedScaling, fp8_dtypes
from common.model.fused_lora_block import FusedLoraBlock
from common.model.llama import Llama
from common.model.lora import adapter_parameters, add_adapters, init_adapters
from common.model.peft_adapter import save_peft_adapter
from common.model.weights import load_base
from common.sharding.activation_offload import HostStack, spread
from common.sharding.frozen_base import FrozenBase
from common.sharding.processes import Processes
from common.training.build import DTYPES, build_model, materialize, prepare
from common.training.loop import pad_for_ranks
from common.training.optimizer import ClippedAdamW, local
from common.training.session import Session, main, measure, train_to_target, warm_up_on_synthetic_tokens
from common.training.warmup import fingerprint
from llama2_70b_lora.data import GovReport, train_batches, validation_pairs
from llama2_70b_lora.log_keys import hyperparameters
from llama2_70b_lora.rules import BENCHMARK, CLOSED, MINIATURE, Config, Rules
from llama2_70b_lora.schedule import cosine_to_zero


def frozen_base(config: RunConfig, rules: Rules, processes: Processes) -> FrozenBase | None:
    """Room for the blocks' matrices outside the model, for fused blocks, in FP8 or bf16; None: they are parameters of it."""
    if config.fp8 == "te":
        why = "adapters on Transformer Engine's layers were never tested"
        raise ConfigError('fp8 = "te" cannot be used for llama2_70b_lora', why, 'set fp8 = "torch"')
    if not config.fused_blocks:
        return None
    return FrozenBase(
        rules.shape,
        processes,
        kernels=config.kernels,
        holding=config.frozen_base,
        transport=config.transport,
        recompute_layers=config.recompute_layers,
        timeout_s=config.hang_timeout_s,
        in_fp8=config.fp8 == "torch",
    )


def build(config: RunConfig, rules: Rules, processes: Processes, frozen: FrozenBase | None = None) -> Llama:
    """A frozen model in the configured precision with adapters; nothing in it has a value yet.

    Sharded over the ranks; or, with `frozen`, without the blocks' matrices. What is left then, embedding, norms and head (1.05 GB at
    70B in bf16), is whole on every rank: sharding it would save less than a gigabyte, for two collectives in every pass.
    """
    with torch.device("meta"):
        # The blocks made here are those of torch's autograd: a frozen base brings its own.
        plain = replace(config, fused_blocks=False, frozen_base="sharded", transport="nccl", offload_layers=0)
        model = build_model(plain if frozen else config, rules.shape, rules.sequence_length)
        model.to(DTYPES[config.precision])  # frozen: there is no update that fp32 would have to keep
        if frozen:
            take_from(frozen, model, config, rules)
            replicated = list(model.parameters())
        else:
            replicated = add_adapters(model, rules.lora_rank, rules.lora_alpha, rules.lora_dropout, config.kernels)
    prepare(model, config, processes.mesh, replicated=replicated)
    materialize(model, processes.device)
    return model


def take_from(frozen: FrozenBase, model: Llama, config: RunConfig, rules: Rules) -> None:
    """Exchange the blocks of `model` for such as get their matrices from `frozen`, with adapters that train; all else does not."""
    model.requires_grad_(False)
    lora = (rules.lora_rank, rules.lora_alpha, rules.lora_dropout)
    if config.fp8_swiglu_input and model.scaling is None:
        model.scaling = DelayedScaling(config.fp8_recipe)  # a base in bf16: what is kept in 8 bits has a scale all the same
    ways = {"fp8_swiglu_input": config.fp8_swiglu_input, "in_fp8": frozen.in_fp8}
    model.blocks = nn.ModuleList(
        FusedLoraBlock(rules.shape, layer, frozen, config.kernels, *lora, model.scaling, **ways) for layer in range(rules.shape.num_layers)
    )
    for norm in (norm for block in model.blocks for norm in (block.attention_norm, block.ffn_norm)):
        norm.to(DTYPES[config.precision])
    model.register_forward_pre_hook(lambda model, _: frozen.begin(model.training))
    if config.offload_layers:
        offload_gate_up(model, config, rules, frozen)


def offload_gate_up(model: Llama, config: RunConfig, rules: Rules, frozen: FrozenBase) -> None:
    """Some blocks leave theirs in the host's memory. Not the last one, which backward asks first."""
    leaving = spread(config.offload_layers, config.recompute_layers, rules.shape.num_layers - 1)
    shape = (config.micro_batch_size * rules.sequence_length, 2 * rules.shape.ffn_hidden_size)
    host = HostStack(len(leaving), shape, fp8_dtypes(frozen.device)[0], frozen.device)
    for block in model.blocks:
        assert isinstance(block, FusedLoraBlock)
        block.host, block.leaves = host, block.layer in leaving
    model.register_forward_pre_hook(lambda *_: host.begin())


def base_folder(config: RunConfig, data_dir: Path) -> tuple[Path, Path | None]:
    """Where the base weights are, and the manifest with their SHA-256 if there is one (`prepare write-manifest`)."""
    folder = data_dir / "base" if config.miniature else Path(os.environ.get("MODEL") or data_dir / "base")
    manifest = folder / "manifest.json"
    return folder, manifest if manifest.is_file() else None


def adapter_optimizer(model: Llama, config: RunConfig, rules: Rules, processes: Processes) -> ClippedAdamW:
    return ClippedAdamW(
        adapter_parameters(model).values(),
        betas=(rules.adam_beta_1, rules.adam_beta_2),
        eps=rules.adam_epsilon,
        weight_decay=rules.weight_decay,
        clip_norm=rules.gradient_clip_norm,
        sum_over_ranks=processes.sum,
        replicas=processes.world_size,
        kernels=config.kernels,
    )


def base_fingerprints(model: Llama, frozen: FrozenBase | None) -> list[int]:
    """A hash of each frozen tensor's bits on this rank."""
    held = frozen.tensors() if frozen else []
    return [fingerprint(tensor) for tensor in (*(local(p) for p in model.parameters() if not p.requires_grad), *held)]


def run(session: Session) -> None:
    """A timed run of one rank, from the first line of the log to the last."""
    config, data_dir, seed = session.config, session.args.data_dir, session.args.seed
    assert isinstance(config, Config)
    rules = MINIATURE if config.miniature else CLOSED
    processes = session.start()
    govreport = GovReport.read(data_dir)  # the sidecar alone: no token file is opened before the clock starts
    govreport.check(rules.sequence_length, rules.shape.vocab_size, rules.train_samples, rules.eval_samples)
    session.log_submission(BENCHMARK, rules.division, hyperparameters(config, rules, govreport.train.rows, session.args.config_name))
    torch.manual_seed(seed + processes.rank)  # of the dropout, which must differ between the ranks
    with attention_backends(processes.device.type):
        frozen = frozen_base(config, rules, processes)
        model = build(config, rules, processes, frozen)
        report = load_base(model, *base_folder(config, data_dir), frozen)
        init_adapters(model, seed)
        optimizer = adapter_optimizer(model, config, rules, processes)
        base = base_fingerprints(model, frozen)
        session.phase_done("init", base_bytes=report.bytes, base_seconds=report.seconds)
        warm_up_on_synthetic_tokens(session, model, optimizer, processes)
        flops = rules.shape.lora_flops_per_token(rules.sequence_length, rules.lora_rank)
        session.make_meter(rules.shape, rules.sequence_length, flops, processes)
        session.start_clock(processes)
        batches, validation = open_data(config, govreport, seed, processes)
        steps, ratio = config.opt_learning_rate_training_steps, config.opt_learning_rate_warmup_ratio
        lr_at = cosine_to_zero(config.opt_base_learning_rate, steps, ratio)
        train_to_target(session, rules, processes, model, optimizer, lr_at, batches, validation)
    keep_adapter(session, model, rules, frozen, base)


def open_data(config: Config, govreport: GovReport, seed: int, processes: Processes) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Training micro-batches, read ahead, and the evaluation set on the device. The clock runs."""
    rows = govreport.open_rows("train")
    pairs = train_batches(rows, seed, config.global_batch_size, config.micro_batch_size, processes.rank, processes.world_size)
    validation = pad_for_ranks(validation_pairs(govreport), processes, config.eval_micro_batch_size)
    return Prefetcher(pairs, processes.device), validation


def keep_adapter(session: Session, model: Llama, rules: Rules, frozen: FrozenBase | None, base_before: list[int]) -> None:
    """After the clock: prove that the base is what it was, and save the adapter in peft's format."""
    unchanged = base_fingerprints(model, frozen) == base_before
    session.events.write("base", unchanged=unchanged, tensors=len(base_before))
    if not unchanged:
        raise RunError("the frozen base changed during training", "its bits differ from those loaded", "this is a defect: report it")
    if session.rank == 0:
        tensors = {name: parameter.detach().cpu() for name, parameter in adapter_parameters(model).items()}
        save_peft_adapter(
            session.args.run_dir / "adapter", tensors, rules.shape, rules.lora_rank, rules.lora_alpha, rules.lora_dropout, "base"
        )


def hold_random_weights(frozen: FrozenBase) -> None:
    """N(0, 0.02), made where they are quantized, a layer at a time."""
    for layer in range(frozen.num_layers):
        shapes = {name: frozen.share(name)[1:] for name in frozen.places}
        shares = {name: torch.empty(shape, dtype=torch.bfloat16, device=frozen.device).normal_(0.0, 0.02) for name, shape in shapes.items()}
        frozen.hold(layer, shares)
    frozen.loaded()


def bench(session: Session) -> None:
    """Throughput of the configured step on synthetic tokens and random weights. No files, no evaluation, no MLLOG."""
    config, args = session.config, session.args
    rules = MINIATURE if config.miniature else CLOSED
    if args.layers:
        rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    processes = session.start()
    with attention_backends(processes.device.type):
        frozen = frozen_base(config, rules, processes)
        model = build(config, rules, processes, frozen)
        for parameter in model.parameters():
            local(parameter.detach()).normal_(0.0, 0.02)
        if frozen:
            hold_random_weights(frozen)
        optimizer = adapter_optimizer(model, config, rules, processes)
        flops = rules.shape.lora_flops_per_token(rules.sequence_length, rules.lora_rank)
        session.make_meter(rules.shape, rules.sequence_length, flops, processes)
        measure(session, BENCHMARK, model, optimizer, processes)


if __name__ == "__main__":
    main(sys.argv[1:], Config, run, bench, "llama2_70b_lora.train")
