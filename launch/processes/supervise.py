"""Supervision of a run's processes: start them in a new session, detect hangs, stop them in order.

The ranks rewrite `ranks/rank_<k>.heartbeat` at every micro-step (common/training/heartbeat.py). If
no rank has done so for the configured time, the rank that holds up the others is named. All ranks
are then asked for their stacks and killed. No process is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import LAUNCHED, Hang, Interrupted

PRCTL = ctypes.CDLL(None).prctl
POLL_S = 0.5
GRACE_S = 20.0  # from SIGTERM to SIGKILL; Slurm's own grace period (KillWait) is 30 s
STACK_S = 2.0  # for the ranks to write stacks and collectives; they check every half second
# Time for ranks to end by themselves after torchrun was killed (common/training/guard.py).
ORPHANS_S = 8.0
# The ranks' collectives have the same timeout, but it starts a little later. The launcher must be
# first, since only it can name the culprit.
BEFORE_COLLECTIVES = 0.9


@dataclass(frozen=True)
class Ending:
    """Reason why the processes ended.

    They ended by themselves (`returncode`), after a signal to the launcher, because of a hang, or
    because `stop` returned True.
    """

    returncode: int
    signal_number: int = 0
    hang: Hang | None = None
    culprit: dict | None = None  # the last heartbeat of the rank that `hang` names
    stopped: bool = False


class HangWatch:
    """Detector of hangs: no heartbeat has changed for too long.

    File times are only compared for change, so clocks may jump. `ranks` are watched through their
    files in `folder`; only `local_ranks` have processes on this machine. `startup_s` is the limit
    until every rank has finished a step (imports, kernel compilation, first collectives), then
    `step_s`.
    """

    def __init__(
        self,
        folder: Path,
        ranks: range,
        local_ranks: range,
        startup_s: float,
        step_s: float,
        clock=time.monotonic,
    ):
        self.folder = folder
        self.ranks = ranks
        self.local_ranks = local_ranks
        self.clock = clock
        self.startup_s = startup_s
        self.step_s = step_s
        self.last_change = clock()
        self.modified: dict[int, int] = {}
        self.beats: dict[int, dict] = {}

    def look(self) -> bool:
        """Read the heartbeats, and return True if the run hangs."""
        for rank in self.ranks:
            path = self.folder / f"rank_{rank}.heartbeat"
            # A file may be missing or half written; it is then read at the next call.
            with contextlib.suppress(OSError, ValueError):
                modified = path.stat().st_mtime_ns
                if modified != self.modified.get(rank):
                    self.modified[rank] = modified
                    self.last_change = self.clock()
                    self.beats[rank] = json.loads(path.read_text())
        started = len(self.beats) == len(self.ranks) and all(
            beat["step"] > 0 for beat in self.beats.values()
        )
        return self.clock() - self.last_change > (self.step_s if started else self.startup_s)

    def explain(self) -> tuple[Hang, dict]:
        """Return the error and the last heartbeat of the culprit.

        The culprit is, in this order:

        - a rank that never reported
        - a rank that wrote no stack after `ask_for_stacks`: it is stopped, or stuck in the kernel
        - the rank that is furthest behind
        """
        silent_s = self.clock() - self.last_change
        unheard = [rank for rank in self.ranks if rank not in self.beats]
        if unheard:
            culprit = {"rank": unheard[0], "step": 0}
            why = f"rank {', '.join(map(str, unheard))} never reported"
        else:
            # Ranks that wait for each other in one step reported in any order, so time is compared
            # last.
            culprit = min(
                self.beats.values(),
                key=lambda beat: (self._answered(beat["rank"]), beat["step"], beat["time"]),
            )
            why = (
                f"rank {culprit['rank']} stopped reporting, at step {culprit['step']} in "
                f"{culprit['phase']!r}"
            )
        what = (
            f"no rank made progress for {silent_s:.0f} s: rank {culprit['rank']} holds up the "
            "others"
        )
        return Hang(
            what, why, "see the stack of every rank in ranks/rank_*.stack; then start again"
        ), culprit

    def ask_for_stacks(self) -> None:
        """Send SIGUSR1 to the local ranks, which makes them write their stacks."""
        for rank in self.local_ranks:
            if rank in self.beats:
                _kill(self.beats[rank]["pid"], signal.SIGUSR1)
        time.sleep(STACK_S)

    def _answered(self, rank: int) -> bool:
        if rank not in self.local_ranks:
            return True  # only its own launcher can ask it
        try:
            return (self.folder / f"rank_{rank}.stack").stat().st_size > 0
        except OSError:
            return True  # it ended or never opened its file, so the missing stack proves nothing


def supervise(
    command: list[str],
    environment: dict[str, str],
    run_dir: Path,
    watch: HangWatch | None = None,
    stop: Callable[[], bool] = lambda: False,
    *,
    poll_s: float = POLL_S,
    stdout: IO | None = None,
    stderr: IO | None = None,
) -> Ending:
    """Run `command` until it ends, `watch` detects a hang, or `stop` returns True.

    `stop` is called every `poll_s` seconds. The first SIGINT, SIGTERM or SIGHUP is passed on as
    SIGTERM; a second one kills at once. No process of this run is left when the function returns or
    raises.
    """
    with signals_noted() as received:
        marked = environment | {LAUNCHED: str(run_dir)}
        process = subprocess.Popen(
            command,
            env=marked,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            while not _ended(process, poll_s) and not received:
                hangs = watch is not None and watch.look()
                stopped = stop()
                if hangs or stopped:
                    if watch:
                        watch.ask_for_stacks()
                    hang, culprit = watch.explain() if watch and not stopped else (None, None)
                    return Ending(-signal.SIGKILL, hang=hang, culprit=culprit, stopped=stopped)
            if received:
                _stop(process, received)
            return Ending(process.poll() or 0, received[0] if received else 0)
        finally:
            kill_processes_of(
                run_dir, ORPHANS_S if (process.poll() or 0) < 0 and not received else 0.0
            )
            process.wait()


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends, even by SIGKILL.

    For use as `preexec_fn`.
    """
    PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, linux/prctl.h


def _ended(process: subprocess.Popen, limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen, received: list[int]) -> None:
    """Send one SIGTERM to torchrun's process group, and wait up to GRACE_S for it to end.

    torchrun passes the signal on to the ranks, which have sessions of their own.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and len(received) < 2 and not _ended(process, 0.1):
        pass


def handled_signals() -> list[int]:
    """Return SIGINT, SIGTERM and SIGHUP, except those that the launcher's parent ignores.

    nohup and a shell's background jobs ignore signals in this way.
    """
    return [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]


def raise_at_signals() -> None:
    """Raise Interrupted at each of the handled signals from now on."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    for number in handled_signals():
        signal.signal(number, interrupt)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list, so that they do not end the process."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, frame: received.append(n))
        for number in handled_signals()
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def processes_of(run_dir: Path) -> list[int]:
    """Return the process IDs of torchrun and the ranks of that run.

    They are found by their environment. Zombies have none and are not counted.
    """
    mark = f"{LAUNCHED}={run_dir}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_processes_of(run_dir: Path, grace_s: float = 0.0, limit_s: float = 10.0) -> None:
    """Send SIGKILL to every process of that run until none is left.

    `grace_s`: time for processes whose launcher was killed to end by themselves. The kernel has
    sent SIGTERM to torchrun.
    """
    began = time.monotonic()
    while (pids := processes_of(run_dir)) and time.monotonic() < began + grace_s + limit_s:
        if time.monotonic() >= began + grace_s:
            for pid in pids:
                _kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
