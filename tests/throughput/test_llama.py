"""Test `throughput llama`: settings per model, rows if memory is full, and whole runs on a CPU."""

import argparse
import json
from dataclasses import replace

import pytest
from probes import make_visible

from common import config as configs
from common.config import RunConfig
from common.errors import ConfigError, DataError, OutOfMemory
from common.estimate.memory import fits, largest_micro_batch, memory_peak, with_micro_batch
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.machine.hardware import Probe
from common.measure import published
from common.paths import ROOT
from llama31_8b.rules import Config
from throughput import __main__ as command
from throughput import llama, llama_case, memory, shared_options
from throughput.result import Result, TimedRow, read

pytestmark = pytest.mark.quick

H200, MI300X = KINDS["H200"], KINDS["MI300X"]
ARCHITECTURES = {"nvidia": "sm_120", "amd": "gfx942"}


def options(**changes) -> argparse.Namespace:
    default = dict(
        model=None,
        lora=False,
        layers=None,
        precision="bf16",
        seq=shared_options.ByDevice(8192, 128),
        batch=None,
        gpus=[1],
        device="cuda",
        steps=2,
        warmup=1,
        search=None,
        resume=False,
    )
    given = argparse.Namespace(**default | changes)
    shared_options.use_defaults(given)
    return given


def case(kind: GpuKind | None = H200, gpus: int = 8, **changes) -> llama_case.LlamaCase:
    return llama_case.case_of(options(**changes), kind, gpus)


def shipped(name: str) -> RunConfig:
    return configs.load(ROOT / "configs" / "llama31_8b" / f"{name}.toml", Config)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_benchmarks_model_is_measured_as_bench_measures_it(gpus):
    """The file's settings, also with fewer layers."""
    assert case(gpus=gpus, model="llama3.1-8b", precision="fp8").config == shipped(f"H200_1x{gpus}")
    assert case(gpus=gpus, model="llama3.1-8b", precision="fp8", layers=4).config == shipped(
        f"H200_1x{gpus}"
    )
    if gpus > 2:  # in bf16 its batch does not fit one or two
        assert case(gpus=gpus, model="llama3.1-8b").config == replace(
            shipped(f"H200_1x{gpus}"), linear="bf16"
        )


def test_a_number_of_gpus_without_a_file_takes_the_nearest():
    found = case(MI300X, gpus=2, model="llama3.1-8b", precision="fp8").config
    assert (
        found.gpu,
        found.gpus_per_node,
        found.world_size,
        found.gradient_accumulation_steps,
    ) == ("MI300X", 2, 2, 1)
    assert found.env == shipped("MI300X_1x8").env
    notes = [
        case(MI300X, gpus=gpus, model="llama3.1-8b", precision="fp8").row()["note"]
        for gpus in (2, 8)
    ]
    assert notes == ["settings from MI300X_1x8.toml", ""]
    assert (
        case(gpus=3, model="qwen3-4b").config.reduce_scatter
        == "copy_engine"
        != case(gpus=1, model="qwen3-4b").config.reduce_scatter
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model", ["qwen3-8b", "mistral-7b-v0.1", "llama3.2-1b"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_batch_max_is_the_largest_that_plan_says_fits(model, precision, lora):
    found = case(model=model, precision=precision, lora=lora, batch="max", seq=4096)
    batch = found.config.micro_batch_size
    assert batch > 1 and found.config.gradient_accumulation_steps == 1
    assert fits(memory_peak(found.config, found.work), H200)
    assert not fits(memory_peak(with_micro_batch(found.config, batch + 1), found.work), H200)
    assert found.row()["planned_gib"] == pytest.approx(
        memory_peak(found.config, found.work).allocated / GIB
    )
    assert case(model=model, precision=precision, lora=lora, seq=4096) == found, (
        "the default of a model that is no benchmark's"
    )


def test_a_batch_that_needs_it_recomputes_as_few_layers_as_it_can():
    one = case(MI300X, model="qwen3-8b", batch=1)
    most = largest_micro_batch(replace(one.config, recompute_layers=0), one.work, MI300X)
    small, large = (case(MI300X, model="qwen3-8b", batch=batch) for batch in (most, most + 1))
    layers = large.config.recompute_layers
    assert small.config.recompute_layers == 0 < layers and large.config.micro_batch_size == most + 1
    fewer = replace(large.config, recompute_layers=layers - 1)
    assert not fits(memory_peak(fewer, large.work), MI300X)
    assert large.row()["settings"] == f"{layers} layers recomputed"


def test_lora_of_a_base_that_one_gpu_cannot_hold_shards_it():
    assert case(model="llama2-70b", lora=True).config.frozen_base == "sharded", (
        "the benchmark's own settings do not fit in bf16"
    )
    assert (
        case(MI300X, model="qwen3-8b", lora=True, precision="fp8").config.frozen_base
        == "replicated"
    )


def test_what_does_not_fit_is_refused_with_what_it_would_need():
    with pytest.raises(OutOfMemory) as raised:
        case(model="llama3.1-70b", batch="max")
    assert (
        "llama3.1-70b, full" in raised.value.what
        and "gathered weights 131" in raised.value.why
        and "more GPUs" in raised.value.do
    )
    with pytest.raises(OutOfMemory) as raised:
        case(gpus=1, model="llama2-13b")
    assert "does not fit" in raised.value.what and "more --gpus" in raised.value.do


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="--layers 33"):
        case(model="llama3.1-8b", layers=33)
    with pytest.raises(ConfigError, match="unknown model"):
        case(model="gpt-2")
    with pytest.raises(ConfigError, match="--model miniature"):
        case(model="miniature")


def test_a_model_that_the_host_cannot_hold_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda root: 16 * GIB)
    for lora in (False, True):
        with pytest.raises(OutOfMemory, match=r"llama3\.1-70b"):
            case(None, 1, device="cpu", model="llama3.1-70b", lora=lora)
    assert case(None, 1, device="cpu", model="llama3.2-1b", layers=1).kind is None
    assert case(None, 1, device="cpu").config.micro_batch_size == 1


def test_a_gpu_that_is_not_known_gets_settings_by_its_memory():
    unknown = GpuKind("unknown", "nvidia", "sm_120", 0, 96 * GIB, 0.0, 0.0)
    found = case(unknown, 4, model="qwen3-4b").config
    assert (found.gpu, found.env, found.reduce_scatter) == (
        "unknown",
        {},
        "nccl",
    ) and found.kernels == "triton"
    assert fits(memory_peak(found, case(unknown, 4, model="qwen3-4b").work), unknown)
    near_b200 = replace(unknown, arch="sm_100", memory_bytes=180 * GIB)
    assert case(near_b200, 4, model="qwen3-4b").config.reduce_scatter == "copy_engine", (
        "as a run would"
    )
    nearest = {
        vendor: case(replace(unknown, vendor=vendor, arch=arch), 8, model="qwen3-4b").source
        for vendor, arch in ARCHITECTURES.items()
    }
    assert nearest == {
        "nvidia": "settings from H100_1x8.toml",
        "amd": "settings from MI300X_1x8.toml",
    }, "of the same maker"


def test_rows_beyond_a_sliding_window_say_so():
    assert "4096" in case(model="mistral-7b-v0.1").row()["note"]
    assert (
        case(model="mistral-7b-v0.1", seq=4096).row()["note"]
        == ""
        == case(model="qwen3-8b").row()["note"]
    )


@pytest.fixture
def result(tmp_path, monkeypatch):
    monkeypatch.setattr(llama, "gpu_kind", lambda: H200)
    return Result(
        "llama",
        llama.TABLES,
        tmp_path / "r",
        "cuda",
        {"peak_tflops_16_bits": 1000.0, "peak_tflops_fp8": 2000.0},
        {},
    )


def test_published_numbers_stand_beside_the_same_model_and_mode_only():
    for number, gpu in enumerate(("MI325X", "MI350X")):
        wanted = llama.TABLES[0].published[number]
        model = ("llama3.1-8b", "qwen3-8b")[number]
        rows = [
            case(KINDS[gpu], model=model, precision="fp8", batch=1, seq=8192, **changes).row()
            for changes in ({}, {"lora": True}, {"layers": 8})
        ]
        values = [published.values_text(row, wanted, gpu) for row in rows]
        assert values[0] != "-" and values[1:] == ["-", "-"]


def test_rows_with_and_without_accumulation_are_not_compared(result, monkeypatch):
    runs_up_to(9, monkeypatch)
    for batch in (None, 1):
        llama.measure(options(model="llama3.1-8b", precision="fp8", batch=batch), result)
    assert [(row["batch"], row["micro_batches"]) for row in result.rows] == [(1, 16), (1, 1)]
    keys = llama.TABLES[0].keys
    assert len({tuple(row[key] for key in keys) for row in result.rows}) == 2


def runs_up_to(batch: int, monkeypatch, fails=OutOfMemory):
    def run(case, options, result):
        if case.config.micro_batch_size > batch:
            raise fails("rank 0: the GPU's memory is full")
        measured = {"times_ms": [900.0, 1000.0, 1200.0], "allocated": 3 * GIB, "reserved": 4 * GIB}
        values = llama.values_of(case, options, measured, result)
        return TimedRow(values, measured["times_ms"])

    monkeypatch.setattr(llama, "run", run)


@pytest.mark.parametrize("batch", ["max", None], ids=["max", "default"])
def test_batch_max_takes_one_less_until_it_runs_and_each_attempt_is_a_row(
    result, monkeypatch, batch
):
    largest = case(gpus=1, model="qwen3-4b", batch="max", seq=4096).config.micro_batch_size
    runs_up_to(largest - 2, monkeypatch)
    llama.measure(options(model="qwen3-4b", batch=batch, seq=4096), result)
    assert [(row["batch"], row.get("error")) for row in result.rows] == [
        (largest, "out of memory"),
        (largest - 1, "out of memory"),
        (largest - 2, None),
    ]


def test_a_given_batch_is_tried_once_and_another_failure_ends_the_measurement(result, monkeypatch):
    runs_up_to(0, monkeypatch)
    llama.measure(options(model="qwen3-4b", batch=2, seq=4096), result)
    assert [row["error"] for row in result.rows] == ["out of memory"]
    runs_up_to(0, monkeypatch, fails=ValueError)  # such an error is a row, and not tried again
    llama.measure(options(model="qwen3-4b", batch="max", seq=4096), result)
    assert len(result.rows) == 2 and "ValueError" in result.rows[1]["error"]
    runs_up_to(0, monkeypatch, fails=DataError)
    with pytest.raises(DataError):
        llama.measure(options(model="qwen3-4b", batch=2, seq=4096), result)


def test_the_values_of_a_row_follow_from_the_median_step(result, monkeypatch):
    runs_up_to(9, monkeypatch)
    llama.measure(
        options(model="qwen3-8b", lora=True, precision="fp8", batch=2, seq=4096, gpus=[2]), result
    )
    (row,), shape = result.rows, case(model="qwen3-8b").work.shape
    assert (
        row["tokens_per_s"] == pytest.approx(2 * 2 * 4096 / 1.0) == 2 * row["tokens_per_s_per_gpu"]
    )
    square = 6 * 36 * 4096 * 4096  # layers, sequence, width of attention
    adapters = 36 * 16 * (4096 + 6144 + 2 * 4096)
    flops = 4 * shape.matmul_parameters + 6 * adapters + square
    assert row["tflops"] == pytest.approx(8192 * flops / 1e12) and row[
        "tflops_12lsh"
    ] == pytest.approx(8192 * (flops + square) / 1e12)
    others = 4 * 151_936 * 4096 + 6 * adapters + square  # head, adapters, attention: in bf16
    peak_s = (flops - others) / 2000e12 + others / 1000e12
    assert row["mfu"] == pytest.approx(100 * 8192 * peak_s)
    assert (row["ms"], row["allocated_gib"], row["reserved_gib"], row["precision"]) == (
        1000.0,
        3.0,
        4.0,
        "fp8",
    )


@pytest.mark.parametrize(
    ("arguments", "model", "mode"),
    [
        pytest.param(
            ["--precision", "fp8", "--batch", "1", "--layers", "1", "--seq", "16"],
            "miniature",
            "full",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--lora", "--batch", "2", "--layers", "1"],
            "miniature",
            "lora",
            marks=pytest.mark.slow,
        ),
        (["--model", "CONFIG", "--seq", "16", "--gpus", "2"], "CONFIG", "full"),
    ],
)
def test_a_whole_run_on_a_cpu(tmp_path, monkeypatch, arguments, model, mode):
    """The last one: Qwen3 with a tied embedding, from a config.json, on two ranks."""
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    (tmp_path / "config.json").write_text(
        json.dumps(dict(model_type="qwen3", vocab_size=61, tie_word_embeddings=True, **sizes))
    )
    given = [
        str(tmp_path / "config.json") if argument == "CONFIG" else argument
        for argument in arguments
    ]
    make_visible(monkeypatch, Probe("none"))
    few = ["--warmup", "1", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert command.start(command.parser().parse_args(["llama", *given, *few])) == 0
    (row,) = read(tmp_path / "out")["rows"]
    assert (row["model"], row["mode"]) == (given[1] if model == "CONFIG" else model, mode)
    assert row["samples"] == 2 and row["tokens_per_s"] == pytest.approx(
        1e3 * row["gpus"] * row["batch"] * row["seq"] / row["ms"]
    )
    assert (
        row["precision"] == ("fp8" if "fp8" in arguments else "fp32")
        and row["tflops"] > 0
        and row.get("mfu") is None
    )
    table = (tmp_path / "out" / "table.md").read_text()
    assert "llama3.1-70b" not in table, "nothing is published for a CPU"
