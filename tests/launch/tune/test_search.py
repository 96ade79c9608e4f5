"""The search of `tune`, with a stand-in for the measurement whose optimum is known."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from common.paths import ROOT
from launch.tune.candidates import changed, is_possible, reduced, value_of
from launch.tune.search import Journal, Measurement, Search
from llama31_8b.rules import Config

BASE = Config(
    gpu="CPU",
    nodes=1,
    gpus_per_node=1,
    miniature=True,
    global_batch_size=16,
    opt_base_learning_rate=1e-3,
    opt_learning_rate_warmup_steps=1,
    max_samples=1024,
    micro_batch_size=1,
    eval_micro_batch_size=1,
    recompute_layers=2,
    env={"SLOW": "1"},
)
ARRANGEMENTS = [
    {"micro_batch_size": size, "recompute_layers": layers}
    for size in (16, 8, 4, 2)
    for layers in (0, 1)
]
SETTINGS = {
    "SLOW": [None, "1"],
    "QUEUES": ["2", "4", "8", None],
    "moment_precision": ["fp32", "bf16"],
}
OPTIMUM = {
    "QUEUES": "4",
    "SLOW": None,
    "micro_batch_size": 4,
    "moment_precision": "bf16",
    "recompute_layers": 0,
}


def step_ms(changes: dict) -> float:
    """Milliseconds of a step: 100 at OPTIMUM. Micro-batches of 16 do not fit."""
    config = changed(BASE, changes)
    value = 100.0
    value *= {1: 1.5, 2: 1.1, 4: 1.0, 8: 1.04}[config.micro_batch_size]
    value *= 1 + 0.1 * config.recompute_layers
    value *= 2.0 if value_of(config, "SLOW") else 1.0
    value *= {"2": 1.2, "4": 1.0, "8": 1.01, None: 1.02}[value_of(config, "QUEUES")]
    return value * (1.0 if config.moment_precision == "bf16" else 1.03)


class StandIn:
    """Measures with `step_ms`, and notes what was measured."""

    def __init__(self, seconds: float = 1.0):
        self.seconds = seconds
        self.measured: list[tuple[str, dict]] = []

    def __call__(self, changes, length, steps, stop) -> Measurement:
        self.measured.append((length, changes))
        if stop(self.seconds):
            return Measurement(changes, length, "stopped", self.seconds)
        if changes.get("micro_batch_size") == 16:
            return Measurement(
                changes, length, "out_of_memory", self.seconds, error={"what": "full"}
            )
        times_ms = tuple(step_ms(changes) for _ in range(steps))
        return Measurement(changes, length, "done", self.seconds, times_ms, 2**30)


def new_journal(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.begin({"config": BASE.as_toml()})
    return journal


def search(journal: Journal, measure, budget_s: float = 1e6) -> tuple[Search, bool]:
    made = Search(BASE, journal, measure, budget_s)
    return made, made.run(ARRANGEMENTS, SETTINGS)


def test_it_finds_the_optimum_from_a_bad_config(tmp_path):
    assert step_ms({}) > 3 * step_ms(OPTIMUM)
    made, finished = search(new_journal(tmp_path), StandIn())
    assert finished
    assert step_ms(made.best) <= 1.01 * step_ms(OPTIMUM)
    assert made.best == reduced(BASE, OPTIMUM)


def test_most_candidates_are_measured_shortly_only(tmp_path):
    measure = StandIn()
    search(new_journal(tmp_path), measure)
    lengths = [length for length, _ in measure.measured]
    assert lengths.count("long") < lengths.count("short")
    long = [changes for length, changes in measure.measured if length == "long"]
    slow = [changes for changes in long if changes and step_ms(changes) > 2 * 103]
    assert slow == []


def test_out_of_memory_is_a_result(tmp_path):
    journal = new_journal(tmp_path)
    search(journal, StandIn())
    outcomes = {each.outcome for each in Journal(tmp_path).measurements}
    assert outcomes == {"done", "out_of_memory"}


def test_no_candidate_is_measured_twice(tmp_path):
    measure = StandIn()
    search(new_journal(tmp_path), measure)
    texts = [json.dumps(each) for each in measure.measured]
    assert len(texts) == len({*texts})


def test_a_measurement_takes_steps_for_some_seconds(tmp_path):
    journal = new_journal(tmp_path)
    search(journal, StandIn())
    first, *others = [each for each in journal.measurements if each.outcome == "done"]
    assert len(first.times_ms) == 2
    counts = {len(each.times_ms) for each in others if each.length == "short"}
    assert counts == {math.ceil(6000 / first.step_ms)}


def test_it_ends_with_its_time_and_returns_the_fastest_so_far(tmp_path):
    measure = StandIn(seconds=10.0)
    journal = new_journal(tmp_path)
    made, finished = search(journal, measure, budget_s=65.0)
    assert not finished and len(measure.measured) == 7
    done = [each for each in journal.measurements if each.outcome == "done"]
    assert step_ms(made.best) == min(each.step_ms for each in done) and len(done) < 7


def test_a_slow_candidate_is_stopped(tmp_path):
    """The limit is three times the longest measurement, at least 60 seconds."""

    class Slow(StandIn):
        def __call__(self, changes, length, steps, stop):
            self.seconds = 100.0 if changes == {} else 20.0
            return super().__call__(changes, length, steps, stop)

    journal = new_journal(tmp_path)
    made, finished = search(journal, Slow())
    assert finished and {each.outcome for each in journal.measurements if not each.changes} == {
        "stopped"
    }
    assert step_ms(made.best) <= 1.01 * step_ms(OPTIMUM)


def test_a_resumed_search_measures_the_rest_only(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    whole = StandIn()
    expected, _ = search(new_journal(one), whole)
    lines = (one / "journal.jsonl").read_text().splitlines(keepends=True)
    # Killed in the middle of a line.
    (two / "journal.jsonl").write_text("".join(lines[:6]) + lines[6][:20])
    rest = StandIn()
    journal = Journal(two)
    made, finished = search(journal, rest)
    assert finished and made.best == expected.best
    assert rest.measured == whole.measured[5:]
    assert len(Journal(two).measurements) == len(whole.measured)
    assert Journal(two).identity == {"config": BASE.as_toml()}


def test_more_minutes_repeat_what_was_stopped_because_there_were_few(tmp_path):
    _, finished = search(new_journal(tmp_path), StandIn(seconds=30.0), budget_s=60.0)
    journal = Journal(tmp_path)
    assert not finished and {each.outcome for each in journal.measurements} == {"stopped"}
    made, finished = search(journal, StandIn(seconds=30.0))
    assert finished and made.best == reduced(BASE, OPTIMUM)
    assert journal.find({}, "short").outcome == "done"


PROGRAM = """
import sys, time
from pathlib import Path
import test_search
class Slow(test_search.StandIn):
    def __call__(self, *arguments):
        time.sleep(0.2)
        return super().__call__(*arguments)
folder = Path(sys.argv[1])
journal = test_search.Journal(folder)
if not journal.identity:
    journal.begin({"config": test_search.BASE.as_toml()})
made, finished = test_search.search(journal, Slow())
print(finished, made.best == test_search.reduced(test_search.BASE, test_search.OPTIMUM))
"""


def test_a_killed_search_goes_on(tmp_path):
    """SIGKILL after the third measurement, then the same command again."""
    paths = f"{ROOT}:{Path(__file__).parent}"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, env={"PYTHONPATH": paths})
    deadline = time.monotonic() + 60
    while len(Journal(tmp_path).measurements) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = Journal(tmp_path).measurements
    assert len(before) >= 3
    done = subprocess.run(command, env={"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr
    after = Journal(tmp_path).measurements
    assert after[: len(before)] == before
    texts = [json.dumps(asdict(each)) for each in after]
    assert len(texts) == len({*texts})


@pytest.mark.parametrize("changes", [{"micro_batch_size": 3}, {"reduce_scatter": "copy_engine"}])
def test_an_impossible_candidate_is_recognized(changes):
    assert not is_possible(BASE, changes)
