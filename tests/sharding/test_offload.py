"""Offloaded activations come back unchanged in any order of the copies that the events allow."""

import random
from unittest import mock

import pytest
import torch
from simulated_streams import ORDERS, SimulatedStreams

from common.config import load
from common.errors import ConfigError
from common.estimate.memory import host_bytes, memory_peak, offloaded_layers
from common.estimate.workload import benchmark_workload
from common.paths import ROOT
from common.sharding import activation_offload as offload
from common.sharding.activation_offload import ActivationOffloader, layers_to_offload
from llama2_70b_lora.rules import Config

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def offloader_of(depth, streams=None, size=4):
    offloader = ActivationOffloader(depth, (size,), torch.uint8, CPU)
    offloader.stream = streams or offloader.stream
    return offloader


class Memory:
    """Device memory that, as torch's allocator, reuses freed tensors in the order of launches."""

    def __init__(self):
        self.free, self.pieces = [], 0

    def allocate(self):
        self.pieces += not self.free
        return self.free.pop() if self.free else torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_overwritten_before_it_is_copied_or_read_before_it_is_back(order, monkeypatch):
    """Two micro-batches of five layers reuse memory as soon as the offloader frees it."""
    streams, memory, seen = SimulatedStreams(), Memory(), []
    offloader = offloader_of(5, streams)
    monkeypatch.setattr(offload.torch, "empty_like", lambda like, device: memory.allocate())

    def holds():
        return [pair[0] for pair in (offloader.outgoing, offloader.incoming) if pair is not None]

    def free_of(before, *kept):
        """Release the memory that the offloader has freed, so that it may be allocated again."""
        memory.free += [x for x in before if all(x is not other for other in (*holds(), *kept))]

    for micro_batch in range(2):
        offloader.start_pass()
        for layer in range(5):
            x, before = memory.allocate(), holds()
            streams.compute(lambda x=x, value=10 * micro_batch + layer: x.fill_(value))
            offloader.offload(x)
            free_of(before)
        for layer in reversed(range(5)):
            before = holds()
            x = offloader.reload()
            free_of(before, x)
            streams.compute(
                lambda x=x, value=10 * micro_batch + layer: seen.append(x.tolist() == [value] * 4)
            )
            memory.free.append(x)
    streams.execute(ORDERS[order])
    assert seen == [True] * 10
    assert memory.pieces == 3, "one more than the two that are on their way: not one per layer"


def test_reloads_are_last_in_first_out_and_a_new_pass_drops_leftovers():
    offloader = offloader_of(3)
    for value in range(3):
        offloader.offload(torch.full((4,), value, dtype=torch.uint8))
    assert [int(offloader.reload()[0]) for _ in range(3)] == [2, 1, 0]
    with pytest.raises(RuntimeError, match="matching offload"):
        offloader.reload()
    for _ in range(3):
        offloader.offload(torch.full((4,), 7, dtype=torch.uint8))
    offloader.prefetch()
    offloader.start_pass()  # a forward whose backward never came
    offloader.offload(torch.full((4,), 8, dtype=torch.uint8))
    assert int(offloader.reload()[0]) == 8 and offloader.height == 0


def test_too_little_host_memory_is_a_config_error():
    full = mock.patch.object(
        offload.torch, "empty", side_effect=RuntimeError("CUDA error: out of memory\nmore")
    )
    with full, pytest.raises(ConfigError, match=r"17\.5 GiB") as error:
        ActivationOffloader(40, (8192, 57344), torch.float8_e4m3fn, CPU)
    assert (
        error.value.why == "CUDA error: out of memory" and "offload_layers lower" in error.value.do
    )


@pytest.mark.parametrize(
    ("count", "num_layers", "expected"),
    [(4, 9, {0, 2, 4, 6}), (3, 6, {0, 1, 3}), (9, 3, {0, 1}), (2, 1, set()), (0, 9, set())],
)
def test_layers_are_spaced_evenly_and_the_last_one_stays(count, num_layers, expected):
    assert layers_to_offload(count, num_layers) == expected


@pytest.mark.parametrize("count", random.Random(0).sample(range(1, 90), 20))
def test_as_many_layers_as_asked_for_and_as_the_plan_counts(count):
    config = load(
        ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": str(count)}
    )
    found = layers_to_offload(count, 80)
    assert (
        len(found)
        == offloaded_layers(config, benchmark_workload("llama2_70b_lora", config))
        == min(count, 79)
    )
    assert all(0 <= layer < 79 for layer in found)


def test_offloading_takes_from_the_gpu_what_it_puts_on_the_host():
    config = load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": "0"})
    work = benchmark_workload("llama2_70b_lora", config)
    more = load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": "40"})
    layer = 8192 * 2 * 28672
    assert memory_peak(config, work).allocated - memory_peak(more, work).allocated == 39 * layer, (
        "one is on its way"
    )
    assert host_bytes(more, work) == 40 * 2**29 > 40 * layer and host_bytes(config, work) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_bytes_come_back_though_their_memory_is_used_again():
    device, shape = torch.device("cuda", torch.cuda.current_device()), (64, 1 << 20)
    offloader = ActivationOffloader(6, shape, torch.uint8, device)
    differ = torch.zeros((), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        offloader.start_pass()
        sums = []
        for _ in range(6):
            x = torch.randint(256, shape, dtype=torch.uint8, device=device)
            sums.append(x.view(torch.int64).sum())
            offloader.offload(x)
            del x
            torch.full(shape, 1, dtype=torch.uint8, device=device)  # into whatever is free
        for expected in reversed(sums):
            x = offloader.reload()
            torch.full(shape, 2, dtype=torch.uint8, device=device)
            differ += x.view(torch.int64).sum() != expected
            del x
    assert differ.item() == 0
    assert torch.cuda.max_memory_allocated() - before < 4.1 * 64 * 2**20
