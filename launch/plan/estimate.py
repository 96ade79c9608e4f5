"""Memory per GPU and time to the target of a config, computed without a GPU.

Memory is counted, not fitted: each term is a tensor that the code holds at the moment of the peak.
The result is within 1 % of the peaks measured on H200s (tests/launch/plan/test_plan.py). Time
follows from one efficiency per GPU kind. Units are bytes and seconds. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from common.config import RunConfig
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.model.shapes import ModelShape

BYTES = {"fp32": 4, "bf16": 2}
# Layers of a frozen base that are gathered or transposed at a time: NUM_BUFFERS of
# common/sharding/frozen_base.py.
FROZEN_BUFFERS = 3

# The driver of an H200 offers 139.8 of its 141 GiB to a process. The same share is assumed for the
# other kinds.
USABLE_SHARE = 139.8 / 141
# Context and loaded libraries, which the driver counts and torch does not. From the out-of-memory
# message of an H200: 139.80 GiB of capacity less 7.25 free, 131.16 allocated by torch and 0.09
# reserved in addition. Assumed for the other kinds.
CONTEXT_BYTES = 1.3 * GIB
# Ratio of reserved to allocated memory if memory is short: 136.1 GiB allocated and 137.5 GiB
# reserved, in the run nearest to the limit. With free memory torch reserves up to 5 % more, which
# it returns before it fails.
RESERVED_OVER_ALLOCATED = 1.01


@dataclass(frozen=True)
class Workload:
    """Quantities that the benchmark's rules fix.

    Samples are sequences. The intervals are those at the config's global batch.
    """

    shape: ModelShape
    sequence_length: int
    eval_samples: int
    eval_interval: int
    first_evaluation: int
    # 0: all weights train; otherwise the base is frozen and adapters of this rank train.
    lora_rank: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the moment of the peak, by kind of tensor."""

    moment: str
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        """torch.cuda.max_memory_allocated plus symmetric memory, which torch does not count."""
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        """Bytes that the driver must offer."""
        return self.allocated * RESERVED_OVER_ALLOCATED + CONTEXT_BYTES


def usable_bytes(kind: GpuKind) -> float:
    """Return the bytes of a GPU that torch can allocate."""
    return kind.memory_bytes * USABLE_SHARE


def fits(memory: Memory, kind: GpuKind) -> bool:
    """Return whether the peak, with context and fragmentation, fits on a GPU of `kind`."""
    return memory.needed <= usable_bytes(kind)


def memory_peak(config: RunConfig, work: Workload) -> Memory:
    """Return the memory at the largest of four moments.

    They are the head's backward, the last block's forward, its backward, and an evaluation.
    """
    shape = work.shape
    element = BYTES[config.precision]
    tokens = config.micro_batch_size * work.sequence_length
    state = state_bytes(config, work) | {"gathered weights": _gathered_bytes(config, work)}
    saved = block = _saved_bytes(config, work)
    # A module's gradient, and as much again for the modules before, whose reduction is still
    # running. LoRA has no such gradients.
    gradient = 0 if work.lora_rank else 2 * element
    forward, backward = _working_bytes(config, work)
    backward = max(backward, attention_backward_bytes(config, shape))
    # The last block is recomputed too, so its forward runs within its backward.
    if _recomputed_layers(config, work) == shape.num_layers:
        block = saved | {
            name: saved[name] + size for name, size in _activations(config, work, layers=1).items()
        }
        backward = max(backward, forward + element * shape.hidden_size)
    head = _head_bytes_per_token(config, shape)
    table_in_flight = {"gradients in flight": shape.vocab_size * shape.hidden_size * gradient}
    layer_in_flight = {"gradients in flight": shape.layer_parameters * gradient}
    # Autograd adds the embedding's gradient to the head's, which is kept until then.
    if shape.tied_embedding and not work.lora_rank:
        layer_in_flight["the tied head's gradient"] = shape.vocab_size * shape.hidden_size * element
    evaluated = (
        config.eval_micro_batch_size
        * work.sequence_length
        * max(head, sum(activation_bytes(config, work).values()) + forward)
    )
    moments = {
        "the head's backward": state | saved | table_in_flight | {"logits and head": tokens * head},
        "a block's forward": state | block | {"a block's working set": tokens * forward},
        "a block's backward": state
        | block
        | layer_in_flight
        | {"a block's working set": tokens * backward},
        # The optimizer step has freed the gradients.
        "an evaluation": state | {"gradients": 0, "logits and head": evaluated},
    }
    moment, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    return Memory(moment, {name: size for name, size in parts.items() if size})


def state_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the bytes of tensors that live as long as the run.

    Trained weights have an fp32 master and gradient, 8 bytes, and AdamW's two moments, 8 or 4
    bytes. Pre-training shards them over a node's GPUs (ZeRO-2). Each GPU holds LoRA's adapters
    whole, and the frozen base as described in `frozen_bytes`.
    """
    shape = work.shape
    gpus = config.gpus_per_node
    table = work.shape.vocab_size * work.shape.hidden_size
    trained = (
        shape.lora_parameters(work.lora_rank) if work.lora_rank else shape.num_parameters / gpus
    )
    moments = 2 * BYTES[config.moment_precision]
    # Copy engines need two buffers for the parts of the largest gradient that other ranks send
    # (common/sharding/copy_engine.py).
    received = (
        2 * (1 - 1 / gpus) * table * BYTES[config.precision]
        if config.reduce_scatter == "copy_engine"
        else 0
    )
    rope = 2 * 4 * work.sequence_length * shape.head_dim // 2
    # Tokens and labels in int32: the evaluation set, and three micro-batches of the prefetcher.
    copies = config.linear_format.weight_copies * config.linear_format.operand_bytes(
        BYTES[config.precision]
    )
    resident = (
        (-(-work.eval_samples // config.world_size) + 3 * config.micro_batch_size)
        * 2
        * 4
        * work.sequence_length
    )
    return {
        "weights": 4 * trained + (frozen_bytes(config, shape) if work.lora_rank else 0),
        "gradients": 4 * trained,
        "AdamW moments": moments * trained,
        # Whole on each GPU: in FP8 one byte rowwise and one byte columnwise.
        "quantized weights": 0
        if work.lora_rank
        else copies * shape.num_layers * shape.matrix_parameters,
        "symmetric buffers": received,
        "buffers": rope + resident,
    }


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes of a frozen base on one GPU (common/sharding/frozen_base.py).

    They are the blocks' matrices, and all other weights whole in bf16. In FP8 a matrix has one byte
    per value and layout. W^T is stored if layers are gathered and with "replicated_both". In bf16,
    W serves both passes.
    """
    storage = config.frozen_base
    gpus = config.gpus_per_node
    transposed = storage == "replicated_both" or (storage == "sharded" and gpus > 1)
    per_value = (
        (2 if transposed else 1) if config.linear_format.stores_fp8 else BYTES[config.precision]
    )
    matrices = shape.num_layers * shape.matrix_parameters
    return per_value * matrices / (gpus if storage == "sharded" else 1) + BYTES[
        config.precision
    ] * (shape.num_parameters - matrices)


def _gathered_bytes(config: RunConfig, work: Workload) -> float:
    """Return the bytes of weights in the products' format that `state_bytes` does not include.

    Pre-training: all weights in bf16. LoRA: buffers for layers that are gathered or, in FP8 with W
    alone, transposed.
    """
    if not work.lora_rank:
        return BYTES[config.precision] * work.shape.num_parameters
    storage = config.frozen_base
    gathers = storage == "sharded" and config.gpus_per_node > 1
    fp8 = config.linear_format.stores_fp8
    transposes = fp8 and not gathers and storage != "replicated_both"
    per_value = 1 if fp8 else BYTES[config.precision]
    return FROZEN_BUFFERS * work.shape.matrix_parameters * per_value if gathers or transposes else 0


def _head_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the logits and the residual stream with its norm and its gradient.

    The gradient of the logits overwrites them.
    """
    return (shape.vocab_size + 3 * shape.hidden_size) * BYTES[config.precision]


def activation_bytes(config: RunConfig, work: Workload) -> dict[str, int]:
    """Return the bytes per token that a block keeps for its backward, by kind of tensor.

    The kinds are the fields of `Saved` in common/model/. Pre-training keeps the input of each
    product for its weight gradient, which a frozen matrix does not need. LoRA in FP8 keeps SwiGLU's
    input in 8 bits.
    """
    shape = work.shape
    element = BYTES[config.precision]
    hidden = shape.hidden_size
    ffn = shape.ffn_hidden_size
    kept = {
        "residual streams": 2 * hidden * element + 2 * 4,  # with 1 / rms of both norms in fp32
        "qkv": shape.qkv_size * element,
        "attention output": shape.attention_size * element
        + shape.num_heads * 4,  # with its log-sum-exp in fp32
        "SwiGLU input": 2
        * ffn
        * (1 if work.lora_rank and config.linear_format.stores_fp8 else element),
    }
    if shape.qk_norm:
        kept["queries and keys before their norm"] = (
            (shape.num_heads + shape.num_kv_heads) * shape.head_dim * element
        )
    if work.lora_rank:
        return kept | {"adapters": 2 * work.lora_rank * element}
    operand = config.linear_format.operand_bytes(element)
    # If kernels do not quantize operands, the output projection reads the attention output itself.
    o = shape.attention_size * operand if config.linear_format.in_fp8 else 0
    return kept | {
        "norm outputs": 2 * hidden * operand,
        "output projection's input": o,
        "SwiGLU output": ffn * operand,
    }


def _working_bytes(config: RunConfig, work: Workload) -> tuple[int, int]:
    """Return the peak bytes per token that a block holds only temporarily, in forward and backward.

    Forward: operands that are not kept and products' results. Backward, at SwiGLU: the gradients of
    the block's result, of SwiGLU's result and, as an operand, of its input.
    """
    hidden = work.shape.hidden_size
    ffn = work.shape.ffn_hidden_size
    element = BYTES[config.precision]
    operand = config.linear_format.operand_bytes(element)
    # Operands are rowwise only. In FP8 the bf16 gate_up exists in addition to its 8-bit copy.
    if work.lora_rank:
        forward = operand * ffn + (
            2 * ffn * element if config.linear_format.stores_fp8 else element * hidden
        )
        return forward, element * (hidden + ffn) + operand * 2 * ffn
    # Operands are rowwise, gradients columnwise. SwiGLU's kept result is freed before its backward.
    if config.linear_format.in_fp8:
        return 3 * hidden + ffn + 2 * element * hidden, (element + 2) * hidden + (
            element + 4 - 1
        ) * ffn
    return 2 * element * hidden, element * (hidden + 2 * ffn)


def attention_backward_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes per token that a block holds temporarily at attention's backward.

    They are the gradients of the block's result, of attention's result and of its inputs. On Hopper
    FlashAttention-4 adds up dQ in fp32, and with grouped heads dK and dV, unless the config pins
    another engine: 134 MB of dQ per sequence of the 8B, 268 MB of the 70B.
    """
    element = BYTES[config.precision]
    gradients = element * (shape.hidden_size + shape.attention_size + shape.qkv_size)
    kind = KINDS.get(config.gpu)
    engine = config.env.get("ATTENTION_ENGINE", "flash_attention_4")
    if kind is None or kind.arch != "sm_90" or engine != "flash_attention_4":
        return gradients
    is_grouped = shape.num_kv_heads < shape.num_heads
    key_values = 2 * shape.num_kv_heads * shape.head_dim if is_grouped else 0
    return gradients + 4 * (shape.attention_size + key_values)


def _activations(config: RunConfig, work: Workload, layers: int) -> dict[str, float]:
    tokens = config.micro_batch_size * work.sequence_length
    return {name: layers * tokens * size for name, size in activation_bytes(config, work).items()}


def _recomputed_layers(config: RunConfig, work: Workload) -> int:
    return min(config.recompute_layers, work.shape.num_layers)


def _saved_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the bytes that all blocks keep on the GPU after the forward.

    A recomputed block keeps its input. One offloaded layer is still being copied.
    """
    recomputed = _recomputed_layers(config, work)
    tokens = config.micro_batch_size * work.sequence_length
    saved = _activations(config, work, work.shape.num_layers - recomputed)
    saved["SwiGLU input"] -= _activations(config, work, max(0, offloaded_layers(config, work) - 1))[
        "SwiGLU input"
    ]
    return saved | {
        "inputs of recomputed layers": recomputed
        * tokens
        * work.shape.hidden_size
        * BYTES[config.precision]
    }


def offloaded_layers(config: RunConfig, work: Workload) -> int:
    """Return the number of layers whose SwiGLU input is offloaded. The last layer never is."""
    return min(config.offload_layers, work.shape.num_layers - 1)


def host_bytes(config: RunConfig, work: Workload) -> int:
    """Return the bytes of pinned host memory of one GPU's process.

    torch rounds each layer's buffer up to a power of two.
    """
    layer = int(_activations(config, work, layers=1)["SwiGLU input"])
    return offloaded_layers(config, work) * (1 << (layer - 1).bit_length())


def largest_micro_batch(config: RunConfig, work: Workload, kind: GpuKind) -> int:
    """Return the largest micro-batch that fits, all else unchanged, or 0 if none does.

    It need not divide the global batch.
    """
    return largest(lambda size: fits(memory_peak(with_micro_batch(config, size), work), kind))


def largest(good: Callable[[int], bool]) -> int:
    """Return the largest number up to 2^20 that is good, or 0 if 1 is not.

    All numbers below a good one must be good.
    """
    low = 0
    high = 1
    while high <= 2**20 and good(high):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    """Return the config at another micro-batch, with a global batch that it divides."""
    return replace(config, micro_batch_size=size, global_batch_size=size * config.world_size)


def fewest_layers(config: RunConfig, work: Workload, kind: GpuKind, key: str) -> int | None:
    """Return the smallest value of `key` with which the config fits, None if there is none.

    `key`: "recompute_layers" or "offload_layers".
    """
    if not config.has_key(key) or (key == "offload_layers" and not config.linear_format.stores_fp8):
        return None  # the config refuses this key
    for count in range(work.shape.num_layers + 1):
        changed = replace(config, **{key: count})  # type: ignore[arg-type]
        if fits(memory_peak(changed, work), kind):
            return count
    return None


# Time of a bf16 step over that of the same step in FP8: 15,829 against 11,223 tok/s/GPU, the 8B on
# 2 H200s. Assumed everywhere.
BF16_OVER_FP8 = 1.41
# Ratio to the forward's FLOPs. Flash attention computes the scores again (arXiv:2205.14135). MFU
# counts a ratio of 2.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Estimate:
    """Seconds of an optimizer step and of an evaluation, and minutes to the target.

    `minutes` is None without a reference (RCP).
    """

    step_s: float
    eval_s: float
    tokens_per_s_per_gpu: float
    minutes: float | None


def products_seconds_per_token(
    work: Workload, kind: GpuKind, *, training: bool, recomputed: float = 0.0
) -> float:
    """Return the time of one token's matrix products on one GPU at the dense peaks.

    Linear layers run at the FP8 peak. Attention, adapters and head run at the bf16 peak. Training
    consists of forward, data gradient and, unless the weights are frozen, weight gradient.
    `recomputed`: share of the layers whose forward runs twice.
    """
    shape = work.shape
    head = 2 * shape.vocab_size * shape.hidden_size
    linears = 2 * shape.matmul_parameters - head
    attention = shape.attention_flops_per_token(work.sequence_length) / 3
    adapters = 2 * shape.lora_parameters(work.lora_rank)
    passes = (2 if work.lora_rank else 3) if training else 1
    in_fp8 = linears * (passes + recomputed)
    in_bf16 = adapters * (3 if training else 1) + attention * (
        (1 + ATTENTION_BACKWARD if training else 1) + recomputed
    )
    in_bf16 += head * passes
    return (in_fp8 / kind.peak_fp8_tflops + in_bf16 / kind.peak_bf16_tflops) / 1e12


def estimate(config: RunConfig, work: Workload, kind: GpuKind, samples: float | None) -> Estimate:
    """Return the time of steps and evaluations, and the minutes to the target.

    `samples`: training sequences to the target, the RCP's mean. Communication is assumed to be
    hidden behind computation.
    """
    slowdown = (1 if config.linear_format.in_fp8 else BF16_OVER_FP8) / kind.efficiency
    recomputed = _recomputed_layers(config, work) / work.shape.num_layers
    step_tokens = config.global_batch_size * work.sequence_length / config.world_size
    step_s = (
        step_tokens
        * slowdown
        * products_seconds_per_token(work, kind, training=True, recomputed=recomputed)
    )
    per_pass = config.world_size * config.eval_micro_batch_size
    # Tokens on one GPU, including padding.
    eval_tokens = (
        -(-work.eval_samples // per_pass) * config.eval_micro_batch_size * work.sequence_length
    )
    eval_s = eval_tokens * slowdown * products_seconds_per_token(work, kind, training=False)
    minutes = (
        None
        if samples is None
        else minutes_to_target(work, samples, config.global_batch_size / step_s, eval_s)
    )
    return Estimate(step_s, eval_s, step_tokens / step_s, minutes)


def minutes_to_target(work: Workload, samples: float, samples_per_s: float, eval_s: float) -> float:
    """Return the minutes of training and of the evaluations on the way.

    The number of evaluations is the mean over whole intervals.
    """
    evaluations = max(1.0, (samples - work.first_evaluation) / work.eval_interval + 1)
    return (samples / samples_per_s + evaluations * eval_s) / 60


def gib(size: float) -> float:
    """Return `size`, in bytes, in GiB."""
    return size / GIB
