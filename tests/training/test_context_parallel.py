"""Sequences shared by 1, 2 and 4 ranks (config key context_parallel) compute the same."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from fp64_llama import sequence_losses
from ranks import call_on_ranks
from tiny import drawn, fill, matrix

from common import config
from common.kernels.cross_entropy import IGNORE_INDEX
from common.kernels.lora import Dropout, keep_mask
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.lora import adapter_parameters
from common.sharding.context_parallel import context_group
from common.sharding.processes import Processes
from common.training.assembly import Assembly, Batching
from common.training.finetuning import assemble_lora
from common.training.loop import evaluate, rank_micro_batches, train_step
from common.training.pretraining import assemble_random
from llama2_70b_lora import rules as lora
from llama31_8b import rules as pretraining
from open_llama import rules as open_llama

RANKS = 4
SIZES = (1, 2, 4)  # ranks that share a sequence
SEED = 7
SEQUENCES = 8
LORA_BASE = 0.05  # scale of the frozen matrices
COMMON = {
    "gpu": "CPU",
    "gpus_per_node": RANKS,
    "global_batch_size": SEQUENCES,
    "opt_base_learning_rate": 4e-3,
    "max_samples": 9_600,
}
MINIATURE = {
    **COMMON,
    "nodes": 1,
    "micro_batch_size": 1,
    "eval_micro_batch_size": 2,
    "miniature": True,
}
CASES = ("llama31_8b", "llama2_70b_lora", "open_llama")


def case_of(name: str, size: int):
    """Return (config, rules) of a miniature with `size` ranks for each sequence."""
    if name == "open_llama":
        table = COMMON | {
            "model": "open_llama/models/llama-10m.json",
            "sequence_length": 256,
            "eval_samples": 8,
            "eval_interval_samples": 480,
            "schedule": "cosine",
            "opt_learning_rate_warmup_steps": 4,
            "weight_decay": 0.1,
            "gradient_clip_norm": 1.0,
        }
        made = config.from_table(table | {"context_parallel": size}, open_llama.Config, "test")
        rules = open_llama.rules_of(made)
        # Also what only this benchmark's models have: norms of heads, a tied head.
        shape = replace(rules.shape, num_layers=2, qk_norm=True, tied_embedding=True)
        return made, replace(rules, shape=shape)
    if name == "llama2_70b_lora":
        table = MINIATURE | {"opt_learning_rate_training_steps": 100, "context_parallel": size}
        return config.from_table(table, lora.Config, "test"), lora.MINIATURE
    # Micro-batches of two sequences, as far as there are ranks for them.
    table = MINIATURE | {"opt_learning_rate_warmup_steps": 4, "micro_batch_size": 2}
    table["context_parallel"] = size
    return config.from_table(table, pretraining.Config, "test"), pretraining.MINIATURE


def sharing(processes: Processes, size: int) -> Processes:
    """Return the processes with `size` ranks for each sequence."""
    group = context_group(processes.rank, processes.world_size, size, 60.0)
    return replace(processes, context=group)


def assemble(name: str, processes: Processes) -> Assembly:
    made, rules = case_of(name, processes.context.size)
    if not rules.lora_rank:
        return assemble_random(made, rules, processes, SEED)

    @torch.no_grad()
    def load(model, base):
        for key, parameter in model.named_parameters():
            parameter.copy_(other_weight(key, parameter.shape))
        fill(base, rules.shape, LORA_BASE)

    assembly, _ = assemble_lora(made, rules, processes, SEED, load)
    with torch.no_grad():
        for key, parameter in adapter_parameters(assembly.model).items():
            parameter.copy_(other_weight(key, parameter.shape))
    return assembly


def other_weight(name: str, shape: torch.Size) -> torch.Tensor:
    """Return a weight of LoRA's model that is not in its frozen base."""
    return torch.ones(shape) if len(shape) == 1 else 0.05 * drawn(5, name, shape)


def sequences(vocab_size: int, length: int, steps: int = 1) -> torch.Tensor:
    """Return int32 [steps x SEQUENCES, 2, length], with labels masked across borders of chunks."""
    generator = torch.Generator().manual_seed(2)
    size = (steps * SEQUENCES, 2, length)
    # Few tokens, so that there is something to learn.
    drawn_tokens = torch.randint(vocab_size // 8, size, generator=generator, dtype=torch.int32)
    labels = drawn_tokens[:, 1]
    border = length // 4
    labels[1::4, border - 3 : border + 5] = IGNORE_INDEX
    labels[2::4, : length // 2 + 1] = IGNORE_INDEX  # no label in the first chunks of some ranks
    return drawn_tokens


def own_batches(whole: torch.Tensor, processes: Processes, micro_batch_size: int):
    own = whole.chunk(processes.data_ranks)[processes.data_rank]
    return iter(own.split(micro_batch_size))


def one_step(processes: Processes, name: str) -> dict:
    """Return the loss, norm, gradients and dropout seeds of one step, and an evaluation before."""
    assembly = assemble(name, processes)
    model = assembly.model
    made, rules = case_of(name, processes.context.size)
    whole = sequences(rules.shape.vocab_size, rules.sequence_length)
    evaluation = evaluate(model, rank_micro_batches(whole[:5].numpy(), processes, 2), processes)
    seeds: list[torch.Tensor] = []
    for block in model.blocks:
        if rules.lora_rank:
            record_seeds(block, seeds)
    torch.manual_seed(SEED + processes.data_rank)
    batching = Batching(SEQUENCES, made.gradient_accumulation_steps)
    batches = own_batches(whole, processes, made.micro_batch_size)
    found: list[torch.Tensor] = []
    rule = assembly.optimizer.rule
    with mock.patch.object(rule, "update", lambda grads, norm, lr: found.extend(grads)):
        loss, norm = train_step(assembly, batches, batching, 1e-3, processes)
    names = {parameter: key for key, parameter in model.named_parameters()}
    gradients = {}
    for parameter, gradient in zip(assembly.optimizer.parameters, found, strict=True):
        if assembly.optimizer.sharded:
            parts = [torch.empty_like(gradient) for _ in range(processes.world_size)]
            torch.distributed.all_gather(parts, gradient)
            gradient = torch.cat(parts)[: len(parameter)]
        gradients[names[parameter]] = gradient.clone()
    return {
        "loss": float(processes.sum(loss)),
        "norm": float(norm),
        "gradients": gradients,
        "seeds": torch.stack(seeds) if seeds else None,
        "evaluation": evaluation,
    }


def record_seeds(block, seeds: list[torch.Tensor]) -> None:
    draw = block.draw_dropouts

    def recorded(x):
        dropouts = draw(x)
        seeds.append(torch.cat([dropout.seed for dropout in dropouts]))
        return dropouts

    block.draw_dropouts = recorded


def on_ranks(processes: Processes, folder) -> dict:
    """Be one of the ranks of the tests below."""
    return {
        f"{name} {size}": one_step(sharing(processes, size), name)
        for name in CASES
        for size in SIZES
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return, by rank, one step of each case for each number of ranks that share a sequence."""
    folder = tmp_path_factory.mktemp("context")
    return call_on_ranks(RANKS, "test_context_parallel:on_ranks", folder)


def truth(name: str, size: int, seeds_of_ranks: list[torch.Tensor]) -> dict:
    """Return the loss and gradients of the step in fp64, and the loss of the evaluation."""
    made, rules = case_of(name, size)
    shape = rules.shape
    if rules.lora_rank:
        weights = {}
        for layer in range(shape.num_layers):
            for each in ("qkv", "o", "gate_up", "down"):
                weight = (LORA_BASE * matrix(shape, layer, each)).float()
                weights[f"blocks.{layer}.{each}.weight"] = weight
        for key, of_key in other_shapes(rules).items():
            weights[key] = other_weight(key, of_key)
        trained = [key for key in weights if ".lora_" in key]
    else:
        model = fused_llama(shape, rules.sequence_length)
        init_weights(model, shape.num_layers, SEED, rules.init_std, copy_weight)
        weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
        trained = list(weights)
    leaves = {
        key: weight.double().requires_grad_(key in trained) for key, weight in weights.items()
    }
    whole = sequences(shape.vocab_size, rules.sequence_length)
    scale = rules.lora_alpha / rules.lora_rank if rules.lora_rank else 0.0
    groups = RANKS // size
    total = torch.zeros((), dtype=torch.float64)
    for group, share in enumerate(whole.chunk(groups)):
        for number, batch in enumerate(share.split(made.micro_batch_size)):
            masks = None
            if rules.lora_rank:
                first = number * shape.num_layers
                seeds = seeds_of_ranks[group * size][first : first + shape.num_layers]
                masks = whole_masks(rules, seeds, batch)
            losses = sequence_losses(shape, leaves, *batch.unbind(1), scale, masks)
            total = total + losses.sum() / SEQUENCES
    gradients = torch.autograd.grad(total, [leaves[key] for key in trained])
    with torch.no_grad():
        evaluation = sequence_losses(shape, leaves, *whole[:5].unbind(1), scale).mean()
    return {
        "loss": float(total.detach()),
        "gradients": dict(zip(trained, gradients, strict=True)),
        "evaluation": float(evaluation),
    }


def other_shapes(rules) -> dict[str, torch.Size]:
    """Return the shapes of the weights of LoRA's model that are not in its frozen base."""
    shape = rules.shape
    sizes = {
        "embedding.weight": (shape.vocab_size, shape.hidden_size),
        "head.norm.weight": (shape.hidden_size,),
        "head.output.weight": (shape.vocab_size, shape.hidden_size),
    }
    for layer in range(shape.num_layers):
        block = f"blocks.{layer}."
        for norm in ("attention_norm", "ffn_norm"):
            sizes[f"{block}{norm}.weight"] = (shape.hidden_size,)
        matrices = {
            "qkv": (shape.qkv_size, shape.hidden_size),
            "o": (shape.hidden_size, shape.attention_size),
        }
        for name, (rows, columns) in matrices.items():
            sizes[f"{block}{name}.lora_a"] = (rules.lora_rank, columns)
            sizes[f"{block}{name}.lora_b"] = (rows, rules.lora_rank)
    return {name: torch.Size(size) for name, size in sizes.items()}


def whole_masks(rules, seeds: torch.Tensor, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the scaled masks of a micro-batch of whole sequences, from the seeds of its layers."""
    masks = {}
    columns = {"qkv": rules.shape.hidden_size, "o": rules.shape.attention_size}
    for layer, of_layer in enumerate(seeds):
        for (name, width), seed in zip(columns.items(), of_layer, strict=True):
            dropout = Dropout(seed[None], rules.lora_dropout)
            mask = keep_mask(batch.shape[0] * batch.shape[2], width, dropout)
            masks[f"{layer}.{name}"] = mask.double().view(len(batch), -1, width) / dropout.kept
    return masks


def errors(found: dict, true: dict) -> dict[str, float]:
    """Return the relative errors of the loss, of the evaluation and of each gradient."""
    result = {key: abs(found[key] - true[key]) / true[key] for key in ("loss", "evaluation")}
    for name, gradient in true["gradients"].items():
        difference = (found["gradients"][name].double() - gradient).norm()
        result[name] = float(difference / gradient.norm())
    return result


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_as_near_to_fp64_as_without_sharing(steps, name):
    found = {}
    for size in SIZES:
        ranks = [of_rank[f"{name} {size}"] for of_rank in steps]
        true = truth(name, size, [each["seeds"] for each in ranks])
        found[size] = errors(ranks[0], true)
        norm = torch.stack([each.norm() for each in true["gradients"].values()]).norm()
        assert ranks[0]["norm"] == pytest.approx(float(norm), rel=2e-6)
    for size in SIZES[1:]:
        for key, error in found[size].items():
            # A loss is one number in fp32: its error may be 0 by chance.
            assert error <= 2 * max(found[1][key], 6e-8), (key, size, found[1][key])
