"""Test the GPU sampler with a fake nvidia-smi: its output, its failures, and the report."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run
from jobs import job_of
from page import Page, read_page
from toy import alive, wait_until

from common.machine.hardware import Device, Probe, probe
from common.paths import ROOT
from common.records.tracking import GPU_SAMPLES
from launch import run
from launch.monitor import gpu_sampler as sampler
from launch.selection.machine import Machine
from submission import gpu_samples, report
from submission.run import Run

pytestmark = pytest.mark.quick

GIB = 2**30

# Three H100; GPU 1 is at its power limit and hot. BROKEN: what it says instead. HANG_S: how long a
# reading takes.
NVIDIA_SMI = """#!{python}
import os, sys, time
fields = sys.argv[1].partition("=")[2].split(",")
if "power.draw" in fields:
    time.sleep(float(os.environ.get("HANG_S", 0)))
    if os.environ.get("BROKEN"):
        sys.exit(os.environ["BROKEN"])
for gpu in range(3):
    known = {{
        "uuid": f"GPU-{{gpu}}{{gpu}}",
        "name": "NVIDIA H100 80GB HBM3",
        "memory.total": 81559,
        "compute_cap": "9.0",
        "mig.mode.current": "Disabled",
        "driver_version": "580.1",
        "power.draw": f"{{650.04 + gpu:.2f}}",
        "enforced.power.limit": "700.00",
        "temperature.gpu": 60 + gpu,
        "clocks.sm": 1700 + gpu,
        "clocks.mem": 2619,
        "memory.used": "71680" if gpu < 2 else "[N/A]",
        "utilization.gpu": 97 + gpu,
        "clocks_event_reasons.active": ("0x0000000000000001", "0x0000000000000024", "[N/A]")[gpu],
    }}
    print(", ".join(str(known[field]) for field in fields))
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A run's directory; the only nvidia-smi on PATH is the fake one."""
    for folder in ("driver", "run"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "driver/nvidia-smi"
    program.write_text(NVIDIA_SMI.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "run"


def lines_of(path):
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def opened(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def record(folder, monkeypatch, samples=2, found=None):
    """Run the sampler until `samples` samples are written, and return them."""
    monkeypatch.setattr(sampler, "PERIOD_S", 0.0)
    waits = []
    found = found or probe()
    gpus = [{"id": device.address, "name": device.name} for device in found.devices]
    sampler.sample(
        opened(folder / GPU_SAMPLES),
        found.vendor,
        gpus,
        lambda seconds: waits.append(seconds) or len(waits) == samples,
    )
    return lines_of(folder / GPU_SAMPLES)


def of(records, event):
    return [record for record in records if record["event"] == event]


# --- what it writes -------------------------------------------------------------------------------


def test_nvidia_values_and_units(driver, monkeypatch):
    records = record(driver, monkeypatch)
    start, (first, second), stop = records[0], of(records, "sample"), records[-1]
    assert (start["source"], stop["event"], stop["samples"]) == ("nvidia-smi", "stop", 2)
    assert start["gpus"][1] == {"id": "GPU-11", "name": "NVIDIA H100 80GB HBM3"}
    assert (
        abs(start["time"] - time.time()) < 60
        and 0 <= first["time_s"] <= second["time_s"] <= stop["time_s"]
    )
    expected = {
        "power_w": 651.04,
        "power_limit_w": 700.0,
        "temperature_c": 61,
        "clock_mhz": 1701,
        "memory_clock_mhz": 2619,
    }
    assert first["gpus"][1] == expected | {
        "memory_gib": 70.0,
        "utilization_percent": 98,
        "throttle": ["power cap", "thermal (driver)"],
    }
    assert first["gpus"][0]["throttle"] == [], "idle is no throttling"
    assert (
        first["gpus"][2]["memory_gib"] is first["gpus"][2]["throttle"] is None
        and first["gpus"][2]["clock_mhz"] == 1702
    )


def test_the_files_of_amdgpu(tmp_path, monkeypatch):
    card = tmp_path / "renderD128/device"
    (card / "hwmon/hwmon3").mkdir(parents=True)
    (card / "mem_info_vram_used").write_text(f"{96 * GIB}\n")
    values = {
        "power1_input": 700_000_000,
        "power1_cap": 750_000_000,
        "temp2_input": 80_000,
        "freq1_input": 2_050_000_000,
    }
    for name, value in values.items():
        (card / "hwmon/hwmon3" / name).write_text(f"{value}\n")
    found = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, address=str(card)),))
    records = record(tmp_path, monkeypatch, found=found)
    expected = {
        "power_w": 700,
        "power_limit_w": 750,
        "temperature_c": 80,
        "clock_mhz": 2050,
        "memory_clock_mhz": None,
    }
    assert of(records, "sample")[0]["gpus"] == [
        expected | {"memory_gib": 96, "utilization_percent": None, "throttle": None}
    ]
    assert records[0]["gpus"] == [{"id": str(card), "name": "AMD Instinct MI300X"}]


@pytest.mark.parametrize(
    ("visible", "temperatures"),
    [(None, [60, 61, 62]), ("2,0", [62, 60]), ("GPU-11", [61])],
)
def test_only_the_gpus_of_the_ranks_in_their_order(driver, monkeypatch, visible, temperatures):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    records = record(driver, monkeypatch)
    assert [gpu["temperature_c"] for gpu in of(records, "sample")[0]["gpus"]] == temperatures
    assert [int(gpu["id"][-1]) + 60 for gpu in records[0]["gpus"]] == temperatures


def test_a_driver_that_stops_answering_is_noted_once_and_sampling_goes_on(driver, monkeypatch):
    found = probe()
    monkeypatch.setenv("BROKEN", "GPU is lost")
    records = record(driver, monkeypatch, samples=4, found=found)
    assert [note["what"] for note in of(records, "note")] == [
        "the GPUs cannot be read: GPU is lost"
    ]
    assert [sample["gpus"] for sample in of(records, "sample")] == [[{}, {}, {}]] * 4


def test_a_gpu_that_the_driver_no_longer_lists_has_no_values(driver, monkeypatch):
    found = Probe("nvidia", (Device("gone", "sm_90", GIB, address="GPU-gone"), *probe().devices))
    gone, first = of(record(driver, monkeypatch, found=found), "sample")[0]["gpus"][:2]
    assert gone == {} and first["temperature_c"] == 60


def test_a_slow_read_leads_to_no_burst(tmp_path, monkeypatch):
    now, waits = [0.0], []

    def closed(seconds):
        waits.append(seconds)
        now[0] += max(seconds, 0)
        return len(waits) == 5

    def slow_read(vendor, addresses, names):
        now[0] += 3.5 if len(waits) == 1 else 0.0
        return []

    monkeypatch.setattr(sampler, "read_gpus", slow_read)
    sampler.sample(opened(tmp_path / "file"), "nvidia", [], closed, clock=lambda: now[0])
    assert waits == [1.0, 0.0, 1.0, 1.0, 1.0]


# --- the process ----------------------------------------------------------------------------------


def test_it_runs_beside_and_ends_with_the_run(driver, capfd):
    with sampler.sampling(driver, probe()):
        wait_until(
            lambda: (
                (driver / GPU_SAMPLES).is_file()
                and len((driver / GPU_SAMPLES).read_text().splitlines()) >= 3
            )
        )
    records = lines_of(driver / GPU_SAMPLES)
    assert (
        records[0]["event"] == "start"
        and records[-1]["event"] == "stop"
        and records[-1]["samples"] == len(of(records, "sample")) >= 2
    )
    assert alive(driver) == [] and capfd.readouterr() == ("", "")


def test_it_is_not_started_where_there_is_no_gpu(driver):
    with sampler.sampling(driver, Probe("none")):
        pass
    assert list(driver.iterdir()) == []


@pytest.mark.parametrize(
    ("visible", "device", "used"),
    [
        (None, "cuda", ["GPU-00", "GPU-11"]),
        ("2,0,1", "cuda", ["GPU-22", "GPU-00"]),
        ("GPU-11,GPU-22", "cuda", ["GPU-11", "GPU-22"]),
        (None, "cpu", []),
    ],
)
def test_only_the_gpus_of_the_ranks_are_sampled(driver, monkeypatch, visible, device, used):
    """A run on two of three GPUs."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    job = job_of("llama31_8b", ROOT / "configs/llama31_8b/H200_1x2.toml", driver)
    job = replace(job, machine=Machine(probe()), selection=replace(job.selection, device=device))
    path = driver / GPU_SAMPLES

    def supervise(*_, **__):
        if used:
            wait_until(lambda: path.is_file() and '"sample"' in path.read_text())

    monkeypatch.setattr(run, "supervise", supervise)
    run._train(job, None, driver, 1, "no")
    if not used:
        assert not path.exists()
        return
    records = lines_of(path)
    assert [gpu["id"] for gpu in records[0]["gpus"]] == used
    watts = [650.04 + int(gpu[-1]) for gpu in used]
    assert [gpu["power_w"] for gpu in of(records, "sample")[0]["gpus"]] == watts


LAUNCHER = """
import sys, time
from pathlib import Path
from common.machine.hardware import probe
from launch.monitor import gpu_sampler as sampler
with sampler.sampling(Path(sys.argv[1]), probe()):
    print("started", flush=True)
    time.sleep(60)
"""


def test_a_killed_launcher_leaves_no_sampler(driver):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(driver)], stdout=subprocess.PIPE, text=True
    )
    wait_until(
        lambda: (
            (driver / GPU_SAMPLES).is_file() and '"sample"' in (driver / GPU_SAMPLES).read_text()
        )
    )
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_until(lambda: alive(driver) == [], seconds=5)
    assert lines_of(driver / GPU_SAMPLES)[-1]["event"] == "stop"


def test_a_driver_that_hangs_does_not_hold_up_the_run(driver, monkeypatch, capfd):
    monkeypatch.setenv("HANG_S", "600")
    monkeypatch.setattr(sampler, "END_S", 0.3)
    path = driver / GPU_SAMPLES
    with sampler.sampling(
        driver, probe()
    ):  # the probe has answered: what now runs is the first reading, which hangs
        wait_until(
            lambda: (
                path.is_file()
                and '"start"' in path.read_text()
                and alive(driver.parent / "driver/nvidia-smi")
            )
        )
    assert "killed" in capfd.readouterr().err
    # Nor nvidia-smi, which would sleep for ten minutes.
    wait_until(lambda: alive(driver.parent) == [])


FULL_DISK = """
import resource, signal, sys
from launch.monitor import gpu_sampler as sampler
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sampler.PERIOD_S = 0
sampler.input_closed = lambda seconds: False
sys.exit(sampler.main(sampler.Path(sys.argv[1]), "nvidia", [{"id": "GPU-00", "name": "H100"}]))
"""


def test_a_full_disk_ends_the_samples_at_a_whole_line(driver):
    path = driver / GPU_SAMPLES
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 1
        and "GPU samples end here" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert len(of(lines_of(path), "sample")) >= 2


def test_a_sampler_that_died_is_said_and_the_run_goes_on(driver, capfd):
    # Which it does not touch: it ends at once.
    (driver / GPU_SAMPLES).write_text("another run's\n")
    with sampler.sampling(driver, probe()):
        wait_until(lambda: any(map(ended_child, Path("/proc").glob("[0-9]*"))))
    said = capfd.readouterr().err
    assert "GPU samples end here" in said and "not affected" in said
    assert (driver / GPU_SAMPLES).read_text() == "another run's\n"


def ended_child(process):
    """Whether that is a child of ours, and a zombie."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return (state, int(parent)) == ("Z", os.getpid())


# --- the report -----------------------------------------------------------------------------------


def sample(time_s, *gpus):
    return {
        "event": "sample",
        "time_s": time_s,
        "gpus": [
            dict(zip(("power_w", "temperature_c", "clock_mhz"), gpu, strict=False)) for gpu in gpus
        ],
    }


def write(folder, *records):
    (folder / GPU_SAMPLES).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run_dir(tmp_path):
    """Directory of a run that took a minute."""
    synthetic_run.write_good(tmp_path / "result.txt")
    records = synthetic_run.records(tmp_path / "result.txt")
    records[-1]["time_ms"] = next(r["time_ms"] for r in records if r["key"] == "run_start") + 60_000
    synthetic_run.write_records(tmp_path / "result.txt", records)
    return tmp_path


def run_start(run_dir):
    return Run.read(run_dir / "result.txt").log.first("run_start").time_ms / 1e3


def page(run_dir):
    assert report.main([str(run_dir)]) == 0
    return read_page(run_dir / "report.html")


def start_at(time_, count=2):
    return {
        "event": "start",
        "source": "nvidia-smi",
        "time": time_,
        "period_s": 1.0,
        "gpus": [{"index": i, "name": f"H100 <{i}>"} for i in range(count)],
    }


def test_the_report_says_nothing_without_a_file(run_dir):
    assert "GPUs during the run" not in page(run_dir) and "Comparison of ranks" not in page(run_dir)


def test_the_report_shows_why_there_are_no_samples(run_dir):
    write(run_dir, {"event": "note", "what": "no sampler: <neither>"})
    assert "no sampler: &lt;neither&gt;" in page(run_dir)


def test_table_and_curves_of_the_timed_part_only(run_dir):
    began = run_start(run_dir)
    before = sample(1.0, (90, 30, 300), (90, 30, 300))  # ten seconds before run_start
    timed = [sample(11.0 + i, (600 + i, 60 + i, 1700), (640 + i, 64 + i, 1690)) for i in range(3)]
    write(
        run_dir,
        start_at(began - 10),
        before,
        *timed,
        {"event": "stop", "time_s": 20.0, "samples": 4},
    )
    text = page(run_dir)
    assert "600 / 601 / 602" in text and "64 / 65 / 66" in text and "1,690 / 1,690 / 1,690" in text
    assert "0: H100 &lt;0&gt;" in text
    power, _, clock = (
        chart["series"] for chart in Page(text).charts if chart.get("sync") == "gpus"
    )
    assert [curve["name"] for curve in power] == ["GPU 0", "GPU 1"] and power[0]["color"] != power[
        1
    ]["color"]
    assert (
        power[1]["data"]
        == [[pytest.approx(minute / 60, rel=1e-4) for minute in (1, 2, 3)], [640, 641, 642]]
        and len(clock) == 2
    )
    assert "throttled by thermal" not in text and "below the median GPU" not in text


def test_a_killed_run_ends_with_its_failure(run_dir):
    """Without run_stop, samples after the failure are left out.

    While the processes are being ended, the GPUs idle at a high clock.
    """
    began, log = run_start(run_dir), run_dir / "result.txt"
    log.write_text(
        "".join(
            line for line in log.read_text().splitlines(keepends=True) if "run_stop" not in line
        )
    )
    (run_dir / "failure.json").write_text(
        json.dumps({"kind": "rank_lost", "what": "rank 1 died", "time": began + 3.0})
    )
    busy, idle = ((690, 60, 1440), (690, 60, 1410)), ((120, 40, 1980), (120, 40, 345))
    write(
        run_dir,
        start_at(began),
        *(sample(float(at), *(busy if at < 4 else idle)) for at in range(60)),
    )
    text = page(run_dir)
    assert "1,410 / 1,410 / 1,410" in text and "below the median GPU" not in text


def test_energy_is_the_integral_of_power(run_dir):
    write(
        run_dir,
        start_at(run_start(run_dir)),
        *(sample(float(at), (600, 60, 1700), (400 + 10 * at, 60, 1700)) for at in (0, 10, 30)),
    )
    text = page(run_dir)
    first, second = 600 * 30 / 3.6e6, (450 * 10 + 600 * 20) / 3.6e6
    assert (
        f">{first:.3f}<" in text
        and f">{second:.3f}<" in text
        and f"<dt>GPU kWh</dt><dd>{first + second:.3f}</dd>" in text
    )


def test_no_energy_of_several_nodes_whose_samples_are_of_one(run_dir):
    (run_dir / "config.toml").write_text('gpu = "H200"\nnodes = 2\ngpus_per_node = 2\n')
    rows = [sample(float(at), (600, 60, 1700), (500, 60, 1700)) for at in range(3)]
    write(run_dir, start_at(run_start(run_dir)), *rows)
    text = page(run_dir)
    assert "GPU kWh" not in text and "GPUs of node 0" in text


def test_no_energy_where_a_gpu_does_not_report_its_power(run_dir):
    write(
        run_dir,
        start_at(run_start(run_dir)),
        *(sample(float(at), (600, 60, 1700), (None, 60, 1700)) for at in range(3)),
    )
    assert "GPU kWh" not in page(run_dir)


def test_a_low_clock_and_heat_are_named(run_dir):
    rows = []
    for i in range(20):
        row = sample(float(i), *[(700, 70, 1700)] * 3, (650, 92, 1500))
        for gpu, reasons in zip(
            row["gpus"],
            (["power cap"], [], [], ["power cap", "thermal (hardware)"] if i < 5 else []),
            strict=True,
        ):
            gpu["throttle"] = reasons
        rows.append(row)
    write(run_dir, start_at(run_start(run_dir), 4), *rows)
    text = page(run_dir)
    assert "1,500 MHz, 12%" in text and "thermal (hardware) in 25.0%" in text
    findings = re.sub('aria-label="[^"]*"', "", text)  # the charts in words name all GPUs
    assert "GPU 3: " in findings and "GPU 0: " not in findings, "a power limit is no finding"
    assert "power cap 100%" in text and "thermal (hardware) 25%" in text


def test_of_two_gpus_the_slower_one_is_named(run_dir):
    write(
        run_dir,
        start_at(run_start(run_dir)),
        *(sample(float(i), (1, 1, 1500), (1, 1, 1700)) for i in range(3)),
    )
    assert "GPU 0: median clock 1,500 MHz" in page(run_dir)


def test_cut_and_strange_lines_spoil_nothing(run_dir):
    write(run_dir, start_at(run_start(run_dir)), sample(1.0, (600, 60, 1700), (600, 60, 1700)))
    with (run_dir / GPU_SAMPLES).open("a") as file:
        file.write(
            '[]\n{"event": "sample", "time_s": null, "gpus": []}\n'
            '{"event": "sample", "time_s": 2.0, "gpus": [null, {"power_w": "x"}]}\n'
        )
        file.write('{"event": "sample", "time_s": 3.0, "gpus": [{}]}\n{"event": "sample", "ti')
    assert "600 / 600 / 600" in page(run_dir)


def test_a_failed_run_without_run_start_shows_all_samples(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    write(tmp_path, start_at(1.7e9), sample(0.0, (500, 50, 1600), (500, 50, 1600)))
    assert "500 / 500 / 500" in page(tmp_path)


def test_a_watched_page_keeps_the_samples_of_one_run_only(run_dir):
    write(run_dir, start_at(0.0), sample(1.0, (500, 50, 1600), (500, 50, 1600)))
    first, second = (Run.read(run_dir / "result.txt") for _ in range(2))
    assert gpu_samples.read_samples(first) is gpu_samples.read_samples(first)
    forgotten = weakref.ref(first)
    gpu_samples.read_samples(second)
    del first
    gc.collect()
    assert forgotten() is None


@pytest.mark.slow
def test_hours_of_samples_stay_a_small_page(run_dir):
    gpus = [
        {
            "power_w": 700.0,
            "temperature_c": 70,
            "clock_mhz": 1700,
            "memory_gib": 70.0,
            "throttle": ["power cap"],
        }
    ] * 8
    rows = ({"event": "sample", "time_s": float(i), "gpus": gpus} for i in range(3 * 3600))
    write(run_dir, start_at(0.0, 8), *rows)
    (run_dir / "result.txt").unlink()
    assert len(page(run_dir)) < 600_000


def test_the_ranks_compared_are_curves(run_dir):
    events = [
        {
            "event": "ranks",
            "step": i,
            "samples": i,
            "block_ms": [0.2, 0.2, 0.2, 0.2 + 0.02 * (i > 0)],
            "slow": [],
        }
        for i in range(4)
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = page(run_dir)
    (compared,) = (chart for chart in Page(text).charts if "a block's forward" in chart["label"])
    assert [curve["name"] for curve in compared["series"]] == [f"rank {rank}" for rank in range(4)]
    assert compared["series"][3]["data"] == [[0, 1, 2, 3], [0.2, 0.22, 0.22, 0.22]]
