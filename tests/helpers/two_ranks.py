"""What the tests want to know from two ranks, found in one pair of processes: starting one costs more than all its work."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from tiny import TINY, run, run_config

from common.model.initialization import parameter_seed
from common.sharding.processes import Processes
from common.training.loop import evaluate, next_token_pairs, pad_for_ranks
from llama31_8b.data import validation_tokens
from llama31_8b.train import assemble

# name -> changes of tiny.DEFAULTS
RUNS = {
    "plain": {"micro_batch_size": 2},  # 2 ranks x 2 sequences x 2 micro-batches
    "recompute": {"micro_batch_size": 2, "recompute_layers": 1},
    "whole micro-batch": {"micro_batch_size": 4},
}


def everything(processes: Processes, folder: Path) -> dict:
    runs = {}
    for name, changes in RUNS.items():
        one = folder / f"{name}_{processes.rank}"
        runs[name] = asdict(run(one, folder / "data", gpus_per_node=2, **changes))
    return {
        "runs": runs,
        **optimizer_step(processes),
        "evaluation": evaluation(processes, folder / "data"),
    }


def optimizer_step(processes: Processes) -> dict:
    """The initial weights put together, one step with known gradients, and the weights after it."""
    assembly = assemble(run_config(gpus_per_node=processes.world_size), TINY, processes, seed=7)
    model = assembly.model
    initial = whole(model)
    sum(
        (parameter * known_gradient(name, parameter.shape)).sum()
        for name, parameter in model.named_parameters()
    ).backward()
    norm = float(assembly.step(1e-2))
    return {"initial": initial, "norm": norm, "stepped": whole(model)}


def known_gradient(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(parameter_seed(3, name)))


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def evaluation(processes: Processes, data_dir: Path) -> float:
    model = assemble(run_config(gpus_per_node=processes.world_size), TINY, processes, seed=7).model
    return evaluate(
        model,
        pad_for_ranks(evaluation_sequences(data_dir), processes, micro_batch_size=4),
        processes,
    )


def evaluation_sequences(data_dir: Path):
    windows = validation_tokens(
        data_dir / TINY.validation_prefix,
        TINY.sequence_length,
        TINY.eval_samples,
        TINY.shape.vocab_size,
    )
    sequences = next_token_pairs(windows)
    sequences[3, 1, 5:] = -100  # a short one: it weighs as much as the others
    sequences[6, 1] = -100  # and one without any label: it has no weight
    return sequences
