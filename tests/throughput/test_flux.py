"""Test `throughput flux` on a CPU: rows, the search for the largest batch, errors, and training."""

import argparse
import gc
import json
import math
import weakref
from dataclasses import asdict, replace

import pytest
import torch
from ranks import call_on_ranks

from common.errors import ConfigError, OutOfMemory, RankLost
from common.estimate.memory import largest
from common.measure import published
from common.measure.files import write_json
from throughput import __main__ as throughput_command
from throughput import flux, flux_rank, shared_options
from throughput.flux_model import Flux, FluxShape
from throughput.flux_rank import FluxRequest, build, synthetic_batch, train_step, try_batch
from throughput.ranks import read_request
from throughput.result import Result

TINY = replace(flux.TINY, double_blocks=1, single_blocks=1)
REQUEST = FluxRequest("cpu", TINY, 2, 3, 5, 2, 1, 1, 1)


def options(**changes) -> argparse.Namespace:
    parser = throughput_command.parser()
    given = argparse.Namespace(**vars(parser.parse_args(["flux"])) | {"device": "cuda"} | changes)
    shared_options.use_defaults(given)
    return given


def result_of(folder, **machine) -> Result:
    return Result("flux", flux.TABLES, folder, "cuda", machine, {})


@pytest.mark.slow
def test_two_ranks_on_this_cpu(tmp_path):
    arguments = [
        "--device=cpu",
        "--gpus=2",
        "--layers=1,1",
        "--batch=3",
        "--resolution=48",
        "--recompute=1",
        "--warmup=1",
        "--steps=2",
    ]
    assert throughput_command.main(["flux", *arguments, "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    known = {
        "model": "tiny, 1 + 1 blocks",
        "gpus": 2,
        "batch": 3,
        "resolution": 48,
        "tokens": 9 + 24,
        "recomputed": "1 of 2 blocks",
        "samples": 2,
    }
    assert known.items() <= row.items() and "error" not in row
    shape = replace(flux.TINY, double_blocks=1, single_blocks=1)
    assert row["parameters"] == sum(parameter.numel() for parameter in Flux(shape).parameters())
    assert row["images_per_s_per_gpu"] == pytest.approx(3e3 / row["ms"])
    assert row["images_per_s_p10"] <= row["images_per_s_per_gpu"] <= row["images_per_s_p90"]
    assert row["tflops"] == pytest.approx(
        row["images_per_s_per_gpu"] * shape.flops_per_image(9, 24) / 1e12
    )


def test_training_lowers_the_loss(processes):
    """From 2, the variance of noise - latents, of which an untrained model knows nothing.

    A few steps vary by 0.1.
    """
    torch.manual_seed(1)
    request = replace(REQUEST, shape=replace(TINY, hidden_size=32, num_heads=1))
    model, optimizer = build(request, processes)
    optimizer.gather()
    batch = synthetic_batch(request, processes, 16)
    losses = [float(train_step(model, optimizer, batch, learning_rate=3e-3)) for _ in range(60)]
    assert sum(losses[:10]) / 10 == pytest.approx(2.0, abs=0.1) and sum(losses[-10:]) / 10 < 1.85


def test_recomputed_blocks_keep_less(processes):
    def saved_bytes(recompute_blocks):
        kept: dict[int, int] = {}

        def note(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        request = replace(REQUEST, recompute_blocks=recompute_blocks)
        model, optimizer = build(request, processes)
        optimizer.gather()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = flux_rank.flow_loss(model, synthetic_batch(request, processes, 2))
        del loss
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return sum(size for place, size in kept.items() if place not in weights)

    none, one, both = map(saved_bytes, (0, 1, 2))
    assert none > one > both


# --- the largest batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 10, 31, 32])
def test_the_largest_batch_is_found_by_doubling_and_bisecting(limit):
    tried = []

    def fits(batch):
        tried.append(batch)
        return batch <= limit

    assert largest(fits) == limit
    assert len(set(tried)) == len(tried) <= 2 * math.ceil(math.log2(limit + 1)) + 1


def out_of_memory(gradient):
    raise torch.OutOfMemoryError("CUDA out of memory")


def one_rank_runs_out(processes, folder):
    """Run out of memory on rank 1 above batch 2, within the backward pass, where ranks wait."""
    run = Flux.forward

    def forward(self, latents, *rest):
        velocity = run(self, latents, *rest)
        if processes.rank == 1 and len(latents) > 2:
            self.single_blocks[0].out.weight.register_hook(out_of_memory)
        return velocity

    Flux.forward = forward
    return flux_rank.measure_batches(replace(REQUEST, batch=0), processes, folder)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_ends_the_search_on_all(tmp_path):
    found = call_on_ranks(2, "test_flux:one_rank_runs_out", tmp_path)
    for of_rank in found:
        assert [(batch, peak is not None) for batch, peak in of_rank["tried"]] == [
            (1, True),
            (2, True),
            (4, False),
            (3, False),
        ]
        assert of_rank["batch"] == 2 and len(of_rank["times_ms"]) == 1
    assert found[0]["times_ms"] == found[1]["times_ms"]  # of the slowest rank


def test_a_try_leaves_its_memory_to_the_timed_steps(processes, monkeypatch):
    left = []

    def watch(*arguments):
        model, optimizer = build(*arguments)
        left.extend(weakref.ref(tensor) for tensor in (*model.parameters(), *optimizer.weights))
        return model, optimizer

    monkeypatch.setattr(flux_rank, "build", watch)
    assert try_batch(REQUEST, processes, 1) is not None
    gc.collect()
    assert len(left) > 20 and not any(reference() is not None for reference in left)


def test_a_try_that_ran_out_in_the_backward_leaves_its_memory_to_the_next(processes, monkeypatch):
    left, alive = [], []

    def watch(*arguments):
        alive.append(sum(reference() is not None for reference in left))
        model, optimizer = build(*arguments)
        left.extend(weakref.ref(tensor) for tensor in (*model.parameters(), *optimizer.weights))
        model.double_blocks[0].image.out.weight.register_hook(out_of_memory)
        return model, optimizer

    monkeypatch.setattr(flux_rank, "build", watch)
    assert [try_batch(REQUEST, processes, 1) for _ in range(2)] == [None, None]
    assert alive == [0, 0] and len(left) > 40


def test_a_batch_that_fits_in_the_first_step_only_does_not_fit(processes, monkeypatch):
    steps, run = [], flux_rank.flow_loss

    def loss(model, batch):
        steps.append(len(batch.latents))
        return out_of_memory(None) if len(steps) == 2 else run(model, batch)

    monkeypatch.setattr(flux_rank, "flow_loss", loss)
    assert try_batch(REQUEST, processes, 3) is None and steps == [3, 3]


def test_what_was_tried_is_written_before_the_timed_steps_run_out(processes, monkeypatch, tmp_path):
    monkeypatch.setattr(flux_rank, "slowest_ms", lambda *arguments: out_of_memory(None))
    with pytest.raises(torch.OutOfMemoryError):
        flux_rank.measure_batches(REQUEST, processes, tmp_path)
    assert json.loads((tmp_path / "measured.json").read_text()) == {"tried": [[2, 0]], "batch": 2}


def test_other_failures_are_not_taken_for_a_lack_of_memory(processes, monkeypatch):
    def fail(model, batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(flux_rank, "flow_loss", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        try_batch(REQUEST, processes, 1)


def test_rows_of_a_search(tmp_path, monkeypatch, capsys):
    found = {
        "tried": [(1, 2**30), (2, None)],
        "batch": 1,
        "times_ms": [200.0, 100.0, 400.0],
        "memory_bytes": 2**31,
    }
    monkeypatch.setattr(flux, "run_request", lambda request, gpus: found)
    result = result_of(tmp_path / "out", gpu_memory_gib=140.0, peak_tflops_16_bits=989.4)
    flux.measure(options(batch="max", gpus=[2]), result)
    first, second, row = result.rows
    assert (first["batch"], first["memory_gib"]) == (1, 1.0) and (
        second["batch"],
        second["error"],
    ) == (2, "out of memory")
    assert (row["batch"], row["ms"], row["images_per_s_per_gpu"], row["memory_gib"]) == (
        1,
        200.0,
        5.0,
        2.0,
    )
    assert row["model"] == "flux.1-dev" and row["percent"] == pytest.approx(
        100 * row["tflops"] / 989.4
    )
    monkeypatch.setattr(
        flux, "run_request", lambda request, gpus: {"tried": [(10, None)], "batch": 0}
    )
    flux.measure(options(gpus=[2]), result)
    assert (result.rows[-1]["batch"], result.rows[-1]["error"]) == (10, "out of memory") and len(
        result.rows
    ) == 4


def test_a_search_goes_down_where_the_timed_steps_run_out(tmp_path, monkeypatch):
    """A batch that was asked for is not changed."""
    asked, timed = [], {"tried": [(3, 1)], "batch": 3, "times_ms": [100.0], "memory_bytes": 1}
    answers = {
        0: {"tried": [(4, 2**30), (8, None)], "batch": 5},
        4: {"tried": [(4, None)], "batch": 0},
        3: timed,
        10: {},
    }
    monkeypatch.setattr(
        flux,
        "run_request",
        lambda request, gpus: asked.append(request.batch) or answers[request.batch],
    )
    result = result_of(tmp_path / "out", gpu_memory_gib=139.8)
    flux.measure(options(batch="max", gpus=[2]), result)
    rows = [(row["batch"], row.get("error")) for row in result.rows if row["table"] == "flux"]
    assert asked == [0, 4, 3] and rows == [
        (5, "out of memory in the timed steps"),
        (4, "out of memory"),
        (3, None),
    ]
    assert len(result.rows) == 5 and result.rows[-1]["images_per_s_per_gpu"] == pytest.approx(30.0)
    flux.measure(options(gpus=[2]), result)
    assert (result.rows[-1]["batch"], result.rows[-1]["error"], len(result.rows)) == (
        10,
        "out of memory",
        6,
    ) and asked[3:] == [10]


def test_what_cannot_fit_is_not_started(tmp_path, monkeypatch):
    """11.9e9 parameters take 14 bytes each on one H200 and 8 bytes on two.

    A part of the model is measured on one.
    """
    started = []
    found = {"tried": [(10, 1)], "batch": 10, "times_ms": [1.0], "memory_bytes": 1}
    monkeypatch.setattr(
        flux,
        "run_request",
        lambda request, gpus: (
            started.append((gpus, request.shape.blocks, request.recompute_blocks)) or found
        ),
    )
    result = result_of(tmp_path / "out", gpu_memory_gib=139.8)
    flux.measure(options(gpus=[1, 2], recompute=40), result)
    one, part, two = result.rows
    assert (
        one["state_gib"] == pytest.approx(14 * 11.90141e9 / 2**30, abs=0.1)
        and "155.2 of 139.8 GiB" in one["error"]
    )
    assert (
        part["model"] == "flux.1-dev, 12 + 24 blocks"
        and "error" not in part
        and part["recomputed"] == "36 of 36 blocks"
    )
    assert two["state_gib"] == pytest.approx(8 * 11.90141e9 / 2**30, abs=0.1) and started == [
        (1, 36, 36),
        (2, 57, 40),
    ]
    flux.measure(options(gpus=[1], layers=[19, 37]), result)
    assert (
        result.rows[-1]["model"] == "flux.1-dev, 19 + 37 blocks"
        and "error" in result.rows[-1]
        and len(result.rows) == 4
    )


def test_the_published_number_stands_beside_the_whole_model_at_512_pixels_only():
    (wanted,) = flux.TABLES[0].published
    rows = [
        flux.row_of(flux.request_from(options(**changes)), 8)
        for changes in ({}, {"layers": [12, 24]}, {"resolution": 1024})
    ]
    values = [published.values_text(row, wanted, "MI300X") for row in rows]
    assert values == ["4.51", "-", "-"]


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("the GPU's memory is full", "tried to allocate"),
        RankLost("another rank went away"),
    ],
)
def test_ranks_that_end_badly(tmp_path, monkeypatch, error):
    """For want of memory: a row that says so, and the next number of GPUs is measured.

    Anything else ends the measurement.
    """

    found = {"tried": [[10, 1]], "batch": 10} if error.kind == OutOfMemory.kind else {}
    monkeypatch.setattr(flux.ranks, "run_ranks", lambda *arguments: (found, error))
    result = result_of(tmp_path / "out", gpu_memory_gib=139.8)
    if error.kind == "rank_lost":
        with pytest.raises(RankLost):
            flux.measure(options(gpus=[2, 4]), result)
    else:
        flux.measure(options(gpus=[2, 4]), result)
        assert [(row["gpus"], row["error"]) for row in result.rows] == [
            (gpus, "out of memory in the timed steps") for gpus in (2, 4)
        ]


def test_defaults_are_the_published_ones():
    request = flux.request_from(options())
    assert (
        request.batch,
        request.rows,
        request.columns,
        request.text_tokens,
        request.recompute_blocks,
    ) == (10, 32, 32, 512, 57)
    assert request.shape == FluxShape() and flux.request_from(options(resolution=1024)).rows == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"resolution": 500},
        {"layers": [3]},
        {"layers": [3, 4, 5]},
        {"recompute": 58},
        {"recompute": -1},
    ],
)
def test_what_is_refused(changes):
    with pytest.raises(ConfigError):
        flux.request_from(options(**changes))


def test_the_request_reaches_the_ranks_unchanged(tmp_path):
    write_json(tmp_path / "request.json", asdict(REQUEST))
    assert read_request(tmp_path, FluxRequest) == REQUEST
