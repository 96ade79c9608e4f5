"""Events of the steps in a trace of torch's profiler, for kernel_time.py. Without torch.

The trace is Chrome trace JSON, which Perfetto opens. The steps are the ranges `ProfilerStep#<n>`.
The first is a lead-in: the window begins at its end and ends with the last step, so that it
contains the gaps between steps. On a GPU a step ends with the last kernel of the main stream
launched in it, on a CPU with the range itself. On a CPU the events are the ops of the thread that
runs the steps, and gloo's threads count as further streams.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.errors import CheckFailed
from common.measure.kernel_time import AUTOGRAD, TraceEvent, class_of, main_stream
from common.model.shapes import ModelShape

STEP = "ProfilerStep#"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # ROCm's category is cuda_runtime as well
ON_GPU = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
# Range around a product that no torch op launches, such as "gemm + SwiGLU: 16 x 96 x 40"
# (`product_range` in common/kernels/fp8.py).
PRODUCT_RANGE = re.compile(r"gemm(.*): (\d+) x (\d+) x (\d+)")
# Op that is a matrix product -> index of the first factor among its inputs. The second factor is
# the next input.
FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::_scaled_mm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,  # the adapters' up_ (common/kernels/lora.py)
}

Shape = tuple[int, int, int]  # M, N, K of [M, K] x [K, N]


@dataclass
class _Call:
    """An op or range of the host."""

    name: str
    end_ns: int
    product: Shape | None  # None if the call is not a matrix product
    epilogue: str = ""  # what the product's kernel also computes, such as " + SwiGLU"
    counted: bool = False  # whether the product's FLOPs are already counted


def timeline(trace: Mapping, roles: Roles) -> tuple[list[TraceEvent], int, int, int]:
    """Return the events, the window's start and end in ns, and the number of its steps.

    Raises CheckFailed if the trace lacks steps, or kernels that belong to them.
    """
    spans = [record for record in trace["traceEvents"] if record.get("ph") == "X"]
    steps = _steps(spans)
    threads: dict[object, list[Mapping]] = defaultdict(list)
    for span in spans:
        if span.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES):
            threads[span["tid"]].append(span)
    on_gpu = [span for span in spans if span.get("cat") in ON_GPU]
    if not on_gpu:
        stepping = threads.pop(steps[0]["tid"])
        events = _cpu_events(stepping, threads.values(), roles)
        return events, _end(steps[0]), _end(steps[-1]), len(steps) - 1
    launches = _launches(threads.values())
    kernels = []
    launch_times = []
    for span in on_gpu:
        launched_ns, calls = launches.get(span["args"].get("correlation"), (-1, ()))
        stream = span["args"].get("stream", 0)
        kernels.append(_event(span, stream, ON_GPU[span["cat"]], calls, roles))
        launch_times.append(launched_ns)
    # Gathers that a step launches last run into the next step. After the last step they run alone
    # and therefore end earlier. So only the main stream counts.
    main = main_stream(kernels, [class_of(kernel) for kernel in kernels])
    on_main = []
    for kernel, launched_ns in zip(kernels, launch_times, strict=True):
        if kernel.stream == main:
            on_main.append((launched_ns, kernel.end_ns))
    return kernels, _last_end(steps[0], on_main), _last_end(steps[-1], on_main), len(steps) - 1


def _steps(spans: Sequence[Mapping]) -> list[Mapping]:
    """Return the ranges of the steps in order. Raises CheckFailed if there are fewer than two."""
    steps = []
    for span in spans:
        if span.get("cat") == "user_annotation" and span["name"].startswith(STEP):
            steps.append(span)
    if len(steps) < 2:
        raise CheckFailed(
            f"the trace has {len(steps)} steps",
            "it must have a lead-in and at least one more",
            "profile --steps 1 or more",
        )
    return sorted(steps, key=lambda step: step["ts"])


def _cpu_events(
    stepping: Sequence[Mapping], others: Iterable[Sequence[Mapping]], roles: Roles
) -> list[TraceEvent]:
    """Return the ops of the thread `stepping` that runs the steps, and gloo's collectives.

    Ranges, autograd nodes and functions (names without ::) are omitted, because their own time is
    Python and bookkeeping.
    """
    events = []
    for span, calls in _nested(stepping):
        is_op = span["cat"] == "cpu_op" and "::" in span["name"]
        if is_op and not AUTOGRAD.search(span["name"]):
            events.append(_event(span, 0, "op", calls, roles))
    for number, thread in enumerate(others, start=1):
        for span in thread:
            if span["name"].startswith("gloo:"):
                events.append(_event(span, number, "kernel", ()))
    return events


def _launches(
    threads: Iterable[Sequence[Mapping]],
) -> dict[object, tuple[int, tuple[_Call, ...]]]:
    """Return correlation ID -> time in ns, and ops and ranges around it, of each kernel launch."""
    launches = {}
    for thread in threads:
        for span, calls in _nested(thread):
            if span["cat"] in LAUNCHES:
                launches[span["args"].get("correlation")] = (_ns(span["ts"]), calls)
    return launches


def _event(
    span: Mapping, stream: int, kind: str, calls: Sequence[_Call], roles: Roles | None = None
) -> TraceEvent:
    label, flops = roles.product(calls) if roles else ("", 0)
    within = tuple(call.name for call in calls)
    return TraceEvent(span["name"], _ns(span["ts"]), _end(span), stream, kind, within, label, flops)


def _last_end(step: Mapping, kernels: Sequence[tuple[int, int]]) -> int:
    """Return the end of the last kernel launched in `step`, in ns.

    `kernels`: pairs of launch and end times, in ns. Raises CheckFailed if no kernel belongs to the
    step.
    """
    ends = [end for launched, end in kernels if _ns(step["ts"]) <= launched <= _end(step)]
    if not ends:
        why = (
            "the launches and the kernels in the trace do not match: "
            "another profiler may be attached, or this machine cannot trace kernels"
        )
        raise CheckFailed(f"no kernel belongs to {step['name']}", why, "see trace.json.gz")
    return max(ends)


def _nested(thread: Sequence[Mapping]) -> Iterator[tuple[Mapping, tuple[_Call, ...]]]:
    """Yield each span of one thread with the ops and ranges around it, outermost first.

    If the span is itself an op or range, it is the last of them.
    """
    stack: list[_Call] = []
    for span in sorted(thread, key=lambda span: (_ns(span["ts"]), -span["dur"])):
        while stack and stack[-1].end_ns <= _ns(span["ts"]):
            stack.pop()
        if span["cat"] not in LAUNCHES:
            stack.append(_call(span))
        yield span, tuple(stack)


def _call(span: Mapping) -> _Call:
    """Return an op or range of the host. A product has its shape from its inputs or its name."""
    name = span["name"]
    if named := PRODUCT_RANGE.fullmatch(name):
        epilogue, rows, columns, inner = named.groups()
        return _Call(name, _end(span), (int(rows), int(columns), int(inner)), epilogue)
    product = None
    if name in FIRST_FACTOR:
        first = FIRST_FACTOR[name]
        factors = span.get("args", {}).get("Input Dims", [])[first : first + 2]
        if len(factors) == 2:
            (rows, inner), (_, columns) = factors
            product = (rows, columns, inner)
    return _Call(name, _end(span), product)


class Roles:
    """Names of matrix products, by their shape.

    With T tokens and a weight W [out, in], y is T x out, dx is T x in, and dW is out x in or its
    transpose.
    """

    def __init__(self, shape: ModelShape, tokens: int, weights_train: bool):
        """Build the tables of names.

        `tokens`: number of tokens in a micro-batch. `weights_train`: whether the weights have
        gradients.
        """
        hidden = shape.hidden_size
        ffn = shape.ffn_hidden_size
        blocks = {
            "qkv": (shape.qkv_size, hidden),
            "o": (hidden, shape.attention_size),
            "gate_up": (2 * ffn, hidden),
            "down": (hidden, ffn),
        }
        self.forward: dict[Shape, list[str]] = defaultdict(list)
        self.backward: dict[Shape, list[str]] = defaultdict(list)
        for role, (out, columns) in {**blocks, "head": (shape.vocab_size, hidden)}.items():
            self.forward[tokens, out, columns].append(role)
            self.backward[tokens, columns, out].append(f"{role} dgrad")
            if weights_train:
                for wgrad in {(out, columns, tokens), (columns, out, tokens)}:
                    self.backward[wgrad].append(f"{role} wgrad")

    def name(self, shape: Shape, in_backward: bool, epilogue: str = "") -> str:
        """Return all roles that have this shape, and the shape: "qkv: 8192 x 6144 x 4096".

        A forward product inside the backward is a recomputation, marked "again". `epilogue` follows
        the roles: "gate_up + SwiGLU: 8192 x 28672 x 4096". If no role has the shape, return the
        shape and the epilogue alone.
        """
        forward = self.forward.get(shape, [])
        backward = self.backward.get(shape, [])
        names = forward or backward
        if in_backward:
            names = backward or [f"{name} again" for name in forward]
        size = " x ".join(map(str, shape))
        return f"{' or '.join(names)}{epilogue}: {size}" if names else f"{size}{epilogue}"

    def product(self, calls: Sequence[_Call]) -> tuple[str, int]:
        """Return the label and the FLOPs of the innermost product in `calls`, or "" and 0.

        If a product has several kernels, its FLOPs are returned for the first one only.
        """
        in_backward = any(call.name.startswith("autograd::engine") for call in calls)
        for call in reversed(calls):
            if call.product is not None:
                flops = 0 if call.counted else 2 * math.prod(call.product)
                call.counted = True
                return self.name(call.product, in_backward, call.epilogue), flops
        return "", 0


def _ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def _end(span: Mapping) -> int:
    return _ns(span["ts"]) + _ns(span["dur"])
