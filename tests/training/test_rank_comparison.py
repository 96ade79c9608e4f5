"""A slow rank is named: the comparison on lists, over two real ranks, in a run's loop; the probe on a GPU."""

import io
import json

import pytest
import torch
from tiny import call_on_ranks

from common.training import rank_comparison as slow_rank
from common.training.metrics import Events, Progress
from common.training.rank_comparison import LOOKS, GemmProbe, RankComparison, compare_ranks, describe, over_median, slow_ranks, typical


@pytest.mark.parametrize(
    ("times_ms", "slow"),
    [
        ([1.0] * 8, []),
        ([1.0] * 7 + [1.049], []),
        ([1.0] * 7 + [1.051], [7]),
        ([1.0, 1.2, 1.0, 1.0, 1.1, 1.0, 1.0, 1.0], [1, 4]),
        ([1.0] * 7 + [0.5], []),  # a fast one is no trouble
        ([1.0, 1.2], [1]),  # of two the faster one is the measure
        ([1.2, 1.0], [0]),
        ([1.0, 1.0, 1.2, 1.2], [2, 3]),
        ([1.0], []),
    ],
)
def test_who_is_slow(times_ms, slow):
    assert slow_ranks(over_median(times_ms)) == slow


class EightRanks:
    """Rank 0 of eight; the others' times arrive in the sum."""

    rank, world_size, device = 0, 8, torch.device("cpu")
    others = (0.0, 0.2, 0.2, 0.26, 0.2, 0.2, 0.2, 0.2)

    def sum(self, tensor):
        return tensor.add_(torch.tensor(self.others, dtype=torch.float64))


def test_the_slow_one_of_eight_is_named_on_screen_and_in_the_events(tmp_path):
    screen = io.StringIO()
    ranks = RankComparison(EightRanks(), Events(tmp_path / "events.jsonl"), Progress(True, screen), lambda: 0.2)
    assert [ranks.compare(step=5, samples=80, time_s=1.5) for _ in range(LOOKS)] == [[]] * (LOOKS - 1) + [[3]]
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert event == {"event": "ranks", "step": 5, "samples": 80, "time_s": 1.5, "probe_ms": [0.2, *EightRanks.others[1:]], "slow": [3]}
    assert screen.getvalue().startswith("SLOW: rank 3 takes 30% longer than the median rank") and screen.getvalue().count("\n") == 1


def test_equal_ranks_are_recorded_and_not_shown(tmp_path):
    equal, screen = EightRanks(), io.StringIO()
    equal.others = (0.0, *[0.2] * 7)
    ranks = RankComparison(equal, Events(tmp_path / "events.jsonl"), Progress(True, screen), lambda: 0.2)
    assert [ranks.compare(1, 8, 0.0) for _ in range(4)] == [[]] * 4 and screen.getvalue() == ""
    assert [json.loads(line)["slow"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [[]] * 4


def test_a_single_slow_time_names_nobody_and_a_rank_that_recovers_is_named_no_more(tmp_path):
    """Of the last five comparisons the middle one counts."""
    ranks, times, said = (
        RankComparison(EightRanks(), Events(None), Progress(False), lambda: 0.2),
        (0.2, 0.3, 0.2, 0.2, 0.2, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2),
        [],
    )
    for ms in times:
        ranks.processes.others = (0.0, *[0.2] * 6, ms)
        said.append(ranks.compare(1, 8, 0.0))
    assert said == [[]] * 7 + [[7]] * 3 + [[]]


def test_two_slow_ones_are_both_named():
    assert "rank 1 takes 50% longer, rank 2 takes 25% longer" in describe([1.0, 1.5, 1.25, 1.0, 1.0], [1, 2])


def on_a_rank(processes, folder):
    """For two gloo ranks: rank 1 takes a third longer."""
    events = Events(folder / "events.jsonl" if processes.rank == 0 else None)
    ranks = RankComparison(processes, events, Progress(False), lambda: 0.3 * (1 + processes.rank / 3))
    return {
        "slow": [ranks.compare(1, 8, 0.0) for _ in range(LOOKS)][-1],
        "on_cpu": compare_ranks(processes, events, Progress(False)) is None,
    }


def test_two_ranks_exchange_their_times_and_agree(tmp_path):
    assert call_on_ranks(2, "test_rank_comparison:on_a_rank", tmp_path) == [{"slow": [1], "on_cpu": True}] * 2
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["probe_ms"] == pytest.approx([0.3, 0.4])


def test_a_run_compares_its_ranks_once_per_evaluation(tmp_path, tiny_data, processes, monkeypatch):
    """The real loop, with a probe that a CPU can run."""
    from tiny import TINY, run

    def with_a_fake_probe(processes, events, progress):
        return RankComparison(processes, events, progress, lambda: 0.2)

    monkeypatch.setattr("common.training.session.compare_ranks", with_a_fake_probe)
    run(tmp_path / "run", tiny_data)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    compared = [event["samples"] for event in events if event["event"] == "ranks"]
    assert compared == [event["samples"] for event in events if event["event"] == "eval"] == [32, 64, 96]
    assert TINY.eval_interval_samples == 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_probe_leaves_the_generators_and_names_a_slow_rank_only():
    """Eight equal ranks, played by one GPU in turn under full load, and then with one that takes 12 % longer."""
    device = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(device)
    probe = GemmProbe(device)
    times_ms = [probe() for _ in range(60 + 8 * LOOKS)][60:]
    assert torch.equal(before, torch.cuda.get_rng_state(device))
    looks = [times_ms[8 * look : 8 * look + 8] for look in range(LOOKS)]
    assert slow_ranks(typical(map(over_median, looks))) == []
    late = [[*look[:7], 1.12 * look[7]] for look in looks]
    assert slow_ranks(typical(map(over_median, late))) == [7]
    tflops = 2 * slow_rank.SIZE**3 / min(times_ms) / 1e9
    assert 200 < tflops < 3000, "a time that is none"
    assert 2 * slow_rank.REPEATS * max(times_ms) < 200, "longer than a pause may be"
