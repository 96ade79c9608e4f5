"""Measure training steps of an MLP with 134 M parameters.

It has three linear layers, 4096 -> 8192 -> 8192 -> 4096, with ReLU between them.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from throughput.result import Result, TimedRow
from throughput.timing import per_second, step_ms

SIZES = {"cuda": (4096, 8192, 8192, 4096), "cpu": (256, 512, 512, 256)}

TABLES = (
    Table(
        "mlp",
        "Training steps of an MLP",
        (
            Column("model", "Linear layers"),
            Column("precision", "Weights, state"),
            Column("parameters", "Parameters", "", ",d"),
            Column("batch", "Batch", "", ",d"),
            *time_columns(format=".3f"),
            Column("samples_per_s", "Samples/s", "", ",.0f"),
            Column("tflops", "TFLOP/s", "", ".4g"),
            Column("percent", "% of peak", "", ".1f"),
        ),
        keys=("model", "precision", "batch"),
        value="samples_per_s",
        formulas=(
            "Step: forward, mean squared error against a random target in fp32, backward, AdamW "
            "(fused on a GPU). Weights, biases, gradients and both moments have the precision of "
            "the row. Gradients are released before each forward. fp32 products run without TF32. "
            "The median step counts. p10 and p90 are percentiles.",
            "Samples/s = batch / median step time. TFLOP/s = 6 x parameters x samples/s / 1e12: "
            "two operations per parameter in the forward, four in the backward. The optimizer is "
            "not counted.",
        ),
        plots=(Plot("bars", "Samples per second", "model", "samples_per_s", "precision"),),
        published=(PublishedValues("mlp", ("model", "batch"), "samples_per_s"),),
    ),
)


def measure(options: argparse.Namespace, result: Result) -> None:
    sizes = SIZES[options.device]
    for precision in ("bf16", "fp32"):
        row = {
            "table": "mlp",
            "model": "-".join(map(str, sizes)),
            "precision": precision,
            "batch": options.batch,
        }
        result.attempt(row, partial(run, sizes, precision, options, result))


def run(
    sizes: tuple[int, ...], precision: str, options: argparse.Namespace, result: Result
) -> TimedRow:
    """Time the steps in one precision.

    `sizes`: sizes of the input and of the output of each layer.
    """
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    layers = [
        nn.Linear(wide, out, device=options.device, dtype=dtype) for wide, out in pairwise(sizes)
    ]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=options.device == "cuda")
    x = torch.randn(options.batch, sizes[0], device=options.device, dtype=dtype)
    target = torch.randn(options.batch, sizes[-1], device=options.device, dtype=dtype)

    def step() -> Tensor:
        optimizer.zero_grad()
        y = x
        for layer in layers[:-1]:
            y = F.relu(layer(y))
        loss = F.mse_loss(layers[-1](y).float(), target.float())
        loss.backward()
        optimizer.step()
        return loss

    times = step_ms(step, options.device, options.warmup, options.steps)
    num_parameters = sum(parameter.numel() for parameter in parameters)
    rate = per_second(times, options.batch)
    tflops = 6 * num_parameters * rate / 1e12
    values = {
        "parameters": num_parameters,
        "samples_per_s": rate,
        "tflops": tflops,
        "percent": result.percent(tflops, precision),
    }
    return TimedRow(values, times)
