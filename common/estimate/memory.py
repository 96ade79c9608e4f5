"""Memory per GPU at the peak of a config's run, computed without a GPU.

Memory is counted, not fitted: each term is a tensor that the code holds at the moment of the peak.
The result is within 1 % of the peaks measured on H200s (tests/launch/plan/test_plan.py). Units are
bytes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from common.config import RunConfig
from common.errors import ConfigError
from common.estimate.workload import Workload
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


def memory_peak(
    config: RunConfig, work: Workload, other_state: Mapping[str, float] | None = None
) -> Memory:
    """Return the memory at the moment of its peak.

    Four moments are compared: the head's backward, the last block's forward, its backward, and an
    evaluation. `other_state`: bytes by kind of tensor that replace the config's, in a layout that
    this package does not train.
    """
    shape = work.shape
    element = BYTES[config.precision]
    tokens = micro_batch_tokens(config, work)
    state = state_bytes(config, work) | {"gathered weights": _gathered_bytes(config, work)}
    saved = _saved_bytes(config, work)
    block = saved
    # Gradients of two modules: the current one, and the one before it, whose reduction is still
    # running. With LoRA the modules have no gradients.
    gradient = 0 if work.lora_rank else 2 * element
    forward, backward = _working_bytes(config, work)
    backward = max(backward, attention_backward_bytes(config, shape))
    # The last block is recomputed too, so its forward runs within its backward.
    if recomputed_layers(config, work) == shape.num_layers:
        recomputed = _activations(config, work, layers=1)
        block = saved | {name: saved[name] + size for name, size in recomputed.items()}
        backward = max(backward, forward + element * shape.hidden_size)
    head = _head_bytes_per_token(config, shape)
    in_head = {
        "gradients in flight": shape.vocab_size * shape.hidden_size * gradient,
        "logits and head": tokens * head,
    }
    in_backward = {
        "gradients in flight": shape.layer_parameters * gradient,
        "a block's working set": tokens * backward,
    }
    # Autograd adds the embedding's gradient to the head's, which is kept until then.
    if shape.tied_embedding and not work.lora_rank:
        in_backward["the tied head's gradient"] = shape.vocab_size * shape.hidden_size * element
    eval_tokens = config.eval_micro_batch_size * work.sequence_length // config.context_parallel
    in_a_block = sum(activation_bytes(config, work).values()) + forward
    # The optimizer step has freed the gradients.
    in_evaluation = {"gradients": 0, "logits and head": eval_tokens * max(head, in_a_block)}
    moments = {
        "the head's backward": state | saved | in_head,
        "a block's forward": state | block | {"a block's working set": tokens * forward},
        "a block's backward": state | block | in_backward,
        "an evaluation": state | in_evaluation,
    }
    moment, parts = max(moments.items(), key=lambda item: sum(item[1].values()))
    parts |= other_state or {}
    return Memory(moment, {name: size for name, size in parts.items() if size})


def state_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the bytes of tensors that live as long as the run.

    Each trained weight has an fp32 master and gradient, 8 bytes, and AdamW's two moments, 8 or 4
    bytes. Pre-training shards them over a node's GPUs (ZeRO-2). With LoRA, each GPU holds all
    adapters, and the frozen base as described in `frozen_bytes`.
    """
    shape = work.shape
    gpus = config.gpus_per_node
    element = BYTES[config.precision]
    if work.lora_rank:
        trained: float = shape.lora_parameters(work.lora_rank)
        frozen = frozen_bytes(config, shape)
        quantized = 0
    else:
        trained = shape.num_parameters / gpus
        frozen = 0
        # Complete on each GPU: in FP8 one byte rowwise and one byte columnwise.
        per_value = config.linear_format.weight_copies * config.linear_format.operand_bytes(element)
        quantized = per_value * shape.num_layers * shape.matrix_parameters
    received = 0.0
    if config.reduce_scatter == "copy_engine":
        # Two buffers for the parts of the largest gradient that other ranks send
        # (common/sharding/copy_engine.py).
        table = shape.vocab_size * shape.hidden_size
        received = 2 * (1 - 1 / gpus) * table * element
    rope = 2 * 4 * work.sequence_length * shape.head_dim // 2
    # Tokens and labels in int32: the evaluation set, and three micro-batches of the prefetcher.
    resident_samples = -(-work.eval_samples // config.data_ranks) + 3 * config.micro_batch_size
    resident = resident_samples * 2 * 4 * work.sequence_length
    return {
        "weights": 4 * trained + frozen,
        "gradients": 4 * trained,
        "AdamW moments": 2 * BYTES[config.moment_precision] * trained,
        "quantized weights": quantized,
        "symmetric buffers": received,
        "buffers": rope + resident,
    }


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes of a frozen base on one GPU (common/sharding/frozen_base.py).

    The base consists of the blocks' matrices, which may be sharded, and of all other weights in
    bf16. In FP8, a matrix has one byte per value for W, and one for W^T if that is stored: with
    "replicated_both", in `transposed_layers`, and if layers are gathered. In bf16, W serves both
    passes.
    """
    storage = config.frozen_base
    gpus = config.gpus_per_node
    element = BYTES[config.precision]
    per_value: float = element
    if config.linear_format.in_fp8:
        stores_transposed = storage == "replicated_both" or (storage == "sharded" and gpus > 1)
        per_value = 2 if stores_transposed else 1
        if storage == "replicated":
            per_value += min(1, config.transposed_layers / shape.num_layers)
    matrices = shape.num_layers * shape.matrix_parameters
    shards = gpus if storage == "sharded" else 1
    return per_value * matrices / shards + element * (shape.num_parameters - matrices)


def _gathered_bytes(config: RunConfig, work: Workload) -> float:
    """Return the bytes of weights in the products' format that `state_bytes` does not include.

    In pre-training, these are all weights in bf16. With LoRA, they are buffers for layers that are
    gathered or, in FP8 without a stored W^T, transposed.
    """
    if not work.lora_rank:
        return BYTES[config.precision] * work.shape.num_parameters
    storage = config.frozen_base
    gathers = storage == "sharded" and config.gpus_per_node > 1
    fp8 = config.linear_format.in_fp8
    transposes = fp8 and not gathers and storage != "replicated_both"
    per_value = 1 if fp8 else BYTES[config.precision]
    if not gathers and not transposes:
        return 0
    return FROZEN_BUFFERS * work.shape.matrix_parameters * per_value


def _head_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes per token of the logits, the last residual stream, its norm and gradient.

    The gradient of the logits overwrites the logits.
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
    swiglu_element = 1 if work.lora_rank and config.linear_format.in_fp8 else element
    kept = {
        "residual streams": 2 * hidden * element + 2 * 4,  # with 1 / rms of both norms in fp32
        "qkv": shape.qkv_size * element,
        # With its log-sum-exp in fp32.
        "attention output": shape.attention_size * element + shape.num_heads * 4,
        "SwiGLU input": 2 * ffn * swiglu_element,
    }
    if config.context_parallel > 1:
        kept["keys and values of other GPUs"] = whole_key_values(config, shape) * element
    if shape.qk_norm:
        kept["queries and keys before their norm"] = (
            (shape.num_heads + shape.num_kv_heads) * shape.head_dim * element
        )
    if work.lora_rank:
        return kept | {"adapters": 2 * work.lora_rank * element}
    operand = config.linear_format.operand_bytes(element)
    # If operands are not quantized, the output projection reads the attention output itself, unless
    # that is in two chunks.
    is_copied = config.linear_format.in_fp8 or config.context_parallel > 1
    projection_input = shape.attention_size * operand if is_copied else 0
    return kept | {
        "norm outputs": 2 * hidden * operand,
        "output projection's input": projection_input,
        "SwiGLU output": ffn * operand,
    }


def _working_bytes(config: RunConfig, work: Workload) -> tuple[int, int]:
    """Return the peak bytes per token that a block holds only temporarily, in forward and backward.

    In the forward, these are operands that are not kept, and results of products. The peak of the
    backward is at SwiGLU, with the gradients of the block's output, of SwiGLU's output and, as an
    operand, of SwiGLU's input.
    """
    hidden = work.shape.hidden_size
    ffn = work.shape.ffn_hidden_size
    element = BYTES[config.precision]
    operand = config.linear_format.operand_bytes(element)
    # Operands are rowwise only. In FP8 the bf16 gate_up exists in addition to its 8-bit copy.
    if work.lora_rank:
        result = 2 * ffn * element if config.linear_format.in_fp8 else element * hidden
        forward = operand * ffn + result
        backward = element * (hidden + ffn) + operand * 2 * ffn
    elif config.linear_format.in_fp8:
        # Operands are rowwise, gradients columnwise. SwiGLU's kept output is freed before its
        # backward.
        forward = 3 * hidden + ffn + 2 * element * hidden
        backward = (element + 2) * hidden + (element + 4 - 1) * ffn
    else:
        forward = 2 * element * hidden
        backward = element * (hidden + 2 * ffn)
    return forward, backward


def attention_backward_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes per token that a block holds temporarily at attention's backward.

    They are the gradients of the block's output, of attention's output and of its inputs. On
    Hopper, FlashAttention-4 also sums dQ in fp32, and with grouped heads dK and dV. It is used
    unless the config pins another engine. dQ has 134 MB per sequence of the 8B, and 268 MB of the
    70B.
    """
    element = BYTES[config.precision]
    gradients = element * (shape.hidden_size + shape.attention_size + shape.qkv_size)
    whole = whole_key_values(config, shape)
    # Gradients of the keys and values of whole sequences, from the engine and packed.
    gradients += element * 2 * whole
    kind = KINDS.get(config.gpu)
    engine = config.env.get("ATTENTION_ENGINE", "flash_attention_4")
    if kind is None or kind.arch != "sm_90" or engine != "flash_attention_4":
        return gradients
    queries = shape.attention_size
    key_values = whole or 2 * shape.num_kv_heads * shape.head_dim
    if whole:
        queries //= 2  # of one chunk
    if shape.num_kv_heads == shape.num_heads:
        key_values = 0
    return gradients + 4 * (queries + key_values)


def micro_batch_tokens(config: RunConfig, work: Workload) -> int:
    """Return the tokens of a micro-batch that one GPU holds."""
    return config.micro_batch_size * work.sequence_length // config.context_parallel


def whole_key_values(config: RunConfig, shape: ModelShape) -> int:
    """Return the elements per token of one GPU that keys and values of whole sequences have.

    GPUs that share sequences gather them (common/sharding/context_parallel.py): 2 c + 1 chunks, of
    which a GPU has 2 itself. Otherwise 0.
    """
    if config.context_parallel == 1:
        return 0
    return (2 * config.context_parallel + 1) * shape.num_kv_heads * shape.head_dim


def _activations(config: RunConfig, work: Workload, layers: int) -> dict[str, float]:
    """Return the bytes that `layers` blocks keep for a micro-batch, by kind of tensor."""
    tokens = micro_batch_tokens(config, work)
    return {name: layers * tokens * size for name, size in activation_bytes(config, work).items()}


def recomputed_layers(config: RunConfig, work: Workload) -> int:
    """Return the number of layers whose forward runs twice."""
    return min(config.recompute_layers, work.shape.num_layers)


def _saved_bytes(config: RunConfig, work: Workload) -> dict[str, float]:
    """Return the bytes that all blocks keep on the GPU after the forward.

    A recomputed block keeps its input. One offloaded layer is still being copied.
    """
    recomputed = recomputed_layers(config, work)
    tokens = micro_batch_tokens(config, work)
    saved = _activations(config, work, work.shape.num_layers - recomputed)
    offloaded = _activations(config, work, max(0, offloaded_layers(config, work) - 1))
    saved["SwiGLU input"] -= offloaded["SwiGLU input"]
    inputs = recomputed * tokens * work.shape.hidden_size * BYTES[config.precision]
    return saved | {"inputs of recomputed layers": inputs}


def offloaded_layers(config: RunConfig, work: Workload) -> int:
    """Return the number of layers whose SwiGLU input is offloaded. The last layer never is."""
    return min(config.offload_layers, work.shape.num_layers - 1)


def host_bytes(config: RunConfig, work: Workload) -> int:
    """Return the bytes of pinned host memory of one GPU's process.

    torch rounds each layer's buffer up to a power of two.
    """
    layer = int(_activations(config, work, layers=1)["SwiGLU input"])
    return offloaded_layers(config, work) * (1 << (layer - 1).bit_length())


def largest_micro_batch(
    config: RunConfig,
    work: Workload,
    kind: GpuKind,
    other_state: Mapping[str, float] | None = None,
) -> int:
    """Return the largest micro-batch that fits if nothing else changes, or 0 if none does.

    It need not divide the global batch. `other_state`: see `memory_peak`.
    """
    return largest(
        lambda size: fits(memory_peak(with_micro_batch(config, size), work, other_state), kind)
    )


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
        if good(middle):
            low = middle
        else:
            high = middle
    return low


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    """Return the config at another micro-batch, with a global batch that it divides."""
    return replace(config, micro_batch_size=size, global_batch_size=size * config.data_ranks)


def fewest_layers(config: RunConfig, work: Workload, kind: GpuKind, key: str) -> int | None:
    """Return the smallest value of `key` with which the config fits, None if there is none.

    `key`: "recompute_layers" or "offload_layers".
    """
    if not config.has_key(key) or (key == "offload_layers" and not config.linear_format.in_fp8):
        return None  # the config refuses this key
    for count in range(work.shape.num_layers + 1):
        try:
            changed = replace(config, **{key: count})  # type: ignore[arg-type]
        except ConfigError:  # the rules of this config allow no such layers
            return None
        if fits(memory_peak(changed, work), kind):
            return count
    return None


def gib(size: float) -> float:
    """Return `size`, in bytes, in GiB."""
    return size / GIB
