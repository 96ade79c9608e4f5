"""Heartbeats, rates, events.jsonl on a full disk, and the step of the first infinite number."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import benchmarks
from common import config as configs
from common.errors import NonFinite
from common.gpu_kinds import KINDS
from common.model.shapes import LLAMA31_8B
from common.paths import ROOT
from common.training.heartbeat import Heartbeat
from common.training.metrics import Events, Meter, ProgressLog, StepRate, make_meter

pytestmark = pytest.mark.quick


def test_a_heartbeat_after_one_with_a_long_phase_can_be_read(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.write(0, "self-test: an op " * 20)
    path = tmp_path / "ranks/rank_0.heartbeat"
    assert json.loads(path.read_text())["phase"].startswith("self-test: an op")
    heartbeat.write(2**40, "train", 2**40, 2**40)
    record = json.loads(path.read_text())
    assert (record["step"], record["phase"]) == (2**40, "train")


def test_only_rank_0_shows_lines():
    stream = io.StringIO()
    ProgressLog(False, stream).show("rank 3 is slow")
    assert stream.getvalue() == ""
    ProgressLog(True, stream).show("rank 3 is slow")
    assert stream.getvalue() == "rank 3 is slow\n"


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_8b_model_at_10000_tokens_per_second_makes_514_7_tflops_and_52_percent_of_hopper(gpu):
    flops, peak = LLAMA31_8B.training_flops(8192).total, KINDS[gpu].peak_bf16_tflops
    assert peak == 989.4  # NVIDIA H100 and H200 SXM data sheets, dense
    rate = StepRate.of(
        step_time_ms=3276.8,
        tokens_per_step=4 * 8192,
        gpus=1,
        flops_per_token=flops,
        peak_tflops=peak,
    )
    assert rate.tokens_per_s_per_gpu == pytest.approx(10_000, rel=1e-12)
    assert round(rate.tflops_per_gpu, 1) == 514.7 and round(rate.mfu, 3) == 0.520
    assert rate.text() == "10,000 tok/s/GPU, 515 TFLOP/s/GPU, MFU 52.0%"


def meter_on(device: str, benchmark: str, file: str, **overrides: str) -> Meter:
    config = configs.load(
        ROOT / "configs" / benchmark / file, benchmarks.config_class(benchmark), overrides
    )
    processes = SimpleNamespace(device=torch.device(device), world_size=config.world_size)
    return make_meter(config, benchmarks.rules_of(benchmark, config), processes, Events(None))


@pytest.mark.parametrize(
    ("benchmark", "linear", "tokens_per_s", "gflops", "text"),
    [
        # GFLOP per token: linear layers of the blocks; attention, adapters and head.
        ("llama31_8b", "fp8", 17_586, (41.8759, 9.5945), "905"),
        ("llama31_8b", "bf16", 11_116, (0, 51.4704), "572"),
        ("llama2_70b_lora", "fp8", 3_296, (273.804, 33.5283), "1,010"),
    ],
)
def test_mfu_divides_each_kind_of_work_by_the_peak_of_its_format(
    benchmark, linear, tokens_per_s, gflops, text
):
    in_fp8, in_bf16 = gflops
    mfu = tokens_per_s * (in_fp8 / 1978.9e3 + in_bf16 / 989.4e3)
    meter = meter_on("cuda", benchmark, "H200_1x4.toml", linear=linear)
    rate = StepRate.of(
        1e3 * meter.tokens_per_step / 4 / tokens_per_s,
        meter.tokens_per_step,
        4,
        meter.flops_per_token,
        meter.peak_tflops,
    )
    assert rate.tflops_per_gpu == pytest.approx(tokens_per_s * sum(gflops) / 1e3, rel=1e-4)
    assert rate.mfu == pytest.approx(mfu, rel=1e-4) and rate.mfu < 0.6
    assert f" {text} TFLOP/s/GPU, MFU {mfu:.1%}" in rate.text()


def test_a_miniature_and_a_cpu_have_no_mfu():
    assert meter_on("cuda", "llama31_8b", "CPU_1x1.toml", gpu="H200").peak_tflops is None
    assert meter_on("cpu", "llama31_8b", "H200_1x4.toml").peak_tflops is None


def test_a_rate_is_that_of_one_gpu():
    one, eight = (StepRate.of(500.0, 8_000, gpus, 10**9, None) for gpus in (1, 8))
    assert one.tokens_per_s_per_gpu == 16_000 == 8 * eight.tokens_per_s_per_gpu
    assert one.tflops_per_gpu == pytest.approx(16.0) and one.mfu is None and "MFU" not in one.text()


# --- meter ----------------------------------------------------------------------------------------


class Alone:
    """Processes of one rank, without a group."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def sum(self, tensor):
        return tensor


def meter_into(path: Path) -> Meter:
    options = {
        "tokens_per_step": 800,
        "samples_per_step": 8,
        "flops_per_token": 10**6,
        "peak_tflops": None,
    }
    meter = Meter(Alone(), Events(path), **options)
    meter.start()
    return meter


def steps(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_flush_names_the_first_step_that_is_not_finite(tmp_path, bad, where):
    meter = meter_into(tmp_path / "events.jsonl")
    for step in range(1, 7):
        values = {"loss": 2.0, "norm": 1.0} | ({where: bad} if step >= 4 else {})
        meter.record(step, 1e-3, torch.tensor(values["loss"]), torch.tensor(values["norm"]))
    with pytest.raises(NonFinite, match="step 4:") as caught:
        meter.flush()
    assert ("did not update" in caught.value.why) == (where == "norm"), (
        "AdamW skips by the norm alone"
    )
    events = steps(tmp_path / "events.jsonl")
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert [None in (event["loss"], event["grad_norm"]) for event in events] == [
        False,
        False,
        False,
        True,
    ]


def test_flush_writes_every_step_once_with_its_own_values(tmp_path):
    meter = meter_into(tmp_path / "events.jsonl")
    for step in (1, 2, 3):
        meter.record(step, step / 10, torch.tensor(float(step)), torch.tensor(step + 0.5))
        assert not (tmp_path / "events.jsonl").read_text(), (
            "a step that does not log wrote something"
        )
    meter.flush()
    meter.flush()  # nothing pending: nothing written
    meter.record(4, 0.4, torch.tensor(4.0), torch.tensor(4.5))
    meter.flush()
    events = steps(tmp_path / "events.jsonl")
    values = [
        [event[key] for key in ("step", "samples", "learning_rate", "loss", "grad_norm")]
        for event in events
    ]
    assert values == [[step, 8 * step, step / 10, float(step), step + 0.5] for step in (1, 2, 3, 4)]
    assert ["tokens_per_s_per_gpu" in event for event in events] == [False, False, True, True]
    times = [event["time_s"] for event in events]
    assert times == sorted(times) and all(event["step_time_ms"] > 0 for event in events)
    assert meter.samples == 32


# --- events on a full disk ------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from common.training.metrics import Events

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
events = Events(Path(sys.argv[1]))
events.write("step", step=1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for step in range(2, 100):
    events.write("step", step=step, filler="x" * 40)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
events.write("verdict", status="success")
"""


def test_a_full_disk_costs_events_and_neither_the_run_nor_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note:") == 1 and "events.jsonl" in done.stderr
    written = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [event["step"] for event in written if event["event"] == "step"]
    assert 5 < len(steps) < 99 and steps == list(range(1, len(steps) + 1))
    assert written[-1]["status"] == "success"


def test_events_of_another_run_are_not_touched(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("old\n")
    with pytest.raises(Exception, match="exists"):
        Events(path)
    assert path.read_text() == "old\n"


def test_a_rank_without_a_file_writes_no_events():
    Events(None).write("step", step=1)


def test_a_reader_that_ended_ends_no_run():
    reader, writer = os.pipe()
    os.close(reader)
    progress = ProgressLog(True, os.fdopen(writer, "w"))
    progress.show("step 1")
    progress.show("step 2")
    with pytest.raises(BrokenPipeError):
        progress.stream.close()
