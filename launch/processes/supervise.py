"""Supervision of a run's processes: start them in a new session, detect hangs, and stop them.

Each rank rewrites `ranks/rank_<k>.heartbeat` at every micro-batch (common/training/heartbeat.py).
If no rank has done so for the configured time, the run hangs. All ranks are then asked to write
their stacks and killed, and the error names the rank that the others wait for. No process is left
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import LAUNCHED, STOP_SIGNALS, Hang

PRCTL = ctypes.CDLL(None).prctl
POLL_S = 0.5
# From the launcher's first signal to SIGKILL. Slurm's own grace period (KillWait) is 30 s.
GRACE_S = 20.0
SAVE_SHARE = 0.75  # of the grace period, for the ranks to save a checkpoint and end by themselves
KILL_S = 10.0  # for SIGKILL, which is repeated until no process is left
STACK_S = 2.0  # for the ranks to write stacks and collectives; they check every half second
ORPHANS_S = 8.0  # for ranks to end by themselves after torchrun was killed (training/guard.py)
# Share of the configured limit after which the launcher reports a hang. The ranks' collectives time
# out at the full limit, but only the launcher can name the rank that the others wait for.
BEFORE_COLLECTIVES = 0.9


@dataclass(frozen=True)
class Grace:
    """Time that the processes have after a signal to the launcher.

    `seconds`: until SIGKILL.
    `save`: asks the ranks to save a checkpoint and end, and returns whether they can.
    """

    seconds: float = GRACE_S
    save: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Ending:
    """Reason why the processes ended: by themselves, or for the one reason that is set."""

    returncode: int
    signal_number: int = 0  # signal that the launcher received
    hang: Hang | None = None
    failed_rank: dict | None = None  # the last heartbeat of the rank that `hang` names
    stopped: bool = False  # because `stop` returned True


class HangWatch:
    """Detector of hangs: a run hangs if no heartbeat has changed for too long.

    `folder`: where all `ranks` write their heartbeats.
    `local_ranks`: the ranks whose processes are on this machine.
    `startup_s`: limit until every rank has finished a step. It covers imports, kernel compilation
        and the first collectives.
    `step_s`: limit after that.

    File times are only tested for a change, so the clocks of nodes may differ or jump.
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

    @property
    def started(self) -> bool:
        """Whether every rank has finished a step, by its heartbeat now."""
        self._read_heartbeats()
        all_reported = len(self.beats) == len(self.ranks)
        return all_reported and all(beat["step"] > 0 for beat in self.beats.values())

    def is_hanging(self) -> bool:
        """Return whether the run hangs."""
        limit_s = self.step_s if self.started else self.startup_s
        return self.clock() - self.last_change > limit_s

    def _read_heartbeats(self) -> None:
        for rank in self.ranks:
            path = self.folder / f"rank_{rank}.heartbeat"
            # A file may be missing or half written; it is then read at the next call.
            with contextlib.suppress(OSError, ValueError):
                modified = path.stat().st_mtime_ns
                if modified != self.modified.get(rank):
                    self.modified[rank] = modified
                    self.last_change = self.clock()
                    self.beats[rank] = json.loads(path.read_text())

    def explain(self) -> tuple[Hang, dict]:
        """Return the error, and the last heartbeat of the failed rank: the one the others wait for.

        The failed rank is the first of these that exists:

        - a rank that never reported
        - a rank that wrote no stack after `ask_for_stacks`: it is stopped, or blocked in the kernel
        - the rank that is furthest behind
        """
        silent_s = self.clock() - self.last_change
        unheard = [rank for rank in self.ranks if rank not in self.beats]
        if unheard:
            failed_rank = {"rank": unheard[0], "step": 0}
            why = f"rank {', '.join(map(str, unheard))} never reported"
        else:
            failed_rank = min(self.beats.values(), key=self._order_of_suspicion)
            why = (
                f"rank {failed_rank['rank']} stopped reporting, at step {failed_rank['step']} in "
                f"{failed_rank['phase']!r}"
            )
        error = Hang(
            f"no rank made progress for {silent_s:.0f} s: rank {failed_rank['rank']} holds up the "
            "others",
            why,
            "see the stack of every rank in ranks/rank_*.stack, then start again",
        )
        return error, failed_rank

    def _order_of_suspicion(self, beat: dict) -> tuple[bool, int, float]:
        """Return a sort key of heartbeats that puts the failed rank first.

        Ranks that wait for each other in the same step report in any order, so time comes last.
        """
        return self._answered(beat["rank"]), beat["step"], beat["time"]

    def ask_for_stacks(self) -> None:
        """Send SIGUSR1 to the local ranks, which makes them write their stacks."""
        for rank in self.local_ranks:
            if rank in self.beats:
                _kill(self.beats[rank]["pid"], signal.SIGUSR1)
        time.sleep(STACK_S)

    def _answered(self, rank: int) -> bool:
        """Return False if `rank` was asked for its stack and wrote none."""
        if rank not in self.local_ranks:
            return True  # only the launcher on its own node can ask it
        try:
            return (self.folder / f"rank_{rank}.stack").stat().st_size > 0
        except OSError:
            return True  # it ended or never opened the file, so the missing stack proves nothing


def supervise(
    command: list[str],
    environment: dict[str, str],
    run_dir: Path,
    watch: HangWatch | None = None,
    stop: Callable[[], bool] = lambda: False,
    grace: Grace | None = None,
    *,
    poll_s: float = POLL_S,
    stdout: IO | None = None,
    stderr: IO | None = None,
) -> Ending:
    """Run `command` until it ends, `watch` detects a hang, or `stop` returns True.

    `stop` is called every `poll_s` seconds. The first of STOP_SIGNALS is passed on as SIGTERM. If
    the ranks can save a checkpoint, they have SAVE_SHARE of the grace period for that before. A
    second signal kills at once. No process of this run is left when the function returns or raises.
    """
    with signals_noted() as received:
        marked = environment | {LAUNCHED: str(run_dir)}
        process = subprocess.Popen(
            command,
            env=marked,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_separate_from_parent,
        )
        try:
            while not _ended(process, poll_s) and not received:
                hangs = watch is not None and watch.is_hanging()
                stopped = stop()
                if hangs or stopped:
                    if watch:
                        watch.ask_for_stacks()
                    hang = None
                    failed_rank = None
                    if watch and not stopped:
                        hang, failed_rank = watch.explain()
                    return Ending(
                        -signal.SIGKILL, hang=hang, failed_rank=failed_rank, stopped=stopped
                    )
            if received:
                _stop(process, received, grace or Grace())
            return Ending(process.poll() or 0, received[0] if received else 0)
        finally:
            torchrun_was_killed = (process.poll() or 0) < 0 and not received
            kill_processes_of(run_dir, ORPHANS_S if torchrun_was_killed else 0.0)
            process.wait()


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends, even by SIGKILL.

    Meant for the argument `preexec_fn` of subprocess.Popen.
    """
    PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, linux/prctl.h


def run_module(arguments: list[str]) -> int:
    """Run a module by launch.start, with stderr as its stdout. Return its exit code.

    A Ctrl-C waits until both processes can receive it: during a fork, Python drops what a handler
    raises. The process ends with this one.
    """
    command = [sys.executable, "-m", "launch.start", *arguments]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=end_with_parent)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        return process.wait()
    finally:
        process.kill()  # no effect after its end


def _separate_from_parent() -> None:
    """End with the parent, and ignore the signals that a batch system may send to all processes.

    The ranks inherit this. Only the launcher acts on these signals. The ranks write their stacks at
    SIGUSR1.
    """
    end_with_parent()
    for number in set(STOP_SIGNALS) - {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}:
        signal.signal(number, signal.SIG_IGN)


def _ended(process: subprocess.Popen, limit_s: float) -> bool:
    """Wait at most `limit_s` seconds, and return whether the process has ended."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen, received: list[int], grace: Grace) -> None:
    """Wait for the ranks to save if they can, send SIGTERM, and wait for the end of the grace time.

    SIGTERM goes once to torchrun's process group. torchrun passes it on to the ranks, which have
    sessions of their own.
    """
    began = time.monotonic()

    def ended_by(limit_s: float) -> bool:
        while time.monotonic() < began + limit_s and len(received) < 2:
            if _ended(process, 0.1):
                return True
        return len(received) >= 2

    if grace.save() and ended_by(SAVE_SHARE * grace.seconds):
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    ended_by(grace.seconds)


class _Received(list[int]):
    """Signals in the order of their arrival. It is their handler."""

    def __call__(self, number: int, frame: object) -> None:
        self.append(number)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Collect STOP_SIGNALS in a list, so that they do not end the process.

    Those that an outer block has collected move to the inner one, which can act on them.
    """
    received = _Received()
    before = {
        number: signal.signal(number, received)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup and background jobs set it
    }
    for outer in before.values():
        if isinstance(outer, _Received):
            received += outer
            outer.clear()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def processes_of(run_dir: Path) -> list[int]:
    """Return the process IDs of torchrun and the ranks of the run in `run_dir`.

    A variable in their environment identifies them. Zombies have no environment and are not
    counted.
    """
    mark = f"{LAUNCHED}={run_dir}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def kill_processes_of(run_dir: Path, grace_s: float = 0.0) -> None:
    """Send SIGKILL to every process of the run in `run_dir`, until none is left or for KILL_S.

    `grace_s`: seconds before the first SIGKILL, in which the processes may end by themselves.
    """
    end_of_grace = time.monotonic() + grace_s
    while time.monotonic() < end_of_grace + KILL_S:
        pids = processes_of(run_dir)
        if not pids:
            return
        if time.monotonic() >= end_of_grace:
            for pid in pids:
                _kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
