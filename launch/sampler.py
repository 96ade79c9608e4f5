"""Samples power, temperature, clocks and memory of the GPUs once a second during a run: `python -m launch.sampler FILE`.

A separate process, so that a driver that hangs or a library that crashes cannot hold up a run. It ends when its standard input closes,
thus also when the launcher is killed. FILE, gpu_samples.jsonl, has one object a line:

    {"event": "start", "source": "nvml", "time": UNIX_TIME, "period_s": 1.0, "gpus": [{"index", "id", "name", "power_limit_w"}]}
    {"event": "sample", "time_s": SECONDS_SINCE_START, "gpus": [{"power_w", "temperature_c", "clock_mhz", "memory_clock_mhz",
                                                                 "memory_gib", "throttle": ["power cap"]}]}
    {"event": "note", "what": WHY_SOMETHING_IS_MISSING}    {"event": "stop", "time_s", "samples"}

`gpus` are those that the ranks see, in their order: entry k belongs to local rank k. null: the driver does not report it. These are the
driver's numbers for finding a slow or hot GPU, not a power measurement by MLPerf's rules. NVML (`nvidia-ml-py`) was tried on an H100;
amdsmi was written from its documentation and never run: we have no AMD GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from common.gpu_kinds import GIB
from common.gpu_stats import NVML_THROTTLE_REASONS
from common.hardware import visible_indices
from launch.console import print_stderr
from records.json_lines import append_line

NAME = "gpu_samples.jsonl"  # submission/gpu_samples.py reads it
PERIOD_S = 1.0
END_S = 5.0  # for the sampler to end: a read of eight GPUs takes some 20 ms, one of a hung driver never ends
NICE = 10  # below the ranks in priority


# --- the launcher's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sampling(run_dir: Path, enabled: bool) -> Iterator[None]:
    """Sample into `run_dir` while the block runs. A failure of the sampler does not affect the run."""
    process = _start(run_dir / NAME) if enabled else None
    try:
        yield
    finally:
        if process is not None:
            _end(process)


def _start(path: Path) -> subprocess.Popen | None:
    command = [sys.executable, "-m", "launch.sampler", str(path)]
    try:  # a session of its own: Ctrl-C is for the launcher, which then closes the pipe
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print_stderr(f"note: no GPU samples: the sampler did not start: {error.strerror}")
        return None


def _end(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    ended_early = process.poll() is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # inside a driver call it may not even die
            process.wait(1.0)
        print_stderr("note: the GPU sampler hung and was killed: the driver may be in trouble")
        return
    if ended_early and process.returncode:
        print_stderr(f"note: the GPU sampler ended early with code {process.returncode}; the run is not affected")


# --- sources: the driver's libraries. `describe` and `read` raise whatever these raise --------------------------------


class Nvml:
    name = "nvml"

    def __init__(self, nvml: ModuleType, environment):
        nvml.nvmlInit()
        self.nvml = nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        self.indices = visible_indices(len(handles), environment.get("CUDA_VISIBLE_DEVICES"), uuids)  # as the driver counts
        self.handles, self.uuids = handles, uuids
        # Throttle is the name until 2023.
        self.reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def describe(self, index: int) -> dict:
        handle = self.handles[index]
        limit_w = self.nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
        return {"id": self.uuids[index], "name": _text(self.nvml.nvmlDeviceGetName(handle)), "power_limit_w": limit_w}

    def read(self, index: int) -> dict[str, Callable[[], object]]:
        nvml, handle = self.nvml, self.handles[index]
        return {
            "power_w": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "memory_gib": lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB, 2),
            "throttle": lambda: [name for bit, name in NVML_THROTTLE_REASONS.items() if self.reasons(handle) & bit],
        }


# gpu_metrics 1.6 and later (MI300 and MI350): counters that grow while the limit lowers the clock
AMD_COUNTERS = {
    "ppt_residency_acc": "power cap",
    "socket_thm_residency_acc": "thermal (socket)",
    "hbm_thm_residency_acc": "thermal (memory)",
    "vr_thm_residency_acc": "thermal (regulator)",
    "prochot_residency_acc": "thermal (hardware)",
}


class AmdSmi:
    name = "amdsmi"

    def __init__(self, smi: ModuleType, environment):
        smi.amdsmi_init()
        self.smi, self.handles = smi, list(smi.amdsmi_get_processor_handles())
        chosen = list(range(len(self.handles)))  # ROCR_VISIBLE_DEVICES cuts first, as in common/hardware.py
        for value in (
            environment.get("ROCR_VISIBLE_DEVICES"),
            environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")),
        ):
            chosen = [chosen[i] for i in visible_indices(len(chosen), value)]
        self.indices = chosen
        self.counters: dict[int, dict[str, int]] = {}

    def describe(self, index: int) -> dict:
        handle = self.handles[index]
        name = self.smi.amdsmi_get_gpu_asic_info(handle)["market_name"]
        return {"id": self.smi.amdsmi_get_gpu_device_bdf(handle), "name": name, "power_limit_w": None}

    def read(self, index: int) -> dict[str, Callable[[], object]]:
        handle = self.handles[index]
        metrics = self.smi.amdsmi_get_gpu_metrics_info(handle)
        return {
            "power_w": lambda: _first(metrics, "current_socket_power", "average_socket_power"),
            "temperature_c": lambda: _first(metrics, "temperature_hotspot", "temperature_edge"),
            "clock_mhz": lambda: _mean(metrics.get("current_gfxclks")) or _first(metrics, "current_gfxclk"),
            "memory_clock_mhz": lambda: _first(metrics, "current_uclk"),
            "memory_gib": lambda: round(self.smi.amdsmi_get_gpu_memory_usage(handle, self.smi.AmdSmiMemoryType.VRAM) / GIB, 2),
            "throttle": lambda: self._throttle(index, metrics),
        }

    def _throttle(self, index: int, metrics: dict) -> list[str] | None:
        """The limits whose counter has grown since the last sample; None if there is nothing to compare."""
        now = {name: int(metrics[name]) for name in AMD_COUNTERS if _number(metrics.get(name)) is not None}
        before, self.counters[index] = self.counters.get(index, {}), now
        common = now.keys() & before.keys()
        return [reason for name, reason in AMD_COUNTERS.items() if name in common and now[name] > before[name]] if common else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _number(value: object) -> float | None:
    """None for "N/A" or all bits set, which is how amdsmi reports a missing value."""
    missing = not isinstance(value, int | float) or value in (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
    return None if missing else value  # type: ignore[return-value]


def _first(metrics: dict, *names: str) -> float | None:
    return next((number for name in names if (number := _number(metrics.get(name))) is not None), None)


def _mean(values: object) -> float | None:
    """Mean over the dies of a GPU, each of which has a clock."""
    numbers = [number for value in values if (number := _number(value)) is not None] if isinstance(values, list) else []
    return round(sum(numbers) / len(numbers)) if numbers else None


def open_source(environment, load: Callable[[str], ModuleType] = importlib.import_module) -> tuple[Nvml | AmdSmi | None, str]:
    """The first library that is installed and sees GPUs; None and the reason if there is none."""
    reasons = []
    for module, kind in (("pynvml", Nvml), ("amdsmi", AmdSmi)):
        try:
            source: Nvml | AmdSmi = kind(load(module), environment)  # type: ignore[operator]
        except Exception as error:  # a driver's library may raise anything
            reasons.append(f"{module}: {error or type(error).__name__}")
            continue
        if source.indices:
            return source, ""
        reasons.append(f"{module}: no GPU that the ranks see")
    return None, f"no sampler: neither NVML (pip install nvidia-ml-py) nor amdsmi can be used ({'; '.join(reasons)})"


# --- the sampler ------------------------------------------------------------------------------------------------------


class Sampler:
    """Writes what a source reads to `file`, a descriptor. A value that cannot be read is null, and the reason is noted once."""

    def __init__(self, source: Nvml | AmdSmi, file: int, clock: Callable[[], float] = time.monotonic):
        self.source, self.file, self.clock = source, file, clock
        self.noted: set[str] = set()
        self.samples = 0

    def run(self, closed: Callable[[float], bool], period_s: float = PERIOD_S) -> None:
        """Sample until `closed(seconds)`, which waits at most that long, says that the launcher has closed our input."""
        gpus = [{"index": index, **self._described(index)} for index in self.source.indices]
        began = self.clock()
        _write(self.file, "start", source=self.source.name, time=time.time(), period_s=period_s, gpus=gpus)
        due = began
        while True:
            _write(self.file, "sample", time_s=round(self.clock() - began, 3), gpus=[self._sample(index) for index in self.source.indices])
            self.samples += 1
            due = max(due + period_s, self.clock())  # no burst after a slow read
            if closed(due - self.clock()):
                break
        _write(self.file, "stop", time_s=round(self.clock() - began, 3), samples=self.samples)

    def _described(self, index: int) -> dict:
        return self._guarded(f"GPU {index}", lambda: self.source.describe(index)) or {"id": None, "name": None, "power_limit_w": None}

    def _sample(self, index: int) -> dict:
        reads = self._guarded(f"GPU {index}", lambda: self.source.read(index)) or {}
        return {name: self._guarded(f"{name} of GPU {index}", read) for name, read in reads.items()}

    def _guarded(self, what: str, read: Callable):
        try:
            return read()
        except Exception as error:  # a GPU that fell off the bus, a counter that this driver lacks
            if what not in self.noted:
                self.noted.add(what)
                _write(self.file, "note", what=f"{what} cannot be read: {error or type(error).__name__}")
            return None


def _write(file: int, event: str, **values) -> None:
    append_line(file, {"event": event, **values})


def _input_closed(seconds: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], max(seconds, 0.0))
    return bool(readable)  # nothing is ever written: readable means closed


def main(path: Path) -> int:
    os.nice(NICE)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        source, why_not = open_source(os.environ)
        if source is None:
            _write(file, "note", what=why_not)
        else:
            Sampler(source, file).run(_input_closed)
    except OSError as error:
        print(f"note: GPU samples end here: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
