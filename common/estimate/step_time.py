"""Time of an optimizer step and of an evaluation, and minutes to the target, without a GPU.

Time is the FLOPs at the GPU's dense peaks, divided by one efficiency per GPU kind, plus what does
not shrink with a step's sequences: the optimizer, the cast of the weights, and communication. Where
GPUs share sequences, the host's launches are a lower limit. Units are seconds unless a name says
minutes. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config import RunConfig
from common.estimate.links import NETWORK_GB_S, exposed_seconds, occupied_seconds
from common.estimate.memory import BYTES, recomputed_layers, state_bytes
from common.estimate.mfu import peak_tflops
from common.estimate.workload import Workload
from common.gpu_kinds import GpuKind
from common.model.shapes import TokenFlops

# Time of a step's products in bf16 divided by that in FP8. A whole step takes 1.41 times as long:
# 11,223 and 15,829 tok/s/GPU with the 8B on 2 H200s. Assumed for every model and GPU.
BF16_OVER_FP8 = 1.42
# Smallest hidden size of the models that the efficiencies were fitted to: the 8B's. Kernels
# other than matrix products take a larger share of narrower models. With 2,048, the 1B of
# pretrain_1b.toml reaches 74 % of the calculated tokens/s on an H100 and 76 to 81 % on an H200.
FITTED_HIDDEN_SIZE = 4096
# Rate of GPUs that share a sequence, divided by that of others, without the time of the links. With
# two GPUs a sequence, two H200s reach 0.91 to 0.93 of the tokens/s in the 8B and 0.92 in LoRA
# (docs/results.md), links included. Assumed for more GPUs and other kinds.
SHARED_SEQUENCE = 0.93
# Seconds in which the host launches a layer's forward and backward of one micro-batch, where GPUs
# share sequences. Steps of the 8B's 32 layers with one micro-batch waited for launches: 303 and 317
# ms with two H200s a sequence, 347 with four and older code (docs/results.md). The older code took
# 1.2 times as long with two. So a layer takes 9.5, 9.9 and 9.0 ms, on hosts with 16 cores a GPU.
# The constant is the lowest. By samples, 17 % of it are the cast of the weights and the optimizer,
# although a step launches them once. Assumed for LoRA, other models, GPU kinds and hosts. Not
# measured for whole sequences, which have half as many launches.
HOST_S_PER_LAYER = 9.0e-3
# FLOPs of attention's backward divided by the forward's. Flash attention recomputes the scores
# (arXiv:2205.14135). MFU counts a ratio of 2.
ATTENTION_BACKWARD = 2.5
# Share of the peak bandwidth of memory that a copy reaches: 4.2 of 4.8 TB/s on an H200, and AdamW's
# kernel nearly as much (common/kernels/adamw.py). Assumed for every kind.
MEMORY_SHARE = 4.2 / 4.8


@dataclass(frozen=True)
class Estimate:
    """Seconds of an optimizer step and of an evaluation, and minutes to the target.

    `minutes` is None without a reference (RCP).
    """

    step_s: float
    eval_s: float
    tokens_per_s_per_gpu: float
    minutes: float | None
    exposed_s: float  # part of the step in which only links work; 0 if their speed is unknown


def products_seconds_per_token(
    work: Workload, kind: GpuKind, *, training: bool, recomputed: float = 0.0
) -> float:
    """Return the time of one token's matrix products on one GPU at the dense peaks.

    Linear layers run at the FP8 peak, and the other products at the bf16 peak. Training consists of
    forward, data gradient and, unless the weights are frozen, weight gradient.
    `recomputed`: share of the layers whose forward runs twice.
    """
    shape = work.shape
    head = 2 * shape.vocab_size * shape.hidden_size
    linears = 2 * shape.matmul_parameters - head
    # A third is the forward: the shape counts a backward of twice the forward.
    attention = shape.attention_flops_per_token(work.sequence_length) / 3
    adapters = 2 * shape.lora_parameters(work.lora_rank)
    # Products for each weight, and FLOPs of attention as a multiple of the forward's.
    passes = 1
    adapter_passes = 1
    attention_passes = 1.0
    if training:
        passes = 2 if work.lora_rank else 3
        adapter_passes = 3
        attention_passes = 1 + ATTENTION_BACKWARD
    others = adapters * adapter_passes + attention * (attention_passes + recomputed)
    others += head * passes
    flops = TokenFlops(linears * (passes + recomputed), others)
    peak = peak_tflops(flops, kind.peak_fp8_tflops, kind.peak_bf16_tflops)
    return flops.total / peak / 1e12


def fixed_seconds(config: RunConfig, work: Workload, kind: GpuKind) -> float:
    """Return the time of a step's work that does not shrink with its sequences.

    The optimizer updates this GPU's weights. In FP8, all weights of the blocks are then read twice,
    for their largest values and for the cast. Bytes at the speed of memory.
    """
    shape = work.shape
    weights: float = shape.lora_parameters(work.lora_rank)  # whole on each GPU
    if not work.lora_rank:
        weights = shape.num_parameters / config.gpus_per_node
    # Master weight and moments are read and written, the gradient read, the rounded weight written.
    moved = weights * (2 * 4 + 2 * 2 * BYTES[config.moment_precision] + 4 + BYTES[config.precision])
    cast = state_bytes(config, work)["quantized weights"]
    if cast:
        matrices = shape.num_layers * shape.matrix_parameters
        moved += 2 * BYTES[config.precision] * matrices + cast
    return moved / (MEMORY_SHARE * kind.memory_tb_s * 1e12) if kind.memory_tb_s else 0.0


def host_seconds(config: RunConfig, work: Workload) -> float:
    """Return the least time in which the host launches a step where GPUs share sequences, or 0.

    Launches of a second forward in recomputed layers are not counted.
    """
    if config.context_parallel == 1:
        return 0.0
    return work.shape.num_layers * config.gradient_accumulation_steps * HOST_S_PER_LAYER


def estimate(
    config: RunConfig,
    work: Workload,
    kind: GpuKind,
    samples: float | None,
    network_gb_s: float = NETWORK_GB_S,
) -> Estimate:
    """Return the time of steps and evaluations, and the minutes to the target.

    `samples`: training sequences to the target, the RCP's mean. `network_gb_s`: per GPU between
    nodes. The host's launches limit steps, not evaluations, whose launches were not measured.
    """
    slowdown = (1 if config.linear_format.in_fp8 else BF16_OVER_FP8) / kind.efficiency
    if config.context_parallel > 1:
        slowdown /= SHARED_SEQUENCE
    recomputed = recomputed_layers(config, work) / work.shape.num_layers
    step_tokens = config.global_batch_size * work.sequence_length / config.world_size
    token_s = products_seconds_per_token(work, kind, training=True, recomputed=recomputed)
    step_s = step_tokens * slowdown * token_s + fixed_seconds(config, work, kind)
    if kind.description:  # names the links
        step_s += occupied_seconds(config, work, kind)
    # Gradients are also sent while the GPU waits for launches.
    step_s = max(step_s, host_seconds(config, work))
    exposed_s = 0.0
    if kind.description:
        exposed_s = exposed_seconds(config, work, kind, step_s, network_gb_s)
        step_s += exposed_s
    per_pass = config.data_ranks * config.eval_micro_batch_size
    eval_passes = -(-work.eval_samples // per_pass)
    # Tokens on one GPU, including padding.
    eval_tokens = eval_passes * config.eval_micro_batch_size * work.sequence_length
    eval_tokens //= config.context_parallel
    eval_s = eval_tokens * slowdown * products_seconds_per_token(work, kind, training=False)
    minutes = None
    if samples is not None:
        minutes = minutes_to_target(work, samples, config.global_batch_size / step_s, eval_s)
    return Estimate(step_s, eval_s, step_tokens / step_s, minutes, exposed_s)


def minutes_to_target(work: Workload, samples: float, samples_per_s: float, eval_s: float) -> float:
    """Return the minutes of training, including the evaluations.

    The number of evaluations is the mean over whole intervals.
    """
    evaluations = max(1.0, (samples - work.first_evaluation) / work.eval_interval + 1)
    return (samples / samples_per_s + evaluations * eval_s) / 60
