"""Tracking process: `python -m launch.monitor.tracking RUN_DIR TRACKER...`.

It follows events.jsonl and gpu_samples.jsonl of a run and sends their numbers to tracking packages.
It is a separate process, so that the ranks never wait for a server. When its standard input closes,
it sends the rest of the files and the outcome, and ends; after END_S seconds, it is killed. Its
output, including the reason of a failure, is in RUN_DIR/tracking.txt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.records.trackers import TRACKERS, Tracker
from common.records.tracking import Follower, ending, facts
from common.terminal import print_stderr
from launch.monitor import gpu_sampler

OUTPUT = "tracking.txt"
PERIOD_S = 2.0
# Seconds that trackers have after the run. A server that does not answer delays the end no longer.
END_S = 60.0


# --- the launcher's side


@contextlib.contextmanager
def tracked(run_dir: Path, names: Sequence[str]) -> Iterator[None]:
    """Track the run in `run_dir` during the block. If a tracker fails, the run continues.

    `names`: keys of TRACKERS.
    """
    if not names:
        yield
        return
    command = [sys.executable, "-m", "launch.monitor.tracking", str(run_dir), *names]
    with (run_dir / OUTPUT).open("ab") as output:
        # A new session keeps Ctrl-C away from the process. The launcher handles it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        _end(process, run_dir / OUTPUT)


def _end(process: subprocess.Popen, output: Path) -> None:
    """End the tracking process, and print a note if it failed or did not end in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the packages' own processes
        process.wait()
        print_stderr(
            f"note: tracking did not end within {END_S:.0f} s and was killed; the run is not "
            f"affected. See {output}"
        )
        return
    if code:
        print_stderr(f"note: tracking failed; the run is not affected. See {output}")


# --- the process


def follow(run_dir: Path, names: Sequence[str]) -> int:
    """Send the points of a run to the trackers until standard input closes. Return the exit code.

    It is 1 if a tracker failed; the others continue without it.
    """
    exit_code = 0
    trackers: dict[str, Tracker] = {}
    for name in names:
        try:
            trackers[name] = TRACKERS[name](run_dir, facts(run_dir))
        except Exception:
            exit_code = _report_failure(name)
    follower = Follower(run_dir)
    closed = False
    while not closed:
        closed = gpu_sampler.input_closed(PERIOD_S)
        for point in follower.points():
            for name, tracker in list(trackers.items()):
                try:
                    tracker.log(point.axis, point.position, point.values)
                except Exception:
                    exit_code = _report_failure(name)
                    del trackers[name]
    for name, tracker in trackers.items():
        try:
            tracker.finish(*ending(run_dir))
        except Exception:
            exit_code = _report_failure(name)
    return exit_code


def _report_failure(name: str) -> int:
    """Print the exception that tracker `name` raised, and return the exit code 1."""
    print(f"note: tracking by {name} failed:", flush=True)
    traceback.print_exc()
    return 1


if __name__ == "__main__":
    os.nice(gpu_sampler.NICE)
    sys.exit(follow(Path(sys.argv[1]), sys.argv[2:]))
