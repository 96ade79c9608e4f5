"""Intervals of training and evaluation, from a log in any of the known dialects.

Logs of other submitters may print every line eight times, have epochs instead of blocks, or log the
size of a block where others log the sample count so far. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.records.json_lines import is_number
from common.records.mlperf_log import Event


@dataclass(frozen=True)
class Interval:
    """The time and training sequences between a start line and its stop line.

    The counts of sequences are those of the lines, or else follow from the evaluations.
    """

    start_ms: float
    stop_ms: float
    start_samples: int | None
    stop_samples: int | None

    @property
    def seconds(self) -> float:
        return (self.stop_ms - self.start_ms) / 1000

    @property
    def samples(self) -> int:
        return (self.stop_samples or 0) - (self.start_samples or 0)


def rate(blocks: Sequence[Interval]) -> float | None:
    """Return the sequences per second over `blocks`, or None if the log does not have them."""
    seconds = sum(block.seconds for block in blocks)
    samples = sum(block.samples for block in blocks)
    return samples / seconds if seconds > 0 and samples > 0 else None


def samples_of(event: Event) -> int | None:
    """Return the training sequences that a record counts, or None."""
    # Both benchmarks count sequences under either name.
    for key in ("samples_count", "epoch_num"):
        count = event.metadata.get(key)
        if is_number(count):
            return round(count)
    return None


def training(events: list[Event], around: list[Interval]) -> list[Interval]:
    """Return the training intervals, with the time of the evaluations inside them subtracted.

    `around`: all evaluations. The subtraction is needed because some logs have one epoch around
    everything.
    """
    has_blocks = any(event.key == "block_start" for event in events)
    intervals = []
    for block in _blocks(events, "block" if has_blocks else "epoch"):
        evaluations_ms = sum(
            evaluation.stop_ms - evaluation.start_ms
            for evaluation in around
            if block.start_ms <= evaluation.start_ms and evaluation.stop_ms <= block.stop_ms
        )
        intervals.append(replace(block, stop_ms=block.stop_ms - evaluations_ms))
    return intervals


def _blocks(events: list[Event], name: str) -> list[Interval]:
    """Return the training intervals, evaluations included.

    Some logs do not have the count so far at a block's end: mlperf_common logs the block's size at
    start and stop, others the count at the start. There a block ends at the count of the next
    evaluation.
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
        after = next(
            (count for time_ms, count in evaluated if time_ms >= block.stop_ms and count > done),
            None,
        )
        if after is not None:
            intervals.append(Interval(block.start_ms, block.stop_ms, done, after))
            done = after
    return intervals


def pairs(events: list[Event], name: str, batch: int, counted: bool = True) -> list[Interval]:
    """Return the intervals between <name>_start and <name>_stop.

    Eight ranks may log each line, some of them late. Lines whose count falls behind are left out.

    `batch`: 0 for training intervals, whose count must grow from start to stop. For evaluations,
    the global batch: the count at the stop may be less than that at the start, by less than one
    batch. `counted`: whether to read the counts of the lines.
    """
    intervals: list[Interval] = []
    opened: Event | None = None
    for event in events:
        samples = samples_of(event) if counted else None
        if event.key == f"{name}_start" and opened is None:
            done = intervals[-1].stop_samples if intervals else None
            late = False
            if samples is not None and done is not None:
                late = samples < done if batch == 0 else samples <= done
            opened = None if late else event
        elif event.key == f"{name}_stop" and opened is not None:
            before = samples_of(opened) if counted else None
            late = False
            if samples is not None and before is not None:
                late = samples <= before - batch
            if not late and event.time_ms >= opened.time_ms:
                intervals.append(Interval(opened.time_ms, event.time_ms, before, samples))
                opened = None
    return intervals
