"""Measurements of `throughput flux` on one rank: `python -m throughput.flux_rank FOLDER`.

torchrun starts one process per GPU. FOLDER/request.json contains the FluxRequest. Rank 0 writes
FOLDER/measured.json: the batches that were tried and, if one fits, the times of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from common.estimate.memory import largest
from common.kernels import accumulate
from common.kernels.attention import attention_backends
from common.model.initialization import parameter_seed
from common.sharding.adamw import AdamW, AdamWSettings
from common.sharding.processes import Processes, start_processes
from common.sharding.zero import ZeroOptimizer, make_reduce_scatter
from common.training.build import default_dtype
from throughput.flux_model import Flux, FluxShape, image_positions, rope_table
from throughput.memory import free_memory, ran_out_of_memory
from throughput.ranks import (
    LocalReduceScatter,
    fullest_bytes,
    main,
    read_request,
    slowest_ms,
    write_measured,
)

TIMEOUT_S = 300.0  # timeout of a collective
SETTINGS = AdamWSettings(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_norm=1.0)
LEARNING_RATE = 1e-5
# Standard deviation of all matrices. Training would initialize some with zeros, but on zeros a GPU
# is faster than on other data.
WEIGHT_STD = 0.02
# Dtype of weights, activations, reduced gradients and moments. Master weights and summed gradients
# are fp32.
DTYPE = torch.bfloat16
GUIDANCE = 1.0


@dataclass(frozen=True)
class FluxRequest:
    """The request for one measurement, the same for all numbers of GPUs."""

    device: str  # "cuda" or "cpu"
    shape: FluxShape
    rows: int  # height of the image in tokens
    columns: int  # width of the image in tokens
    text_tokens: int
    batch: int  # images per rank; 0: the largest number that fits
    recompute_blocks: int  # number of leading blocks that are recomputed in the backward
    warmup: int  # number of untimed steps
    steps: int  # number of timed steps


def measure(folder: Path) -> None:
    """Run the request in `folder` on this rank. Rank 0 writes the measurements into `folder`."""
    request = read_request(folder, FluxRequest)
    processes = start_processes(request.device, TIMEOUT_S, high_priority_compute=True)
    processes.barrier()  # lets NCCL allocate its memory before any batch is tried
    with attention_backends(request.device):
        measure_batches(request, processes, folder)
    dist.destroy_process_group()


def measure_batches(request: FluxRequest, processes: Processes, folder: Path) -> dict[str, Any]:
    """Try batches, time the steps of the one that fits, and return the measurements.

    `tried`: pairs of a batch and the peak memory of the fullest rank in bytes, None if a rank ran
    out of memory. `batch`: the batch that fits, or 0. If one fits: `times_ms`, the step times on
    the slowest rank, and `memory_bytes`. Rank 0 writes `tried` and `batch` into `folder` before
    the steps run, and everything after them.
    """
    tried: list[tuple[int, int | None]] = []

    def fits(batch: int) -> bool:
        peak = try_batch(request, processes, batch)
        tried.append((batch, peak))
        return peak is not None

    if not request.batch:
        batch = largest(fits)
    else:
        batch = request.batch if fits(request.batch) else 0
    measured: dict[str, Any] = {"tried": tried, "batch": batch}
    write_measured(folder, measured, processes)
    if batch:
        free_memory(processes.device)
        model, optimizer = build(request, processes)
        optimizer.gather()
        step = partial(train_step, model, optimizer, synthetic_batch(request, processes, batch))
        measured |= {
            "times_ms": slowest_ms(step, request.warmup, request.steps, processes),
            "memory_bytes": fullest_bytes(processes),
        }
        write_measured(folder, measured, processes)
    return measured


# --- a training step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FluxBatch:
    """Random inputs in bf16, in place of the encoders' outputs. Shapes: see `Flux.forward`."""

    latents: Tensor
    text: Tensor
    pooled: Tensor
    rope: Tensor


def synthetic_batch(request: FluxRequest, processes: Processes, size: int) -> FluxBatch:
    device = processes.device
    shape = request.shape
    generator = torch.Generator(device).manual_seed(
        parameter_seed(1, f"batch of rank {processes.rank}")
    )
    draw = partial(torch.randn, device=device, dtype=DTYPE, generator=generator)
    positions = image_positions(request.rows, request.columns, request.text_tokens)
    return FluxBatch(
        draw(size, request.rows * request.columns, shape.in_channels),
        draw(size, request.text_tokens, shape.context_size),
        draw(size, shape.pooled_size),
        rope_table(positions, shape, device),
    )


def flow_loss(model: Flux, batch: FluxBatch) -> Tensor:
    """Return the rectified flow loss (Liu et al., arXiv:2209.03003), fp32 [].

    It is the mean squared error of the predicted velocity, whose true value is noise - latents, at
    (1 - t) latents + t noise. For each image, t is the logistic function of a sample of N(0, 1)
    (arXiv:2403.03206, logit-normal).
    """
    latents = batch.latents
    noise = torch.randn_like(latents)
    time = torch.randn(len(latents), device=latents.device).sigmoid()
    noisy = torch.lerp(latents, noise, time[:, None, None].to(latents.dtype))
    velocity = model(
        noisy, batch.text, batch.pooled, time, torch.full_like(time, GUIDANCE), batch.rope
    )
    return F.mse_loss(velocity.float(), (noise - latents).float())


def train_step(
    model: Flux, optimizer: ZeroOptimizer, batch: FluxBatch, learning_rate: float = LEARNING_RATE
) -> Tensor:
    """Run forward, backward with reduction, clipping and AdamW.

    Return the loss of this rank's images, fp32 [].
    """
    loss = flow_loss(model, batch)
    loss.backward()
    optimizer.step(learning_rate)
    return loss.detach()


def build(request: FluxRequest, processes: Processes) -> tuple[Flux, ZeroOptimizer]:
    """Build model and optimizer with equal weights on all ranks.

    Elements of matrices are normally distributed with WEIGHT_STD, biases are 0, norms are 1. The
    ranks do not communicate, so no rank waits for one that runs out of memory. Call
    `optimizer.gather` to complete the model's weights.
    """
    device = processes.device
    with torch.device("meta"), default_dtype(DTYPE):
        model = Flux(request.shape, request.recompute_blocks)
    model.to_empty(device=device)
    kernels = kernels_of(device)
    reduce_scatter = partial(make_reduce_scatter, "nccl", processes, DTYPE, kernels)
    make_rule = partial(AdamW, SETTINGS, kernels, DTYPE)
    optimizer = ZeroOptimizer(model.parts, processes, make_rule, kernels, reduce_scatter)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith((".norm.q.weight", ".norm.k.weight"))
        weight = torch.full(parameter.shape, 1.0 if is_norm else 0.0, device=device)
        if parameter.ndim > 1:
            generator = torch.Generator(device).manual_seed(parameter_seed(1, name))
            weight.normal_(0.0, WEIGHT_STD, generator=generator)
        optimizer.set_weight(parameter, weight)
    return model, optimizer


def kernels_of(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "reference"


# --- the largest batch ----------------------------------------------------------------------------


def try_batch(request: FluxRequest, processes: Processes, size: int) -> int | None:
    """Return the peak memory of two steps on the fullest rank, in bytes.

    Return None if a rank runs out of memory. Model, optimizer and batch are newly allocated.
    """
    free_memory(processes.device)
    built: list[tuple[Flux, ZeroOptimizer, FluxBatch]] = []

    def build_all() -> None:
        model, optimizer = build(request, processes)
        if processes.world_size > 1:
            optimizer.reduce_scatter = LocalReduceScatter(
                processes.shard_group,
                None,
                DTYPE,
                accumulate.IMPLEMENTATIONS[kernels_of(processes.device)],
            )
        built.append((model, optimizer, synthetic_batch(request, processes, size)))

    if not succeeds_everywhere(build_all, processes):
        return None
    model, optimizer, batch = built.pop()
    optimizer.gather()
    # Like every later step, the second step starts with memory that torch has cached before.
    for _ in range(2):
        if not succeeds_everywhere(lambda: flow_loss(model, batch).backward(), processes):
            return None
        optimizer.step(LEARNING_RATE)
    return fullest_bytes(processes)


def succeeds_everywhere(work: Callable[[], None], processes: Processes) -> bool:
    """Run `work` and return whether it fits in the memory of every rank.

    `work` must not communicate.
    """
    succeeded = torch.ones(1, device=processes.device)
    try:
        work()
        if processes.device.type == "cuda":
            torch.cuda.synchronize(processes.device)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        succeeded.zero_()
    return int(processes.sum(succeeded)) == processes.world_size


if __name__ == "__main__":
    main(measure)
