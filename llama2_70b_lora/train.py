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

from common.config import RunConfig
from common.distributed import Processes
from common.errors import RunError
from common.kernels.attention import attention_backends
from common.llama import Llama
from common.loop import pad_for_ranks
from common.lora import adapter_parameters, add_adapters, init_adapters
from common.optim import ClippedAdamW, local
from common.parallel import DTYPES, materialise, prepare
from common.prefetch import Prefetcher
from common.session import Session, main, measure, train_to_target, warm_up_on_synthetic_tokens
from common.warmup import fingerprint
from llama2_70b_lora.adapter import save_peft_adapter
from llama2_70b_lora.data import GovReport, train_batches, validation_pairs
from llama2_70b_lora.log_keys import hyperparameters
from llama2_70b_lora.rules import BENCHMARK, CLOSED, MINIATURE, Config, Rules
from llama2_70b_lora.schedule import cosine_to_zero
from llama2_70b_lora.weights import load_base


def build(config: RunConfig, rules: Rules, processes: Processes) -> Llama:
    """A frozen model in the configured precision, sharded over the ranks, with adapters; nothing in it has a value yet."""
    with torch.device("meta"):
        model = Llama(rules.shape, rules.sequence_length, config.kernels, config.fp8_swiglu_input)
        model.to(DTYPES[config.precision])  # frozen: there is no update that fp32 would have to keep
        adapters = add_adapters(model, rules.lora_rank, rules.lora_alpha, rules.lora_dropout, config.kernels)
    prepare(model, config, processes.mesh, replicated=adapters)
    materialise(model, processes.device)
    return model


def base_folder(config: RunConfig, data_dir: Path) -> tuple[Path, Path | None]:
    """Where the base weights are, and the manifest with their SHA-256 if there is one (`prepare write-manifest`)."""
    folder = data_dir / "base" if config.miniature else Path(os.environ.get("MODEL") or data_dir / "base")
    manifest = folder / "manifest.json"
    return folder, manifest if manifest.is_file() else None


def adapter_optimizer(model: Llama, rules: Rules, processes: Processes) -> ClippedAdamW:
    return ClippedAdamW(
        adapter_parameters(model).values(),
        betas=(rules.adam_beta_1, rules.adam_beta_2),
        eps=rules.adam_epsilon,
        weight_decay=rules.weight_decay,
        clip_norm=rules.gradient_clip_norm,
        sum_over_ranks=processes.sum,
        replicas=processes.world_size,
    )


def base_fingerprints(model: Llama) -> list[int]:
    """A hash of each frozen tensor's bits on this rank."""
    return [fingerprint(local(p)) for p in model.parameters() if not p.requires_grad]


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
        model = build(config, rules, processes)
        report = load_base(model, *base_folder(config, data_dir))
        init_adapters(model, seed)
        optimizer = adapter_optimizer(model, rules, processes)
        base = base_fingerprints(model)
        session.phase_done("init", base_bytes=report.bytes, base_seconds=report.seconds)
        warm_up_on_synthetic_tokens(session, model, optimizer, processes)
        flops = rules.shape.lora_flops_per_token(rules.sequence_length, rules.lora_rank)
        session.make_meter(rules.shape, rules.sequence_length, flops, processes)
        session.start_clock(processes)
        batches, validation = open_data(config, govreport, seed, processes)
        steps, ratio = config.opt_learning_rate_training_steps, config.opt_learning_rate_warmup_ratio
        lr_at = cosine_to_zero(config.opt_base_learning_rate, steps, ratio)
        train_to_target(session, rules, processes, model, optimizer, lr_at, batches, validation)
    keep_adapter(session, model, rules, base)


def open_data(config: Config, govreport: GovReport, seed: int, processes: Processes) -> tuple[Prefetcher, list[torch.Tensor]]:
    """Training micro-batches, read ahead, and the evaluation set on the device. The clock runs."""
    rows = govreport.open_rows("train")
    pairs = train_batches(rows, seed, config.global_batch_size, config.micro_batch_size, processes.rank, processes.world_size)
    validation = pad_for_ranks(validation_pairs(govreport), processes, config.eval_micro_batch_size)
    return Prefetcher(pairs, processes.device), validation


def keep_adapter(session: Session, model: Llama, rules: Rules, base_before: list[int]) -> None:
    """After the clock: prove that the base is what it was, and save the adapter in peft's format."""
    unchanged = base_fingerprints(model) == base_before
    session.events.write("base", unchanged=unchanged, tensors=len(base_before))
    if not unchanged:
        raise RunError("the frozen base changed during training", "its bits differ from those loaded", "this is a defect: report it")
    if session.rank == 0:
        tensors = {name: parameter.detach().cpu() for name, parameter in adapter_parameters(model).items()}
        save_peft_adapter(
            session.args.run_dir / "adapter", tensors, rules.shape, rules.lora_rank, rules.lora_alpha, rules.lora_dropout, "base"
        )


def bench(session: Session) -> None:
    """Throughput of the configured step on synthetic tokens and random weights. No files, no evaluation, no MLLOG."""
    config, args = session.config, session.args
    rules = MINIATURE if config.miniature else CLOSED
    if args.layers:
        rules = replace(rules, shape=replace(rules.shape, num_layers=args.layers))
    processes = session.start()
    with attention_backends(processes.device.type):
        model = build(config, rules, processes)
        for parameter in model.parameters():
            local(parameter.detach()).normal_(0.0, 0.02)
        optimizer = adapter_optimizer(model, rules, processes)
        flops = rules.shape.lora_flops_per_token(rules.sequence_length, rules.lora_rank)
        session.make_meter(rules.shape, rules.sequence_length, flops, processes)
        measure(session, BENCHMARK, model, optimizer, processes)


if __name__ == "__main__":
    main(sys.argv[1:], Config, run, bench, "llama2_70b_lora.train")
