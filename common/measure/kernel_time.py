"""Attribution of each instant of a profiled window to a kernel class. Without torch.

The first pattern in NAMES that matches a kernel's name gives its class. If that class is vague (a
copy, an elementwise kernel, an unknown name), the innermost op or range around its launch with a
clear class decides.

If several kernels run at once, the instant belongs to one of them. Compute takes precedence over
communication, then the main stream over others, kernels over copies, and the kernel that started
last over earlier ones. Communication is therefore exposed only while nothing else runs, and hidden
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

GEMM = "GEMM"
ATTENTION = "attention"
NORM = "norm"
ROPE = "RoPE"
SWIGLU = "SwiGLU"
CROSS_ENTROPY = "cross-entropy"
CASTS = "casts"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
ELEMENTWISE = "elementwise"
OTHER = "other"
IDLE = "idle"
CLASSES = (
    GEMM,
    ATTENTION,
    NORM,
    ROPE,
    SWIGLU,
    CROSS_ENTROPY,
    CASTS,
    COMMUNICATION,
    OPTIMIZER,
    ELEMENTWISE,
    OTHER,
    IDLE,
)
VAGUE = (ELEMENTWISE, OTHER)  # an op or range around the launch may have a clearer class

# The first match wins, ignoring case. The order matters: FlashAttention 3 is built with CUTLASS,
# fused kernels also quantize, and names of FP8 products contain e4m3.
NAMES = (
    (COMMUNICATION, r"^nccl|^rccl|ncclDev|ncclKernel|^gloo:|c10d::|_c10d_functional"),
    (COMMUNICATION, r"symm_mem|symmetric_memory|multimem"),
    # Copy engines, and the ranges of ZeRO.
    (COMMUNICATION, r"memcpy PtoP|memcpy (DtoH|HtoD).*pinned|^(weight_shards|zero)\w*::"),
    (COMMUNICATION, r"^_(accumulate|add_rows)_kernel$"),
    # The gradient norm belongs to the optimizer too.
    (OPTIMIZER, r"adam|^Optimizer\.|LpNorm|_foreach_norm|linalg_vector_norm"),
    (ATTENTION, r"cudnn.*(sdpa|flash|[fb]prop)|compute_dot_do_o|convert_dq_to"),
    (ATTENTION, r"flash::|flash_?(fwd|bwd|attn|attention)"),
    (ATTENTION, r"fmha|mha_(fwd|bwd|v3)|attn_(fwd|bwd)|bwd_(kernel_d|preprocess)"),
    (ATTENTION, r"scaled_dot_product|mem_eff|fused_?attn"),
    (GEMM, r"nvjet|gemm|gemv|^Cijk_|Custom_Cijk|cublas|splitK|hipblaslt"),
    (GEMM, r"^aten::(mm|addmm_?|bmm|baddbmm|_scaled_mm)(\.|$)"),
    # The second alternative: the adapters' kernels (common/kernels/lora.py).
    (GEMM, r"^mkldnn::_linear|^_(down|up)(_backward)?_kernel$"),
    (CROSS_ENTROPY, r"cross_?entropy|log_?soft_?max|nll_?loss|logsumexp"),
    (SWIGLU, r"swiglu|silu"),
    (ROPE, r"(^|[^a-z])d?rope|rotary"),
    (NORM, r"rms_?norm|layer_?norm|(^|[^a-z])ln_(fwd|bwd)|^aten::rsqrt"),
    (CASTS, r"quanti[sz]e|rescale|amax|float8|fp8|e4m3|e5m2|transpose_kernel"),
    (ELEMENTWISE, r"memcpy|memset|copyBuffer|fillBuffer|elementwise|reduce_kernel"),
    (ELEMENTWISE, r"multi_tensor_apply|CatArray|FillFunctor|direct_copy|embedding|index"),
    (ELEMENTWISE, r"gather|scatter|RadixSort|DeviceScan|DeviceReduce|distribution|_dropout"),
    (ELEMENTWISE, r"^aten::|AccumulateGrad"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in NAMES)
AUTOGRAD = re.compile(r"^autograd::engine|Backward\d*$")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A GPU kernel, a GPU copy, or a CPU op. All times are on one clock."""

    name: str
    start_ns: int
    end_ns: int
    stream: int
    # "kernel", "copy" (memcpy, memset) or "op". Ops are nested, and an instant belongs to the
    # innermost.
    kind: str
    within: tuple[str, ...] = ()  # names of ops and ranges around its launch, outermost first
    label: str = ""  # role and shape of a matrix product
    flops: int = 0


@dataclass
class ProfileRow:
    """Sums over the events with one name inside the window."""

    name: str
    kind: str = ""  # the class of a kernel; "" for the row of a whole class
    exposed_ns: int = 0  # time attributed to these events
    kernel_ns: int = 0  # sum of durations, in which two concurrent kernels count twice
    launches: int = 0
    flops: int = 0
    product_ns: int = 0  # part of kernel_ns of matrix products whose shape, and so flops, is known

    @property
    def hidden_ns(self) -> int:
        return max(0, self.kernel_ns - self.exposed_ns)


@cache
def class_of_name(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def class_of(event: TraceEvent) -> str:
    """Return the first class that is not vague, from the event's own name outwards.

    Autograd nodes are skipped, because recomputation runs inside any node that triggers it.
    """
    vague = OTHER
    for name in (event.name, *reversed(event.within)):
        if name != event.name and AUTOGRAD.search(name):
            continue
        kind = class_of_name(name)
        if kind not in VAGUE:
            return kind
        if kind == ELEMENTWISE:
            vague = ELEMENTWISE
    return vague


def breakdown(
    events: Sequence[TraceEvent], start_ns: int, end_ns: int
) -> dict[str, list[ProfileRow]]:
    """Attribute the window [start_ns, end_ns) to `events`. Parts outside the window do not count.

    Return four tables, of which the last three are sorted, longest first:

    - "classes": a row for each of CLASSES. Their exposed_ns sum to the window.
    - "products": kernels of class GEMM, by role and shape.
    - "others": kernels of class other, by name.
    - "kernels": all kernels by class and name, and idle. Their exposed_ns sum to the window.
    """
    kinds = [class_of(event) for event in events]
    exposed, idle_ns = exposed_ns(events, kinds, start_ns, end_ns)
    classes = {name: ProfileRow(name) for name in CLASSES}
    kernels: dict[tuple[str, str], ProfileRow] = {}
    for event, kind, own in zip(events, kinds, exposed, strict=True):
        if not (inside := _inside(event, start_ns, end_ns)):
            continue
        name = event.label or event.name
        for row in (classes[kind], kernels.setdefault((kind, name), ProfileRow(name, kind))):
            kernel_ns = own if event.kind == "op" else inside
            row.exposed_ns += own
            row.kernel_ns += kernel_ns
            row.launches += 1
            row.flops += event.flops
            row.product_ns += kernel_ns if event.label else 0
    classes[IDLE].exposed_ns = idle_ns
    rows = sorted(kernels.values(), key=lambda row: -row.exposed_ns)
    return {
        "classes": list(classes.values()),
        "products": [row for row in rows if row.kind == GEMM],
        "others": [row for row in rows if row.kind == OTHER],
        "kernels": [*rows, ProfileRow(IDLE, IDLE, exposed_ns=idle_ns)],
    }


def exposed_ns(
    events: Sequence[TraceEvent], kinds: Sequence[str], start_ns: int, end_ns: int
) -> tuple[list[int], int]:
    """Return the nanoseconds of the window that belong to each event, and those that are idle.

    They sum to the window. `kinds`: the class of each event.
    """
    main = main_stream(events, kinds)
    precedence = []  # of each event; the smallest takes precedence
    for event, kind in zip(events, kinds, strict=True):
        is_communication = kind == COMMUNICATION
        is_copy = event.kind == "copy"
        precedence.append((is_communication, event.stream != main, is_copy, -event.start_ns))
    # Indices of the events in the window. The next to start is the last.
    waiting = [i for i, event in enumerate(events) if _inside(event, start_ns, end_ns)]
    waiting.sort(key=lambda i: -events[i].start_ns)
    moments = {start_ns, end_ns}
    for i in waiting:
        moments |= {events[i].start_ns, events[i].end_ns}
    within = sorted(moment for moment in moments if start_ns <= moment <= end_ns)
    own_ns = [0 for _ in events]
    idle_ns = 0
    running: list[int] = []
    for begin, end in pairwise(within):
        while waiting and events[waiting[-1]].start_ns <= begin:
            running.append(waiting.pop())
        running = [i for i in running if events[i].end_ns > begin]
        if running:
            own_ns[min(running, key=lambda i: (precedence[i], -i))] += end - begin
        else:
            idle_ns += end - begin
    return own_ns, idle_ns


def main_stream(events: Sequence[TraceEvent], kinds: Sequence[str]) -> int | None:
    """Return the stream with the longest compute time, or None if no event computes."""
    busy: dict[int, int] = {}
    for event, kind in zip(events, kinds, strict=True):
        if kind != COMMUNICATION and event.kind != "copy":
            busy[event.stream] = busy.get(event.stream, 0) + event.end_ns - event.start_ns
    return max(busy, key=lambda stream: busy[stream], default=None)


def _inside(event: TraceEvent, start_ns: int, end_ns: int) -> int:
    """Return the nanoseconds of the event inside the window."""
    return max(0, min(end_ns, event.end_ns) - max(start_ns, event.start_ns))
