"""Intervals of training and evaluation, out of the lines of a log in any of the dialects that occur.

Other people's logs print every line eight times, know epochs instead of blocks, or log the size of a block where others log the count
so far. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.records.json_lines import is_number
from common.records.mlperf_log import Event


@dataclass(frozen=True)
class Interval:
    """From a start line to its stop line; counts of training sequences as logged, or as the evaluations tell."""

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
    """Sequences per second over `blocks`; None where the log does not tell."""
    seconds, samples = (
        sum(block.seconds for block in blocks),
        sum(block.samples for block in blocks),
    )
    return samples / seconds if seconds > 0 and samples > 0 else None


def samples_of(event: Event) -> int | None:
    counts = (
        event.metadata.get(key) for key in ("samples_count", "epoch_num")
    )  # both benchmarks give sequences under either name
    return next((round(count) for count in counts if is_number(count)), None)


def training(events: list[Event], around: list[Interval]) -> list[Interval]:
    """Training intervals, less the evaluations `around` that lie in them: some log one epoch around everything."""
    found = []
    for block in _blocks(
        events, "block" if any(event.key == "block_start" for event in events) else "epoch"
    ):
        inside = sum(
            e.stop_ms - e.start_ms
            for e in around
            if block.start_ms <= e.start_ms and e.stop_ms <= block.stop_ms
        )
        found.append(replace(block, stop_ms=block.stop_ms - inside))
    return found


def _blocks(events: list[Event], name: str) -> list[Interval]:
    """Training intervals. Where the lines of a block carry no count so far (mlperf_common logs the block's size in both, others
    the count at its start), a block ends at the count of the evaluation after it."""
    starts, stops = (
        [samples_of(event) or 0 for event in events if event.key == f"{name}_{end}"]
        for end in ("start", "stop")
    )
    if max(stops, default=0) > max(starts, default=0):
        return pairs(events, name, 0)
    found, done = [], 0
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
            found.append(Interval(block.start_ms, block.stop_ms, done, after))
            done = after
    return found


def pairs(events: list[Event], name: str, batch: int, counted: bool = True) -> list[Interval]:
    """Pairs of <name>_start and <name>_stop. Eight ranks may log each line, some of them late: what falls behind is left out.

    `batch` 0: training intervals, which end beyond where they start; else evaluations, which may end up to one batch before.
    """
    found: list[Interval] = []
    opened: Event | None = None
    for event in events:
        samples = samples_of(event) if counted else None
        if event.key == f"{name}_start" and opened is None:
            done = found[-1].stop_samples if found else None
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
                found.append(Interval(opened.time_ms, event.time_ms, before, samples))
                opened = None
    return found
