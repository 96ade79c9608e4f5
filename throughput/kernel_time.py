"""Where the time of a step went: every instant of a window belongs to one kernel class, or is idle. Pure functions, no torch.

A class follows from names, by the first line of NAMES that matches: the kernel's own, or, where that says little (a copy, an
elementwise kernel, a name never seen), the nearest op or range around its launch that says more.

An instant at which several kernels run belongs to one of them: compute before communication, the main stream before others, kernels
before copies, then who came first. So communication counts where nothing else runs; the rest of its time is `hidden`.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

GEMM, ATTENTION, NORM, ROPE, SWIGLU, CROSS_ENTROPY = "GEMM", "attention", "norm", "RoPE", "SwiGLU", "cross-entropy"
CASTS, COMMUNICATION, OPTIMIZER, ELEMENTWISE, OTHER, IDLE = "casts", "communication", "optimizer", "elementwise", "other", "idle"
CLASSES = (GEMM, ATTENTION, NORM, ROPE, SWIGLU, CROSS_ENTROPY, CASTS, COMMUNICATION, OPTIMIZER, ELEMENTWISE, OTHER, IDLE)
VAGUE = (ELEMENTWISE, OTHER)  # of an event so named, what surrounds its launch may know more

# First match wins; letters match in either case. Order matters: FlashAttention 3 is built of CUTLASS, our fused kernels quantize,
# FP8 products have e4m3 in their name, and autograd nodes are left out (recomputation runs inside whichever node asks for it).
NAMES = (
    (COMMUNICATION, r"^nccl|^rccl|ncclDev|ncclKernel|^gloo:|c10d::|_c10d_functional|symm_mem|symmetric_memory|multimem|userbuffers"),
    (COMMUNICATION, r"memcpy PtoP|memcpy (DtoH|HtoD).*pinned"),  # copy engines, to peers or pinned memory of the host
    # Packing and unpacking around a collective.
    (COMMUNICATION, r"^fsdp::|^weight_shards::|split_with_sizes_copy|chunk_cat|^_accumulate_kernel$"),
    (OPTIMIZER, r"adam|^Optimizer\.|LpNorm|_foreach_norm|linalg_vector_norm"),  # the gradient norm is the optimizer's too
    (ATTENTION, r"cudnn.*(sdpa|flash|[fb]prop)|compute_dot_do_o|convert_dq_to|flash::|flash_?(fwd|bwd|attn|attention)"),
    (ATTENTION, r"fmha|mha_(fwd|bwd|v3)|attn_(fwd|bwd)|bwd_(kernel_d|preprocess)|scaled_dot_product|mem_eff|fused_?attn"),
    (GEMM, r"nvjet|gemm|gemv|^Cijk_|Custom_Cijk|cublas|splitK|hipblaslt|triton_tem_\w*mm|^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)(\.|$)"),
    (GEMM, r"^mkldnn::_linear|^_(down|up)(_backward)?_kernel$"),  # the latter: ours of the adapters (kernels/lora.py)
    (CROSS_ENTROPY, r"cross_?entropy|log_?soft_?max|nll_?loss|logsumexp|triton_\w*softmax"),
    (SWIGLU, r"swiglu|silu|gated_act|dgated"),
    (ROPE, r"(^|[^a-z])d?rope|rotary|triton_\w*(cat|stack)\w*(mul|neg|sub)"),
    (NORM, r"rms_?norm|layer_?norm|(^|[^a-z])ln_(fwd|bwd)|^aten::rsqrt|triton_\w*(rsqrt|pow)"),
    (CASTS, r"cast_transpose|quanti[sz]e|amax|float8|fp8|e4m3|e5m2|transpose_kernel|scaling_recipe|scale_update|triton_\w*clamp"),
    (ELEMENTWISE, r"memcpy|memset|copyBuffer|fillBuffer|elementwise|reduce_kernel|multi_tensor_apply|CatArray|FillFunctor|direct_copy"),
    (ELEMENTWISE, r"embedding|index|gather|scatter|RadixSort|DeviceScan|DeviceReduce|distribution|_dropout|^triton_"),
    (ELEMENTWISE, r"^aten::(add|sub|mul|div|neg|pow|mean|sum|sqrt|square|sin|cos|clamp|where|maximum|minimum|abs|reciprocal|pad)_?$"),
    (ELEMENTWISE, r"^aten::(_foreach_\w+|copy_|clone|to|_to_copy|contiguous|cat|stack|fill_|zero_|zeros|ones|full|\w+_like)$"),
    (ELEMENTWISE, r"^aten::(isfinite|isnan|bitwise_not|eq|ne|gt|lt|logical_\w+|bernoulli_|(native_)?dropout|linear|matmul|item)$"),
    (ELEMENTWISE, r"^aten::(t|transpose|view(_as)?|_?reshape\w*|_unsafe_view|narrow|slice\w*|select\w*|split\w*|chunk|unbind|detach_?)$"),
    (ELEMENTWISE, r"^aten::(as_strided|expand(_as)?|permute|flatten|unflatten|(un)?squeeze|alias|set_|record_stream|_local_scalar_dense)$"),
    (ELEMENTWISE, r"^aten::((new_)?empty\w*|new_\w+|resize_|resolve_(conj|neg))$|AccumulateGrad"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in NAMES)
AUTOGRAD = re.compile(r"^autograd::engine|Backward\d*$")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that ran: a kernel, a copy of the GPU's, or an op of a CPU. Times are on one clock."""

    name: str
    start_ns: int
    duration_ns: int
    stream: int
    kind: str  # "kernel", "copy" (memcpy, memset) or "op"
    within: tuple[str, ...] = ()  # ops and ranges around its launch, outermost first
    launches: int = 1  # 0: what an op does after an op that it called
    label: str = ""  # of a product: role and shape
    flops: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Row:
    """What events of one kind did inside a window."""

    name: str
    exposed_ns: int  # instants that belong to them
    kernel_ns: int  # sum of durations: two at once count twice
    launches: int
    flops: int

    @property
    def hidden_ns(self) -> int:
        return self.kernel_ns - self.exposed_ns


@dataclass(frozen=True)
class Breakdown:
    window_ns: int
    classes: tuple[Row, ...]  # all of CLASSES, in that order; their exposed_ns sum to window_ns exactly
    products: tuple[Row, ...]  # GEMM by role and shape, longest first; they sum to GEMM
    others: tuple[Row, ...]  # class "other" by kernel name, longest first


@cache
def class_of_name(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def class_of(event: Event) -> str:
    """The first telling name, from the event's own outwards; without one the first that is known at all."""
    seen = [class_of_name(event.name)]
    seen += [class_of_name(name) for name in reversed(event.within) if not AUTOGRAD.search(name)]
    return next((kind for kind in seen if kind not in VAGUE), ELEMENTWISE if ELEMENTWISE in seen else OTHER)


def breakdown(events: Sequence[Event], start_ns: int, end_ns: int) -> Breakdown:
    """Attribute the window [start_ns, end_ns) to `events`; those that reach beyond it count with what is inside."""
    kinds = [class_of(event) for event in events]
    own, idle_ns = exposed_ns(events, kinds, start_ns, end_ns)
    inside = [(event, kind, ns) for event, kind, ns in zip(events, kinds, own, strict=True) if _clipped(event, start_ns, end_ns)]

    def rows(wanted: Callable[[str], bool], name_of: Callable[[Event, str], str]) -> dict[str, Row]:
        chosen = [(name_of(event, kind), event, ns) for event, kind, ns in inside if wanted(kind)]
        return {row.name: row for row in _sums(chosen, start_ns, end_ns)}

    by_class = rows(lambda kind: True, lambda event, kind: kind)
    by_class[IDLE] = Row(IDLE, idle_ns, idle_ns, 0, 0)
    products = rows(lambda kind: kind == GEMM, lambda event, kind: event.label or event.name)
    others = rows(lambda kind: kind == OTHER, lambda event, kind: event.name)
    return Breakdown(
        end_ns - start_ns,
        tuple(by_class.get(name, Row(name, 0, 0, 0, 0)) for name in CLASSES),
        tuple(_longest_first(products.values())),
        tuple(_longest_first(others.values())),
    )


def exposed_ns(events: Sequence[Event], kinds: Sequence[str], start_ns: int, end_ns: int) -> tuple[list[int], int]:
    """For each event the instants of the window that belong to it, and the rest, which belongs to none; together the window."""
    main = main_stream(events, kinds)
    arriving = sorted((i for i, event in enumerate(events) if _clipped(event, start_ns, end_ns)), key=lambda i: events[i].start_ns)
    bounds = {start_ns, end_ns}
    for i in arriving:
        bounds |= {max(start_ns, events[i].start_ns), min(end_ns, events[i].end_ns)}
    running: list[tuple[tuple, int]] = []  # a heap: the first is who the instant belongs to
    own, idle_ns, next_one = [0] * len(events), 0, 0
    for begin, end in pairwise(sorted(bounds)):
        while next_one < len(arriving) and events[arriving[next_one]].start_ns <= begin:
            index = arriving[next_one]
            event = events[index]
            first = (kinds[index] == COMMUNICATION, event.stream != main, event.kind == "copy", event.start_ns, index)
            heapq.heappush(running, (first, index))
            next_one += 1
        while running and events[running[0][1]].end_ns <= begin:
            heapq.heappop(running)
        if running:
            own[running[0][1]] += end - begin
        else:
            idle_ns += end - begin
    return own, idle_ns


def main_stream(events: Sequence[Event], kinds: Sequence[str]) -> int | None:
    """The stream that computes longest; None where nothing computes."""
    busy: dict[int, int] = {}
    for event, kind in zip(events, kinds, strict=True):
        if kind != COMMUNICATION and event.kind != "copy":
            busy[event.stream] = busy.get(event.stream, 0) + event.duration_ns
    return max(busy, key=lambda stream: busy[stream], default=None)


def _clipped(event: Event, start_ns: int, end_ns: int) -> int:
    """Nanoseconds of the event inside the window."""
    return max(0, min(end_ns, event.end_ns) - max(start_ns, event.start_ns))


def _sums(chosen: Iterable[tuple[str, Event, int]], start_ns: int, end_ns: int) -> list[Row]:
    sums: dict[str, list[int]] = {}
    for name, event, own in chosen:
        total = sums.setdefault(name, [0, 0, 0, 0])
        for position, value in enumerate((own, _clipped(event, start_ns, end_ns), event.launches, event.flops)):
            total[position] += value
    return [Row(name, *total) for name, total in sums.items()]


def _longest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.exposed_ns, -row.kernel_ns, row.name))
