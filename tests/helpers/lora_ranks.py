"""A few LoRA steps on one or two ranks, with everything but the processes equal: what test_lora.py compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from common.config import from_table
from common.model.initialization import parameter_seed
from common.model.lora import adapter_parameters
from common.model.shapes import ModelShape
from common.sharding.processes import Processes
from common.training.loop import Batching, evaluate, train_step
from llama2_70b_lora.rules import MINIATURE, Config
from llama2_70b_lora.train import assemble, base_fingerprints

RULES = replace(MINIATURE, shape=ModelShape(2, 32, 48, 4, 2, 61, 10000.0), sequence_length=16, lora_dropout=0.0)
TABLE = {
    "gpu": "CPU",
    "nodes": 1,
    "global_batch_size": 8,
    "opt_base_learning_rate": 1e-2,
    "opt_learning_rate_training_steps": 100,
    "max_samples": 800,
    "eval_micro_batch_size": 4,
    "miniature": True,
}


def fill_base(model, base) -> None:
    """Weights that depend on their names alone: equal for any number of ranks."""
    draw = lambda name, *size: 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(parameter_seed(5, name)))  # noqa: E731
    for name, parameter in model.named_parameters():
        parameter.data.copy_(draw(name, *parameter.shape) if parameter.ndim == 2 else torch.ones(parameter.shape))
    for layer in range(base.num_layers):
        shards = {}
        for name, matrix in base.matrices.items():
            first, rows, columns = base.shard_rows(name)
            full = torch.zeros(base.ranks * rows, columns)
            full[: matrix.rows] = draw(f"blocks.{layer}.{name}.weight", matrix.rows, columns)
            shards[name] = full[first : first + rows]
        base.add_layer(layer, shards)
    base.finalize()


def few_steps(processes: Processes, folder: Path | None = None, micro_batch_size: int = 2, rules=RULES) -> dict:
    table = TABLE | {"gpus_per_node": processes.world_size, "micro_batch_size": micro_batch_size}
    config = from_table(table, Config, "test")
    assembly, base = assemble(config, rules, processes, 3, fill_base)
    before = base_fingerprints(assembly.model, base)
    sequences = torch.randint(61, (48, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    sequences[:, 1, 11:] = -100
    share = 8 // processes.world_size
    mine = [part for batch in sequences.split(8) for part in batch.split(share)[processes.rank].split(micro_batch_size)]
    batches, batching = iter(mine), Batching(config.global_batch_size, config.gradient_accumulation_steps)
    losses, norms = [], []
    for _ in range(6):
        loss, norm = train_step(assembly, batches, batching, 1e-2, processes)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    shares = list(sequences[: 4 * processes.world_size].split(4))[processes.rank :: processes.world_size]
    return {
        "losses": losses,
        "norms": norms,
        "adapters": {name: parameter.detach().clone() for name, parameter in adapter_parameters(assembly.model).items()},
        "base unchanged": base_fingerprints(assembly.model, base) == before,
        "trained": sum(tensor.numel() for tensor in assembly.optimizer.weights),
        "states": sum(t.numel() for t in assembly.optimizer.state_tensors()),
        "evaluation": evaluate(assembly.model, shares, processes),
    }
