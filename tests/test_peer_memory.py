"""Gathers and reductions by pulling: FSDP on two ranks whose "peer memory" is a file that both map, against gloo's collectives."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiling import TARGETS, check_compiles, run_in_interpreter
from tiny import call_on_ranks, run, run_config, start_ranks, write_data

from common import peer_memory
from common.distributed import start_processes
from common.errors import ConfigError
from common.kernels import mean
from common.peer_memory import PulledAllGather, PulledReduceScatter, Turns

SIZE = 1 << 18


class FilePeers:
    """Two ranks, two turns: files of SIZE bytes in $PEERS."""

    made = 0

    def __init__(self, group):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        FilePeers.made += 1
        folder, name = Path(os.environ["PEERS"]), FilePeers.made
        self.buffers = [
            [
                torch.from_file(str(folder / f"{name}_{turn}_{peer}"), shared=True, size=SIZE, dtype=torch.uint8)
                for peer in range(self.ranks)
            ]
            for turn in range(2)
        ]

    def reserve(self, num_bytes):
        assert num_bytes <= SIZE

    def of(self, turn, peer):
        return self.buffers[turn][peer]

    def barrier(self, turn):
        dist.barrier(self.group)


def on_two_ranks(processes, folder):
    os.environ["PEERS"] = str(folder)
    results = {}
    for name, changes in WAYS.items():
        for gather in ("nccl", "copy_engine"):
            with mock.patch("common.parallel.SymmetricPeers", FilePeers):
                one = folder / f"{name}_{gather}_{processes.rank}"
                results[f"{name} {gather}"] = asdict(run(one, folder / "data", gpus_per_node=2, gather=gather, **changes))
    return {"results": results, "made": FilePeers.made}


WAYS = {"plain": {"micro_batch_size": 2}, "reshard": {"micro_batch_size": 2, "reshard_after_forward": True}}


def test_training_by_pulling_is_training_by_collectives(tmp_path):
    write_data(tmp_path / "data")
    found = call_on_ranks(2, "test_peer_memory:on_two_ranks", tmp_path)[0]
    assert found["made"] == 2 * len(WAYS), "one pair of buffers for gathers, one for reductions"
    for name in WAYS:
        usual, pulled = (found["results"][f"{name} {gather}"] for gather in ("nccl", "copy_engine"))
        assert len(usual["losses"]) > 3 and usual["losses"] == pytest.approx(pulled["losses"], rel=1e-6)
        assert usual["norms"] == pytest.approx(pulled["norms"], rel=1e-5)
        assert [loss for _, loss in usual["evaluations"]] == pytest.approx([loss for _, loss in pulled["evaluations"]], rel=1e-6)


class OneProcess:
    """Three ranks' buffers in this process; what is asked of them is noted."""

    def __init__(self, rank, ranks=3):
        self.rank, self.ranks, self.notes = rank, ranks, []
        self.buffers = torch.zeros(2, ranks, 96, dtype=torch.uint8)

    def reserve(self, num_bytes):
        self.notes.append(num_bytes)

    def of(self, turn, peer):
        return self.buffers[turn, peer]

    def barrier(self, turn):
        self.notes.append(f"barrier {turn}")


def test_a_gather_brings_every_share_to_its_place():
    peers = OneProcess(rank=1)
    gather = PulledAllGather(peers)
    for turn in (1, 0, 1):
        out = gather.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        assert out.data_ptr() == peers.of(turn, 1).data_ptr(), "the buffers take turns"
        for peer in range(3):
            peers.of(turn, peer)[:24].view(torch.float32).view(3, 2)[peer] = torch.tensor([peer + 1.0, 10.0 * turn])
        gather(out, out.narrow(0, 2, 2), None)
        assert out.tolist() == [1, 10 * turn, 2, 10 * turn, 3, 10 * turn] and peers.notes == [24, f"barrier {turn}"]
        peers.notes.clear()


@pytest.mark.parametrize("op, expected", [(dist.ReduceOp.AVG, [2.0, 20.0]), (dist.ReduceOp.SUM, [6.0, 60.0])])
def test_a_reduction_takes_this_ranks_part_of_everyone(op, expected):
    peers = OneProcess(rank=2)
    reduce = PulledReduceScatter(peers, "reference")
    for _ in range(3):
        given = reduce.allocate((6,), dtype=torch.bfloat16, device=torch.device("cpu"))
        out = reduce.allocate((2,), dtype=torch.bfloat16, device=torch.device("cpu"))
        turn = reduce.turns.turn
        for peer in range(3):
            theirs = peers.of(turn, peer)[:12].view(torch.bfloat16).view(3, 2)
            theirs.fill_(99.0)
            theirs[2] = torch.tensor([peer + 1.0, 10.0 * (peer + 1)])
        reduce(out, given, None, op)
        assert out.tolist() == expected


def test_all_ranks_begin_with_another_peer():
    firsts = [Turns(OneProcess(rank, 4)).others() for rank in range(4)]
    assert [others[0] for others in firsts] == [1, 2, 3, 0] and all(sorted([*o, r]) == [0, 1, 2, 3] for r, o in enumerate(firsts))


def test_another_reduction_is_not_guessed():
    reduce = PulledReduceScatter(OneProcess(0), "reference")
    with pytest.raises(AssertionError, match="no such reduction"):
        reduce(torch.zeros(2), torch.zeros(6), None, dist.ReduceOp.MAX)


def test_a_torch_without_custom_collectives_is_refused():
    with pytest.raises(ConfigError, match="copy_engine"):
        peer_memory.pull_from_peers([object()], OneProcess(0), OneProcess(0), "reference")


def test_one_gpu_has_nothing_to_pull():
    with pytest.raises(ConfigError, match="gather"):
        run_config(gather="copy_engine")


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_the_mean_compiles_for(target):
    types = {"own_ptr": "*bf16", "pulled_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"}
    for rows in (1, 3, 7):
        check_compiles(target, mean._mean_of_ranks_kernel, types, {"ROWS": rows, "BLOCK": mean.BLOCK}, mean.NUM_WARPS)


INTERPRETED = """
import torch
from common.kernels.mean import mean_reference, mean_triton
for rows, size, dtype in ((3, 5000, torch.float32), (1, 100, torch.float16), (7, 2048, torch.float32)):
    own, pulled = torch.randn(size).to(dtype), torch.randn(rows, size).to(dtype)
    ours, theirs = torch.empty(size), torch.empty(size)
    mean_triton(own, pulled, ours)
    mean_reference(own, pulled, theirs)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (rows, size)
print("agreed")
"""


def test_the_mean_in_the_interpreter():
    run_in_interpreter(INTERPRETED)


def gathers_on_gpus(processes):
    """Both ways on real GPUs: two gathers and two reductions of changing contents, each compared with NCCL's."""
    group, device = processes.mesh.get_group(), processes.device
    gather, reduce = PulledAllGather(peer_memory.SymmetricPeers(group)), PulledReduceScatter(peer_memory.SymmetricPeers(group), "triton")
    agreed = True
    for turn in range(6):
        size = 1 << (16 + turn % 3)
        share = torch.randn(size, device=device).bfloat16()
        out = gather.allocate((size * processes.world_size,), dtype=torch.bfloat16, device=device)
        mine = out.narrow(0, processes.rank * size, size).copy_(share)
        gather(out, mine, group)
        expected = torch.empty_like(out)
        dist.all_gather_into_tensor(expected, share)
        agreed &= torch.equal(out, expected)
        given = reduce.allocate((size * processes.world_size,), dtype=torch.bfloat16, device=device)
        given.normal_()
        part = reduce.allocate((size,), dtype=torch.bfloat16, device=device)
        reduce(part, given, group, dist.ReduceOp.AVG)
        truth = given.float()
        dist.all_reduce(truth)
        truth = truth.view(processes.world_size, -1)[processes.rank] / processes.world_size
        agreed &= torch.equal(part, truth.bfloat16())
    return agreed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus_pulling_brings_what_nccl_brings(tmp_path):
    ranks = start_ranks(2, [str(Path(__file__)), str(tmp_path)])
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, stderr) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, stderr[-4000:]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["agreed", "agreed"]


if __name__ == "__main__":
    processes = start_processes("cuda", 120.0)
    (Path(sys.argv[1]) / str(processes.rank)).write_text("agreed" if gathers_on_gpus(processes) else "differed")
    dist.destroy_process_group()
