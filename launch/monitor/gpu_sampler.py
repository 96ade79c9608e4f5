"""Sampler of the GPUs: `python -m launch.monitor.gpu_sampler FILE VENDOR GPUS`.

It records power, temperature, clocks and memory once a second during a run. It is a separate
process, so that a driver that hangs cannot delay the run. It ends when its standard input closes,
and thus also when the launcher is killed. FILE, gpu_samples.jsonl, has one JSON object per line:

    {"event": "start", "source": "nvidia-smi", "time": UNIX_TIME, "period_s": 1.0,
     "gpus": [{"id", "name"}]}
    {"event": "sample", "time_s": SECONDS_SINCE_START,
     "gpus": [{"power_w", "power_limit_w", "temperature_c", "clock_mhz", "memory_clock_mhz",
               "memory_gib", "utilization_percent", "throttle": ["power cap"]}]}
    {"event": "note", "what": WHY_SOMETHING_IS_MISSING}
    {"event": "stop", "time_s", "samples"}

`gpus` are the GPUs that the ranks use, in their order: entry k belongs to local rank k. null means
that the driver does not report the value. The samples help to find a slow or hot GPU. They are not
a power measurement by MLPerf's rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.machine.gpu_stats import SAMPLED, DriverError, read_gpus, with_throttling
from common.machine.hardware import Probe
from common.records.json_lines import append_line
from common.records.tracking import GPU_SAMPLES
from common.terminal import print_stderr

PERIOD_S = 1.0
END_S = 5.0  # for the sampler to end; a call to a hung driver never returns
NICE = 10  # below the ranks in priority
SOURCES = {"nvidia": "nvidia-smi", "amd": "amdgpu's files in /sys"}


# --- the launcher's side --------------------------------------------------------------------------


@contextlib.contextmanager
def sampling(run_dir: Path, found: Probe) -> Iterator[None]:
    """Sample the GPUs during the block. If the sampler fails, the run continues without it."""
    if not found.devices:
        yield
        return
    gpus = json.dumps([{"id": device.address, "name": device.name} for device in found.devices])
    command = [
        sys.executable,
        "-m",
        "launch.monitor.gpu_sampler",
        str(run_dir / GPU_SAMPLES),
        found.vendor,
        gpus,
    ]
    # A new session keeps Ctrl-C away from the sampler. The launcher handles it and closes the pipe.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """End the sampler, and print a note if it hung or had failed."""
    assert process.stdin is not None
    ended_early = process.poll() is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also ends nvidia-smi
        # A process inside a driver call may not even be killable.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        print_stderr("note: the GPU sampler hung and was killed: the driver may be in trouble")
        return
    if ended_early and process.returncode:
        print_stderr(
            f"note: the GPU sampler ended early with exit code {process.returncode}; the run is "
            "not affected"
        )


# --- the sampler ----------------------------------------------------------------------------------


def sample(
    file: int,
    vendor: str,
    gpus: list[dict],
    closed: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write samples until `closed` returns True.

    `file`: a descriptor. `closed(seconds)`: waits at most that long, and returns whether this
    process's standard input is closed.
    """
    append_line(
        file,
        {
            "event": "start",
            "source": SOURCES[vendor],
            "time": time.time(),
            "period_s": PERIOD_S,
            "gpus": gpus,
        },
    )
    began = due = clock()
    samples = 0
    noted = set()
    before: list[dict] = []
    while True:
        time_s = round(clock() - began, 3)
        try:
            reading = read_gpus(vendor, [gpu["id"] for gpu in gpus], SAMPLED)
            values = with_throttling(before, reading)
            before = reading
        except DriverError as error:
            values = [{} for _ in gpus]
            if str(error) not in noted:
                append_line(file, {"event": "note", "what": f"the GPUs cannot be read: {error}"})
            noted.add(str(error))
        append_line(file, {"event": "sample", "time_s": time_s, "gpus": values})
        samples += 1
        due = max(due + PERIOD_S, clock())  # no burst of samples after a slow read
        if closed(due - clock()):
            break
    append_line(file, {"event": "stop", "time_s": round(clock() - began, 3), "samples": samples})


def input_closed(seconds: float) -> bool:
    """Wait at most `seconds`, and return whether this process's standard input is closed."""
    readable, _, _ = select.select([sys.stdin], [], [], max(seconds, 0.0))
    return bool(readable)  # nothing is ever written, so readable means closed


def main(path: Path, vendor: str, gpus: list[dict]) -> int:
    """Create the file `path` and write samples to it. Return the exit code."""
    os.nice(NICE)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        sample(file, vendor, gpus, input_closed)
    except OSError as error:
        print(f"note: GPU samples end here: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
