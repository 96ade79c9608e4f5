"""Measure training steps of FLUX.1-dev's transformer on random latents and text embeddings.

The model has 11.9 B parameters, in bf16, sharded over the GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from common.errors import ConfigError, OutOfMemory
from common.gpu_kinds import GIB
from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from throughput import ranks, shared_options
from throughput.flux_model import Flux, FluxShape
from throughput.flux_rank import FluxRequest
from throughput.memory import OUT_OF_MEMORY, require_host_memory
from throughput.result import Result
from throughput.timing import per_second, spread

MODEL = "flux.1-dev"
PIXELS_PER_TOKEN = 16  # per side: 8 per latent of the autoencoder, and 2 latents per token
TEXT_TOKENS = 512  # FLUX.1-dev pads every text to this length and attends to the padding
# The model that is measured on a CPU. Its times say nothing about the machine.
TINY = FluxShape(
    double_blocks=2,
    single_blocks=3,
    hidden_size=64,
    num_heads=2,
    in_channels=16,
    context_size=32,
    pooled_size=24,
    rope_axes=(8, 12, 12),
)
TINY_TEXT_TOKENS = 24
SMALLER_BLOCKS = (12, 24)  # number of double and single blocks if the full model does not fit
LIMIT_S = 1800.0  # time limit for one number of GPUs; collectives have a shorter timeout
SHARDED_BYTES = 12  # per parameter: fp32 master weight and gradient, two bf16 moments

TABLES = (
    Table(
        "flux",
        "Training steps of FLUX.1-dev's transformer",
        (
            Column("model", "Model"),
            Column("parameters", "Parameters", "", ",d"),
            Column("precision", "Precision"),
            Column("gpus", "GPUs", "", "d"),
            Column("resolution", "Image, pixels a side", "", "d"),
            Column("tokens", "Tokens of image and text", "", ",d"),
            Column("batch", "Batch per GPU", "", "d"),
            Column("recomputed", "Recomputed"),
            Column("images_per_s_per_gpu", "Images/s per GPU", "", ".3g"),
            Column("images_per_s_p10", "images/s, p10", "", ".3g"),
            Column("images_per_s_p90", "images/s, p90", "", ".3g"),
            *time_columns(),
            Column("tflops", "TFLOP/s per GPU", "", ".4g"),
            Column("percent", "% of peak", "", ".1f"),
            Column("state_gib", "Weights and optimizer state", "GiB", ".1f"),
            Column("memory_gib", "Peak memory", "GiB", ".1f"),
        ),
        keys=("model", "precision", "gpus", "resolution", "batch", "recomputed"),
        value="images_per_s_per_gpu",
        formulas=(
            "Step: draw noise and time, forward, mean squared error in fp32 of the velocity "
            "noise - latents (rectified flow), backward, clipping, AdamW. The time is the logistic "
            "function of N(0, 1), one per image. The autoencoder and the text encoders do not run.",
            "Images/s per GPU = batch / median step time of the slowest rank. p10 and p90 are "
            "percentiles.",
            "TFLOP per image = 3 x forward. Forward = 2 x weights of each matrix x tokens that it "
            "multiplies + 4 x tokens^2 x hidden size for attention in each block. Recomputation is "
            "not counted. Plain torch, nothing is compiled.",
            "Weights, activations, reduced gradients and both moments are bf16. Master weights and "
            "summed gradients are fp32. All are sharded over the GPUs (ZeRO-2): 2 + 12 / GPUs "
            "bytes per parameter. A recomputed block keeps only its inputs for the backward.",
            "Peak memory: of the tensors, on the GPU that needs the most.",
            f"A model with fewer blocks, or tiny, is not {MODEL}. Its images/s cannot be compared "
            "with published numbers.",
        ),
        plots=(Plot("bars", "Images per second and GPU", "gpus", "images_per_s_per_gpu", "model"),),
        published=(
            PublishedValues(
                "flux", ("model", "precision", "resolution", "batch"), "images_per_s_per_gpu"
            ),
        ),
    ),
    Table(
        "flux_batches",
        "Batches tried",
        (
            Column("model", "Model"),
            Column("gpus", "GPUs", "", "d"),
            Column("resolution", "Image, pixels a side", "", "d"),
            Column("batch", "Batch per GPU", "", "d"),
            Column("memory_gib", "Peak memory", "GiB", ".1f"),
        ),
        keys=("model", "gpus", "resolution", "batch"),
        value="memory_gib",
        formulas=(
            "With --batch max, the batch doubles until memory runs out, and the largest batch is "
            "then found by bisection. Each attempt runs two steps in newly allocated memory. A "
            "batch does not fit if any GPU runs out of memory. If the timed steps of the largest "
            "batch run out of memory, the next smaller batch is timed.",
        ),
        larger_is_better=False,
    ),
)


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure each number of GPUs, with fewer blocks if the full model does not fit.

    Raises ConfigError for wrong options, and the error of a rank that failed for any reason other
    than memory.
    """
    request = request_from(options)
    for gpus in options.gpus:
        if not add_rows(request, gpus, result) and not options.layers:
            double_blocks, single_blocks = SMALLER_BLOCKS
            shape = replace(request.shape, double_blocks=double_blocks, single_blocks=single_blocks)
            recompute = min(request.recompute_blocks, shape.blocks)
            add_rows(replace(request, shape=shape, recompute_blocks=recompute), gpus, result)


def add_rows(request: FluxRequest, gpus: int, result: Result) -> bool:
    """Add the rows of one number of GPUs, including rows of batches that ran out of memory.

    Return False, without a measurement, if weights and optimizer state alone do not fit.
    """
    row = row_of(request, gpus)
    if request.device == "cpu":
        require_host_memory(f"flux {row['model']}", gpus * row["state_gib"] * GIB)
    memory_gib = result.data["machine"].get("gpu_memory_gib", float("inf"))
    if row["state_gib"] > memory_gib:
        used = f"{row['state_gib']:.1f} of {memory_gib:.1f} GiB"
        error = f"out of memory: weights and optimizer state alone need {used}"
        result.add(row | {"error": error})
        return False
    measured = run_request(request, gpus)
    if not request.batch:
        add_batches(row, measured.get("tried", ()), result)
    batch = measured.get("batch") or request.batch or 1
    # A batch that fits two steps may still run out of memory in the timed ones. With --batch max,
    # the next smaller batch is then timed.
    while "times_ms" not in measured:
        error = OUT_OF_MEMORY
        if measured.get("batch"):
            error = "out of memory in the timed steps"
        result.add(row | {"batch": batch, "error": error})
        if request.batch or batch == 1:
            return True
        batch -= 1
        measured = run_request(replace(request, batch=batch), gpus)
    result.add(row | {"batch": batch} | rates(request, measured, result), measured["times_ms"])
    return True


def add_batches(
    row: dict[str, Any], tried: Iterable[tuple[int, int | None]], result: Result
) -> None:
    """Add a row of table "flux_batches" for each batch of `tried`.

    `row`: the row of table "flux". `tried`: see throughput/flux_rank.py.
    """
    for batch, peak in tried:
        attempt = {
            "table": "flux_batches",
            "model": row["model"],
            "gpus": row["gpus"],
            "resolution": row["resolution"],
            "batch": batch,
        }
        if peak is None:
            result.add(attempt | {"error": OUT_OF_MEMORY})
        else:
            result.add(attempt | {"memory_gib": peak / GIB})


def request_from(options: argparse.Namespace) -> FluxRequest:
    """Return the request that the ranks read. Raises ConfigError for wrong options."""
    device = options.device
    resolution = options.resolution
    if resolution % PIXELS_PER_TOKEN:
        why = f"a token is a square of {PIXELS_PER_TOKEN} x {PIXELS_PER_TOKEN} pixels"
        raise ConfigError(
            f"--resolution {resolution}",
            why,
            f"use a multiple of {PIXELS_PER_TOKEN}, such as 512 or 1024",
        )
    shape = TINY if device == "cpu" else FluxShape()
    if options.layers:
        if len(options.layers) != 2:
            raise ConfigError(
                f"--layers {','.join(map(str, options.layers))}",
                "the numbers of double and of single blocks are required",
                "give two numbers, such as --layers 12,24",
            )
        shape = replace(shape, double_blocks=options.layers[0], single_blocks=options.layers[1])
    recompute = shape.blocks if options.recompute is None else options.recompute
    if not 0 <= recompute <= shape.blocks:
        raise ConfigError(
            f"--recompute {recompute}",
            f"the model has {shape.blocks} blocks",
            f"use a number from 0 to {shape.blocks}",
        )
    side = resolution // PIXELS_PER_TOKEN
    text_tokens = TINY_TEXT_TOKENS if device == "cpu" else TEXT_TOKENS
    batch = 0 if options.batch == shared_options.MAX else options.batch
    return FluxRequest(
        device=device,
        shape=shape,
        rows=side,
        columns=side,
        text_tokens=text_tokens,
        batch=batch,
        recompute_blocks=recompute,
        warmup=options.warmup,
        steps=options.steps,
    )


def row_of(request: FluxRequest, gpus: int) -> dict[str, Any]:
    """Return the columns that are known before anything is measured."""
    shape = request.shape
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Flux(shape).parameters())
    model = MODEL if request.device == "cuda" else "tiny"
    if shape not in (FluxShape(), TINY):
        model += f", {shape.double_blocks} + {shape.single_blocks} blocks"
    return {
        "table": "flux",
        "model": model,
        "parameters": parameters,
        "precision": "bf16",
        "gpus": gpus,
        "resolution": request.rows * PIXELS_PER_TOKEN,
        "tokens": request.rows * request.columns + request.text_tokens,
        "batch": request.batch or None,
        "recomputed": f"{request.recompute_blocks} of {shape.blocks} blocks",
        "state_gib": parameters * (2 + SHARDED_BYTES / gpus) / GIB,
    }


def rates(request: FluxRequest, measured: dict[str, Any], result: Result) -> dict[str, Any]:
    """Return the columns that follow from the measured times."""
    times = spread(measured["times_ms"])
    batch = measured["batch"]
    images_per_s = per_second(measured["times_ms"], batch)
    image_tokens = request.rows * request.columns
    flops = request.shape.flops_per_image(image_tokens, request.text_tokens)
    tflops = flops * images_per_s / 1e12
    return {
        "images_per_s_per_gpu": images_per_s,
        "images_per_s_p10": 1e3 * batch / times["ms_p90"],
        "images_per_s_p90": 1e3 * batch / times["ms_p10"],
        "tflops": tflops,
        "percent": result.percent(tflops, "bf16"),
        "memory_gib": measured["memory_bytes"] / GIB or None,
    }


def run_request(request: FluxRequest, gpus: int) -> dict[str, Any]:
    """Run throughput/flux_rank.py on `gpus` GPUs (or CPU processes) and return its measurements.

    They lack `times_ms` if memory ran out, and are {} if it ran out in the first attempt. Raises
    the RunError of the rank that failed first, for any reason other than memory.
    """
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    measured, error = ranks.run_request("throughput.flux_rank", request, gpus, settings, LIMIT_S)
    if error and error.kind != OutOfMemory.kind:
        raise error
    return measured
