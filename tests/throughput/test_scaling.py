"""`throughput scaling` on one and two ranks of a CPU, and its rows from given times."""

import argparse
import gc
import itertools
import weakref
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from ranks import call_on_ranks

from common.errors import ConfigError, OutOfMemory, RunError
from common.kernels.accumulate import accumulate_reference
from common.measure import report
from common.measure.files import write_json
from common.sharding.processes import start_processes
from common.sharding.reduce_scatter import Shard
from launch.preflight.measure import collective
from throughput import gpt_model, scaling, scaling_rank
from throughput.__main__ import main
from throughput.gpt_sizes import SIZES, STAND_INS, GptShape, Size
from throughput.ranks import LocalReduceScatter, read_request, run_request
from throughput.result import Result
from throughput.scaling_rank import ScalingRequest

GPT = Size(GptShape(2, 2, 32, 48, 61), 2, 8)
REQUEST = ScalingRequest("CPU", GPT, 2, False, 1, 2, (2**12, 2**13), 3)


@pytest.fixture
def result(tmp_path):
    return Result(
        "scaling",
        scaling.TABLES,
        tmp_path / "out",
        "cuda",
        {"peak_tflops_16_bits": 100.0, "peak_tflops_fp8": 200.0},
        {},
    )


# --- what ranks measure ---------------------------------------------------------------------------


def test_two_ranks_measure_all_parts():
    found, error = run_request("throughput.scaling_rank", REQUEST, 2, {}, scaling.LIMIT_S)
    assert error is None
    for part in ("DDP", "ZeRO-2"):
        assert (
            len(found[part]["times_ms"]) == len(found[part]["alone_ms"]) == 2
            and found[part]["memory_bytes"] == 0
        )
        assert min(found[part]["times_ms"] + found[part]["alone_ms"]) > 0
    calls = [(call["name"], call["bytes"], len(call["times_ms"])) for call in found["collectives"]]
    assert calls == [
        (name, size, 3) for name in ("all-reduce", "all-gather") for size in (2**12, 2**13)
    ]


@pytest.mark.slow
def test_a_part_that_fails_leaves_those_before_it(result):
    impossible = replace(GPT, shape=replace(GPT.shape, num_heads=5))
    request = replace(REQUEST, gpt=impossible)
    found, error = run_request("throughput.scaling_rank", request, 1, {}, scaling.LIMIT_S)
    assert found.keys() == {"collectives", "ZeRO-2"} and isinstance(error, RunError)
    # One rank sends nothing.
    assert found["collectives"] == [] and found["ZeRO-2"]["alone_ms"] == []
    for strategy in ("DDP", "ZeRO-2"):
        scaling.add_steps(strategy, "7b", REQUEST, 1, found, error, result)
    ddp, zero_2 = result.rows
    assert ddp["error"] and "tokens_per_s" not in ddp
    assert zero_2["tokens_per_s"] > 0 and "error" not in zero_2


def reduced(processes, folder):
    """Return (a weight, reduce-scatters) after steps with and without reduction.

    Returns them for both strategies, on each rank.
    """
    gpt_model.LEARNING_RATE = 0.1  # so that a step changes the weight
    models, calls, build, train_step = [], [], scaling_rank.build_gpt, scaling_rank.train_step
    scatter = dist.reduce_scatter_tensor
    dist.reduce_scatter_tensor = lambda *args, **keywords: (
        calls.append(1) or scatter(*args, **keywords)
    )

    def keep(*arguments):
        models.append(build(*arguments))
        return models[-1]

    def of_own_tokens(model, size):
        torch.manual_seed(processes.rank)
        return train_step(model, size)

    def run(request, processes, step, alone):
        found = []
        for one in (step, alone):
            calls.clear()
            one()
            weight = (
                models[0].blocks[0].up.weight.detach().float().clone() if models else torch.zeros(1)
            )
            found.append((weight, torch.tensor(len(calls))))
        return found

    scaling_rank.build_gpt, scaling_rank.train_step, scaling_rank.measure_steps = (
        keep,
        of_own_tokens,
        run,
    )
    request = replace(REQUEST, gpt=replace(GPT, batch=4))
    return {
        "ZeRO-2": scaling_rank.measure_zero_2(request, processes),
        "DDP": scaling_rank.measure_ddp(request, processes),
    }


@pytest.mark.slow
def test_the_second_step_leaves_out_the_reduction(tmp_path):
    first, second = call_on_ranks(2, "test_scaling:reduced", tmp_path)
    together, apart = zip(first["DDP"], second["DDP"], strict=True)
    assert torch.equal(together[0][0], together[1][0]) and not torch.equal(apart[0][0], apart[1][0])
    assert int(first["ZeRO-2"][0][1]) > 0 and int(first["ZeRO-2"][1][1]) == 0


def own_rows(processes, folder):
    gradient = torch.arange(10.0).view(5, 2) * (1 + processes.rank)
    shard = Shard(torch.nn.Parameter(gradient), gradient, gradient, torch.zeros(3, 2))
    unsent = LocalReduceScatter(processes.shard_group, None, torch.float32, accumulate_reference)
    unsent.start([shard], [gradient])
    unsent.start([shard], [gradient])
    return shard.gradient


def test_a_rank_keeps_its_own_rows_of_its_own_gradient(tmp_path):
    gradient = torch.arange(10.0).view(5, 2)
    first, second = call_on_ranks(2, "test_scaling:own_rows", tmp_path)
    assert torch.equal(first, 2 * gradient[:3])
    assert torch.equal(second, 2 * 2 * torch.cat([gradient[3:], torch.zeros(1, 2)]))


def test_the_llama_leaves_its_memory_to_the_gpt(monkeypatch):
    left = []
    assemble = scaling_rank.assemble_random

    def watch(*arguments, **keywords):
        assembly = assemble(*arguments, **keywords)
        left.extend(
            weakref.ref(tensor)
            for tensor in (*assembly.model.parameters(), *assembly.optimizer.weights)
        )
        return assembly

    monkeypatch.setattr(scaling_rank, "assemble_random", watch)
    scaling_rank.measure_zero_2(REQUEST, start_processes("cpu", 60.0))
    gc.collect()
    assert len(left) > 20 and not any(reference() is not None for reference in left)


# --- rows -----------------------------------------------------------------------------------------


def found_in(step_ms: float, alone_ms: float | None = None, spread_ms: float = 0.0) -> dict:
    times = [step_ms - spread_ms, step_ms, step_ms + spread_ms]
    part = {
        "times_ms": times,
        "alone_ms": [alone_ms] * 3 if alone_ms else [],
        "memory_bytes": 3 * 10**9,
    }
    return {"DDP": part, "ZeRO-2": part}


def rows_of(
    result, times: dict[int, dict], request: ScalingRequest = REQUEST, strategy: str = "DDP"
) -> list[dict]:
    for gpus, found in times.items():
        scaling.add_steps(strategy, "7b", request, gpus, found, None, result)
    return result.rows


def test_rates_efficiency_and_exposed_communication(result):
    one, two = rows_of(result, {1: found_in(100.0), 2: found_in(125.0, 110.0)})
    tokens = GPT.batch * GPT.sequence_length
    assert one["tokens_per_s"] == pytest.approx(10 * tokens) and two[
        "tokens_per_s"
    ] == pytest.approx(16 * tokens)
    assert (one["efficiency"], two["efficiency"]) == (pytest.approx(100), pytest.approx(80))
    assert "exposed" not in one and two["exposed"] == pytest.approx(12)
    flops = GPT.shape.training_flops_per_token(GPT.sequence_length)
    assert two["tflops_per_gpu"] == pytest.approx(8 * tokens * flops / 1e12)
    assert two["percent"] == pytest.approx(two["tflops_per_gpu"]) and two["memory_gb"] == 3
    assert (two["ms_p10"], two["samples"]) == (125.0, 3)


def test_the_llama_has_its_own_flops_and_precision(result):
    (row,) = rows_of(
        result,
        {1: found_in(100.0)},
        replace(REQUEST, gpu="H200", llama_layers=4, fp8=True),
        "ZeRO-2",
    )
    rate = 10 * 8192
    hidden = 4096
    weights = 4 * (hidden * (6144 + hidden + 3 * 14336)) + 128256 * hidden
    assert row["tokens_per_s"] == pytest.approx(rate) and row["precision"] == "fp8"
    assert row["tflops_per_gpu"] == pytest.approx(
        rate * (6 * weights + 6 * 4 * 8192 * hidden) / 1e12
    )
    others = 6 * 128256 * hidden + 6 * 4 * 8192 * hidden  # head and attention: in bf16
    linears = 6 * weights + 6 * 4 * 8192 * hidden - others
    assert row["percent"] == pytest.approx(100 * rate * (linears / 200e12 + others / 100e12))


def test_without_one_gpu_there_is_no_efficiency(result):
    assert not any(
        "efficiency" in row for row in rows_of(result, {2: found_in(100.0), 4: found_in(100.0)})
    )


def test_a_result_below_its_smaller_neighbor_is_marked(result):
    rows = rows_of(
        result,
        {
            1: found_in(100.0),
            2: found_in(300.0, 100.0),
            4: found_in(120.0, 100.0),
            8: found_in(121.0, 100.0),
        },
    )
    assert [row.get("mark", "") for row in rows] == ["", "below 1 GPU", "faster per GPU than 2", ""]


def test_within_the_spread_nothing_is_marked(result):
    rows = rows_of(
        result, {1: found_in(100.0, spread_ms=10), 2: found_in(99.0, 98.0, spread_ms=10)}
    )
    assert rows[1]["mark"] == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemory("the GPU's memory is full"), "out of memory"),
        (RunError("CUDA error: out of memory"), "out of memory"),
        (RunError("x"), "x"),
    ],
)
def test_a_missing_row_says_why(result, error, expected):
    scaling.add_steps("DDP", "13b", REQUEST, 2, {}, error, result)
    assert result.rows[0]["error"] == expected and result.rows[0]["gpus"] == 2


def test_bus_bandwidth_is_what_nccls_tests_compute(result, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    calls = []
    for name in ("all-reduce", "all-gather"):
        _, bus_gb = collective(name, 8 * 10**6, torch.device("cpu"))
        calls.append({"name": name, "bytes": 8 * 10**6, "bus_gb": bus_gb, "times_ms": [2.0]})
    scaling.add_collectives(4, calls, result)
    reduce, gather = result.rows
    assert reduce["algorithm_gb_per_s"] == gather["algorithm_gb_per_s"] == pytest.approx(4.0)
    assert reduce["bus_gb_per_s"] == pytest.approx(6.0) and gather["bus_gb_per_s"] == pytest.approx(
        3.0
    )


def test_sizes_are_drawn_on_a_logarithmic_axis_and_numbers_of_gpus_are_not(result):
    scaling.add_collectives(
        2,
        [
            {"name": "all-reduce", "bytes": 4**k << 20, "bus_gb": 1.0, "times_ms": [1.0]}
            for k in range(6)
        ],
        result,
    )
    rows_of(result, {gpus: found_in(100.0) for gpus in (1, 2, 4, 8)})
    bases = {}
    for table in (scaling.SCALING, scaling.COLLECTIVES):
        rows = report.rows_of(table, result.data)
        (block,) = report.charts_of(table.plots[0], table, rows, {})
        bases[table.name] = block["chart"]["log"]
    assert bases == {"scaling": {}, "collectives": {"x": 2}}


def test_a_request_survives_its_file(tmp_path):
    write_json(tmp_path / "request.json", asdict(REQUEST))
    assert read_request(tmp_path, ScalingRequest) == REQUEST


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "device": "cpu",
            "model": None,
            "gpus": [1],
            "batch": None,
            "seq": None,
            "precision": "bf16",
            "warmup": 1,
            "steps": 2,
        }
        | changes
    )


def test_options_choose_what_is_measured(result):
    model, request = scaling.request_for(options(), result)
    assert model == "tiny" and request.gpt == STAND_INS["tiny"] and request.gpu == "CPU"
    model, request = scaling.request_for(options(model="7b", batch=3, seq=256), result)
    assert (model, request.gpt) == ("7b", Size(SIZES["7b"].shape, 3, 256))


def test_an_unknown_model_is_refused(capsys):
    assert main(["scaling", "--model", "9b"]) == ConfigError.exit_code
    assert "7b" in capsys.readouterr().err


def test_more_gpus_than_there_are_is_one_error(tmp_path, capsys):
    assert (
        main(["scaling", "--device", "cpu", "--gpus", "1,99999", "--out", str(tmp_path / "out")])
        == 2
    )
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == [
        "error: ",
        "  why: ",
        "  do:  ",
    ]


def test_the_default_gpt_fits_the_gpu():
    sizes = {
        gpu: scaling.default_gpt(gib * 2**30)
        for gpu, gib in (("H200", 140), ("H100", 79), ("L4", 22), ("none", 0))
    }
    assert sizes == {"H200": "7b", "H100": "3b", "L4": "small", "none": "tiny"}


def test_the_counts_are_measured_one_after_the_other(result, monkeypatch):
    counts = []
    times = itertools.count(100)

    def run_request(module, request, count, *_):
        counts.append(count)
        return found_in(next(times)) | {"collectives": []}, None

    monkeypatch.setattr(scaling.ranks, "run_request", run_request)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    scaling.measure(options(gpus=[2, 1, 2]), result)
    assert result.data["machine"]["NCCL_ALGO"] == "Ring"
    assert counts == [1, 2] and [(row["strategy"], row["gpus"]) for row in result.rows] == [
        *(("DDP", 1), ("ZeRO-2", 1), ("DDP", 2), ("ZeRO-2", 2))
    ]
