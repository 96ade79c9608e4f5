"""Measure training steps of GPTs in plain torch on one GPU: eight sizes, 30 M to 10 B parameters.

--batch max finds the largest batch that fits, and --sweep measures all powers of two up to it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from common.errors import ConfigError
from common.estimate.memory import largest
from common.kernels.attention import attention_backends
from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from common.training.metrics import peak_bytes
from throughput import shared_options
from throughput.gpt_model import STATE_BYTES, build_gpt, train_step
from throughput.gpt_sizes import SIZES, STAND_INS, Size
from throughput.memory import (
    free_memory,
    ran_out_of_memory,
    require_host_memory,
)
from throughput.result import Result, TimedRow
from throughput.timing import per_second, step_ms

# Largest batch of a sweep on a CPU, where a sweep must not fill the memory of the host.
MOST_ON_CPU = 16
PRECISION = "bf16"

COLUMNS = (
    Column("model", "Model"),
    Column("precision", "Precision"),
    Column("parameters", "Parameters", "", ",d"),
    Column("batch", "Batch", "", ",d"),
    Column("seq", "Sequence", "", ",d"),
    Column("tokens_per_s", "Tokens/s", "", ",.0f"),
    Column("tflops", "TFLOP/s, 6 P", "", ".4g"),
    Column("tflops_attention", "TFLOP/s, 6 N + 6 L S H", "", ".4g"),
    Column("percent", "MFU", "%", ".1f"),
    Column("memory_gb", "Memory", "GB", ".1f"),
    *time_columns(),
)
FORMULAS = (
    "Step: forward, mean cross-entropy, backward, fused AdamW, on random tokens. Weights, "
    "gradients and both moments are bf16, 8 bytes per parameter, without fp32 master "
    "weights. Plain torch: without compilation and recomputation, with "
    "scaled_dot_product_attention and a vocabulary of 50,257 that is not padded.",
    "Tokens/s = batch x sequence / median step time. P: all parameters, with the embedding, which "
    "is also the head, counted once. N: parameters in matrix products. L: layers, S: sequence, H: "
    "hidden size. Causal attention counts half of the square.",
    "MFU: TFLOP/s by 6 N + 6 L S H, as a share of the dense BF16 peak of this GPU kind. Memory: "
    "peak of torch's allocator, in 1e9 bytes.",
    "On a CPU, tiny and mini replace the eight sizes. They only show that the measurement works.",
)
KEYS = ("model", "batch", "seq")
TABLES = (
    Table(
        "gpt",
        "Training steps of GPTs on one GPU",
        COLUMNS,
        KEYS,
        "tokens_per_s",
        FORMULAS,
        plots=(Plot("bars", "TFLOP/s by model", "model", "tflops", "precision"),),
        published=(
            PublishedValues("gpt", ("model", "seq"), "parameters", compared=False),
            PublishedValues("gpt", KEYS, "tokens_per_s"),
            PublishedValues("gpt", KEYS, "tflops"),
        ),
    ),
    Table(
        "sweep",
        "GPTs by batch",
        (*COLUMNS, Column("mark", "Mark")),
        KEYS,
        "tokens_per_s",
        FORMULAS,
        plots=(Plot("lines", "Tokens/s by batch", "batch", "tokens_per_s", "model"),),
        published=(PublishedValues("gpt", KEYS, "tokens_per_s"),),
    ),
)


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure the chosen sizes, at one batch each or as a sweep.

    Raises ConfigError for wrong options.
    """
    if options.batch and options.sweep:
        raise ConfigError(
            "--batch and --sweep exclude each other",
            "a sweep chooses the batches",
            "leave out one of them",
        )
    known = SIZES | STAND_INS
    names = list(STAND_INS if options.device == "cpu" else SIZES)
    if options.model:
        names = [options.model]
    for name in names:
        size = replace(known[name], sequence_length=options.seq or known[name].sequence_length)
        if options.sweep:
            sweep(name, size, options, result)
        else:
            batch = options.batch or size.batch
            if batch == shared_options.MAX:
                batch = max(1, largest(partial(fits, size, options.device)))
            add_row("gpt", name, replace(size, batch=batch), options, result)


def add_row(table: str, name: str, size: Size, options: argparse.Namespace, result: Result) -> bool:
    """Measure one size, add its row, and return whether the measurement succeeded.

    `table`: "gpt" or "sweep". Raises OutOfMemory, before it starts, if the memory of the host is
    too small.
    """
    if options.device == "cpu":
        require_host_memory(f"gpt {name}, batch {size.batch}", state_bytes(size))
    row = {
        "table": table,
        "model": name,
        "precision": PRECISION,
        "batch": size.batch,
        "seq": size.sequence_length,
    }
    return result.attempt(row, lambda: run(size, options, result))


def state_bytes(size: Size) -> int:
    """Return the bytes of weights, gradients and moments, without activations."""
    return STATE_BYTES * size.shape.num_parameters(size.sequence_length)


def run(size: Size, options: argparse.Namespace, result: Result) -> TimedRow:
    """Time the steps of one size."""
    times, memory = timed_steps(size, options.device, options.warmup, options.steps)
    shape = size.shape
    length = size.sequence_length
    rate = per_second(times, size.batch * length)
    tflops_attention = shape.training_flops_per_token(length) * rate / 1e12
    values: dict[str, Any] = {
        "parameters": shape.num_parameters(length),
        "tokens_per_s": rate,
        "tflops": 6 * shape.num_parameters(length) * rate / 1e12,
        "tflops_attention": tflops_attention,
        "percent": result.percent(tflops_attention, PRECISION),
        "memory_gb": memory / 1e9 if memory else None,
    }
    return TimedRow(values, times)


def timed_steps(size: Size, device: str, warmup: int, steps: int) -> tuple[list[float], int]:
    """Time steps of a new model.

    Return the milliseconds of each step and the peak memory in bytes, which is 0 on a CPU.
    """
    torch_device = torch.device(device)
    free_memory(torch_device)
    with attention_backends(device):
        step = train_step(build_gpt(size.shape, size.sequence_length, torch_device), size)
        times = step_ms(step, device, warmup, steps)
    return times, peak_bytes(torch_device)


# --- the largest batch ----------------------------------------------------------------------------


def sweep(name: str, size: Size, options: argparse.Namespace, result: Result) -> None:
    """Add rows for batches 1, 2, 4, ... and mark the fastest.

    If memory runs out, add a row with the error, and a row for the largest batch that fits.
    """
    first = len(result.rows)
    batch = 1
    while add_row("sweep", name, replace(size, batch=batch), options, result):
        if options.device == "cpu" and batch >= MOST_ON_CPU:
            break
        batch *= 2
    marks: dict[int, list[str]] = {}
    if batch > 1 and "error" in result.rows[-1]:
        good = batch // 2
        most = good + largest(
            lambda more: good + more < batch and fits(size, options.device, good + more)
        )
        marks[most] = ["largest that fits"]
        if most > good:
            add_row("sweep", name, replace(size, batch=most), options, result)
    measured = [row for row in result.rows[first:] if "tokens_per_s" in row]
    if measured:
        fastest = max(measured, key=lambda row: row["tokens_per_s"])
        marks.setdefault(fastest["batch"], []).append("most tokens/s")
    for row in measured:
        row["mark"] = ", ".join(marks.get(row["batch"], []))


def fits(size: Size, device: str, batch: int) -> bool:
    """Return whether two steps fit in memory. AdamW's moments exist from the second step on.

    Raises the error of a step unless it is out of memory.
    """
    try:
        timed_steps(replace(size, batch=batch), device, warmup=1, steps=1)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        return False
    return True
