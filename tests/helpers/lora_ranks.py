"""A few LoRA steps on one or two ranks, with everything but the processes equal: what test_lora.py compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from common.config import from_table
from common.model.llama import copy_into, parameter_seed
from common.model.lora import adapter_parameters, init_adapters
from common.model.shapes import ModelShape
from common.sharding.processes import Processes
from common.training.loop import evaluate, train_step
from common.training.session import batching_of
from llama2_70b_lora.rules import MINIATURE, Config
from llama2_70b_lora.train import adapter_optimizer, base_fingerprints, build

RULES = replace(MINIATURE, shape=ModelShape(2, 32, 48, 4, 2, 61, 10000.0), sequence_length=16, lora_dropout=0.0)
TABLE = {
    "gpu": "CPU",
    "nodes": 1,
    "global_batch_size": 8,
    "opt_base_learning_rate": 1e-2,
    "opt_learning_rate_training_steps": 100,
    "max_samples": 800,
    "eval_micro_batch_size": 4,
    "precision": "fp32",
    "reshard_after_forward": True,
    "miniature": True,
}


def few_steps(processes: Processes, folder: Path | None = None, micro_batch_size: int = 2, rules=RULES) -> dict:
    table = TABLE | {"gpus_per_node": processes.world_size, "micro_batch_size": micro_batch_size}
    config = from_table(table, Config, "test")
    model = build(config, rules, processes)
    for name, parameter in model.named_parameters():
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter_seed(5, name.replace(".base", ""))))
        copy_into(parameter, 0.1 * full if parameter.ndim == 2 else torch.ones(parameter.shape))
    init_adapters(model, seed=3)
    optimizer = adapter_optimizer(model, config, rules, processes)
    base = base_fingerprints(model, None)
    sequences = torch.randint(61, (48, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sequences[:, 1, 11:] = -100
    share = 8 // processes.world_size
    mine = [part for batch in sequences.split(8) for part in batch.split(share)[processes.rank].split(micro_batch_size)]
    batches = iter(mine)
    losses, norms = [], []
    for _ in range(6):
        loss, norm = train_step(model, optimizer, batches, batching_of(config), 1e-2, processes.world_size, lambda phase: None)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    evaluation = evaluate(
        model, list(sequences[: 4 * processes.world_size].split(4))[processes.rank :: processes.world_size], processes, lambda phase: None
    )
    return {
        "losses": losses,
        "norms": norms,
        "adapters": {name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()},
        "base unchanged": base_fingerprints(model, None) == base,
        "trained": sum(p.numel() for p in optimizer.parameters),
        "states": sum(t.numel() for t in optimizer.state_tensors()),
        "evaluation": evaluation,
    }
