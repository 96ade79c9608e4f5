"""Test symmetric memory: mapped buffers, no multicast, and an error without peer access."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric

from common.errors import ConfigError
from common.sharding.symmetric_memory import SymmetricBuffers, ring_order

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
GROUP = mock.Mock(size=lambda: 3, rank=lambda: 1)


def allocate(*shape, dtype, device):
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    return torch.zeros(shape, dtype=dtype)


def test_the_buffers_of_all_ranks_are_mapped_without_multicast(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    memory = torch.arange(3 * 2 * 8, dtype=torch.uint8).view(3, 2, 8)

    def get_buffer(rank, shape, dtype):
        assert tuple(shape) == (2, 8) and dtype == torch.uint8
        return memory[rank]

    handle = mock.Mock(get_buffer=get_buffer)
    monkeypatch.setattr(symmetric, "empty", allocate)
    monkeypatch.setattr(symmetric, "rendezvous", lambda own, group: handle)
    buffers = SymmetricBuffers(GROUP, CPU, 2, 8)
    assert (buffers.rank, buffers.ranks) == (1, 3) and sorted(buffers.buffers) == [0, 1, 2]
    assert all(torch.equal(buffers.buffers[rank], memory[rank]) for rank in range(3))
    buffers.barrier()
    assert handle.barrier.call_count == 1


def test_ring_order_starts_with_the_next_rank():
    assert [ring_order(rank, 3) for rank in range(3)] == [[1, 2], [2, 0], [0, 1]] and ring_order(
        0, 1
    ) == []


def test_gpus_that_cannot_access_each_other_are_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(symmetric, "empty", allocate)
    monkeypatch.setattr(
        symmetric, "rendezvous", mock.Mock(side_effect=RuntimeError("no peer access\nmore"))
    )
    with pytest.raises(ConfigError, match="copy_engine") as refused:
        SymmetricBuffers(GROUP, CPU, 2, 8)
    assert (
        "no peer access" in refused.value.why
        and "more" not in refused.value.why
        and "nccl" in refused.value.do
    )


def test_a_peer_that_is_lost_during_the_rendezvous_is_not_missing_peer_access(monkeypatch):
    lost = mock.Mock(side_effect=torch.distributed.DistNetworkError("Broken pipe"))
    monkeypatch.setattr(symmetric, "empty", allocate)
    monkeypatch.setattr(symmetric, "rendezvous", lost)
    with pytest.raises(torch.distributed.DistNetworkError):
        SymmetricBuffers(GROUP, CPU, 2, 8)


def test_a_cpu_has_no_copy_engines():
    with pytest.raises(ConfigError, match="copy_engine"):
        SymmetricBuffers(GROUP, CPU, 2, 8)
