"""The sampler beside a run: what it writes with fake drivers, that it never disturbs a run, and what the report makes of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic_log
from page import Page
from toy import alive, wait_until

from launch import sampler
from submission import gpu_samples, report
from submission.runs import read_attempt

ROOT = Path(__file__).parents[2]
GIB = 2**30


def nvml(count=2, **changes):
    """A pynvml with `count` H100s; the handles are the indices."""
    fake = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}{handle}",
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100 80GB HBM3",
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetPowerUsage=lambda handle: 650_040 + 1000 * handle,
        nvmlDeviceGetTemperature=lambda handle, kind: 60 + handle,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1700 + handle, 2: 2619}[kind],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=70 * GIB),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: (0x1, 0x24)[handle],
    )
    for name, value in changes.items():
        setattr(fake, name, value)
    return fake


class Smi(SimpleNamespace):
    """An amdsmi with two MI300X, eight dies each, as gpu_metrics 1.6 gives them."""

    AmdSmiMemoryType = SimpleNamespace(VRAM=0)

    def __init__(self, **metrics):
        super().__init__(amdsmi_init=lambda: None, reads=0)
        self.metrics = metrics

    def amdsmi_get_processor_handles(self):
        return ["a", "b"]

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_device_bdf(self, handle):
        return f"0000:{handle}"

    def amdsmi_get_gpu_memory_usage(self, handle, kind):
        return 96 * GIB

    def amdsmi_get_gpu_metrics_info(self, handle):
        self.reads += 1
        counters = dict.fromkeys(sampler.AMD_COUNTERS, 5) | {"ppt_residency_acc": 100 * self.reads, "vr_thm_residency_acc": "N/A"}
        clocks = [2000, 2100, "N/A", 0xFFFF]
        facts = {"current_socket_power": 700, "temperature_hotspot": 80, "current_gfxclks": clocks, "current_uclk": 1300}
        return {**facts, **counters, **self.metrics}


def loader(**modules):
    def load(name):
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return modules[name]

    return load


def lines_of(path):
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def opened(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def record(tmp_path, samples=2, environment=None, **modules):
    """What the sampler writes until it is told to stop after `samples`."""
    source, why = sampler.open_source(environment or {}, loader(**modules))
    assert source is not None, why
    worker = sampler.Sampler(source, opened(tmp_path / sampler.NAME))
    worker.run(lambda seconds: worker.samples >= samples)
    return lines_of(tmp_path / sampler.NAME)


def of(records, event):
    return [record for record in records if record["event"] == event]


# --- what it writes ---------------------------------------------------------------------------------------------------


def test_nvml_values_and_units(tmp_path):
    records = record(tmp_path, pynvml=nvml())
    start, (first, second), stop = records[0], of(records, "sample"), records[-1]
    assert (start["source"], start["period_s"], stop["samples"]) == ("nvml", 1.0, 2)
    assert start["gpus"][1] == {"index": 1, "id": "GPU-11", "name": "NVIDIA H100 80GB HBM3", "power_limit_w": 700.0}
    assert abs(start["time"] - time.time()) < 60 and 0 <= first["time_s"] <= second["time_s"] <= stop["time_s"]
    expected = {"power_w": 651.0, "temperature_c": 61, "clock_mhz": 1701, "memory_clock_mhz": 2619, "memory_gib": 70.0}
    assert first["gpus"][1] == expected | {"throttle": ["power cap", "thermal (driver)"]}
    assert first["gpus"][0]["throttle"] == [], "idle is no throttling"


def test_amdsmi_values_units_and_counters(tmp_path):
    records = record(tmp_path, amdsmi=Smi())
    first, second = of(records, "sample")
    assert records[0]["source"] == "amdsmi" and records[0]["gpus"][0]["id"] == "0000:a"
    expected = {"power_w": 700, "temperature_c": 80, "clock_mhz": 2050, "memory_clock_mhz": 1300, "memory_gib": 96.0}
    assert first["gpus"][0] == expected | {"throttle": None}, "one reading of a counter says nothing"
    assert second["gpus"][0]["throttle"] == ["power cap"] == second["gpus"][1]["throttle"], "only the counter that grew"


def test_amdsmi_values_that_the_gpu_does_not_give_are_null(tmp_path):
    missing = dict.fromkeys(("current_socket_power", "average_socket_power"), "N/A") | {
        "temperature_hotspot": 0xFFFF,
        "current_gfxclks": [],
    }
    sample = of(record(tmp_path, amdsmi=Smi(**missing)), "sample")[0]["gpus"][0]
    assert (sample["power_w"], sample["temperature_c"], sample["clock_mhz"], sample["memory_clock_mhz"]) == (None, None, None, 1300)


@pytest.mark.parametrize(
    ("environment", "indices"),
    [({}, [0, 1, 2]), ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]), ({"CUDA_VISIBLE_DEVICES": "GPU-11"}, [1])],
)
def test_only_the_gpus_of_the_ranks_in_their_order(tmp_path, environment, indices):
    start = record(tmp_path, environment=environment, pynvml=nvml(3))[0]
    assert [gpu["index"] for gpu in start["gpus"]] == indices


def test_amd_visibility_cuts_twice(tmp_path):
    environment = {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}
    assert [gpu["index"] for gpu in record(tmp_path, environment=environment, amdsmi=Smi())[0]["gpus"]] == [1]


def test_the_newer_name_of_the_reasons_is_taken(tmp_path):
    fake = nvml(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x40)
    assert of(record(tmp_path, pynvml=fake), "sample")[0]["gpus"][0]["throttle"] == ["thermal (hardware)"]


def test_an_nvml_that_sees_nothing_gives_way_to_amdsmi(tmp_path):
    def no_driver():
        raise OSError("NVML Shared Library Not Found")

    assert record(tmp_path, pynvml=nvml(nvmlInit=no_driver), amdsmi=Smi())[0]["source"] == "amdsmi"


def test_neither_library_is_said_with_the_reasons():
    source, why = sampler.open_source({}, loader(pynvml=nvml(0)))
    assert source is None and "neither NVML" in why and "no GPU that the ranks see" in why and "No module named 'amdsmi'" in why


def test_a_gpu_that_stops_answering_is_noted_once_and_the_others_go_on(tmp_path):
    def power(handle):
        if handle == 1:
            raise RuntimeError("GPU is lost")
        return 500_000

    records = record(tmp_path, samples=4, pynvml=nvml(nvmlDeviceGetPowerUsage=power))
    assert [note["what"] for note in of(records, "note")] == ["power_w of GPU 1 cannot be read: GPU is lost"]
    for sample in of(records, "sample"):
        assert [gpu["power_w"] for gpu in sample["gpus"]] == [500.0, None] and sample["gpus"][1]["temperature_c"] == 61


def test_a_gpu_that_says_nothing_at_all_is_noted_once(tmp_path):
    smi = Smi()
    smi.amdsmi_get_gpu_metrics_info = lambda handle: {}["gone"]
    records = record(tmp_path, samples=3, amdsmi=smi)
    assert len(of(records, "note")) == 2 and of(records, "sample")[-1]["gpus"] == [{}, {}]


def test_a_slow_read_leads_to_no_burst(tmp_path):
    now, waits = [0.0], []

    def closed(seconds):
        waits.append(seconds)
        now[0] += max(seconds, 0)
        return len(waits) == 5

    def slow_power(handle):
        now[0] += 3.5 if len(waits) == 1 else 0.0
        return 500_000

    source, _ = sampler.open_source({}, loader(pynvml=nvml(1, nvmlDeviceGetPowerUsage=slow_power)))
    sampler.Sampler(source, opened(tmp_path / "file"), clock=lambda: now[0]).run(closed)
    assert waits == [1.0, 0.0, 1.0, 1.0, 1.0]


# --- the process ------------------------------------------------------------------------------------------------------

FAKE_PYNVML = """
import os, time
NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = range(3)
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return "a fake"
def nvmlDeviceGetEnforcedPowerLimit(handle): return 700000
def nvmlDeviceGetPowerUsage(handle):
    time.sleep(float(os.environ.get("HANG_S", 0)))
    return 650000
def nvmlDeviceGetTemperature(handle, kind): return 60
def nvmlDeviceGetClockInfo(handle, kind): return 1700
class Memory: used = 2**30
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetCurrentClocksEventReasons(handle): return 4
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A fake pynvml on the path of the sampler's process."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/pynvml.py").write_text(FAKE_PYNVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'driver'}{os.pathsep}{ROOT}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_it_runs_beside_and_ends_with_the_run(driver, capfd):
    with sampler.sampling(driver, enabled=True):
        wait_until(lambda: (driver / sampler.NAME).is_file() and len((driver / sampler.NAME).read_text().splitlines()) >= 3)
    records = lines_of(driver / sampler.NAME)
    assert records[0]["event"] == "start" and records[-1]["event"] == "stop" and records[-1]["samples"] == len(of(records, "sample")) >= 2
    assert alive(driver) == [] and capfd.readouterr() == ("", "")


def test_it_is_not_started_where_there_is_no_gpu(driver):
    with sampler.sampling(driver, enabled=False):
        pass
    assert list(driver.iterdir()) == []


LAUNCHER = """
import sys, time
from pathlib import Path
from launch import sampler
with sampler.sampling(Path(sys.argv[1]), enabled=True):
    print("started", flush=True)
    time.sleep(60)
"""


def test_a_killed_launcher_leaves_no_sampler(driver):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(driver)], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (driver / sampler.NAME).is_file() and '"sample"' in (driver / sampler.NAME).read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_until(lambda: alive(driver) == [], seconds=5)
    assert lines_of(driver / sampler.NAME)[-1]["event"] == "stop"


def test_a_driver_that_hangs_does_not_hold_up_the_run(driver, monkeypatch, capfd):
    monkeypatch.setenv("HANG_S", "60")
    monkeypatch.setattr(sampler, "END_S", 0.3)
    began = time.monotonic()
    with sampler.sampling(driver, enabled=True):
        wait_until(lambda: (driver / sampler.NAME).is_file())
    assert time.monotonic() - began < 20 and alive(driver) == []
    assert "hung and was killed" in capfd.readouterr().err


def test_without_a_library_one_line_says_so_and_nothing_else_happens(driver, capfd):
    (driver.parent / "driver/pynvml.py").write_text("raise ImportError('there is none')")
    (driver.parent / "driver/amdsmi.py").write_text("raise KeyError('ROCM_PATH')")
    with sampler.sampling(driver, enabled=True):
        wait_until(lambda: (driver / sampler.NAME).is_file() and (driver / sampler.NAME).read_text().endswith("\n"))
    (only,) = lines_of(driver / sampler.NAME)
    assert only["event"] == "note" and "there is none" in only["what"] and "ROCM_PATH" in only["what"]
    assert capfd.readouterr().err == ""


FULL_DISK = """
import resource, signal, sys
from launch import sampler
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
sampler.PERIOD_S = 0
sampler._input_closed = lambda seconds: False
sys.exit(sampler.main(sampler.Path(sys.argv[1])))
"""


def test_a_full_disk_ends_the_samples_at_a_whole_line(driver):
    path = driver / sampler.NAME
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "GPU samples end here" in done.stderr and "Traceback" not in done.stderr
    assert len(of(lines_of(path), "sample")) >= 2


def test_a_sampler_that_died_is_said_and_the_run_goes_on(driver, capfd):
    (driver / sampler.NAME).write_text("another run's\n")  # which it does not touch: it ends at once
    process = sampler._start(driver / sampler.NAME)
    process.wait(20)
    sampler._end(process)
    said = capfd.readouterr().err
    assert "GPU samples end here" in said and "the run is not affected" in said
    assert (driver / sampler.NAME).read_text() == "another run's\n"


# --- the report -------------------------------------------------------------------------------------------------------


def sample(time_s, *gpus):
    return {
        "event": "sample",
        "time_s": time_s,
        "gpus": [dict(zip(("power_w", "temperature_c", "clock_mhz"), gpu, strict=False)) for gpu in gpus],
    }


def write(folder, *records):
    (folder / gpu_samples.NAME).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run_dir(tmp_path):
    """Of a run that took a minute."""
    synthetic_log.write_good(tmp_path / "result.txt")
    records = synthetic_log.records(tmp_path / "result.txt")
    records[-1]["time_ms"] = next(r["time_ms"] for r in records if r["key"] == "run_start") + 60_000
    synthetic_log.write_records(tmp_path / "result.txt", records)
    return tmp_path


def run_start(run_dir):
    return read_attempt(run_dir / "result.txt").log.first("run_start").time_ms / 1e3


def page(run_dir):
    assert report.main([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert Page(text).links == []
    return text


def start_at(time_, count=2):
    return {
        "event": "start",
        "source": "nvml",
        "time": time_,
        "period_s": 1.0,
        "gpus": [{"index": i, "name": f"H100 <{i}>"} for i in range(count)],
    }


def test_both_sides_mean_the_same_file():
    assert sampler.NAME == gpu_samples.NAME


def test_the_report_says_nothing_without_a_file(run_dir):
    assert "GPUs during the run" not in page(run_dir) and "Ranks compared" not in page(run_dir)


def test_the_report_shows_why_there_are_no_samples(run_dir):
    write(run_dir, {"event": "note", "what": "no sampler: <neither>"})
    assert "no sampler: &lt;neither&gt;" in page(run_dir)


def test_table_and_curves_of_the_timed_part_only(run_dir):
    began = run_start(run_dir)
    before = sample(1.0, (90, 30, 300), (90, 30, 300))  # ten seconds before run_start
    timed = [sample(11.0 + i, (600 + i, 60 + i, 1700), (640 + i, 64 + i, 1690)) for i in range(3)]
    write(run_dir, start_at(began - 10), before, *timed, {"event": "stop", "time_s": 20.0, "samples": 4})
    text = page(run_dir)
    assert "600 / 601 / 602" in text and "64 / 65 / 66" in text and "1,690 / 1,690 / 1,690" in text
    assert "0: H100 &lt;0&gt;" in text and text.count('<polyline class="gpu"') == 6, "three curves of two GPUs"
    assert "held down by thermal" not in text and "below the median GPU" not in text


def test_a_low_clock_and_heat_are_named(run_dir):
    rows = []
    for i in range(20):
        row = sample(float(i), *[(700, 70, 1700)] * 3, (650, 92, 1500))
        for gpu, reasons in zip(row["gpus"], (["power cap"], [], [], ["power cap", "thermal (hardware)"] if i < 5 else []), strict=True):
            gpu["throttle"] = reasons
        rows.append(row)
    write(run_dir, start_at(run_start(run_dir), 4), *rows)
    text = page(run_dir)
    assert "GPU 3: median clock 1,500 MHz, 12% below" in text and "GPU 3: held down by thermal (hardware) in 25.0% of the samples" in text
    assert "GPU 0: " not in text, "a power limit is no finding"
    assert "power cap 100%" in text and "thermal (hardware) 25%" in text


def test_of_two_gpus_the_slower_one_is_named(run_dir):
    write(run_dir, start_at(run_start(run_dir)), *(sample(float(i), (1, 1, 1500), (1, 1, 1700)) for i in range(3)))
    assert gpu_samples.findings(gpu_samples.read_samples(read_attempt(run_dir / "result.txt")))[0].startswith(
        "GPU 0: median clock 1,500 MHz"
    )


def test_cut_and_strange_lines_spoil_nothing(run_dir):
    write(run_dir, start_at(run_start(run_dir)), sample(1.0, (600, 60, 1700), (600, 60, 1700)))
    with (run_dir / gpu_samples.NAME).open("a") as file:
        file.write(
            '[]\n{"event": "sample", "time_s": null, "gpus": []}\n{"event": "sample", "time_s": 2.0, "gpus": [null, {"power_w": "x"}]}\n'
        )
        file.write('{"event": "sample", "time_s": 3.0, "gpus": [{}]}\n{"event": "sample", "ti')
    assert "600 / 600 / 600" in page(run_dir)


def test_a_failed_run_without_run_start_shows_all_samples(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    write(tmp_path, start_at(1.7e9), sample(0.0, (500, 50, 1600), (500, 50, 1600)))
    assert "500 / 500 / 500" in page(tmp_path)


def test_hours_of_samples_stay_a_small_page(run_dir):
    gpus = [{"power_w": 700.0, "temperature_c": 70, "clock_mhz": 1700, "memory_gib": 70.0, "throttle": ["power cap"]}] * 8
    rows = ({"event": "sample", "time_s": float(i), "gpus": gpus} for i in range(3 * 3600))
    write(run_dir, start_at(0.0, 8), *rows)
    (run_dir / "result.txt").unlink()
    assert len(page(run_dir)) < 600_000


def test_the_ranks_compared_are_listed(run_dir):
    events = [{"event": "ranks", "step": i, "probe_ms": [0.2, 0.2, 0.2, 0.2 + 0.02 * (i > 0)], "slow": [3] * (i > 0)} for i in range(4)]
    events += [{"event": "ranks", "probe_ms": None, "slow": 3}, {"event": "ranks", "probe_ms": [None], "slow": []}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = page(run_dir)
    assert "0.200 / 0.220 / 0.220" in text and "3 of 4" in text and text.count("never") == 3
