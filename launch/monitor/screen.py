"""Display of a run while it trains.

On a terminal it is a few lines that are redrawn. Elsewhere it is one line from time to time. All
values come from the files of the run: events.jsonl, the heartbeat of rank 0, gpu_samples.jsonl. On
a terminal the MLPerf log goes only to its file. The ranks' stderr passes through this process, so
that their messages appear above the lines that are redrawn.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import time
from pathlib import Path

from common.benchmarks import Rules
from common.config import RunConfig
from common.records import rcp
from common.records.json_lines import Tail
from common.terminal import duration, inform, is_quiet, paint, print_stderr, sparkline
from launch.monitor import gpu_sampler as sampler

# Phase of a heartbeat -> name on the screen.
PHASES = {
    "init": "starting",
    "data": "training",
    "compute": "training",
    "optimizer": "training",
}
PLAIN_S = 60.0  # between lines where nothing can be redrawn; each evaluation has its own line


class Screen:
    """Context manager around this node's ranks, which use its `stdout` and `stderr`.

    `update` is called twice a second.
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
        self.run_dir, self.config, self.rules = run_dir, config, rules
        self.title = f"{benchmark} · {Path(config_name).stem}"
        self.unit = (
            "tok/s/GPU" if on_gpus else "tok/s" if config.world_size == 1 else "tok/s per process"
        )
        # Both files are closed by __exit__.
        self.stdout = open(os.devnull, "w") if sys.stdout.isatty() else None  # noqa: SIM115
        # A file in memory still works for the ranks if the disk is full.
        self.stderr = open(os.memfd_create("stderr"), "w+b", buffering=0)  # noqa: SIM115
        # A pipe such as | tee may end on the same terminal.
        rewrites = sys.stderr.isatty() and not stat.S_ISFIFO(os.fstat(1).st_mode)
        self.rewrites = rewrites and not is_quiet() and leads
        self.messages, self.events, self.samples = (
            Tail(self.stderr.fileno()),
            Tail(run_dir / "events.jsonl"),
            Tail(run_dir / sampler.NAME),
        )
        self.step: dict = {}
        self.gpus: list[dict] = []
        self.losses: list[float] = []
        self.evaluations: list[dict] = []
        self.began = self.shown = time.monotonic()
        self.ended, self.drawn = False, 0  # number of lines that the next drawing replaces

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.update(to_the_end=True)
        with contextlib.suppress(OSError):  # the messages were shown already
            (self.run_dir / "stderr.txt").write_bytes(os.pread(self.stderr.fileno(), 2**26, 0))
        self.stderr.close()
        if self.stdout:
            self.stdout.close()

    def update(self, to_the_end: bool = False) -> None:
        """Redraw the display. A failure, such as a closed terminal or an odd file, does not end the
        run.
        """
        if self.ended:
            return
        try:
            self._show(to_the_end)
        except Exception as error:
            self.ended = True
            with contextlib.suppress(OSError):
                print_stderr(f"note: from here on nothing is shown, and the run goes on: {error!r}")

    def _show(self, to_the_end: bool) -> None:
        messages, news = self.messages.lines(to_the_end), self._read_events()
        if self.rewrites:
            columns = 80
            with contextlib.suppress(OSError):  # the terminal was closed
                # The size is 0 if the terminal does not know it.
                columns = os.get_terminal_size(sys.stderr.fileno()).columns or columns
            lines = [line[: columns - 1] for line in self.lines()]
            lines[0] = paint(lines[0], "1")
            back = f"\x1b[{self.drawn}A\r\x1b[J" if self.drawn else ""
            print_stderr(back + "\n".join([*messages, *news, *lines]))
            self.drawn = len(lines)
            return
        if messages:
            print_stderr(*messages)
        if self.step and time.monotonic() - self.shown > PLAIN_S:
            self.shown = time.monotonic()
            news.append(
                f"{self.progress()} · loss {self.losses[-1]:.4f} · {self.speed()} · {self.outlook()}"
            )
        inform(*news)

    def _read_events(self) -> list[str]:
        """Read new events and samples, and return one line for each evaluation."""
        found = []
        for line in self.events.lines():
            event = json.loads(line)
            if event["event"] == "step":
                self.losses.append(event["loss"] if event["loss"] is not None else math.nan)
                self.step = event if "tokens_per_s_per_gpu" in event else self.step
            elif event["event"] == "eval" and event["loss"] is not None:
                self.evaluations.append(event)
                after = f"after {duration(event['time_s'])}" + (
                    f"; {self.speed()}" if self.step else ""
                )
                loss = f"loss {event['loss']:.4f}, target {self.rules.target_loss}"
                found.append(f"evaluation at {event['samples']:,} sequences: {loss}, {after}")
        for line in self.samples.lines():
            self.gpus = json.loads(line).get("gpus") or self.gpus
        return found

    def lines(self) -> list[str]:
        phase, target = self.phase(), self.rules.target_loss
        title = f"{self.title} · {phase} · {duration(time.monotonic() - self.began)}"
        if not self.step:
            return [title]
        last = f" · last evaluation {self.evaluations[-1]['loss']:.4f}" if self.evaluations else ""
        rows = {
            "loss": f"{self.losses[-1]:.4f} {sparkline(self.losses, target)} target {target}{last}",
            "speed": self.speed(),
        }
        rows |= {"progress": self.progress(), "outlook": self.outlook()} if phase != "done" else {}
        return [title, *(f"  {label:<9}{text}" for label, text in rows.items())]

    def phase(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            phase = json.loads((self.run_dir / "ranks" / "rank_0.heartbeat").read_text())["phase"]
            return PHASES.get(phase, phase)
        return "starting"

    def speed(self) -> str:
        parts = [f"{self.step['tokens_per_s_per_gpu']:,.0f} {self.unit}"]
        parts += [f"MFU {self.step['mfu']:.1%}"] if self.step["mfu"] else []
        parts += [f"{self.step['memory_gib']:.1f} GiB"] if self.step["memory_gib"] else []
        powers = [gpu["power_w"] for gpu in self.gpus if gpu.get("power_w")]
        return " · ".join(
            parts + ([f"{sum(powers):,.0f} W on {len(powers)} GPUs"] if powers else [])
        )

    def progress(self) -> str:
        samples, batch, rules = self.step["samples"], self.config.global_batch_size, self.rules
        interval = rules.eval_interval(batch)
        due = max(rules.first_evaluation(batch), (samples // interval + 1) * interval)
        return f"step {self.step['step']:,} · {samples:,} sequences · next evaluation in {self.time_of(due - samples)}"

    def outlook(self) -> str:
        """Return the time to the target at the present speed, and to the limit of max_samples.

        The target is expected at the mean of the MLPerf reference.
        """
        samples, config = self.step["samples"], self.config
        mean = rcp.mean_samples(self.rules, config.global_batch_size)
        expects = mean is not None and mean > samples
        about = (
            f"target in {self.time_of(mean - samples)}, at the reference's mean of {mean:,.0f} · "
            if expects
            else ""
        )
        return f"{about}gives up at {config.max_samples:,} sequences, in {self.time_of(config.max_samples - samples)}"

    def time_of(self, samples: float) -> str:
        """Return the time to train `samples` sequences at the displayed speed.

        It includes the evaluations on the way, as long as one has been measured.
        """
        seconds = (
            samples
            * self.rules.sequence_length
            / (self.step["tokens_per_s_per_gpu"] * self.config.world_size)
        )
        if self.evaluations:
            seconds += (
                samples
                // self.rules.eval_interval(self.config.global_batch_size)
                * self.evaluations[-1]["seconds"]
            )
        return duration(seconds)
