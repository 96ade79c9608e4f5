"""Intervals of training and evaluation in the log of any submitter.

Logs may contain every line eight times, have epochs instead of blocks, or give the size of a block
where others give the number of samples so far. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.records.json_lines import is_number
from common.records.mlperf_log import Event


@dataclass(frozen=True)
class Interval:
    """An interval between a start line and its stop line.

    The numbers of training sequences come from the lines, or else from the evaluations.
    """

    start_ms: float  # since 1970
    stop_ms: float
    start_samples: int | None  # training sequences before the interval, None if unknown
    stop_samples: int | None

    @property
    def seconds(self) -> float:
        return (self.stop_ms - self.start_ms) / 1000

    @property
    def samples(self) -> int:
        return (self.stop_samples or 0) - (self.start_samples or 0)


def rate(blocks: Sequence[Interval]) -> float | None:
    """Return the sequences per second over `blocks`, or None if the log has no numbers for it."""
    seconds = sum(block.seconds for block in blocks)
    samples = sum(block.samples for block in blocks)
    return samples / seconds if seconds > 0 and samples > 0 else None


def samples_of(event: Event) -> int | None:
    """Return the number of training sequences that a record gives, or None."""
    # Under either name, both benchmarks count sequences.
    for key in ("samples_count", "epoch_num"):
        count = event.metadata.get(key)
        if is_number(count):
            return round(count)
    return None


def training(events: list[Event], evaluations: list[Interval]) -> list[Interval]:
    """Return the training intervals, shortened by the evaluations inside them.

    `evaluations`: all evaluations of the log. Some logs have one epoch around the whole run, which
    contains them.
    """
    has_blocks = any(event.key == "block_start" for event in events)
    intervals = []
    for block in _blocks(events, "block" if has_blocks else "epoch"):
        inside_ms = []
        for evaluation in evaluations:
            if block.start_ms <= evaluation.start_ms and evaluation.stop_ms <= block.stop_ms:
                inside_ms.append(evaluation.stop_ms - evaluation.start_ms)
        intervals.append(replace(block, stop_ms=block.stop_ms - sum(inside_ms)))
    return intervals


def _blocks(events: list[Event], name: str) -> list[Interval]:
    """Return the training intervals between <name>_start and <name>_stop, evaluations included.

    In some logs the stop lines do not give the number of samples so far. mlperf_common logs the
    block's size at start and stop. Others log the number at the start. A block of such a log ends
    at the number of the next evaluation.
    """
    starts = [samples_of(event) or 0 for event in events if event.key == f"{name}_start"]
    stops = [samples_of(event) or 0 for event in events if event.key == f"{name}_stop"]
    if max(stops, default=0) > max(starts, default=0):
        return pairs(events, name, 0)
    intervals = []
    done = 0
    evaluated = [
        (event.time_ms, samples_of(event) or 0)
        for event in events
        if event.key in ("eval_start", "eval_accuracy")
    ]
    for block in pairs(events, name, 0, counted=False):
        for time_ms, count in evaluated:
            if time_ms >= block.stop_ms and count > done:
                intervals.append(Interval(block.start_ms, block.stop_ms, done, count))
                done = count
                break
    return intervals


def pairs(events: list[Event], name: str, batch: int, counted: bool = True) -> list[Interval]:
    """Return the intervals between <name>_start and <name>_stop.

    Each of eight ranks may log every line, and some lines are late. A line with fewer samples than
    the lines before it is late, and is skipped.

    `batch`: 0 for training, in which the number of samples must grow from start to stop. For
    evaluations the global batch: the number at the stop may be smaller than at the start by less
    than this. `counted`: whether to read the numbers of samples.
    """
    intervals: list[Interval] = []
    start: Event | None = None
    for event in events:
        samples = samples_of(event) if counted else None
        if event.key == f"{name}_start" and start is None:
            done = intervals[-1].stop_samples if intervals else None
            late = False
            if samples is not None and done is not None:
                late = samples < done if batch == 0 else samples <= done
            if not late:
                start = event
        elif event.key == f"{name}_stop" and start is not None:
            before = samples_of(start) if counted else None
            late = False
            if samples is not None and before is not None:
                late = samples <= before - batch
            if not late and event.time_ms >= start.time_ms:
                intervals.append(Interval(start.time_ms, event.time_ms, before, samples))
                start = None
    return intervals
