"""Attribution of each instant of a profiled window to a kernel class. Pure functions, no torch.

A kernel's class follows from its name: the first pattern of NAMES that matches. If the name is
vague (a copy, an elementwise kernel, an unknown name), the nearest op or range around its launch
with a clear class decides.

If several kernels run at once, the instant belongs to one of them: compute before communication,
the main stream before others, kernels before copies, then the one that started last. Communication
is therefore exposed only where nothing else runs. The rest of it is hidden.
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
VAGUE = (ELEMENTWISE, OTHER)  # the op or range around the launch may be clearer

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
    (GEMM, r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)(\.|$)"),
    # The second alternative: the adapters' kernels (common/kernels/lora.py).
    (GEMM, r"^mkldnn::_linear|^_(down|up)(_backward)?_kernel$"),
    (CROSS_ENTROPY, r"cross_?entropy|log_?soft_?max|nll_?loss|logsumexp"),
    (SWIGLU, r"swiglu|silu"),
    (ROPE, r"(^|[^a-z])d?rope|rotary"),
    (NORM, r"rms_?norm|layer_?norm|(^|[^a-z])ln_(fwd|bwd)|^aten::rsqrt"),
    (CASTS, r"quanti[sz]e|amax|float8|fp8|e4m3|e5m2|transpose_kernel"),
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
    # "kernel", "copy" (memcpy, memset) or "op". Ops nest: an instant belongs to the innermost.
    kind: str
    within: tuple[str, ...] = ()  # ops and ranges around its launch, outermost first
    label: str = ""  # role and shape of a matrix product
    flops: int = 0


@dataclass
class Row:
    """Sums over the events of one name inside the window.

    `kind`: the class of a kernel, "" for the row of a whole class.
    """

    name: str
    kind: str = ""
    exposed_ns: int = 0  # instants attributed to these events
    kernel_ns: int = 0  # sum of durations: two kernels at once count twice
    launches: int = 0
    flops: int = 0

    @property
    def hidden_ns(self) -> int:
        return max(0, self.kernel_ns - self.exposed_ns)


@cache
def class_of_name(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def class_of(event: TraceEvent) -> str:
    """Return the first class that is not vague, from the event's own name outwards.

    Autograd nodes do not count, since recomputation runs inside whichever node triggers it.
    """
    seen = [
        class_of_name(name)
        for name in (event.name, *reversed(event.within))
        if name == event.name or not AUTOGRAD.search(name)
    ]
    return next(
        (kind for kind in seen if kind not in VAGUE), ELEMENTWISE if ELEMENTWISE in seen else OTHER
    )


def breakdown(events: Sequence[TraceEvent], start_ns: int, end_ns: int) -> dict[str, list[Row]]:
    """Attribute the window [start_ns, end_ns) to `events`, of which only the part inside counts.

    Return "classes", all of CLASSES, whose exposed_ns sum to the window; "products", GEMM by role
    and shape; "others", class other by kernel name; and "kernels", every kernel with its class,
    which with idle sum to the window as well. The latter three are sorted, longest first.
    """
    kinds = [class_of(event) for event in events]
    exposed, idle_ns = exposed_ns(events, kinds, start_ns, end_ns)
    classes = {name: Row(name) for name in CLASSES}
    kernels: dict[tuple[str, str], Row] = {}
    for event, kind, own in zip(events, kinds, exposed, strict=True):
        if not (inside := _inside(event, start_ns, end_ns)):
            continue
        name = event.label or event.name
        for row in (classes[kind], kernels.setdefault((kind, name), Row(name, kind))):
            row.exposed_ns += own
            row.kernel_ns += own if event.kind == "op" else inside
            row.launches += 1
            row.flops += event.flops
    classes[IDLE].exposed_ns = idle_ns
    rows = sorted(kernels.values(), key=lambda row: -row.exposed_ns)
    return {
        "classes": list(classes.values()),
        "products": [row for row in rows if row.kind == GEMM],
        "others": [row for row in rows if row.kind == OTHER],
        "kernels": [*rows, Row(IDLE, IDLE, exposed_ns=idle_ns)],
    }


def exposed_ns(
    events: Sequence[TraceEvent], kinds: Sequence[str], start_ns: int, end_ns: int
) -> tuple[list[int], int]:
    """Return the nanoseconds of the window that belong to each event, and those of none.

    Together they sum to the window.
    """
    main = main_stream(events, kinds)
    rank = [
        (kind == COMMUNICATION, e.stream != main, e.kind == "copy", -e.start_ns)
        for e, kind in zip(events, kinds, strict=True)
    ]
    arriving = sorted(
        (i for i, event in enumerate(events) if _inside(event, start_ns, end_ns)),
        key=lambda i: -events[i].start_ns,
    )
    moments = {
        moment
        for i in arriving
        for moment in (events[i].start_ns, events[i].end_ns)
        if start_ns < moment < end_ns
    }
    own = [0] * len(events)
    idle_ns = 0
    running = []
    for begin, end in pairwise(sorted({start_ns, end_ns} | moments)):
        while arriving and events[arriving[-1]].start_ns <= begin:
            running.append(arriving.pop())
        running = [i for i in running if events[i].end_ns > begin]
        if running:
            own[min(running, key=lambda i: (rank[i], -i))] += end - begin
        else:
            idle_ns += end - begin
    return own, idle_ns


def main_stream(events: Sequence[TraceEvent], kinds: Sequence[str]) -> int | None:
    """Return the stream that computes longest, or None if nothing computes."""
    busy: dict[int, int] = {}
    for event, kind in zip(events, kinds, strict=True):
        if kind != COMMUNICATION and event.kind != "copy":
            busy[event.stream] = busy.get(event.stream, 0) + event.end_ns - event.start_ns
    return max(busy, key=lambda stream: busy[stream], default=None)


def _inside(event: TraceEvent, start_ns: int, end_ns: int) -> int:
    """Return the nanoseconds of the event inside the window."""
    return max(0, min(end_ns, event.end_ns) - max(start_ns, event.start_ns))
