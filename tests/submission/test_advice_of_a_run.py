"""Test advice: none for a healthy run on H200s, and the right one, with its number, per symptom."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_run import (
    events,
    run_start_s,
    sample_lines,
    spread,
    write_good,
    write_json_lines,
)

from common.paths import ROOT
from submission import report
from submission.advice import advice, planned_speed
from submission.run import Run

pytestmark = pytest.mark.quick

ONE_BILLION = "open_llama/models/llama-1b.json"
PLANNED = 17_500  # tokens/s/GPU of H200_1x8 by the plan, about


def healthy_gpu(gpu: int, second: int, noise: random.Random) -> dict:
    """Sample of an H200 under full load, mostly at its power limit, so its clock varies."""
    return {
        "power_w": noise.gauss(685, 15),
        "power_limit_w": 700.0,
        "temperature_c": 62 + gpu % 4,
        "clock_mhz": noise.gauss(1620 + 8 * (gpu % 3), 60),
        "memory_clock_mhz": 3201,
        "memory_gib": 118.0,
        "utilization_percent": 100 if second % 20 else 40,  # an evaluation begins
        "throttle": ["power cap"] if noise.random() < 0.8 else [],
    }


class Planted:
    """A healthy run in `folder`. Each method plants a symptom, and `symptoms` reads the advice."""

    def __init__(self, folder: Path):
        self.folder, noise = folder, random.Random(0)
        write_good(folder / "result.txt")
        spread(folder / "result.txt", 4125)
        (folder / "config.toml").write_text((ROOT / "configs/llama31_8b/H200_1x8.toml").read_text())
        self.events = events()
        for event in self.events:
            if event["event"] == "step":
                event |= {
                    "tokens_per_s_per_gpu": noise.gauss(0.95 * PLANNED, 100),
                    "memory_gib": 118.0,
                    "allocated_gib": 114.0,
                }
        times = [
            [noise.gauss(5.4 + 0.05 * (rank % 3), 0.02) for rank in range(8)] for _ in range(20)
        ]
        self.events += [
            {"event": "ranks", "step": 10 * k, "samples": 320 * k, "block_ms": ms, "slow": []}
            for k, ms in enumerate(times)
        ]
        self.samples = [
            [healthy_gpu(gpu, second, noise) for gpu in range(8)] for second in range(60)
        ]

    def gpu(self, number: int, seconds: int = 60, **values) -> None:
        for gpus in self.samples[:seconds]:
            gpus[number] |= values

    def steps(self, **values) -> None:
        for event in self.events:
            event |= values if event["event"] == "step" else {}

    def symptoms(self) -> list[str]:
        start_s = run_start_s(self.folder / "result.txt")
        gpus = [{"id": "", "name": "NVIDIA H200"}] * 8
        samples = sample_lines("nvidia-smi", start_s, gpus, self.samples)
        write_json_lines(self.folder / "gpu_samples.jsonl", samples)
        write_json_lines(self.folder / "events.jsonl", self.events)
        return [each.symptom for each in advice(Run.read(self.folder / "result.txt"))]


@pytest.fixture
def run(tmp_path):
    return Planted(tmp_path)


def test_a_healthy_run_gets_no_advice(run, capsys):
    assert run.symptoms() == []
    assert report.main([str(run.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(run.folder / "report.html")]


def test_a_low_power_limit_that_is_reached(run):
    run.gpu(2, power_limit_w=500.0, power_w=497.0, clock_mhz=1600)
    (symptom,) = run.symptoms()
    assert symptom.startswith("GPU 2:") and "500 W" in symptom and "700" in symptom
    assert "100%" in symptom
    run.gpu(2, power_w=300.0)  # it was never near
    assert run.symptoms() == []


def test_heat_and_power_brake(run):
    run.gpu(5, seconds=15, throttle=["power cap", "thermal (driver)"])
    (symptom,) = run.symptoms()
    assert symptom.startswith("GPU 5:") and "thermal (driver)" in symptom and "25.0%" in symptom
    run.gpu(5, throttle=["power brake"])
    (symptom,) = run.symptoms()
    assert symptom.startswith("GPU 5:") and "power brake" in symptom and "100.0%" in symptom
    run.gpu(5, throttle=[])
    run.gpu(5, seconds=1, throttle=["hardware slowdown"])  # once
    assert run.symptoms() == []


def test_a_clock_far_below_the_others(run):
    run.gpu(7, clock_mhz=1400)
    (said,) = run.symptoms()
    assert re.match(r"GPU 7: .*clock 1,400 MHz.* 14%", said)
    run.gpu(0, seconds=1, clock_mhz=1980)  # between two steps
    (found,) = advice(Run.read(run.folder / "result.txt"))
    assert " 15% " in found.worth, "the fastest median, not the highest sample"


def test_fragmentation(run):
    run.steps(memory_gib=134.0, allocated_gib=110.0)
    (symptom,) = run.symptoms()
    assert "fragmented" in symptom and "134 GiB" in symptom and "110 GiB" in symptom
    run.steps(memory_gib=116.0)  # what torch takes where it can
    assert run.symptoms() == []


def test_steps_slower_than_planned(run):
    run.steps(tokens_per_s_per_gpu=0.8 * PLANNED)
    (said,) = run.symptoms()
    assert said.startswith("14,000 tokens/s/GPU, 2") and "H200" in said


@pytest.mark.parametrize(("model", "compared"), [("llama3.1-8b", True), (ONE_BILLION, False)])
def test_only_models_as_wide_as_the_8b_are_compared_with_the_plan(tmp_path, model, compared):
    config = (ROOT / "open_llama/examples/pretrain_1b.toml").read_text()
    config = config.replace(ONE_BILLION, model)
    (tmp_path / "config.toml").write_text(f'gpu = "H100"\n{config}')
    folder_of_run = SimpleNamespace(folder=tmp_path, benchmark="open_llama")
    assert bool(planned_speed(folder_of_run)) is compared


def test_gpus_that_wait_for_their_host(run):
    for gpu in range(8):
        run.gpu(gpu, utilization_percent=71)
    assert run.symptoms() == []  # the steps are as fast as they should be
    run.steps(tokens_per_s_per_gpu=0.7 * PLANNED)
    said = run.symptoms()
    assert len(said) == 2 and "host" in said[0] and "71 %" in said[0]


def test_a_miniature_gets_no_advice(run):
    run.steps(memory_gib=134.0, allocated_gib=110.0, tokens_per_s_per_gpu=0.001 * PLANNED)
    assert len(run.symptoms()) == 2
    config = run.folder / "config.toml"
    config.write_text("miniature = true\n" + config.read_text())
    assert run.symptoms() == []


def test_a_slow_rank(run):
    for event in run.events[-5:]:
        event["block_ms"][3] = 1.04 * min(event["block_ms"])
        event["slow"] = [3]
    (symptom,) = run.symptoms()
    assert symptom.startswith("rank 3") and "4.0%" in symptom


def test_each_advice_has_all_its_parts_on_the_page_and_in_the_terminal(run, capsys):
    run.gpu(5, throttle=["thermal (hardware)"])
    run.gpu(2, power_limit_w=500.0, power_w=500.0)
    run.gpu(1, clock_mhz=1200)
    run.steps(memory_gib=134.0, allocated_gib=110.0, tokens_per_s_per_gpu=0.5 * PLANNED)
    run.events[-1]["slow"] = [0]
    symptoms = run.symptoms()
    found = advice(Run.read(run.folder / "result.txt"))
    assert len(symptoms) == 6 and all(all(each) for each in found)
    assert report.main([str(run.folder)]) == 0
    lines, page = capsys.readouterr().out.splitlines(), (run.folder / "report.html").read_text()
    assert len(lines) == 7 and all(
        symptom in line for symptom, line in zip(symptoms, lines[1:], strict=True)
    )
    assert "rank 0 takes" in page and "expandable_segments" in page and "thermal (hardware)" in page


def test_a_run_that_left_nothing_gets_none(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    assert advice(Run.read(tmp_path / "result.txt")) == []
