"""The processes of a run: started in a group of their own, watched for hangs, stopped in order, and none left behind.

The ranks rewrite `ranks/rank_<k>.heartbeat` at every micro-step (common/sharding/processes.py). When no rank has done so for the
configured time, the one that stands still is named, every rank is asked for its stack, and all are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import Hang

POLL_S = 0.5
GRACE_S = 20.0  # from SIGTERM to SIGKILL; Slurm's own patience (KillWait) is 30 s
STACK_S = 1.0  # for the ranks to write their stacks
MARK = "LAUNCH_MARK"  # environment variable by which we know our own processes, also when their parent is gone
# A collective of the ranks times out after the same time, counted from a little later: be first, since we can name the guilty.
BEFORE_COLLECTIVES = 0.9


@dataclass(frozen=True)
class Ending:
    """How the processes ended: by themselves (`returncode`), because we were asked to stop, or because nothing moved."""

    returncode: int
    signal_number: int = 0
    hang: Hang | None = None
    guilty: dict | None = None  # the last heartbeat of the rank named in `hang`


@dataclass(frozen=True)
class HangLimits:
    startup_s: float  # until every rank has reported and finished a step: imports, compilation, first collectives
    step_s: float


class HangWatch:
    """Tells when no heartbeat has changed for too long. Compares file times only for change, so clocks may jump."""

    def __init__(self, ranks: Path, world_size: int, limits: HangLimits, clock: Callable[[], float] = time.monotonic):
        self.ranks, self.world_size, self.limits, self.clock = ranks, world_size, limits, clock
        self.last_change = clock()
        self.modified: dict[int, int] = {}
        self.beats: dict[int, dict] = {}

    def look(self) -> bool:
        """True if the run stands still."""
        for rank in range(self.world_size):
            self._read(rank)
        started = len(self.beats) == self.world_size and all(beat["step"] > 0 for beat in self.beats.values())
        return self.clock() - self.last_change > (self.limits.step_s if started else self.limits.startup_s)

    def _read(self, rank: int) -> None:
        path = self.ranks / f"rank_{rank}.heartbeat"
        try:
            modified = path.stat().st_mtime_ns
            if modified != self.modified.get(rank):
                self.modified[rank], self.last_change = modified, self.clock()
                self.beats[rank] = json.loads(path.read_text())
        except (OSError, ValueError):
            return  # not there yet, or just being written: the next look reads it

    def explain(self) -> tuple[Hang, dict]:
        """The error, and the last heartbeat of the rank it names: a stopped process, a silent one, or the one furthest behind."""
        silent_s = self.clock() - self.last_change
        stopped = [beat for beat in self.beats.values() if process_state(beat["pid"]) in ("T", "t")]
        unheard = [rank for rank in range(self.world_size) if rank not in self.beats]
        if stopped:
            guilty = stopped[0]
            why = f"process {guilty['pid']} of rank {guilty['rank']} is stopped (SIGSTOP, or a debugger)"
        elif unheard:
            guilty = {"rank": unheard[0], "step": 0}
            why = f"rank {', '.join(map(str, unheard))} never reported"
        else:
            guilty = min(self.beats.values(), key=lambda beat: (beat["step"], beat["time"]))
            why = f"rank {guilty['rank']} was the first to fall silent, at step {guilty['step']} in {guilty['phase']!r}"
        what = f"no rank made progress for {silent_s:.0f} s: rank {guilty['rank']} holds up the others"
        return Hang(what, why, "see where every rank stood in ranks/rank_*.stack; then start again"), guilty

    def pids(self) -> list[int]:
        return [beat["pid"] for beat in self.beats.values()]


def supervise(
    command: list[str],
    environment: dict[str, str],
    watch: HangWatch | None = None,
    *,
    poll_s: float = POLL_S,
    grace_s: float = GRACE_S,
) -> Ending:
    """Run `command` to its end. SIGINT, SIGTERM and SIGHUP are passed on as one SIGTERM, a second one kills at once.

    Whatever happens, no process of this run is left when the function returns or raises.
    """
    mark = uuid.uuid4().hex
    with _signals_noted() as received:
        process = subprocess.Popen(command, env=environment | {MARK: mark}, start_new_session=True)
        try:
            while not _ended(process, poll_s):
                if received:
                    break
                if watch and watch.look():
                    hang, guilty = watch.explain()
                    _ask_for_stacks(watch.pids())
                    return Ending(-signal.SIGKILL, hang=hang, guilty=guilty)
            if received:
                _stop(process, received, grace_s)
            return Ending(process.poll() or 0, received[0] if received else 0)
        finally:
            kill_marked(mark)
            process.wait()


def _ended(process: subprocess.Popen, patience_s: float) -> bool:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(process: subprocess.Popen, received: list[int], grace_s: float) -> None:
    """One SIGTERM to torchrun's group; torchrun passes it on to the ranks, which live in sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and len(received) < 2 and not _ended(process, 0.1):
        pass


def _ask_for_stacks(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_S)


def heeded_signals() -> list[int]:
    """SIGINT, SIGTERM and SIGHUP, less those that whoever started us wants ignored (nohup, a shell's background jobs)."""
    return [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of dying of them."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, frame: received.append(n)) for number in heeded_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_marked(mark: str, patience_s: float = 10.0) -> None:
    """SIGKILL every process that carries `mark` in its environment, until none is left."""
    deadline = time.monotonic() + patience_s
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes with `mark` in their environment. A zombie has none, so it does not count."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def processes_of(run_dir: Path) -> list[int]:
    """torchrun and the ranks of that run, also when their launcher is gone: `run_dir` is an argument, and they carry our mark."""
    wanted, ours, found = str(run_dir).encode(), f"{MARK}=".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "cmdline").read_bytes().split(b"\0") and ours in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def end_processes_of(run_dir: Path, patience_s: float = GRACE_S) -> None:
    """What a killed launcher left behind was told to stop by the kernel (launch/torchrun.py): wait, then SIGKILL."""
    deadline = time.monotonic() + patience_s
    while (pids := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def process_state(pid: int) -> str:
    """The letter of /proc/<pid>/stat: R, S, D, T (stopped), t (traced), Z; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
