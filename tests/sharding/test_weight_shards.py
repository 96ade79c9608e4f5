"""Weights whole for computing, masters in shards: against plain tensors, on one rank, two, and two nodes of one; FSDP2 is the other way.

That two ranks train as one process does, and as FSDP2 does to the bit, is in test_loop.py; several nodes are in test_two_nodes.py.
"""

import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compiling import TARGETS, check_compiles, run_in_interpreter
from tiny import TINY, call_on_ranks, run_config
from torch.distributed.device_mesh import init_device_mesh

from common.errors import ConfigError
from common.kernels import accumulate
from common.kernels.attention import attention_backends
from common.model.shapes import LLAMA31_8B
from common.sharding.reduce_scatter import ByMail
from common.sharding.zero import WeightShards
from common.training.loop import Batching, train_step
from common.training.session import synthetic_batches
from llama31_8b.train import build
from plan.estimate import Workload, state_bytes

ROWS = {"even": 6, "ragged": 5, "single": 1}  # the ranks are two


class Weights(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.empty(ROWS[name], 3, dtype=torch.bfloat16)))

    def forward(self, scale):
        return sum((parameter.float() * scale).square().sum() for parameter in self.parameters())


def full(name, seed):
    return torch.randn(ROWS[name], 3, generator=torch.Generator().manual_seed(seed + ROWS[name]))


class FileBoxes:
    """peer_memory.Mailboxes on a CPU: a file per rank, which all ranks map. A rank comes to a barrier when it likes."""

    def __init__(self, folder, seconds, group, num_bytes, device):
        self.rank, self.ranks, self.group, self.seconds = group.rank(), group.size(), group, seconds
        mapped = partial(torch.from_file, shared=True, size=2 * num_bytes, dtype=torch.uint8)
        self.slots_of = [mapped(str(folder / f"{rank}.mail")).view(2, num_bytes) for rank in range(self.ranks)]

    def barrier(self):
        time.sleep(random.Random().uniform(0, self.seconds))
        dist.barrier(self.group)
        time.sleep(random.Random().uniform(0, self.seconds))


def on_two_ranks(processes, folder):
    """fill, gather, two micro-batches of a backward that differ by rank, a change of the masters, gather."""
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    ways = {"one node": (one, None), "two nodes": (two, None), "by mail": (one, partial(FileBoxes, folder, 0.0))}
    found = {}
    for name, (mesh, mailboxes) in ways.items():
        modules = [Weights(["even", "ragged"]), Weights(["single"])]
        shards = WeightShards(modules, mesh, torch.float32, "reference", mailboxes)
        named = {name: parameter for module in modules for name, parameter in module.named_parameters()}
        for key, parameter in named.items():
            shards.fill(parameter, full(key, 1))
        shards.gather()
        filled = {key: parameter.detach().clone() for key, parameter in named.items()}
        for micro_batch in (1.0, 2.0):
            sum(module(micro_batch + processes.rank) for module in modules).backward()
            assert all(parameter.grad is None for parameter in named.values()), "a whole gradient was kept"
        shards.backward_done()
        gradients = {key: shards.by_parameter[parameter].master.grad.clone() for key, parameter in named.items()}
        with torch.no_grad():
            for master in shards.masters:
                master.sub_(0.1 * master.grad)
        shards.gather()
        stepped = {key: parameter.detach().clone() for key, parameter in named.items()}
        masters = {key: shards.by_parameter[parameter].master.detach().clone() for key, parameter in named.items()}
        found[name] = {"filled": filled, "gradients": gradients, "stepped": stepped, "masters": masters}
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return call_on_ranks(2, "test_weight_shards:on_two_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("nodes", ["one node", "two nodes", "by mail"])
@pytest.mark.parametrize("name", ROWS)
def test_masters_take_the_mean_gradient_and_every_rank_gets_every_row(two_ranks, nodes, name):
    start = full(name, 1)
    scales = [[1.0, 2.0], [2.0, 3.0]]  # by rank: of its two micro-batches
    weight = start.bfloat16().float()
    # Each rank's gradients are bf16, as the weight is; the mean of them is not rounded again, nor is the sum over the micro-batches.
    gradient = sum(
        ((2 * weight * a * a).bfloat16().float() + (2 * weight * b * b).bfloat16().float()) / 2 for a, b in zip(*scales, strict=True)
    )
    expected = start - 0.1 * gradient
    pieces = [rank[nodes] for rank in two_ranks]
    for rank in pieces:
        assert torch.equal(rank["filled"][name], start.bfloat16()) and torch.equal(rank["stepped"][name], expected.bfloat16())
    if nodes == "two nodes":  # a node's only rank has all rows
        for rank in pieces:
            assert torch.equal(rank["gradients"][name], gradient) and torch.equal(rank["masters"][name], expected)
        return
    both = {key: torch.cat([rank[key][name] for rank in pieces]) for key in ("gradients", "masters")}
    rows = ROWS[name]
    assert torch.equal(both["gradients"][:rows], gradient) and torch.equal(both["masters"][:rows], expected)
    assert len(both["masters"]) == -(-rows // 2) * 2 and not both["masters"][rows:].any(), "rows that were added stay zero"


def test_reducing_in_bf16_rounds_the_mean_and_adds_up_in_fp32(tmp_path):
    for rank in call_on_ranks(2, "test_weight_shards:reduce_in_bf16", tmp_path):
        assert rank["dtype"] == "torch.float32" and rank["sum"] == 1.0 + 2.0**-9, "added up in bf16 it would be 1.0"


def reduce_in_bf16(processes, folder):
    module = Weights(["even"])
    shards = WeightShards([module], processes.mesh, torch.bfloat16, "reference")
    for value in (1.0, 2.0**-9):
        (module.even * value).sum().backward()
    gradient = shards.masters[0].grad
    return {"dtype": str(gradient.dtype), "sum": float(gradient[0, 0])}


def reduce_at_leisure(processes, folder):
    """Six micro-batches over five modules, by collectives and by mail, the ranks now and then late."""
    found = []
    for mailboxes in (None, partial(FileBoxes, folder, 0.02)):
        modules = [Weights(["even", "ragged"]) for _ in range(5)]
        shards = WeightShards(modules, processes.mesh, torch.bfloat16, "reference", mailboxes)
        random_numbers = torch.Generator().manual_seed(processes.rank)
        for micro_batch in range(6):
            if micro_batch == 3:
                shards.backward_done()
            values = torch.randint(-8, 9, (len(modules),), generator=random_numbers)  # whose means are exact in bf16
            sum(
                (parameter * value).sum() for module, value in zip(modules, values, strict=True) for parameter in module.parameters()
            ).backward()
        shards.backward_done()
        found.append([master.grad.tolist() for master in shards.masters])
    return found


def test_mail_that_is_opened_late_is_the_mail_that_was_sent(tmp_path):
    """A slot written to again too early would change what is read from it; so would mail in another rank's place, of which two have but one."""
    for by_collectives, by_mail in call_on_ranks(4, "test_weight_shards:reduce_at_leisure", tmp_path):
        assert by_collectives == by_mail


WRONG_WAYS = [
    {"gpus_per_node": 1},
    {"gpus_per_node": 2, "nodes": 2},
    {"gpus_per_node": 2, "reshard_after_forward": True},
    {"gpus_per_node": 2, "compile": True},
]


@pytest.mark.parametrize("changes", WRONG_WAYS, ids=str)
def test_copy_engines_where_they_carry_nothing_are_refused(changes):
    with pytest.raises(ConfigError, match="transport = 'copy_engine' cannot be used"):
        run_config(transport="copy_engine", global_batch_size=8, **changes)


def test_mailboxes_are_in_the_plan():
    """On 4 GPUs, each two slots of three quarters of the embedding's gradient in bf16: 2 x 3 / 4 x 128,256 x 4,096 x 2."""
    config = run_config(gpus_per_node=4, global_batch_size=16, transport="copy_engine", reduce_precision="bf16")
    assert state_bytes(config, Workload(LLAMA31_8B, 8192, 1024, 12288, 10**6))["mailboxes"] == 1_576_009_728
    masters = [torch.nn.Parameter(torch.empty(LLAMA31_8B.vocab_size // 4, LLAMA31_8B.hidden_size, device="meta"))]
    assert 2 * ByMail.num_bytes(masters, 4, torch.bfloat16) == 1_576_009_728


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_accumulating_compiles_for(target):
    types = {"total_ptr": "*fp32", "part_ptr": "*bf16", "size": "i32"}
    for first in (True, False):
        for others in (0, 1, 7):
            constants = {"OTHERS": others, "FIRST": first, "BLOCK": accumulate.BLOCK} | ({} if others else {"others_ptr": None})
            read = types | ({"others_ptr": "*bf16"} if others else {})
            check_compiles(target, accumulate._accumulate_kernel, read, constants, accumulate.NUM_WARPS)


INTERPRETED = """
import torch
from common.kernels.accumulate import accumulate_reference, accumulate_triton
for size, dtype in ((5000, torch.float16), (8192, torch.bfloat16), (7, torch.float32), (1, torch.float32)):
    ours = theirs = None
    for others in (0, 0, 0, 1, 3):
        part = torch.randn(size).to(dtype)
        more = torch.randn(others, size).to(dtype) if others else None
        ours, theirs = accumulate_triton(ours, part, more), accumulate_reference(theirs, part.clone(), more)
        same = torch.equal(ours, theirs) if others < 3 else torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)  # 3 add up in another order
        assert same and ours.dtype == torch.float32, (size, dtype, others)
print("agreed")
"""


def test_accumulating_in_the_interpreter():
    run_in_interpreter(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(14336, 4096), (4097,)])
def test_accumulating_on_a_gpu(shape):
    parts = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    ours = theirs = None
    for part in parts:
        ours, theirs = accumulate.accumulate_triton(ours, part), accumulate.accumulate_reference(theirs, part)
    assert torch.equal(ours, theirs)
    for others in (1, 3):
        more = torch.randn(others, *shape, device="cuda").bfloat16()
        ours, theirs = accumulate.accumulate_triton(ours, parts[0], more), accumulate.accumulate_reference(theirs, parts[0], more)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def train_both_ways(processes, folder):
    """Losses of a small model in bf16 by WeightShards, with collectives and with copy engines, and by FSDP2."""
    rules = replace(TINY, shape=replace(TINY.shape, hidden_size=256, ffn_hidden_size=512, vocab_size=509), sequence_length=128)
    losses = {}
    for reshard, transport in ((False, "nccl"), (False, "copy_engine"), (True, "nccl")):
        fused = {"precision": "bf16", "kernels": "triton", "fused_blocks": True}
        config = run_config(gpus_per_node=2, micro_batch_size=2, reshard_after_forward=reshard, transport=transport, **fused)
        with attention_backends("cuda"):
            model, optimizer = build(config, rules, processes, seed=1)
            assert (model.weight_shards is None) == reshard
            source = synthetic_batches(rules.shape.vocab_size, rules.sequence_length, processes, 2)
            steps = [train_step(model, optimizer, source, Batching(8, 2, reshard), 1e-3, 2, lambda phase: None) for _ in range(20)]
        losses[transport, reshard] = [processes.sum(loss.clone()).item() for loss, _ in steps]
    return list(losses.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus_it_trains_as_fsdp_does(tmp_path):
    """A race between the streams would not show on a CPU. bf16 rounds by 2^-9; twenty steps of learning four batches amplify that."""
    ours, by_mail, fsdp = call_on_ranks(2, "test_weight_shards:train_both_ways", tmp_path, timeout_s=300, device="cuda")[0]
    assert ours == pytest.approx(fsdp, rel=2e-3) and ours[-1] < 0.95 * ours[0]
    assert by_mail == pytest.approx(ours, rel=2e-3)
