"""What a config needs and how long it takes, without a GPU: memory per GPU by kind, FLOPs, time to the target.

Memory is counted, not fitted: every term below is a tensor that the code holds at the moment of the peak, and with them all
our measured peaks on H200s come out within 1 % (docs/plan.md, tests/plan/test_plan.py). Time is one efficiency per GPU kind, fitted to the
published MLPerf results of that kind. Standard library only; memory in bytes, time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from common.config import RunConfig
from common.gpu_kinds import GIB, GpuKind
from common.model.shapes import ModelShape

BYTES = {"fp32": 4, "bf16": 2}
RING_LAYERS = 3  # of a frozen FP8 base: at work or on their way, SLOTS of common/sharding/frozen_base.py

# Of a card's memory, what the driver offers to a process: 139.8 of an H200's 141 GiB. Assumed for the others.
USABLE_SHARE = 139.8 / 141
# The process's context and loaded libraries, which the driver counts and torch does not: what one H200 had in use when a fourth sequence
# of the 8B found no room (139.80 - 7.25 free), less torch's 131.16 allocated and 0.09 beside it. Assumed for the other kinds.
CONTEXT_BYTES = 1.3 * GIB
# The allocator reserves more than it hands out and gives it back before it gives up; what stays are pieces too small to be of use. The
# run nearest to the limit got by with 1.0 % (136.1 allocated, 137.5 reserved). Where there is room it takes up to 4.5 %.
LEAST_RESERVE, USUAL_RESERVE = 1.01, 1.05


@dataclass(frozen=True)
class Workload:
    """What the rules fix and the plan needs. Samples are sequences; the intervals are those of the config's global batch."""

    shape: ModelShape
    sequence_length: int
    eval_samples: int
    eval_interval: int
    first_evaluation: int
    lora_rank: int = 0  # 0: all weights train; otherwise the base is frozen, and only adapters of this rank do


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the moment of the peak, by kind of tensor."""

    moment: str
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated will say."""
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        """What the driver must offer for it to run at all."""
        return self.allocated * LEAST_RESERVE + CONTEXT_BYTES

    @property
    def comfortable(self) -> float:
        """What the process takes where the allocator never has to give memory back."""
        return self.allocated * USUAL_RESERVE + CONTEXT_BYTES


def usable_bytes(kind: GpuKind) -> float:
    return kind.memory_bytes * USABLE_SHARE


def fits(memory: Memory, kind: GpuKind) -> bool:
    return memory.needed <= usable_bytes(kind)


def memory_peak(config: RunConfig, work: Workload) -> Memory:
    """The largest of four moments; which one it is depends on model and settings.

    - The head's backward: everything saved for backward is there, and the logits, and the head's gradient.
    - The forward of the last block: all but the logits is there; what the block does not keep is widest at SwiGLU.
    - Its backward: the head is done; a block's weights and widest gradients are there instead.
    - An evaluation: no gradients and nothing saved, but its own micro-batch.
    """
    state, saved = state_bytes(config, work), _saved_bytes(config, work)
    tokens, element = config.micro_batch_size * work.sequence_length, BYTES[config.precision]
    layer, table = layer_parameters(work.shape), work.shape.vocab_size * work.shape.hidden_size
    # The whole gradient, and FSDP2's copy that travels; in weight_shards.py about as much of the modules before is still on its way.
    per_gradient = 0 if work.lora_rank else element + BYTES[config.reduce_precision]
    recomputes = config.recompute_layers >= work.shape.num_layers  # the last block too
    again = _activations(config, work, layers=1) if recomputes else {}
    forward, backward = working_bytes(config, work)
    if recomputes:  # with the upstream gradient beside it
        backward = max(backward, forward + element * work.shape.hidden_size)
    at_head = {"gathered weights": _gathered(config, work, table, ahead=layer)}
    in_block = {
        **state,
        **{name: saved.get(name, 0) + again.get(name, 0) for name in saved | again},
        "gathered weights": _gathered(config, work, layer, ahead=layer),
    }
    evaluated = max(_head_bytes_per_token(config, work.shape), _evaluated_bytes(config, work))
    moments = {
        "the head's backward": {
            **state,
            **saved,
            **at_head,
            "gradients in flight": table * per_gradient,
            "logits and head": tokens * _head_bytes_per_token(config, work.shape),
        },
        "a block's forward": {**in_block, "a block's working set": tokens * forward},
        "a block's backward": {**in_block, "gradients in flight": layer * per_gradient, "a block's working set": tokens * backward},
        "an evaluation": {
            **{name: size for name, size in state.items() if name != "gradients"},  # zero_grad lets go of them
            **at_head,
            "logits and head": config.eval_micro_batch_size * work.sequence_length * evaluated,
        },
    }
    name, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    return Memory(name, {part: size for part, size in parts.items() if size})


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one block: its four matrices and two norms."""
    return shape.hidden_size * (shape.qkv_size + shape.hidden_size + 3 * shape.ffn_hidden_size + 2)


def matrix_parameters(shape: ModelShape) -> int:
    """Weights of one block's matrices: without its norms."""
    return layer_parameters(shape) - 2 * shape.hidden_size


def state_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """What lives from the first step to the last, on one GPU.

    Full training: fp32 weights, gradients and both moments, 16 bytes per parameter over all GPUs; in FP8 also what the fused blocks
    cast the matrices to, rows and columns, which each GPU holds whole from the first micro-batch of a step to its end. LoRA: the frozen
    base in the computing precision over all GPUs, or as `frozen_bytes` says, and 16 bytes per adapter parameter on each.
    """
    parameters, gpus = work.shape.num_parameters, config.world_size
    if holds_frozen(config, work):
        frozen = frozen_bytes(config, work.shape)
    else:
        frozen = BYTES[config.precision] * parameters / gpus if work.lora_rank else 0
    trained = work.shape.lora_parameters(work.lora_rank) if work.lora_rank else parameters / gpus
    rope = 2 * 4 * work.sequence_length * work.shape.head_dim // 2
    # Tokens and labels, int32: the evaluation set, and three micro-batches of the prefetcher.
    resident = (-(-work.eval_samples // gpus) + 3 * config.micro_batch_size) * 2 * 4 * work.sequence_length
    return {
        "weights": frozen + 4 * trained,
        "gradients": 4 * trained,
        "Adam moments": 8 * trained,
        "FP8 copies of weights": 2 * _cast_parameters(config, work),
        "mailboxes": _mailbox_bytes(config, work),
        "buffers": rope + resident,
    }


def _mailbox_bytes(config: RunConfig, work: Workload) -> float:
    """Two slots for what the node's other ranks send of the largest module's gradient, the head's or the embedding's (common/sharding/reduce_scatter.py)."""
    if config.transport != "copy_engine" or work.lora_rank:
        return 0
    return 2 * (1 - 1 / config.gpus_per_node) * work.shape.vocab_size * work.shape.hidden_size * BYTES[config.reduce_precision]


def _cast_parameters(config: RunConfig, work: Workload) -> int:
    """Training weights that are FP8 operands of products (FusedBlock.weight_operands, Fp8Linear)."""
    if config.fp8 != "torch" or work.lora_rank:
        return 0
    head = work.shape.vocab_size * work.shape.hidden_size if config.fp8_head else 0
    return work.shape.num_layers * matrix_parameters(work.shape) + head


def holds_frozen(config: RunConfig, work: Workload) -> bool:
    """Is there a frozen base that common/sharding/frozen_base.py holds?"""
    return bool(work.lora_rank) and config.fused_blocks


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """A frozen base on one GPU (common/sharding/frozen_base.py): the blocks' matrices, and all else whole in the computing precision."""
    matrices = shape.num_layers * matrix_parameters(shape)
    gpus = config.gpus_per_node if config.frozen_base == "sharded" else 1
    # In FP8 a byte per value and layout, and W^T beside W where it is not made as it is needed; in bf16 W serves both passes.
    per_value = (2 if gpus > 1 or config.frozen_base == "replicated_both" else 1) if config.fp8 else BYTES[config.precision]
    return per_value * matrices / gpus + BYTES[config.precision] * (shape.num_parameters - matrices)


def _gathered(config: RunConfig, work: Workload, module: float, ahead: float) -> float:
    """Bytes of whole weights: all, or the embedding, the module at work and, with peers, the next one on its way.

    The embedding belongs to the root, which is gathered from the beginning of the forward to the end of the backward. On one GPU
    there is no collective, and FSDP makes the next module's copy only when it is needed. A frozen FP8 base has a ring of layers
    instead, for gathered ones or transposed ones.
    """
    element = BYTES[config.precision]
    if holds_frozen(config, work):
        gathers = config.frozen_base == "sharded" and config.gpus_per_node > 1
        transposes = bool(config.fp8) and not gathers and config.frozen_base != "replicated_both"
        per_value = 1 if config.fp8 else element
        return RING_LAYERS * matrix_parameters(work.shape) * per_value if gathers or transposes else 0
    if not config.reshard_after_forward:
        return element * work.shape.num_parameters
    embedding = work.shape.vocab_size * work.shape.hidden_size
    return element * (embedding + module + (ahead if config.world_size > 1 else 0))


def _head_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Logits, and the residual stream, its norm and its gradient.

    By the Triton kernel and compiled, the gradient of the logits is written over them: one more sequence of 4 layers of the 8B costs
    2.1 GiB at the head, and one copy in bf16 is 1.96. Plain torch has two copies in fp32 beside it. A head in FP8 casts that gradient,
    and keeps the cast input for its own, each in rows and columns.
    """
    element = BYTES[config.precision]
    once = config.kernels == "triton" or config.compile
    cast = 2 * (shape.vocab_size + shape.hidden_size) if config.fp8_head else 0
    return shape.vocab_size * (element if once else element + 8) + 3 * shape.hidden_size * element + cast


def activation_bytes(config: RunConfig, work: Workload) -> dict[str, int]:
    """Bytes per token that a block without recompute keeps for its backward, by kind.

    A frozen matrix needs no input for a weight gradient. Fused blocks rotate q and k where they lie, and keep the products' inputs in
    one FP8 layout (in bf16 the output projection's is the attention output itself); of an adapter's input they keep nothing. Compiled
    blocks keep an adapter's input, and q and k a second time: the attention's v is a view of qkv, and the peaks of both benchmarks
    show both.
    """
    shape, element = work.shape, BYTES[config.precision]
    hidden, ffn, lora = shape.hidden_size, shape.ffn_hidden_size, bool(work.lora_rank)
    kept = {
        "residual streams": 2 * hidden * element + 2 * 4,  # with 1 / rms of both norms in fp32
        "qkv": shape.qkv_size * element,
        "attention output": hidden * element + shape.num_heads * 4,  # with its log-sum-exp in fp32
        "SwiGLU input": 2 * ffn if config.fp8_swiglu_input else 2 * ffn * element,
    }
    if lora:
        kept["adapters"] = 2 * work.lora_rank * element
    if config.fused_blocks:
        operand, o = (1, hidden) if config.fp8 else (element, 0)
        inputs = {"norm outputs": 2 * hidden * operand, "output projection's input": o, "SwiGLU output": ffn * operand}
        return kept if lora else kept | inputs
    kept["rotated q and k"] = (shape.num_heads + shape.num_kv_heads) * shape.head_dim * element
    kept["SwiGLU input"] += 2 * 4 if config.fp8_swiglu_input else 0  # two scales in fp32
    if not lora:
        return kept | {"norm outputs": 2 * hidden * element, "SwiGLU output": ffn * element}
    # Plain dropout keeps what it lets through, its mask comes from a seed; kernels/lora_down.py keeps neither.
    dropped = 2 * hidden * element if config.kernels == "reference" else 0
    return kept | {"norm outputs": hidden * element, "adapters": kept["adapters"] + dropped}  # the input of the adapter on qkv


def working_bytes(config: RunConfig, work: Workload) -> tuple[int, int]:
    """Bytes per token that a block holds for a moment beside what it keeps: the most in its forward, and in its backward.

    Fused blocks, forward: the operands that are not kept, SwiGLU's input where only its 8 bits are, and what products write. Backward,
    at SwiGLU: the upstream gradient, the gradients of SwiGLU's output and, in the format of products, of its input.
    """
    hidden, ffn, element = work.shape.hidden_size, work.shape.ffn_hidden_size, BYTES[config.precision]
    if not config.fused_blocks:
        return 0, element * (hidden + 3 * ffn)  # the backward is more
    gate_up = 2 * ffn * element if config.fp8_swiglu_input else 0
    if work.lora_rank:  # no layout but rows; SwiGLU's input is given up before the down projection
        return ffn + max(gate_up, element * hidden), element * (hidden + ffn) + 2 * ffn
    if config.fp8:  # both layouts; h is used up before SwiGLU's backward
        return 3 * hidden + ffn + gate_up + 2 * element * hidden, (element + 2) * hidden + (element + 4 - 1) * ffn
    return 2 * element * hidden, element * (hidden + 2 * ffn)


def _evaluated_bytes(config: RunConfig, work: Workload) -> int:
    """Bytes per token of a block's forward in an evaluation: a fused block holds until its end what it would keep."""
    hidden, ffn, element = work.shape.hidden_size, work.shape.ffn_hidden_size, BYTES[config.precision]
    if not config.fused_blocks:
        return element * (3 * hidden + 3 * ffn)
    return sum(activation_bytes(config, work).values()) + working_bytes(config, work)[0]


def _activations(config: RunConfig, work: Workload, layers: int) -> dict[str, float]:
    tokens = config.micro_batch_size * work.sequence_length
    return {name: layers * tokens * size for name, size in activation_bytes(config, work).items()}


def _saved_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """All that is kept on the GPU for backward when the forward is over; a recomputed block keeps its input.

    Of what goes to the host (common/sharding/activation_offload.py) one layer's is still here, or here again.
    """
    recomputed = min(config.recompute_layers, work.shape.num_layers)
    tokens = config.micro_batch_size * work.sequence_length
    inputs = recomputed * tokens * work.shape.hidden_size * BYTES[config.precision]
    saved = _activations(config, work, work.shape.num_layers - recomputed)
    saved["SwiGLU input"] -= _activations(config, work, max(0, offloaded_layers(config, work) - 1))["SwiGLU input"]
    return saved | {"inputs of recomputed layers": inputs}


def offloaded_layers(config: RunConfig, work: Workload) -> int:
    """Layers whose SwiGLU input waits in the host's memory: neither recomputed ones nor the last one."""
    return max(0, min(config.offload_layers, work.shape.num_layers - 1 - config.recompute_layers))


def host_bytes(config: RunConfig, work: Workload) -> int:
    """Pinned memory of the host that one GPU's process takes for what waits there; torch rounds each layer's up to a power of two."""
    layer = int(_activations(config, work, layers=1)["SwiGLU input"])
    return offloaded_layers(config, work) * (1 << (layer - 1).bit_length())


def largest_micro_batch(config: RunConfig, work: Workload, kind: GpuKind) -> int:
    """The largest micro-batch that fits with everything else as it is; 0 if none does. It need not divide the global batch."""
    size = 0
    while fits(memory_peak(replace(config, micro_batch_size=size + 1), work), kind):
        size += 1
    return size


def recompute_needed(config: RunConfig, work: Workload, kind: GpuKind) -> int | None:
    """The fewest recomputed layers with which the micro-batch fits; None if it never does."""
    counts = range(work.shape.num_layers + 1)
    return next((n for n in counts if fits(memory_peak(replace(config, recompute_layers=n), work), kind)), None)


def offload_needed(config: RunConfig, work: Workload, kind: GpuKind) -> int | None:
    """The fewest layers that must wait in the host's memory for the micro-batch to fit; None if it never does, or if they cannot."""
    if not (holds_frozen(config, work) and config.fp8_swiglu_input):
        return None
    counts = range(config.offload_layers, work.shape.num_layers - config.recompute_layers)
    return next((n for n in counts if fits(memory_peak(replace(config, offload_layers=n), work), kind)), None)


def advice(config: RunConfig, work: Workload, kind: GpuKind) -> str:
    """What would make a config fit: the cheapest change first."""
    options = []
    if config.micro_batch_size > 1 and fits(memory_peak(replace(config, micro_batch_size=1), work), kind):
        options.append("micro_batch_size 1")
    if (layers := offload_needed(config, work, kind)) is not None:
        options.append(f"offload_layers {layers}")
    if (layers := recompute_needed(config, work, kind)) is not None:
        options.append(f"recompute_layers {layers}")
    if options:
        return "try " + " or ".join(options)
    smallest = replace(config, micro_batch_size=1, eval_micro_batch_size=1, reshard_after_forward=True, transport="nccl")
    layers = recompute_needed(smallest, work, kind)
    if layers is None:
        return "more GPUs are needed: with all layers recomputed and resharded it is still too much"
    return f"try micro_batch_size 1, eval_micro_batch_size 1, reshard_after_forward true and recompute_layers {layers}"


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def useful_flops_per_token(parameters: float, *, frozen: bool = False, attention: float = 0.0) -> float:
    """6 N for training, 4 N where the weights are frozen (no gradient of their own), plus attention's 6 L S H if given.

    A multiply-add counts as 2, causal attention as half of the square, recomputation not at all. `parameters`: those in matrix products.
    """
    return (4 if frozen else 6) * parameters + attention


def mfu(flops_per_token: float, tokens: float, seconds: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation: share of `peak_tflops` (of all GPUs together) that `tokens` in `seconds` make use of."""
    return flops_per_token * tokens / seconds / (peak_tflops * 1e12)


# --- time -------------------------------------------------------------------------------------------------------------


# Share of the dense peak (FP8 for the linears, bf16 for attention and head) at which the products of a whole FP8 step run, everything
# between them included. One number per kind: it makes the mean logarithm of predicted / published score zero over the MLPerf v5.1
# results of AMD on its GPUs, Dell and HPE on H200s (tests/plan/test_plan.py fits it again). H100: the H200's, as it is the same chip;
# there is no v5.1 result of one node.
EFFICIENCY = {"MI300X": 0.326, "MI325X": 0.393, "MI350X": 0.376, "MI355X": 0.420, "H100": 0.437, "H200": 0.437}
# This package's own where we have run it: fitted in the same way to our FP8 runs of both benchmarks on 1, 2 and 4 H200s (docs/plan.md).
# H100: the H200's. On the other kinds it is planned as what was published there.
OWN_EFFICIENCY = EFFICIENCY | {"H100": 0.521, "H200": 0.521}
# A bf16 step of the same work takes so many times longer: 15,227 against 10,893 tok/s/GPU, Megatron-core + TE in FP8 and bf16,
# Llama 3.1 8B on the same 4 H200s on the same day. Assumed for every kind and both models.
BF16_OVER_FP8 = 1.40
# NCCL's bus bandwidth in one node of 8 Hopper GPUs is 300 to 370 GB/s, and 8 network cards of 400 Gbit/s carry as much between nodes.
COLLECTIVE_BYTES_PER_S = 350e9
ATTENTION_BACKWARD = 2.5  # of the forward's FLOPs: flash attention computes the scores again (arXiv:2205.14135); MFU counts 2


@dataclass(frozen=True)
class Estimate:
    """Seconds of one optimizer step and one evaluation, and the way to the target; `minutes` is None without an RCP."""

    step_s: float
    eval_s: float
    tokens_per_s_per_gpu: float
    evaluations: float
    minutes: float | None


def products_seconds_per_token(work: Workload, kind: GpuKind, *, training: bool, recomputed: float = 0.0, fp8_head: bool = False) -> float:
    """Time of a token's matrix products on one GPU at the dense peaks: linears in FP8, adapters, attention and, but for `fp8_head`, the head in bf16.

    Training: forward, data gradient and, unless frozen, weight gradient; `recomputed` is the share of layers that run forward twice.
    """
    shape, length = work.shape, work.sequence_length
    head = 2 * shape.vocab_size * shape.hidden_size
    linears = 2 * shape.matmul_parameters - head
    attention = shape.attention_flops_per_token(length) / 3
    adapters = 2 * shape.lora_parameters(work.lora_rank)
    passes = (2 if work.lora_rank else 3) if training else 1
    in_fp8 = linears * (passes + recomputed)
    in_bf16 = adapters * (3 if training else 1) + attention * ((1 + ATTENTION_BACKWARD if training else 1) + recomputed)
    if fp8_head:
        in_fp8 += head * passes
    else:
        in_bf16 += head * passes
    return (in_fp8 / kind.peak_fp8_tflops + in_bf16 / kind.peak_bf16_tflops) / 1e12


def _traffic_seconds(work: Workload, gpus: int) -> float:
    """Per step, in the published layouts, not hidden: LoRA's adapter gradients, fp32, all-reduced; else bf16 gradients
    reduce-scattered and weights all-gathered, the linears in FP8 (AMD's v5.1 package overlaps neither with the backward).
    """
    shape = work.shape
    if work.lora_rank:
        size = 2 * 4 * shape.lora_parameters(work.lora_rank)
    else:
        tables = 2 * shape.vocab_size * shape.hidden_size
        size = 2 * shape.num_parameters + (shape.num_parameters - tables) + 2 * tables
    return size * (gpus - 1) / gpus / COLLECTIVE_BYTES_PER_S


def estimate(
    work: Workload,
    kind: GpuKind,
    *,
    gpus: int,
    global_batch_size: int,
    eval_micro_batch_size: int = 1,
    recompute_layers: int = 0,
    fp8: bool,
    fp8_head: bool = False,
    published_stack: bool,
    samples: float | None,
) -> Estimate:
    """Time of a run on `gpus` GPUs, the linears in `fp8`, with the head or without, or all in bf16. `published_stack`: as those
    behind EFFICIENCY, which do not hide their traffic; else this package.

    `samples`: train sequences to the target, e.g. the RCP's mean; evaluations are counted as the mean of whole intervals.
    """
    per_product_second = (1 if fp8 else BF16_OVER_FP8) / (EFFICIENCY if published_stack else OWN_EFFICIENCY)[kind.name]
    recomputed = min(recompute_layers, work.shape.num_layers) / work.shape.num_layers
    step_tokens = global_batch_size * work.sequence_length / gpus
    products = partial(products_seconds_per_token, work, kind, fp8_head=fp8_head)
    step_s = step_tokens * per_product_second * products(training=True, recomputed=recomputed)
    step_s += _traffic_seconds(work, gpus) if published_stack else 0.0
    eval_sequences = -(-work.eval_samples // (gpus * eval_micro_batch_size)) * eval_micro_batch_size  # of one GPU, padding included
    forward_s = per_product_second * products(training=False)
    eval_s = eval_sequences * work.sequence_length * forward_s
    evaluations, minutes = 0.0, None
    if samples is not None:
        evaluations = max(1.0, (samples - work.first_evaluation) / work.eval_interval + 1)
        minutes = (samples / global_batch_size * step_s + evaluations * eval_s) / 60
    return Estimate(step_s, eval_s, step_tokens / step_s, evaluations, minutes)


def gib(size: float) -> float:
    return size / GIB
