"""What waits in the host's memory comes back as it was, in any order of the copies, and a run with it is the same to the bit."""

import random
from unittest import mock

import pytest
import torch
from playing import HURRIES, TwoStreams
from tiny import ROOT

from common.config import load
from common.errors import ConfigError
from common.sharding import activation_offload as offload
from common.sharding.activation_offload import HostStack, spread
from llama2_70b_lora.rules import Config
from plan import estimate as plan
from plan.command import workload

CPU = torch.device("cpu")


def stack_of(depth, streams=None, size=4):
    stack = HostStack(depth, (size,), torch.uint8, CPU)
    stack.stream = streams or stack.stream
    return stack


class Memory:
    """Device memory as torch's allocator hands it out: what was let go of is given away again, in the order of the launches."""

    def __init__(self):
        self.free, self.pieces = [], 0

    def take(self):
        self.pieces += not self.free
        return self.free.pop() if self.free else torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize("hurry", HURRIES)
def test_nothing_is_overwritten_before_it_is_copied_or_read_before_it_is_back(hurry, monkeypatch):
    """Two micro-batches of five layers, whose memory is handed out again as soon as the stack lets go of it."""
    streams, memory, seen = TwoStreams(), Memory(), []
    stack = stack_of(5, streams)
    monkeypatch.setattr(offload.torch, "empty_like", lambda like, device: memory.take())

    def holds():
        return [pair[0] for pair in (stack.leaving, stack.coming) if pair is not None]

    def free_of(before, *kept):
        """What the stack held before, and holds no more, is free for the next who asks."""
        memory.free += [x for x in before if all(x is not other for other in (*holds(), *kept))]

    for micro_batch in range(2):
        stack.begin()
        for layer in range(5):
            x, before = memory.take(), holds()
            streams.compute(lambda x=x, value=10 * micro_batch + layer: x.fill_(value))
            stack.push(x)
            free_of(before)
        for layer in reversed(range(5)):
            before = holds()
            x = stack.pop()
            free_of(before, x)
            streams.compute(lambda x=x, value=10 * micro_batch + layer: seen.append(x.tolist() == [value] * 4))
            memory.free.append(x)
    streams.play(HURRIES[hurry])
    assert seen == [True] * 10
    assert memory.pieces == 3, "one more than the two that are on their way: not one per layer"


def test_last_in_first_out_and_what_was_left_is_forgotten():
    stack = stack_of(3)
    for value in range(3):
        stack.push(torch.full((4,), value, dtype=torch.uint8))
    assert [int(stack.pop()[0]) for _ in range(3)] == [2, 1, 0]
    with pytest.raises(RuntimeError, match="did not send"):
        stack.pop()
    for _ in range(3):
        stack.push(torch.full((4,), 7, dtype=torch.uint8))
    stack.fetch()
    stack.begin()  # a forward whose backward never came
    stack.push(torch.full((4,), 8, dtype=torch.uint8))
    assert int(stack.pop()[0]) == 8 and stack.height == 0


def test_memory_that_the_host_has_not_is_a_clear_error():
    full = mock.patch.object(offload.torch, "empty", side_effect=RuntimeError("CUDA error: out of memory\nmore"))
    with full, pytest.raises(ConfigError, match=r"offload_layers: 17.5 GiB of host memory per GPU cannot be had") as error:
        HostStack(40, (8192, 57344), torch.float8_e4m3fn, CPU)
    assert error.value.why == "CUDA error: out of memory" and "offload_layers lower" in error.value.do


@pytest.mark.parametrize(
    ("count", "first", "last", "expected"),
    [(4, 0, 8, {0, 2, 4, 6}), (3, 2, 7, {2, 3, 5}), (9, 3, 5, {3, 4}), (2, 5, 5, set()), (2, 6, 5, set()), (0, 0, 8, set())],
)
def test_layers_are_spread(count, first, last, expected):
    assert spread(count, first, last) == expected


@pytest.mark.parametrize("seed", range(20))
def test_as_many_layers_as_asked_for_and_as_the_plan_counts(seed):
    numbers = random.Random(seed)
    count, first, layers = numbers.randrange(1, 90), numbers.randrange(90), 80
    config = load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": str(count), "recompute_layers": str(first)})
    work = workload("llama2_70b_lora", config)
    found = spread(count, first, layers - 1)
    assert len(found) == plan.offloaded_layers(config, work) == max(0, min(count, 79 - first))
    assert all(first <= layer < 79 for layer in found)


def test_offloading_takes_from_the_gpu_what_it_puts_on_the_host():
    config = load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": "0", "recompute_layers": "0"})
    work = workload("llama2_70b_lora", config)
    more = load(ROOT / "configs/llama2_70b_lora/H200_1x1.toml", Config, {"offload_layers": "40", "recompute_layers": "0"})
    layer = 8192 * 2 * 28672
    assert plan.memory_peak(config, work).allocated - plan.memory_peak(more, work).allocated == 39 * layer, "one is on its way"
    assert plan.host_bytes(more, work) == 40 * 2**29 > 40 * layer and plan.host_bytes(config, work) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_bytes_come_back_though_their_memory_is_used_again():
    device, shape = torch.device("cuda", torch.cuda.current_device()), (64, 1 << 20)
    stack, differ = HostStack(6, shape, torch.uint8, device), torch.zeros((), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        stack.begin()
        sums = []
        for _ in range(6):
            x = torch.randint(256, shape, dtype=torch.uint8, device=device)
            sums.append(x.view(torch.int64).sum())
            stack.push(x)
            del x
            torch.full(shape, 1, dtype=torch.uint8, device=device)  # into whatever is free
        for expected in reversed(sums):
            x = stack.pop()
            torch.full(shape, 2, dtype=torch.uint8, device=device)
            differ += x.view(torch.int64).sum() != expected
            del x
    assert differ.item() == 0
    assert torch.cuda.max_memory_allocated() - before < 4.1 * 64 * 2**20
