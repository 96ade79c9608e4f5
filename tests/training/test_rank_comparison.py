"""Test that a slow rank is named: on lists, over two ranks, in the loop, and with block times."""

import io
import json
import random

import pytest
import torch
from ranks import call_on_ranks
from torch import nn

from common.training.metrics import Events, ProgressLog
from common.training.rank_comparison import (
    COMPARISONS,
    ForwardTimes,
    RankComparison,
    describe,
    make_rank_comparison,
    over_median,
    slow_ranks,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("times_ms", "slow"),
    [
        ([1.0] * 8, []),
        ([1.0] * 7 + [1.019], []),
        ([1.0] * 7 + [1.021], [7]),
        ([1.0, 1.2, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0], [1, 4]),
        ([1.0] * 7 + [0.5], []),  # a fast one is no trouble
        ([1.0, 1.2], [1]),  # of two the faster one is the measure
        ([1.2, 1.0], [0]),
        ([1.0, 1.0, 1.2, 1.2], [2, 3]),
        ([1.0], []),
    ],
)
def test_slow_ranks_are_named_after_enough_comparisons(times_ms, slow):
    assert (
        slow_ranks([over_median(times_ms)] * COMPARISONS) == slow
        and slow_ranks([over_median(times_ms)] * (COMPARISONS - 1)) == []
    )


def test_a_slowdown_of_three_percent_is_seen_within_five_comparisons():
    """Ranks differ by 1 % with the noise of two H200s. Later the rank recovers."""
    noise = random.Random(0)

    def look(late: float) -> list[float]:
        return over_median(
            [speed * noise.gauss(1.0, 0.0025) for speed in (1.0, 1.01, 1.01, 1.01 * (1 + late))]
        )

    history = [look(0.0) for _ in range(400)]
    assert [slow_ranks(history[:count]) for count in range(1, 401)] == [[]] * 400
    said = []
    for _ in range(COMPARISONS):
        history.append(look(0.03))
        said.append(slow_ranks(history))
    assert said[0] == [] and said[-1] == [3]
    assert slow_ranks([*history, *(look(0.0) for _ in range(COMPARISONS))]) == []


class EightRanks:
    """Rank 0 of eight; the others' times arrive in the sum."""

    rank, world_size, device = 0, 8, torch.device("cpu")
    others = (0.0, 0.2, 0.2, 0.26, 0.2, 0.2, 0.2, 0.2)

    def sum(self, tensor):
        return tensor.add_(torch.tensor(self.others, dtype=torch.float64))


def test_the_slow_rank_of_eight_is_named_on_screen_and_in_the_events(tmp_path):
    screen = io.StringIO()
    ranks = RankComparison(
        EightRanks(), Events(tmp_path / "events.jsonl"), ProgressLog(True, screen), lambda: 0.2
    )
    assert [ranks.compare(step=5, samples=80, time_s=1.5) for _ in range(COMPARISONS)] == [[]] * (
        COMPARISONS - 1
    ) + [[3]]
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert event == {
        "event": "ranks",
        "step": 5,
        "samples": 80,
        "time_s": 1.5,
        "block_ms": [0.2, *EightRanks.others[1:]],
        "slow": [3],
    }
    (line,) = screen.getvalue().splitlines()
    assert line.startswith("SLOW: rank 3 ") and "30.0%" in line


def test_equal_ranks_are_recorded_and_not_shown(tmp_path):
    equal, screen = EightRanks(), io.StringIO()
    equal.others = (0.0, *[0.2] * 7)
    ranks = RankComparison(
        equal, Events(tmp_path / "events.jsonl"), ProgressLog(True, screen), lambda: 0.2
    )
    assert [ranks.compare(1, 8, 0.0) for _ in range(4)] == [[]] * 4 and screen.getvalue() == ""
    assert [
        json.loads(line)["slow"] for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ] == [[]] * 4


def test_a_single_slow_time_names_nobody_and_a_rank_that_recovers_is_named_no_more(tmp_path):
    """The mean of the last five counts; what is said on the screen is said once."""
    screen = io.StringIO()
    ranks = RankComparison(EightRanks(), Events(None), ProgressLog(True, screen), lambda: 0.2)
    said = []
    for ms in (0.2, 0.24, *[0.2] * 13, *[0.22] * 6, *[0.2] * 6):
        ranks.processes.others = (0.0, *[0.2] * 6, ms)
        said.append(ranks.compare(1, 8, 0.0))
    assert said == [[]] * 17 + [[7]] * 6 + [[]] * 4 and screen.getvalue().count("SLOW") == 1


def test_a_rank_near_the_limit_is_shown_once(tmp_path):
    """The noise is that of two H200s in a run of the 8B."""
    noise = random.Random(0)
    screen = io.StringIO()
    ranks = RankComparison(EightRanks(), Events(None), ProgressLog(True, screen), lambda: 0.2)
    below_limit = 0
    for _ in range(400):
        ranks.processes.others = (0.0, *[0.2] * 6, 0.2 * noise.gauss(1.02, 0.0025))
        ranks.compare(1, 8, 0.0)
        below_limit += slow_ranks(ranks.history) == []
    assert below_limit > 100
    assert screen.getvalue().count("SLOW") == 1


def test_a_slow_rank_that_recovered_is_shown_again(tmp_path):
    screen = io.StringIO()
    ranks = RankComparison(EightRanks(), Events(None), ProgressLog(True, screen), lambda: 0.2)
    for ms in (*[0.21] * 6, *[0.201] * 6, *[0.21] * 6):
        ranks.processes.others = (0.0, *[0.2] * 6, ms)
        ranks.compare(1, 8, 0.0)
    assert screen.getvalue().count("SLOW") == 2


def test_two_slow_ranks_are_both_named():
    assert "rank 1 takes 50.0% longer, rank 2 takes 25.0% longer" in describe(
        [1.0, 1.5, 1.25, 1.0, 1.0], [1, 2]
    )


def on_a_rank(processes, folder):
    """For two gloo ranks: rank 1 takes a third longer."""
    events = Events(folder / "events.jsonl" if processes.rank == 0 else None)
    ranks = RankComparison(
        processes, events, ProgressLog(False), lambda: 0.3 * (1 + processes.rank / 3)
    )
    return {
        "slow": [ranks.compare(1, 8, 0.0) for _ in range(COMPARISONS)][-1],
        "on_cpu": make_rank_comparison(processes, events, ProgressLog(False), nn.Identity())
        is None,
    }


def test_two_ranks_exchange_their_times_and_agree(tmp_path):
    assert (
        call_on_ranks(2, "test_rank_comparison:on_a_rank", tmp_path)
        == [{"slow": [1], "on_cpu": True}] * 2
    )
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])[
        "block_ms"
    ] == pytest.approx([0.3, 0.4])


def test_a_run_compares_its_ranks_whenever_it_logs(tmp_path, tiny_data, processes, monkeypatch):
    """The real loop, with a probe that a CPU can run."""
    from tiny import run

    def with_a_fake_probe(processes, events, progress, model):
        assert len(model.blocks) > 0
        return RankComparison(processes, events, progress, lambda: 0.2)

    monkeypatch.setattr("common.training.timed_run.make_rank_comparison", with_a_fake_probe)
    run(tmp_path / "run", tiny_data)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    compared = [event["samples"] for event in events if event["event"] == "ranks"]
    assert (
        compared == [event["samples"] for event in events if "tokens_per_s_per_gpu" in event]
        and len(compared) > 2
    )


class FakeEvent:
    """Replacement of torch.cuda.Event. Its clock is in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


class Block(nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.ms = ms

    def forward(self, x):
        FakeEvent.now += self.ms
        return x


def test_the_time_of_a_block_is_that_of_its_training_forward_after_its_weights_are_there(
    monkeypatch,
):
    """The wait for weights and evaluations are not timed, and each call starts anew."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    blocks = [Block(ms) for ms in (4.0, 6.0)]

    def waits(module, args):
        FakeEvent.now += 100.0

    for block in blocks:
        block.register_forward_pre_hook(waits)
    times = ForwardTimes(blocks)
    x = torch.zeros(1)
    for block in [*blocks, *blocks]:
        block(x)
    assert times.mean_ms() == 5.0
    with torch.no_grad():
        blocks[1](x)
    blocks[0](x)
    assert times.mean_ms() == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_times_of_blocks_on_a_gpu_add_up_and_leave_the_generators():
    device = torch.device("cuda", 0)
    blocks = [nn.Linear(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(8)]
    times, x = ForwardTimes(blocks), torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    before = torch.cuda.get_rng_state(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        if timed:
            times.mean_ms()
            begin.record()
        for block in blocks * 8:
            x = block(x)
        end.record()
    one = times.mean_ms()
    assert torch.equal(before, torch.cuda.get_rng_state(device))
    whole = begin.elapsed_time(end) / 64
    assert 0 < one <= whole, "a block takes no longer than its share of all of them"
