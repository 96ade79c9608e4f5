"""Samples power, temperature, clocks and memory of the GPUs once a second during a run: `python -m launch.sampler FILE`.

A separate process, so that a driver that hangs cannot hold up a run. It ends when its standard input closes, thus also when the launcher
is killed. FILE, gpu_samples.jsonl, has one object a line:

    {"event": "start", "source": "nvidia-smi", "time": UNIX_TIME, "period_s": 1.0, "gpus": [{"id", "name"}]}
    {"event": "sample", "time_s": SECONDS_SINCE_START, "gpus": [{"power_w", "power_limit_w", "temperature_c", "clock_mhz",
                                                                 "memory_clock_mhz", "memory_gib", "throttle": ["power cap"]}]}
    {"event": "note", "what": WHY_SOMETHING_IS_MISSING}    {"event": "stop", "time_s", "samples"}

`gpus` are those that the ranks see, in their order: entry k belongs to local rank k. null: the driver does not report it. These are the
driver's numbers for finding a slow or hot GPU, not a power measurement by MLPerf's rules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import PreflightError
from common.gpu_stats import SAMPLED, DriverError, read_gpus
from common.hardware import Probe, probe
from launch.console import print_stderr
from records.json_lines import append_line

NAME = "gpu_samples.jsonl"  # submission/gpu_samples.py reads it
PERIOD_S = 1.0
END_S = 5.0  # for the sampler to end; a call of a hung driver never ends
NICE = 10  # below the ranks in priority
SOURCES = {"nvidia": "nvidia-smi", "amd": "amdgpu's files in /sys"}


# --- the launcher's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sampling(run_dir: Path, enabled: bool) -> Iterator[None]:
    """Sample into `run_dir` while the block runs. A failure of the sampler does not affect the run."""
    if not enabled:
        yield
        return
    process = _start(run_dir / NAME)
    try:
        yield
    finally:
        _end(process)


def _start(path: Path) -> subprocess.Popen:
    """In a session of its own: Ctrl-C is for the launcher, which then closes the pipe."""
    command = [sys.executable, "-m", "launch.sampler", str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    ended_early = process.poll() is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with nvidia-smi
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside a driver call it may not even die
            process.wait(1.0)
        print_stderr("note: the GPU sampler hung and was killed: the driver may be in trouble")
        return
    if ended_early and process.returncode:
        print_stderr(f"note: the GPU sampler ended early with code {process.returncode}; the run is not affected")


# --- the sampler ------------------------------------------------------------------------------------------------------


def sample(found: Probe, file: int, closed: Callable[[float], bool], clock: Callable[[], float] = time.monotonic) -> None:
    """Write samples to `file`, a descriptor, until `closed(seconds)`, which waits at most that long, says that our input is closed."""
    gpus = [{"id": device.address, "name": device.name} for device in found.devices]
    _write(file, "start", source=SOURCES[found.vendor], time=time.time(), period_s=PERIOD_S, gpus=gpus)
    began = due = clock()
    samples, noted = 0, set()
    while True:
        time_s = round(clock() - began, 3)
        try:
            values = read_gpus(found.vendor, [device.address for device in found.devices], SAMPLED)
        except DriverError as error:
            values = [{} for _ in gpus]
            if str(error) not in noted:
                _write(file, "note", what=f"the GPUs cannot be read: {error}")
            noted.add(str(error))
        _write(file, "sample", time_s=time_s, gpus=values)
        samples += 1
        due = max(due + PERIOD_S, clock())  # no burst after a slow read
        if closed(due - clock()):
            break
    _write(file, "stop", time_s=round(clock() - began, 3), samples=samples)


def _write(file: int, event: str, **values) -> None:
    append_line(file, {"event": event, **values})


def _input_closed(seconds: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], max(seconds, 0.0))
    return bool(readable)  # nothing is ever written: readable means closed


def main(path: Path) -> int:
    os.nice(NICE)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            found, why_not = probe(), "no GPU that the ranks see"
        except PreflightError as error:
            found, why_not = Probe("none"), error.what
        if found.devices:
            sample(found, file, _input_closed)
        else:
            _write(file, "note", what=f"no sampler: {why_not}")
    except OSError as error:
        print(f"note: GPU samples end here: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
