"""Compare ZeRO-2 with plain tensors on one rank, two ranks and two nodes.

test_loop.py tests that two ranks train as one process does. test_multi_node.py tests several nodes.
"""

import gc
import random
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import call_on_ranks
from tiny import run_config
from torch.distributed.device_mesh import init_device_mesh

from common.errors import ConfigError
from common.kernels import accumulate
from common.sharding.adamw import AdamW, AdamWSettings
from common.sharding.copy_engine import CopyEngineReduceScatter
from common.sharding.processes import Processes
from common.sharding.reduce_scatter import NcclReduceScatter
from common.sharding.replicated import ReplicatedOptimizer
from common.sharding.zero import ZeroOptimizer, make_reduce_scatter

ROWS = {"even": 6, "ragged": 5, "single": 1}  # the ranks are two
SETTINGS = AdamWSettings((0.9, 0.95), 1e-8, 0.1, 1e9)
MAKE_RULE = partial(AdamW, SETTINGS, "reference", torch.float32)
LEARNING_RATE = 0.1


class Weights(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(
                name, torch.nn.Parameter(torch.empty(ROWS[name], 3, dtype=torch.bfloat16))
            )

    def forward(self, scale):
        return sum((parameter.float() * scale).square().sum() for parameter in self.parameters())


def full(name, seed):
    return torch.randn(ROWS[name], 3, generator=torch.Generator().manual_seed(seed + ROWS[name]))


class FileBuffers:
    """SymmetricBuffers on a CPU: a file per rank, which all ranks map.

    A rank reaches a barrier after a random time.
    """

    def __init__(self, folder, seconds, group, count, num_bytes):
        self.rank, self.ranks, self.group, self.seconds = group.rank(), group.size(), group, seconds
        mapped = partial(torch.from_file, shared=True, size=count * num_bytes, dtype=torch.uint8)
        self.buffers = {
            rank: mapped(str(folder / f"{rank}.buffers_{count}")).view(count, num_bytes)
            for rank in range(self.ranks)
        }

    def barrier(self):
        time.sleep(random.Random().uniform(0, self.seconds))
        dist.barrier(self.group)
        time.sleep(random.Random().uniform(0, self.seconds))


def copy_engines(folder, seconds, dtype, group, modules):
    return CopyEngineReduceScatter(
        partial(FileBuffers, folder, seconds, group),
        modules,
        dtype,
        accumulate.IMPLEMENTATIONS["reference"],
    )


def zero(modules, processes, reduce_scatter=None, dtype=torch.float32):
    """Return a ZeRO optimizer with the weights `full(name, 1)`."""
    make = reduce_scatter or partial(make_reduce_scatter, "nccl", processes, dtype, "reference")
    optimizer = ZeroOptimizer(modules, processes, MAKE_RULE, "reference", make)
    for module in modules:
        for name, parameter in module.named_parameters():
            optimizer.set_weight(parameter, full(name, 1))
    optimizer.gather()
    return optimizer


def on_two_ranks(processes, folder):
    """Two micro-batches that differ by rank, and a step."""
    nodes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    two_nodes = Processes(processes.rank, 2, processes.device, nodes)
    by_copy = partial(copy_engines, folder, 0.0, torch.float32, processes.shard_group)
    found = {}
    for way, (place, reduce_scatter) in {
        "one node": (processes, None),
        "two nodes": (two_nodes, None),
        "copy engines": (processes, by_copy),
    }.items():
        modules = [Weights(["even", "ragged"]), Weights(["single"])]
        optimizer = zero(modules, place, reduce_scatter)
        named = {
            name: parameter for module in modules for name, parameter in module.named_parameters()
        }
        filled = {key: parameter.detach().clone() for key, parameter in named.items()}
        for micro_batch in (1.0, 2.0):
            sum(module(micro_batch + processes.rank) for module in modules).backward()
            assert all(parameter.grad is None for parameter in named.values()), (
                "a whole gradient was kept"
            )
        optimizer.finish_reduction()
        gradients = {
            key: optimizer.shard_of[parameter].gradient.clone() for key, parameter in named.items()
        }
        norm = float(optimizer.step(LEARNING_RATE))
        found[way] = {
            "filled": filled,
            "gradients": gradients,
            "norm": norm,
            "stepped": {key: parameter.detach().clone() for key, parameter in named.items()},
            "masters": {
                key: optimizer.shard_of[parameter].master.clone()
                for key, parameter in named.items()
            },
        }
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return call_on_ranks(2, "test_zero:on_two_ranks", tmp_path_factory.mktemp("ranks"))


def mean_gradient(name):
    """Return the mean gradient.

    Each rank's gradients are bf16. Neither the mean over ranks nor the sum over micro-batches is
    rounded.
    """
    weight = full(name, 1).bfloat16().float()
    scales = [[1.0, 2.0], [2.0, 3.0]]  # of the two micro-batches, by rank
    return sum(
        ((2 * weight * a * a).bfloat16().float() + (2 * weight * b * b).bfloat16().float()) / 2
        for a, b in zip(*scales, strict=True)
    )


def after_first_step(name):
    """AdamW's first update is lr * g / (|g| + eps), after decay."""
    start, gradient = full(name, 1), mean_gradient(name)
    return start - LEARNING_RATE * (
        SETTINGS.weight_decay * start + gradient / (gradient.abs() + SETTINGS.eps)
    )


@pytest.mark.parametrize("way", ["one node", "two nodes", "copy engines"])
@pytest.mark.parametrize("name", ROWS)
def test_masters_take_the_mean_gradient_and_every_rank_gets_every_row(two_ranks, way, name):
    pieces = [rank[way] for rank in two_ranks]
    for rank in pieces:
        assert torch.equal(rank["filled"][name], full(name, 1).bfloat16())
        assert torch.equal(rank["stepped"][name], pieces[0]["stepped"][name])
    rows = ROWS[name]
    both = {
        key: torch.cat([rank[key][name] for rank in pieces]) for key in ("gradients", "masters")
    }
    if way == "two nodes":  # a node's only rank has all rows
        both = {key: pieces[1][key][name] for key in both}
        assert all(torch.equal(pieces[0][key][name], tensor) for key, tensor in both.items())
    assert torch.equal(both["gradients"][:rows], mean_gradient(name))
    torch.testing.assert_close(both["masters"][:rows], after_first_step(name), rtol=1e-5, atol=1e-6)
    assert torch.equal(pieces[0]["stepped"][name], both["masters"][:rows].bfloat16()), (
        "what the model reads is the rounded master"
    )
    assert not both["masters"][rows:].any(), "rows of padding stay zero"


@pytest.mark.parametrize("way", ["one node", "two nodes", "copy engines"])
def test_the_norm_is_that_of_the_whole_gradient(two_ranks, way):
    expected = sum(float(mean_gradient(name).double().square().sum()) for name in ROWS) ** 0.5
    assert [rank[way]["norm"] for rank in two_ranks] == pytest.approx([expected] * 2, rel=1e-6)


def test_reducing_in_bf16_rounds_the_mean_and_adds_up_in_fp32(tmp_path):
    for rank in call_on_ranks(2, "test_zero:reduce_in_bf16", tmp_path):
        assert rank["dtype"] == "torch.float32" and rank["sum"] == 1.0 + 2.0**-9, (
            "added up in bf16 it would be 1.0"
        )


def reduce_in_bf16(processes, folder):
    module = Weights(["even"])
    optimizer = zero([module], processes, dtype=torch.bfloat16)
    for value in (1.0, 2.0**-9):
        (module.even * value).sum().backward()
    gradient = optimizer.shards[0].gradient
    return {"dtype": str(gradient.dtype), "sum": float(gradient[0, 0])}


def reduce_with_late_ranks(processes, folder):
    """Reduce six micro-batches over five modules, with collectives and copies and delays."""
    found = []
    group = processes.shard_group
    by_nccl = NcclReduceScatter(
        group, None, torch.bfloat16, accumulate.IMPLEMENTATIONS["reference"]
    )
    for make in (
        lambda modules: by_nccl,
        partial(copy_engines, folder, 0.02, torch.bfloat16, group),
    ):
        modules = [Weights(["even", "ragged"]) for _ in range(5)]
        optimizer = zero(modules, processes, make)
        random_numbers = torch.Generator().manual_seed(processes.rank)
        for micro_batch in range(6):
            if micro_batch == 3:
                optimizer.finish_reduction()
            # Whose means are exact in bf16.
            values = torch.randint(-8, 9, (len(modules),), generator=random_numbers)
            sum(
                (parameter * value).sum()
                for module, value in zip(modules, values, strict=True)
                for parameter in module.parameters()
            ).backward()
        optimizer.finish_reduction()
        found.append([shard.gradient.tolist() for shard in optimizer.shards])
    return found


def test_copies_are_summed_as_they_were_sent_however_late_a_rank_is(tmp_path):
    """A buffer overwritten too early, or a copy in another rank's place, would change the sum."""
    for by_collectives, by_copies in call_on_ranks(4, "test_zero:reduce_with_late_ranks", tmp_path):
        assert by_collectives == by_copies


def embedding_gradients(processes, folder):
    """Return the gradients of two micro-batches, by rows and dense."""
    found = []
    for sparse in (True, False):
        module = torch.nn.Embedding(11, 3, sparse=sparse, dtype=torch.bfloat16)
        make = partial(make_reduce_scatter, "nccl", processes, torch.float32, "reference")
        optimizer = ZeroOptimizer([module], processes, MAKE_RULE, "reference", make)
        optimizer.set_weight(module.weight, torch.zeros(11, 3))
        optimizer.gather()
        random_numbers = torch.Generator().manual_seed(processes.rank)
        for _ in range(2):
            ids = torch.randint(11, (2, 8), generator=random_numbers)
            # Whose sums are exact in bf16, to which a dense gradient is rounded.
            (
                module(ids) * torch.randint(-4, 5, (2, 8, 3), generator=random_numbers)
            ).sum().backward()
            assert module.weight.grad is None
        optimizer.finish_reduction()
        found.append(optimizer.shards[0].gradient.tolist())
    return found


def test_an_embeddings_gradient_by_rows_is_the_dense_one(tmp_path):
    ranks = call_on_ranks(2, "test_zero:embedding_gradients", tmp_path)
    for by_rows, dense in ranks:
        assert by_rows == dense
    assert ranks[0][1] != ranks[1][1]


# --- the contract ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_weight_that_was_never_set_is_refused(processes):
    module = Weights(["even", "ragged"])
    optimizer = ZeroOptimizer(
        [module],
        processes,
        MAKE_RULE,
        "reference",
        partial(make_reduce_scatter, "nccl", processes, torch.float32, "reference"),
    )
    with torch.no_grad():
        module.even.normal_()  # past the optimizer: the master would not have it
    optimizer.set_weight(module.ragged, full("ragged", 1))
    with pytest.raises(RuntimeError, match="1 of 2 weights"):
        optimizer.gather()


def test_a_second_optimizer_on_the_same_weights_is_refused(processes):
    module = Weights(["even"])
    zero([module], processes)
    with pytest.raises(ValueError, match="another optimizer"):
        ReplicatedOptimizer(module.parameters(), processes, MAKE_RULE)


@pytest.mark.quick
def test_the_model_reads_the_trained_weights(processes):
    module = Weights(["even"])
    optimizer = zero([module], processes)
    before = module.even.detach().clone()
    module(1.0).backward()
    optimizer.step(LEARNING_RATE)
    assert not torch.equal(module.even, before) and torch.equal(
        module.even, optimizer.weights[0].bfloat16()
    )


def test_memory_is_freed_once_nothing_refers_to_the_model(processes):
    """Although torch keeps the hooks of parameters where the garbage collector does not look."""
    module = Weights(["even", "ragged"])
    optimizer = zero([module], processes)
    module(1.0).backward()
    optimizer.step(LEARNING_RATE)
    module(1.0).backward()
    held = [
        *module.parameters(),
        *optimizer.weights,
        *(shard.gradient for shard in optimizer.shards),
    ]
    gone = [weakref.ref(tensor) for tensor in held]
    del module, optimizer, held
    gc.collect()
    assert len(gone) == 6 and not any(reference() is not None for reference in gone)


WRONG_WAYS = [
    {"gpu": "CPU", "gpus_per_node": 2},
    {"gpu": "H200", "gpus_per_node": 2, "nodes": 2},
    {"gpu": "H200"},
]


@pytest.mark.parametrize("changes", WRONG_WAYS, ids=str)
def test_copy_engines_where_there_are_none_are_refused(changes):
    with pytest.raises(ConfigError, match="copy_engine"):
        run_config(reduce_scatter="copy_engine", global_batch_size=8, micro_batch_size=1, **changes)
