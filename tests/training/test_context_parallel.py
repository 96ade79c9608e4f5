"""Sequences shared by 1, 2 and 4 ranks (config key context_parallel) compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import combinations, count
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from fp64_llama import sequence_losses
from ranks import call_on_ranks
from synthetic_run import records
from tiny import drawn, facts, fill, matrix, run, run_config

from common import config
from common.errors import ConfigError
from common.kernels.cross_entropy import IGNORE_INDEX
from common.kernels.lora import Dropout, keep_mask
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.lora import adapter_parameters
from common.model.shapes import ModelShape
from common.records.mlperf_log import read
from common.sharding.context_parallel import ContextGroup, context_group
from common.sharding.processes import Processes
from common.training.assembly import Assembly, Batching
from common.training.finetuning import assemble_lora
from common.training.loop import evaluate, rank_micro_batches, train_step
from common.training.pretraining import assemble_random
from common.training.rank_comparison import timed_modules
from llama2_70b_lora import rules as lora
from llama31_8b import rules as pretraining
from open_llama import rules as open_llama
from submission.examined_log import examine
from submission.log_rules import wrong_batch

RANKS = 4
SIZES = (1, 2, 4)  # ranks that share a sequence
SEED = 7
SEQUENCES = 4
BY_TOKEN = "open_llama"  # this case has the loss of conversations: its mean over all their answers
EVALUATED = 3  # not divisible by the ranks
LORA_BASE = 0.05  # scale of the frozen matrices
COMMON = {
    "gpu": "CPU",
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
IN_FP8 = "llama31_8b, fp8"
CASES = ("llama31_8b", "llama2_70b_lora", "open_llama", IN_FP8)
SMALL = ", small"  # marks a case with the sizes below
SMALL_SHAPE = ModelShape(2, 64, 96, 4, 2, 256, 10000.0)
SMALL_LENGTH = 64


def case_of(name: str, size: int, ranks: int = RANKS):
    """Return (config, rules) of a case with `size` of `ranks` ranks for each sequence."""
    whole_name = name.removesuffix(SMALL)
    made, rules = miniature_of(whole_name, size, ranks)
    if name != whole_name:
        kept = {key: getattr(rules.shape, key) for key in ("qk_norm", "tied_embedding")}
        shape = replace(SMALL_SHAPE, **kept)
        rules = replace(rules, shape=shape, sequence_length=SMALL_LENGTH)
    return made, rules


def is_by_token(name: str) -> bool:
    return name.removesuffix(SMALL) == BY_TOKEN


def miniature_of(name: str, size: int, ranks: int):
    """Return (config, rules) of a miniature. See `case_of`."""
    sharing = {"context_parallel": size, "gpus_per_node": ranks}
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
        made = config.from_table(table | sharing, open_llama.Config, "test")
        rules = open_llama.rules_of(made)
        # Also what only this benchmark's models have: norms of heads, a tied head.
        shape = replace(rules.shape, num_layers=2, qk_norm=True, tied_embedding=True)
        return made, replace(rules, shape=shape)
    if name == "llama2_70b_lora":
        table = MINIATURE | {"opt_learning_rate_training_steps": 100} | sharing
        return config.from_table(table, lora.Config, "test"), lora.MINIATURE
    # Micro-batches of two sequences, as far as a rank has two.
    table = MINIATURE | {"opt_learning_rate_warmup_steps": 4, "micro_batch_size": min(size, 2)}
    linear = {"linear": "fp8"} if name == IN_FP8 else {}
    made = config.from_table(table | sharing | linear, pretraining.Config, "test")
    return made, pretraining.MINIATURE


def sharing(processes: Processes, size: int) -> Processes:
    """Return the processes with `size` ranks for each sequence."""
    group = context_group(processes.rank, processes.world_size, size, 60.0)
    return replace(processes, context=group)


def assemble(name: str, processes: Processes) -> Assembly:
    made, rules = case_of(name, processes.context.size, processes.world_size)
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
    evaluated = rank_micro_batches(whole[:EVALUATED].numpy(), processes, 2)
    evaluation = evaluate(model, evaluated, processes, per_token=is_by_token(name))
    if rules.lora_rank:
        seed_by_sequence(model, processes)
    counted = None
    if is_by_token(name):
        counted = iter([int((whole[:, 1] != IGNORE_INDEX).sum())])
    batching = Batching(SEQUENCES, made.gradient_accumulation_steps, counted)
    batches = own_batches(whole, processes, made.micro_batch_size)
    found: list[torch.Tensor] = []
    rule = assembly.optimizer.rule
    with (
        mock.patch.object(rule, "update", lambda grads, norm, lr: found.extend(grads)),
        gathers_in(timed_modules(model)) as gathers,
    ):
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
        "evaluation": evaluation,
        "state": assembly.linear.state(),
        "gathers while timed": len(gathers),
    }


@contextmanager
def gathers_in(modules: list[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Yield a list, to which each gather in a forward of `modules` adds the module."""
    inside: list[torch.nn.Module] = []
    found: list[torch.nn.Module] = []
    for module in modules:
        module.register_forward_pre_hook(lambda module, _: inside.append(module))
        module.register_forward_hook(lambda *_: inside.clear())
    gather = torch.distributed.all_gather_into_tensor

    def recorded(*arguments, **options):
        found.extend(inside)
        return gather(*arguments, **options)

    with mock.patch.object(torch.distributed, "all_gather_into_tensor", recorded):
        yield found


def seed_by_sequence(model, processes: Processes) -> None:
    """Let the dropout seeds of a sequence be `dropout_seeds`, whichever rank has it.

    Each micro-batch has one sequence.
    """
    share = SEQUENCES // processes.data_ranks
    passes = count()

    def start(*_) -> None:
        step, number = divmod(next(passes), share)
        torch.manual_seed(SEED + step * SEQUENCES + processes.data_rank * share + number)

    model.blocks[0].register_forward_pre_hook(start)


def dropout_seeds(sequence: int, layers: int) -> list[torch.Tensor]:
    """Return the two seeds of each layer for a sequence of the batch."""
    generator = torch.Generator().manual_seed(SEED + sequence)
    return [torch.randint(0, 2**63 - 1, (2,), generator=generator) for _ in range(layers)]


def on_ranks(processes: Processes, folder, scale: str = "") -> dict:
    """Be one of the ranks of the tests below. `scale`: SMALL, or "" for the miniatures."""
    results = {
        f"{name} {size}": one_step(sharing(processes, size), name + scale)
        for name in CASES
        for size in SIZES
    }
    for begins, ends in CONTINUED[scale]:
        run_and_continue(folder, begins, ends)
    return results


def small_on_ranks(processes: Processes, folder) -> dict:
    """Be one of the ranks of the default tests."""
    return on_ranks(processes, folder, SMALL)


# Scale -> ranks that share a sequence in a run, and in the run that continues it.
CONTINUED = {SMALL: ((4, 1),), "": ((1, 4), (4, 1), (2, 2))}


def run_and_continue(folder, begins: int, ends: int) -> None:
    """Train 12 steps with a checkpoint after 8, and continue from it in another run."""
    options = {"gpus_per_node": RANKS, "micro_batch_size": 2, "eval_micro_batch_size": 2}
    run(
        folder / f"{begins} whole {ends}",
        folder / "data",
        checkpoint="2",
        context_parallel=begins,
        **options,
    )
    run(
        folder / f"{begins} then {ends}",
        folder / "data",
        continues=folder / f"{begins} whole {ends}",
        context_parallel=ends,
        **options,
    )


class Results(NamedTuple):
    """What the ranks computed at a scale (see `on_ranks`)."""

    scale: str
    of_ranks: list[dict]
    folder: Path  # of the runs


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.slow)])
def results(request, tmp_path_factory, tiny_data):
    """Return one step of each case for each number of ranks that share a sequence, and runs."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "data").symlink_to(tiny_data)
    scale, function = ("", "on_ranks")
    if request.param == "small":
        scale, function = (SMALL, "small_on_ranks")
    of_ranks = call_on_ranks(RANKS, f"test_context_parallel:{function}", folder, 600.0)
    return Results(scale, of_ranks, folder)


@cache
def truth(name: str) -> dict:
    """Return the loss, norm and gradients of the step in fp64, and the loss of the evaluation."""
    _, rules = case_of(name, 1)
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
    masks = whole_masks(rules) if rules.lora_rank else None

    def mean(batch: torch.Tensor, masks=None) -> torch.Tensor:
        tokens, labels = batch.unbind(1)
        losses = sequence_losses(shape, leaves, tokens, labels, scale, masks)
        counts = (labels != IGNORE_INDEX).sum(1).double()
        weights = counts if is_by_token(name) else torch.ones_like(counts)
        return (losses * weights).sum() / weights.sum()

    loss = mean(whole, masks)
    gradients = torch.autograd.grad(loss, [leaves[key] for key in trained])
    with torch.no_grad():
        evaluation = mean(whole[:EVALUATED])
    return {
        "loss": float(loss.detach()),
        "norm": float(torch.stack([gradient.norm() for gradient in gradients]).norm()),
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


def whole_masks(rules) -> dict[str, torch.Tensor]:
    """Return the scaled masks of the step's whole sequences."""
    columns = {"qkv": rules.shape.hidden_size, "o": rules.shape.attention_size}
    masks: dict[str, list[torch.Tensor]] = {}
    for sequence in range(SEQUENCES):
        for layer, seeds in enumerate(dropout_seeds(sequence, rules.shape.num_layers)):
            for (name, width), seed in zip(columns.items(), seeds, strict=True):
                dropout = Dropout(seed[None], rules.lora_dropout)
                mask = keep_mask(rules.sequence_length, width, dropout).double() / dropout.kept
                masks.setdefault(f"{layer}.{name}", []).append(mask)
    return {key: torch.stack(of_sequences) for key, of_sequences in masks.items()}


def errors(name: str, found: dict) -> dict[str, float]:
    """Return the relative errors of the losses, and of each gradient and all of them together."""
    true = truth(name)
    result = {key: abs(found[key] - true[key]) / true[key] for key in ("loss", "evaluation")}
    squares = 0.0
    for key, gradient in true["gradients"].items():
        difference = float((found["gradients"][key].double() - gradient).norm())
        squares += difference**2
        result[key] = difference / float(gradient.norm())
    result["all gradients"] = squares**0.5 / true["norm"]
    return result


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_as_near_to_fp64_as_without_sharing(results, name):
    steps = results.of_ranks[0]
    case = name + results.scale
    true_norm = truth(case)["norm"]
    alone = errors(case, steps[f"{name} 1"])
    # A norm is at most as far from the true one as the gradients are from theirs.
    norm_error = abs(steps[f"{name} 1"]["norm"] / true_norm - 1)
    norm_limit = 2 * max(norm_error, alone["all gradients"])
    for size in SIZES[1:]:
        found = steps[f"{name} {size}"]
        assert abs(found["norm"] / true_norm - 1) <= norm_limit
        for key, error in errors(case, found).items():
            # A loss is one number, whose error may be 0 by chance: at least the rounding of the
            # precision outside FP8, fp32 or bf16.
            limit = 2 * max(alone[key], 2**-8 if name == IN_FP8 else 2**-24)
            assert error <= limit, (key, size)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_have_the_same_result(results, name):
    for size in SIZES:
        first, *others = [of_rank[f"{name} {size}"] for of_rank in results.of_ranks]
        for other in others:
            assert other["loss"] == first["loss"]
            assert other["norm"] == first["norm"]
            assert other["evaluation"] == first["evaluation"]


@pytest.mark.parametrize("name", CASES)
def test_what_the_ranks_compare_waits_for_no_other_rank(results, name):
    for of_rank in results.of_ranks:
        for size in SIZES:
            assert of_rank[f"{name} {size}"]["gathers while timed"] == 0


def test_scales_are_those_of_whole_sequences(results):
    """Some amaxes are ten times as large at the first tokens, which one rank of a group has."""
    amaxes = {
        size: [
            of_rank[f"{IN_FP8} {size}"]["state"]["fp8_history"][0] for of_rank in results.of_ranks
        ]
        for size in SIZES
    }
    for size in SIZES[1:]:
        for rank, found in enumerate(amaxes[size]):
            first = rank // size * size  # of the group
            whole = torch.stack(amaxes[1][first : first + size]).amax(0)
            # Of rounded values: one rounding of e5m2, the coarser format, is at most 1/8.
            torch.testing.assert_close(found, whole, rtol=1 / 8, atol=0)
            assert torch.equal(found, amaxes[size][first])


def test_a_run_continues_with_another_number_of_ranks_for_a_sequence(results):
    folder = results.folder
    pairs = CONTINUED[results.scale]
    alone = facts(folder / f"{pairs[0][0]} whole {pairs[0][1]}")
    assert len(alone.losses) == 12
    for begins, ends in pairs:
        whole = facts(folder / f"{begins} whole {ends}")
        rest = facts(folder / f"{begins} then {ends}")
        # The same sums in another order, amplified by 12 steps (tests/training/test_loop.py).
        tolerance = 0 if begins == ends else 1e-5
        assert rest.losses == pytest.approx(whole.losses[8:], rel=tolerance, abs=0)
        assert rest.norms == pytest.approx(whole.norms[8:], rel=tolerance, abs=0)
        assert whole.losses == pytest.approx(alone.losses, rel=1e-5)
        assert dict(whole.evaluations) == pytest.approx(dict(alone.evaluations), rel=1e-5)


def test_the_log_of_shared_sequences_is_clean_and_names_their_ranks(results):
    folder = results.folder
    path = folder / "4 whole 1" / "result.txt"
    values = {record["key"]: record["value"] for record in records(path)}
    assert values["context_parallelism"] == 4
    assert values["tensor_parallelism"] == 1
    assert values["micro_batch_size"] * values["gradient_accumulation_steps"] == 8
    rest = {found.rule for found in examine(folder / "4 then 1" / "result.txt").errors()}
    more = {"after_target", "samples_count"}  # found at a run's second evaluation
    assert {found.rule for found in examine(path).errors()} == rest | more
    # The rule needs the number of GPUs, which the launcher writes.
    made = run_config(gpus_per_node=RANKS, context_parallel=4, micro_batch_size=2)
    (path.parent / "config.toml").write_text(made.as_toml())
    assert not list(wrong_batch(read(path), pretraining.MINIATURE))


@pytest.mark.parametrize("size", [3, 8])
def test_a_number_that_does_not_divide_the_ranks_of_a_node_is_refused(size):
    with pytest.raises(ConfigError) as caught:
        run_config(gpus_per_node=4, context_parallel=size, micro_batch_size=1)
    assert f"context_parallel = {size}" in caught.value.what
    assert "gpus_per_node = 4" in caught.value.why


def test_a_sequence_that_cannot_be_cut_is_refused(processes):
    made = run_config(context_parallel=4, gpus_per_node=4, micro_batch_size=2)
    rules = replace(pretraining.MINIATURE, sequence_length=100)
    with pytest.raises(ConfigError) as caught:
        assemble_random(made, rules, processes, SEED)
    assert "context_parallel = 4" in caught.value.what
    assert "100 tokens" in caught.value.why and "8 equal chunks" in caught.value.why


def test_a_batch_is_divided_among_the_groups_of_ranks():
    made = run_config(context_parallel=4, gpus_per_node=4, micro_batch_size=2)
    assert made.gradient_accumulation_steps == 4  # 8 sequences, 1 group
    with pytest.raises(ConfigError) as caught:
        run_config(context_parallel=2, gpus_per_node=4, micro_batch_size=8)
    assert "8 x 2 = 16" in caught.value.why


def test_dropout_masks_are_those_of_the_whole_micro_batch():
    """Bit for bit, for a micro-batch of three sequences."""
    length = 32
    seed = torch.tensor([2**50 + 3])
    whole = keep_mask(3 * length, 24, Dropout(seed, 0.25)).view(3, length, 24)
    for size in SIZES:
        for rank in range(size):
            context = ContextGroup(size, rank)
            own = length // size
            numbers = context.token_numbers(3, own, torch.device("cpu"))
            mask = keep_mask(3 * own, 24, Dropout(seed, 0.25, numbers)).view(3, own, 24)
            assert torch.equal(mask, context.cut(whole, 1))


def test_each_rank_has_the_first_chunk_and_its_mirror_image():
    whole = torch.arange(24)[None]
    parts = [ContextGroup(3, rank).cut(whole, 1)[0].tolist() for rank in range(3)]
    assert parts[0] == [0, 1, 2, 3, 20, 21, 22, 23]
    assert parts[1] == [4, 5, 6, 7, 16, 17, 18, 19]
    assert parts[2] == [8, 9, 10, 11, 12, 13, 14, 15]


# --- curves ---------------------------------------------------------------------------------------

STEPS = 64
LOW_RATE = 3e-4  # at which rounding differences do not grow
# Learning rates as shipped.
RATES = {"llama31_8b": 4e-3, "llama2_70b_lora": 2e-3, "open_llama": 2e-3}
MICRO_BATCHES = (1, 2, 4)


def curve(
    processes: Processes, name: str, rate: float, micro_batch_size: int = 0
) -> list[list[float]]:
    """Return the losses and gradient norms of STEPS steps at a constant rate.

    `micro_batch_size`: 0 for the one of the case.
    """
    assembly = assemble(name, processes)
    made, rules = case_of(name, processes.context.size, processes.world_size)
    if micro_batch_size:
        made = replace(made, micro_batch_size=micro_batch_size)
    if rules.lora_rank:
        seed_by_sequence(assembly.model, processes)
    batching = Batching(SEQUENCES, made.gradient_accumulation_steps)
    losses = []
    norms = []
    for whole in sequences(rules.shape.vocab_size, rules.sequence_length, STEPS).split(SEQUENCES):
        batches = own_batches(whole, processes, made.micro_batch_size)
        loss, norm = train_step(assembly, batches, batching, rate, processes)
        losses.append(float(processes.sum(loss)))
        norms.append(float(norm))
    return [losses, norms]


def curves(processes: Processes, folder) -> dict:
    """Return the curves of a case, for each number of ranks that may share a sequence."""
    name = (folder / "case").read_text()
    sizes = [1]
    rates = [RATES[name]]
    if processes.world_size == RANKS:
        sizes = list(SIZES)
        rates.append(LOW_RATE)
    return {
        f"{size} {rate}": curve(sharing(processes, size), name, rate)
        for size in sizes
        for rate in rates
    }


@pytest.fixture(scope="module", params=RATES)
def all_curves(request, tmp_path_factory):
    """Return (case, number of ranks -> its curves)."""
    found = {}
    for ranks in (1, 2, RANKS):
        folder = tmp_path_factory.mktemp(f"curves_{ranks}")
        (folder / "case").write_text(request.param)
        found[ranks] = call_on_ranks(ranks, "test_context_parallel:curves", folder, 1500.0)[0]
    return request.param, found


def apart(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the relative difference at each step."""
    return [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.slow
def test_curves_are_those_without_sharing(all_curves):
    name, by_ranks = all_curves
    of_four = by_ranks[RANKS]
    for size in SIZES[1:]:
        pairs = zip(of_four[f"{size} {LOW_RATE}"], of_four[f"1 {LOW_RATE}"], strict=True)
        losses, norms = (apart(*pair) for pair in pairs)
        print(f"{name} c={size} at {LOW_RATE}: loss {max(losses):.1e}, norm {max(norms):.1e}")
        assert max(losses) <= 2e-6
        assert max(norms) <= 2e-5


@pytest.mark.slow
def test_at_the_shipped_rate_curves_are_as_far_apart_as_those_of_1_2_and_4_ranks(all_curves):
    """Rounding differences grow there, whatever their source."""
    name, by_ranks = all_curves
    key = f"1 {RATES[name]}"
    alone = [of_ranks[key][0] for of_ranks in by_ranks.values()]
    pairs = [apart(ours, theirs) for ours, theirs in combinations(alone, 2)]
    of_ranks = [max(of_pairs) for of_pairs in zip(*pairs, strict=True)]
    for size in SIZES[1:]:
        shared = by_ranks[RANKS][f"{size} {RATES[name]}"][0]
        losses = apart(shared, by_ranks[RANKS][key][0])
        for end in (8, 16, 32, STEPS):
            here = max(losses[:end])
            there = max(of_ranks[:end])
            print(f"{name} c={size}, {end} steps: {here:.1e}; 1, 2 and 4 ranks, c=1: {there:.1e}")
        assert max(losses[:8]) <= 1e-6
        assert max(losses) <= 3 * max(of_ranks)


def fp8_curves(processes: Processes, folder) -> dict:
    """Return the losses in FP8 at the shipped rate, without sharing and shared by 2 and 4 ranks.

    On one rank: with each micro-batch size.
    """
    rate = RATES["llama31_8b"]
    if processes.world_size == 1:
        return {size: curve(processes, IN_FP8, rate, size)[0] for size in MICRO_BATCHES}
    return {size: curve(sharing(processes, size), IN_FP8, rate)[0] for size in SIZES}


@pytest.mark.slow
def test_fp8_curves_are_as_far_apart_as_those_of_other_micro_batches(tmp_path):
    """The first step scales each micro-batch by its own amaxes, and so rounds otherwise.

    Without sharing, 1, 2 and 4 ranks have the same micro-batches: they round alike in that step,
    and are closer than FP8's own spread.
    """
    found = {}
    for ranks in (1, RANKS):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found[ranks] = call_on_ranks(ranks, "test_context_parallel:fp8_curves", folder, 1500.0)[0]
    pairs = combinations(found[1].values(), 2)
    spread = [max(steps) for steps in zip(*(apart(*pair) for pair in pairs), strict=True)]
    for size in SIZES[1:]:
        losses = apart(found[RANKS][size], found[RANKS][1])
        for end in (8, 16, 32, STEPS):
            here = max(losses[:end])
            print(f"c={size}, {end} steps: {here:.1e}; micro-batches: {max(spread[:end]):.1e}")
        assert max(losses) <= 3 * max(spread)
