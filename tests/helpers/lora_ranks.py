"""A few LoRA steps on any number of ranks, from the same weights and sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tiny import TINY

from common.config import from_table
from common.model.initialization import parameter_seed
from common.model.llama import Llama
from common.model.lora import adapter_parameters
from common.model.shapes import ModelShape
from common.sharding.frozen_base import ROWWISE, FrozenBase, layer_layout, pass_order
from common.sharding.processes import Processes
from common.training.assembly import Batching
from common.training.loop import evaluate, pad_for_ranks, train_step
from llama2_70b_lora.rules import MINIATURE, Config
from llama2_70b_lora.train import assemble, base_fingerprints

RULES = replace(MINIATURE, shape=TINY.shape, sequence_length=TINY.sequence_length, lora_dropout=0.0)
TABLE = {
    "gpu": "CPU",
    "nodes": 1,
    "global_batch_size": 8,
    "opt_base_learning_rate": 1e-2,
    "opt_learning_rate_training_steps": 100,
    "max_samples": 800,
    "eval_micro_batch_size": 2,
    "miniature": True,
}


def matrix(shape: ModelShape, layer: int, name: str) -> torch.Tensor:
    """A whole matrix of the base in bf16, equal everywhere; each has another largest value."""
    size = layer_layout(shape, 1, 1)[0][name]
    generator = torch.Generator().manual_seed(parameter_seed(layer, name))
    return (torch.randn(size.rows, size.columns, generator=generator) * (layer + 1)).bfloat16()


def fill(base: FrozenBase, shape: ModelShape, scale: float = 1.0) -> FrozenBase:
    """Add scale x `matrix` of every layer; rows beyond a matrix are large numbers, which must not matter."""
    for layer in range(shape.num_layers):
        shards = {}
        for name in base.matrices:
            first, rows, columns = base.shard_rows(name)
            own = scale * matrix(shape, layer, name)[first : first + rows]
            shards[name] = torch.cat(
                (own, torch.full((rows - len(own), columns), 1e4, dtype=torch.bfloat16))
            ).to(base.device)
        base.add_layer(layer, shards)
    base.finalize()
    return base


def lora_config(processes: Processes, **changes) -> Config:
    return from_table(
        {**TABLE, "gpus_per_node": processes.world_size, "micro_batch_size": 2, **changes},
        Config,
        "test",
    )


def with_precision(config: Config, precision: str) -> Config:
    """On a CPU, where a config without FP8 is in fp32, as a GPU computes it."""
    kind = type("Config", (Config,), {"precision": precision})
    return kind(**vars(config))


def few_steps(
    processes: Processes,
    folder: Path | None = None,
    rules=RULES,
    one_batch: bool = False,
    precision: str = "",
    **changes,
) -> dict:
    """Losses and gradient norms, an evaluation whose last batch is padded, and what became of model and base.

    Six steps; with `one_batch` three steps on the same batch, which is learned faster, and the scales of FP8 start anew in each step, so that
    they do not depend on how the ranks share the batch.
    """
    torch.manual_seed(0)
    config = lora_config(processes, **changes)
    if precision:
        config = with_precision(config, precision)

    def load(model: Llama, base: FrozenBase) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                full = torch.randn(
                    parameter.shape,
                    generator=torch.Generator().manual_seed(parameter_seed(5, name)),
                )
                parameter.copy_(0.1 * full if parameter.ndim == 2 else torch.ones(parameter.shape))
        fill(base, rules.shape, 0.1)

    assembly, base = assemble(config, rules, processes, 3, load)
    model, optimizer, batching = (
        assembly.model,
        assembly.optimizer,
        Batching(config.global_batch_size, config.gradient_accumulation_steps),
    )
    before = base_fingerprints(model, base)
    sequences = torch.randint(
        61, (48, 2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    sequences[:, 1, 11:] = -100
    steps = [sequences[:8]] * 3 if one_batch else list(sequences.split(8))
    own = [batch.chunk(processes.world_size)[processes.rank] for batch in steps]
    batches, losses, norms = (
        iter([part for batch in own for part in batch.split(config.micro_batch_size)]),
        [],
        [],
    )
    for _ in own:
        if one_batch:
            assembly.linear.reset()
        loss, norm = train_step(assembly, batches, batching, 1e-2, processes)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    evaluation = evaluate(model, pad_for_ranks(sequences[:5].numpy(), processes, 2), processes)
    return {
        "losses": losses,
        "norms": norms,
        "evaluation": evaluation,
        "evaluates forward only": base.order == pass_order(rules.shape.num_layers, False, ROWWISE),
        "base unchanged": base_fingerprints(model, base) == before,
        "adapters": {
            name: parameter.detach().clone()
            for name, parameter in adapter_parameters(model).items()
        },
        "parameters": [name for name, _ in model.named_parameters()],
        "trained": sum(p.numel() for p in optimizer.weights),
        "states": sum(t.numel() for t in optimizer.state_tensors()),
    }
