"""Live display of a run.

On a terminal, rich redraws a few lines. Elsewhere, new numbers are printed once a minute. All
values come from the run's files: events.jsonl, the heartbeat of rank 0, and gpu_samples.jsonl. The
ranks' stderr passes through this process, so that their messages appear above the redrawn lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.atomic_write import write_whole
from common.benchmarks import Rules
from common.config import RunConfig
from common.records import rcp, run_states
from common.records.json_lines import Tail
from common.records.run_record import EVENTS
from common.records.tracking import GPU_SAMPLES
from common.terminal import (
    Rate,
    draw,
    duration,
    has_rich,
    inform,
    is_quiet,
    print_stderr,
    progress_row,
    start_live,
    stop_live,
)
from launch.console import prints_log

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

# Phase in a heartbeat -> its name on the screen. Other phases are shown as they are.
PHASES = {
    "init": "starting",
    "data": "training",
    "compute": "training",
    "optimizer": "training",
    "loading": "loading the base weights",
}
STOPPED = "stopped"
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24  # characters
CEILING = 0.85  # share of a sparkline's values below its highest bar
# Lines of C++ stacks, which follow torch's own message.
FRAME = re.compile(r"frame #\d+: |Exception raised from |<omitting python frames>")
LOOKUP = "hostname of the client socket cannot be retrieved"  # for each connection
PLAIN_S = 60.0  # between progress lines where nothing is redrawn


class Screen:
    """Live display of a run, as a context manager around this node's ranks.

    The ranks use its `stdout` and `stderr`. Call `update` about twice a second.
    """

    def __init__(
        self,
        run_dir: Path,
        benchmark: str,
        config_name: str,
        config: RunConfig,
        rules: Rules,
        *,
        on_gpus: bool,
        leads: bool,
    ):
        """`leads`: whether this is node 0, which shows the run."""
        self.run_dir = run_dir
        self.config = config
        self.rules = rules
        self.title = f"{benchmark} · {Path(config_name).stem}"
        self.unit = "tok/s per process"
        if on_gpus:
            self.unit = "tok/s/GPU"
        elif config.world_size == 1:
            self.unit = "tok/s"
        # Both files are closed by __exit__.
        self.stdout = None
        if not prints_log(benchmark, config):
            self.stdout = open(os.devnull, "w")  # noqa: SIM115
        # A file in memory still works for the ranks if the disk is full. A pipe would break if the
        # launcher is killed.
        self.stderr = open(os.memfd_create("stderr"), "w+b", buffering=0)  # noqa: SIM115
        # A pipe such as | tee may end on the same terminal.
        redraws = sys.stderr.isatty() and not stat.S_ISFIFO(os.fstat(1).st_mode) and has_rich()
        self.redraws = redraws and not is_quiet() and leads
        self.live: Live | None = None
        self.messages = Tail(self.stderr.fileno())
        self.events = Tail(run_dir / EVENTS)
        self.samples = Tail(run_dir / GPU_SAMPLES)
        self.step: dict = {}
        self.printed = self.step  # in the last progress line
        self.gpus: list[dict] = []
        self.losses: list[float] = []  # training loss of each step
        self.evaluations: list[dict] = []
        self.verdict = ""  # shown instead of the phase after the run has ended
        self.loaded: Rate | None = None  # progress of loading the base weights
        self.began = self.shown = time.monotonic()
        self.broken = False
        self.lookup_failed = False

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.verdict = self.verdict or STOPPED
        self.update(to_the_end=True)
        if self.live:
            with contextlib.suppress(OSError):  # the terminal was closed
                stop_live(self.live)
        with contextlib.suppress(OSError):  # the messages were shown already
            write_whole(self.run_dir / "stderr.txt", os.pread(self.stderr.fileno(), 2**26, 0))
        self.stderr.close()
        if self.stdout:
            self.stdout.close()

    def update(self, to_the_end: bool = False) -> None:
        """Redraw the display. An error, such as a closed terminal, does not end the run."""
        if self.broken:
            return
        try:
            self._show(to_the_end)
        except Exception as error:
            self.broken = True
            with contextlib.suppress(OSError):
                print_stderr(f"note: the display stops, but the run continues: {error!r}")

    def _show(self, to_the_end: bool) -> None:
        """Print new messages and evaluations, and redraw the lines or print a progress line.

        `to_the_end`: also print a last message that has no newline.
        """
        messages = self._readable(self.messages.lines(to_the_end))
        news = self._read_events()
        if self.redraws:
            self.live = self.live or start_live(transient=False)
            if messages or news:
                print_stderr(*messages, *news)
            draw(self.live, self.content)
            return
        if messages:
            print_stderr(*messages)
        if self.step is not self.printed and time.monotonic() - self.shown > PLAIN_S:
            self.shown = time.monotonic()
            self.printed = self.step
            parts = [self.progress(), f"train loss {self.losses[-1]:.4f}", self.speed()]
            end = "gives up" if self.rules.target_loss else "ends"
            news.append(" · ".join([*parts, f"{end} in {self.time_to_limit()}"]))
        inform(*news)

    def _readable(self, lines: list[str]) -> list[str]:
        """Leave out C++ stacks, and all but the first failed look-up of a host name.

        stderr.txt has them.
        """
        kept = []
        for line in lines:
            repeated = self.lookup_failed and LOOKUP in line
            self.lookup_failed |= LOOKUP in line
            if not repeated and not FRAME.match(line):
                kept.append(line)
        return kept

    def _read_events(self) -> list[str]:
        """Read new events and samples, and return a line for each evaluation."""
        news = []
        for event in self.events.records():
            if event["event"] == "step":
                self.losses.append(event["loss"] if event["loss"] is not None else math.nan)
                if "tokens_per_s_per_gpu" in event:
                    self.step = event
            elif event["event"] == "eval" and event["loss"] is not None:
                self.evaluations.append(event)
                text = f"loss {event['loss']:.4f}"
                if self.rules.target_loss:
                    text += f", {self.rules.target_text}"
                text += f", after {duration(event['time_s'])}"
                if self.step:
                    text += f"; {self.speed()}"
                news.append(f"evaluation at {event['samples']:,} sequences: {text}")
            elif event["event"] == "verdict":
                self.verdict = self.verdict_of(event["status"])
        for sample in self.samples.records():
            self.gpus = sample.get("gpus") or self.gpus
        return news

    def verdict_of(self, status: str) -> str:
        """Return the text for the status of a run that ended."""
        if status == "aborted":
            return STOPPED
        if status != "success":
            return status
        return run_states.words(run_states.GOOD, bool(self.rules.target_loss))

    def content(self, width: int) -> RenderableType:
        """Return the lines to draw: a title, rows that wrap between words, and a loading bar."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2, 0, 0))
        for label, text in self.rows().items():
            rows.add_row(f"  {label}", text)
        parts: list[Any] = [Text(self.title_line(), style="bold"), rows]
        if self.loaded and not self.step:
            parts.append(progress_row("  loading", self.loaded, width))
        return Group(*parts)

    def title_line(self) -> str:
        """Return the title: benchmark, config, phase or verdict, and the time since the start."""
        phase = self.verdict or self.phase()
        return f"{self.title} · {phase} · {duration(time.monotonic() - self.began)}"

    def rows(self) -> dict[str, str]:
        """Return label -> text of each row. Forecasts are left out after the end of the run."""
        if not self.step:
            return {}
        is_over = bool(self.verdict)
        rows = {
            "train": f"loss {self.losses[-1]:.4f}  {sparkline(self.losses)}",
            "evaluate": self.evaluation(is_over),
            "speed": self.speed(),
            "progress": self.progress(),
        }
        if not is_over:
            rows["target"] = self.time_to_target()
            end = "gives up at" if self.rules.target_loss else "ends after"
            rows["limit"] = (
                f"{end} {self.config.max_samples:,} sequences, "
                f"in {self.time_to_limit()} at this speed"
            )
        return {label: text for label, text in rows.items() if text}

    def phase(self) -> str:
        """Return the phase of rank 0, and update the progress of loading the base weights."""
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads((self.run_dir / "ranks" / "rank_0.heartbeat").read_text())
            if beat.get("total"):
                self.loaded = self.loaded or Rate(beat["total"], "layers")
                self.loaded.add(beat["done"])
            return PHASES.get(beat["phase"], beat["phase"])
        return "starting"

    def evaluation(self, is_over: bool) -> str:
        target = self.rules.target_text
        parts = [target]
        if self.evaluations:
            last = self.evaluations[-1]
            parts = [f"loss {last['loss']:.4f} at {last['samples']:,} sequences", target]
        if not is_over:
            parts.append(f"next in {self.time_to_evaluation()}")
        return " · ".join(parts)

    def speed(self) -> str:
        parts = [f"{self.step['tokens_per_s_per_gpu']:,.0f} {self.unit}"]
        if padding := self.step.get("padding"):
            parts.append(f"{padding:.0%} padding")
        if self.step["mfu"]:
            parts.append(f"MFU {self.step['mfu']:.1%}")
        if self.step["memory_gib"]:
            parts.append(f"{self.step['memory_gib']:.1f} GiB")
        if powers := [gpu["power_w"] for gpu in self.gpus if gpu.get("power_w")]:
            several = f" on {len(powers)} GPUs" if len(powers) > 1 else ""
            parts.append(f"{sum(powers):,.0f} W{several}")
        return " · ".join(parts)

    def progress(self) -> str:
        return f"step {self.step['step']:,} · {self.step['samples']:,} sequences"

    def time_to_evaluation(self) -> str:
        samples = self.step["samples"]
        batch = self.config.global_batch_size
        interval = self.rules.eval_interval(batch)
        due = max(self.rules.first_evaluation(batch), (samples // interval + 1) * interval)
        return self.time_of(due - samples)

    def time_to_target(self) -> str:
        """Return when the target is expected, by the mean of the MLPerf reference runs.

        Return "" if there are none, or if the run has passed their mean.
        """
        samples = self.step["samples"]
        mean = rcp.mean_samples(self.rules, self.config.global_batch_size)
        if mean is None or mean <= samples:
            return ""
        return f"expected in {self.time_of(mean - samples)} (reference mean {mean:,.0f} sequences)"

    def time_to_limit(self) -> str:
        return self.time_of(self.config.max_samples - self.step["samples"])

    def time_of(self, samples: float) -> str:
        """Return the time to train `samples` sequences at the displayed speed.

        It includes the evaluations in between, each as long as the last one.
        """
        tokens_per_s = self.step["tokens_per_s_per_gpu"] * self.config.world_size
        tokens_per_sample = self.rules.sequence_length * (1 - self.step.get("padding", 0.0))
        seconds = samples * tokens_per_sample / tokens_per_s
        if self.evaluations:
            interval = self.rules.eval_interval(self.config.global_batch_size)
            seconds += samples // interval * self.evaluations[-1]["seconds"]
        return duration(seconds)


def sparkline(values: Sequence[float]) -> str:
    """Return a sparkline of at most SPARKLINE_WIDTH bars, each for the mean of a few `values`.

    The lowest bar is the smallest mean. The few largest means all get the highest bar: otherwise
    the high loss of the first steps would make the rest look flat.
    """
    size = max(1, -(-len(values) // SPARKLINE_WIDTH))
    means = []
    for first in range(0, len(values), size):
        group = [value for value in values[first : first + size] if math.isfinite(value)]
        if group:
            means.append(sum(group) / len(group))
    if not means:
        return ""
    low = min(means)
    high = sorted(means)[round(CEILING * (len(means) - 1))]
    span = max(high - low, 1e-9)
    heights = [min((mean - low) / span, 1.0) for mean in means]
    return "".join(BARS[round(height * (len(BARS) - 1))] for height in heights)
