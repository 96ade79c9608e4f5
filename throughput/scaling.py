"""Measure training steps on 1, 2, 4 and 8 GPUs, collectives by size, and the links between GPUs.

Two strategies are measured: DDP trains a GPT, and ZeRO-2 a Llama with few layers. For each number
of GPUs, a separate torchrun starts one process per GPU (throughput/scaling_rank.py). On a CPU, a
process takes the place of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.errors import Interrupted, RunError
from common.machine.host import cpu_count
from common.measure.tables import Column, Plot, PublishedValues, Table, time_columns
from common.model.shapes import TokenFlops
from common.variables import Use, select
from launch.processes.ranks import rank_environment
from launch.processes.supervise import supervise
from throughput import links, ranks
from throughput.gpt_sizes import SIZES, STAND_INS
from throughput.memory import OUT_OF_MEMORY, ran_out_of_memory
from throughput.result import Result
from throughput.scaling_rank import DDP, STRATEGIES, ScalingRequest
from throughput.timing import per_second, spread

LIMIT_S = 900.0  # time limit for one number of GPUs; collectives have a shorter timeout
# GPT -> bytes that the GPU's memory must exceed. The first that fits is the default. The numbers
# are the published peak memory (7b: 107.9 GB, 3b: 26.9 GB) plus about a tenth.
DEFAULT_GPT = {"7b": 120e9, "3b": 30e9, "small": 0.0}
LLAMA_LAYERS = {"cuda": 4, "cpu": 2}
COLLECTIVE_BYTES = {
    "cuda": tuple(4**k << 20 for k in range(6)),  # 1 MiB to 1 GiB
    "cpu": (2**16, 2**18, 2**20),
}
REPEATS = {"cuda": 20, "cpu": 5}
MIB = 2**20

SCALING = Table(
    "scaling",
    "Training steps by number of GPUs",
    (
        Column("strategy", "Strategy"),
        Column("model", "Model"),
        Column("precision", "Precision"),
        Column("gpus", "GPUs", "", "d"),
        Column("tokens_per_s", "Tokens/s", "", ",.0f"),
        Column("tokens_per_s_per_gpu", "Tokens/s per GPU", "", ",.0f"),
        Column("efficiency", "Efficiency", "%", ".1f"),
        Column("exposed", "Exposed communication", "%", ".1f"),
        Column("mark", "Mark"),
        Column("tflops_per_gpu", "TFLOP/s per GPU", "", ".4g"),
        Column("percent", "MFU", "%", ".1f"),
        Column("memory_gb", "Memory per GPU", "GB", ".1f"),
        Column("batch", "Batch per GPU", "", ",d"),
        Column("seq", "Sequence", "", ",d"),
        *time_columns(),
        Column("alone_ms", "Step without reduction", "ms", ".1f"),
    ),
    keys=("strategy", "model", "precision", "gpus", "batch", "seq"),
    value="tokens_per_s",
    formulas=(
        "The time of a step is the slowest rank's, optimizer included. Efficiency = tokens/s "
        "on n GPUs / (n x tokens/s on one). The batch per GPU is the same for all n.",
        "DDP: a GPT (`gpt`) replicated on each GPU, torch's DistributedDataParallel, bf16 "
        "throughout; on one GPU without the wrapper. ZeRO-2: this package's Llama 3.1 8B with "
        "fewer layers, fused blocks, sharded fp32 master weights and moments, NCCL's "
        "reduce-scatter and all-gather. On a CPU both models are tiny.",
        "Exposed communication = (step - step without reduction) / step. Without reduction: for "
        "DDP, inside no_sync; for ZeRO-2, each rank adds its own rows of its own gradient. Both "
        "include the gather of weights.",
        "TFLOP/s: 6 N + 6 L S H per token. N: parameters in matrix products. Attention counts half "
        "of the square. MFU: share of the dense peak of one GPU. In fp8, linear layers count at "
        "the FP8 peak, and attention and head at the bf16 peak.",
        "Mark: a row with fewer tokens/s than the next smaller number of GPUs, or with steps that "
        "are faster than there beyond the spread. Measure such a row again.",
    ),
    plots=(Plot("lines", "Tokens/s by number of GPUs", "gpus", "tokens_per_s", "strategy"),),
    published=(
        PublishedValues("scaling_7b", ("model", "gpus", "seq"), "tokens_per_s"),
        PublishedValues("scaling_ddp", ("model", "gpus", "batch", "seq"), "tokens_per_s"),
    ),
)
COLLECTIVES = Table(
    "collectives",
    "Collectives by size",
    (
        Column("name", "Collective"),
        Column("mib", "Size", "MiB", ",.4g"),
        *time_columns("Calls", "Time", ".3f"),
        Column("algorithm_gb_per_s", "Algorithm bandwidth", "GB/s", ".4g"),
        Column("bus_gb_per_s", "Bus bandwidth", "GB/s", ".4g"),
    ),
    keys=("name", "mib"),
    value="bus_gb_per_s",
    formulas=(
        "Size: of the tensor that is reduced, or of the result that is gathered. Algorithm "
        "bandwidth = size / median time of the slowest rank.",
        "Bus bandwidth, as NCCL's tests define it (nccl-tests, doc/PERFORMANCE.md): algorithm "
        "bandwidth x 2 (n - 1) / n for all-reduce, x (n - 1) / n for all-gather. It is the rate of "
        "each link, for any number n of ranks.",
    ),
    plots=(Plot("lines", "Bus bandwidth by size", "mib", "bus_gb_per_s", "name"),),
)
LINKS = Table(
    "links",
    "Links between the GPUs",
    (
        Column("pair", "From, to"),
        Column("link", "Link"),
        Column("peer", "Peer access"),
        Column("gb_per_s", "Copy", "GB/s", ".1f"),
    ),
    keys=("pair",),
    value="gb_per_s",
    formulas=(
        "Link: name given by the driver (nvidia-smi topo -m, rocm-smi --showtopo). Copy: 256 MiB "
        "from one GPU's memory to another's, in one direction, while the other GPUs are idle. "
        "Without peer access the copy goes through the host.",
    ),
    plots=(
        Plot(
            "links", "Links, and copies in GB/s from (row) to (column)", "pair", "gb_per_s", "link"
        ),
    ),
)
TABLES = (SCALING, COLLECTIVES, LINKS)


def measure(options: argparse.Namespace, result: Result) -> None:
    """Measure each number of GPUs, then the links. Raises ConfigError for an unknown model."""
    available = min(2, cpu_count())
    if options.device == "cuda":
        available = torch.cuda.device_count()
        # On AMD this is RCCL's version.
        result.data["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    model, request = request_for(options, result)
    result.data["machine"] |= select(Use.COMPARED, os.environ)
    counts = options.gpus or [gpus for gpus in (1, 2, 4, 8) if gpus <= available]
    for gpus in sorted(set(counts)):  # a number is not compared with itself
        processes = "process" if gpus == 1 else "processes"
        print(f"starting {gpus} {processes} ...", file=sys.stderr, flush=True)
        measured, error = ranks.run_request("throughput.scaling_rank", request, gpus, {}, LIMIT_S)
        for strategy in STRATEGIES:
            add_steps(strategy, model, request, gpus, measured, error, result)
        add_collectives(gpus, measured.get("collectives", []), result)
    if options.device == "cuda" and available > 1:
        add_links(available, result)


def request_for(options: argparse.Namespace, result: Result) -> tuple[str, ScalingRequest]:
    """Return the name of the GPT, and the request that the ranks read."""
    device = options.device
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    known = SIZES | STAND_INS
    model = options.model or default_gpt(memory)
    gpt = replace(
        known[model],
        batch=options.batch or known[model].batch,
        sequence_length=options.seq or known[model].sequence_length,
    )
    request = ScalingRequest(
        gpu="CPU" if device == "cpu" else str(result.data["machine"].get("kind")),
        gpt=gpt,
        llama_layers=LLAMA_LAYERS[device],
        fp8=options.precision == "fp8",
        warmup=options.warmup,
        steps=options.steps,
        collective_bytes=COLLECTIVE_BYTES[device],
        collective_repeats=REPEATS[device],
    )
    return model, request


def default_gpt(memory_bytes: int) -> str:
    """Return the name of the default GPT for a GPU with this memory, or "tiny" for 0 (a CPU)."""
    return next((name for name, needed in DEFAULT_GPT.items() if memory_bytes > needed), "tiny")


# --- rows -----------------------------------------------------------------------------------------


def add_steps(
    strategy: str,
    model: str,
    request: ScalingRequest,
    gpus: int,
    measured: dict[str, Any],
    error: RunError | None,
    result: Result,
) -> None:
    """Add the row of `strategy` ("DDP" or "ZeRO-2") on `gpus` GPUs.

    If `measured` lacks the strategy, the row has the reason. `model`: name of the GPT.
    """
    described, flops = describe_steps(strategy, model, request)
    row: dict[str, Any] = {"table": "scaling", "strategy": strategy, "gpus": gpus, **described}
    part = measured.get(strategy)
    if part is None:
        result.add(row | {"error": reason(error)})
        return
    row |= spread(part["times_ms"])
    rate = per_second(part["times_ms"], gpus * row["batch"] * row["seq"])
    tflops = flops.total * rate / gpus / 1e12
    row |= {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / gpus,
        "tflops_per_gpu": tflops,
        "percent": result.percent(tflops, row["precision"], flops),
        "memory_gb": part["memory_bytes"] / 1e9 or None,
    }
    if part["alone_ms"]:
        alone_ms = statistics.median(part["alone_ms"])
        row |= {"alone_ms": alone_ms, "exposed": 100 * (row["ms"] - alone_ms) / row["ms"]}
    smaller = [
        old for old in result.rows if old.get("strategy") == strategy and "tokens_per_s" in old
    ]
    first = smaller[0] if smaller else row
    if first["gpus"] == 1:
        row["efficiency"] = 100 * rate / gpus / first["tokens_per_s"]
    if smaller:
        row["mark"] = mark(smaller[-1], row)
    result.add(row)


def describe_steps(
    strategy: str, model: str, request: ScalingRequest
) -> tuple[dict[str, Any], TokenFlops]:
    """Return the columns that describe the model and its batch, and the FLOPs per token."""
    if strategy == DDP:
        length = request.gpt.sequence_length
        gpt = {"model": model, "precision": "bf16", "batch": request.gpt.batch, "seq": length}
        return gpt, TokenFlops(request.gpt.shape.training_flops_per_token(length), 0)
    precision = "fp32" if request.gpu == "CPU" else "bf16"
    if request.fp8:
        precision = "fp8"
    llama = {
        "model": f"Llama, {request.llama_layers} layers",
        "precision": precision,
        "batch": 1,
        "seq": request.rules.sequence_length,
    }
    return llama, request.rules.training_flops


def reason(error: RunError | None) -> str:
    """Return why a part was not measured. `error`: the error that ended the ranks."""
    if error is None:
        return "not measured"
    return OUT_OF_MEMORY if ran_out_of_memory(error) else error.what


def mark(smaller: dict[str, Any], row: dict[str, Any]) -> str:
    """Describe why `row` does not fit the scaling trend, or return "" if it fits.

    `smaller`: the row of the next smaller number of GPUs.
    """
    if row["tokens_per_s"] < smaller["tokens_per_s"]:
        unit = "GPU" if smaller["gpus"] == 1 else "GPUs"
        return f"below {smaller['gpus']} {unit}"
    if row["ms_p90"] < smaller["ms_p10"]:
        return f"faster per GPU than {smaller['gpus']}"
    return ""


def add_collectives(ranks: int, measured: list[dict[str, Any]], result: Result) -> None:
    """Add the rows of table "collectives". `measured`: see `measure_collectives`."""
    for call in measured:
        row = {
            "table": "collectives",
            "name": f"{call['name']}, {ranks} ranks",
            "mib": call["bytes"] / MIB,
            "algorithm_gb_per_s": per_second(call["times_ms"], call["bytes"]) / 1e9,
            "bus_gb_per_s": per_second(call["times_ms"], call["bus_gb"]),
        }
        result.add(row, call["times_ms"])


def add_links(gpus: int, result: Result) -> None:
    """Add the rows of table "links" for `gpus` GPUs, and a row for each part that failed."""
    vendor = "amd" if torch.version.hip else "nvidia"
    names, why = links.read_names(vendor, os.environ, gpus)
    with tempfile.TemporaryDirectory(prefix="links-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "throughput.links", str(folder / "copies.json")]
        ending = supervise(command, rank_environment(os.environ, {}, 1), folder, stdout=sys.stderr)
        if ending.signal_number:
            raise Interrupted(ending.signal_number)
        copies = json.loads((folder / "copies.json").read_text()) if ending.returncode == 0 else []
    for row in links.rows(names, copies):
        result.add({"table": "links", **row})
    if why:
        result.add({"table": "links", "pair": "all", "error": why})
    if not copies:
        error = "the copies failed: see the messages above"
        result.add({"table": "links", "pair": "all", "error": error})
