"""Events of the steps in a trace of torch's profiler, for kernel_time.py. No torch.

The trace is Chrome trace JSON, which Perfetto opens. Steps are the ranges `ProfilerStep#<n>`. The
first is a lead-in: the window runs from its end to the end of the last, so that it contains the
gaps between steps. On a GPU a step ends with the last main-stream kernel launched in it, on a CPU
with the range itself. On a CPU the events are the ops of the thread that steps, and gloo's threads
as further streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.errors import CheckFailed
from common.model.shapes import ModelShape
from throughput.kernel_time import AUTOGRAD, TraceEvent, class_of, main_stream

STEP = "ProfilerStep#"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # ROCm's category is cuda_runtime as well
ON_GPU = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
# Op -> index of a product's first factor among its inputs. The second factor is the next input.
FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::_scaled_mm": 0,
    "aten::addmm": 1,
}

Shape = tuple[int, int, int]  # M, N, K of [M, K] x [K, N]


@dataclass
class _Call:
    """An op or range of the host."""

    name: str
    end_ns: int
    factors: list  # shapes of a product's two factors, else empty
    counted: bool = False  # whether the product's FLOPs are already counted


def timeline(trace: Mapping, roles: Roles) -> tuple[list[TraceEvent], int, int, int]:
    """Return the events, the window's start and end in ns, and the number of its steps.

    Raises CheckFailed if the trace lacks steps, or kernels that belong to them.
    """
    spans = [record for record in trace["traceEvents"] if record.get("ph") == "X"]
    steps = sorted(
        (s for s in spans if s.get("cat") == "user_annotation" and s["name"].startswith(STEP)),
        key=lambda s: s["ts"],
    )
    if len(steps) < 2:
        raise CheckFailed(
            f"the trace holds {len(steps)} steps",
            "a lead-in and at least one more are needed",
            "profile --steps 1 or more",
        )
    threads = defaultdict(list)
    for span in spans:
        if span.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES):
            threads[span["tid"]].append(span)
    on_gpu = [span for span in spans if span.get("cat") in ON_GPU]
    if not on_gpu:
        # Ranges, autograd nodes and functions (no namespace) are omitted, since their own time is
        # Python and bookkeeping.
        ops = [
            (s, calls)
            for s, calls in _nested(threads.pop(steps[0]["tid"]))
            if s["cat"] == "cpu_op" and "::" in s["name"]
        ]
        events = [
            _event(span, 0, "op", calls, roles)
            for span, calls in ops
            if not AUTOGRAD.search(span["name"])
        ]
        for number, others in enumerate(threads.values(), start=1):
            events += [
                _event(s, number, "kernel", ()) for s in others if s["name"].startswith("gloo:")
            ]
        return events, _end(steps[0]), _end(steps[-1]), len(steps) - 1
    on_host = [
        (span, calls)
        for thread in threads.values()
        for span, calls in _nested(thread)
        if span["cat"] in LAUNCHES
    ]
    launches = {
        span["args"].get("correlation"): (_ns(span["ts"]), calls) for span, calls in on_host
    }
    launched = [launches.get(span["args"].get("correlation"), (-1, ())) for span in on_gpu]
    streams = [(span["args"].get("stream", 0), ON_GPU[span["cat"]]) for span in on_gpu]
    kernels = [
        _event(s, *stream, calls, roles)
        for s, stream, (_, calls) in zip(on_gpu, streams, launched, strict=True)
    ]
    # Gathers that a step launches last run into the next step. After the last step they run alone
    # and therefore end sooner. So only the main stream counts.
    main = main_stream(kernels, [class_of(kernel) for kernel in kernels])
    on_main = [
        (moment, kernel.end_ns)
        for kernel, (moment, _) in zip(kernels, launched, strict=True)
        if kernel.stream == main
    ]
    return kernels, _last_end(steps[0], on_main), _last_end(steps[-1], on_main), len(steps) - 1


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
            "launches and kernels of the trace do not match: "
            "another profiler may be attached, or this machine cannot trace kernels"
        )
        raise CheckFailed(f"no kernel belongs to {step['name']}", why, "see trace.json.gz")
    return max(ends)


def _nested(thread: Sequence[Mapping]) -> Iterator[tuple[Mapping, tuple[_Call, ...]]]:
    """Yield each span of one thread with the ops and ranges around it, outermost first.

    An op or range is itself the last of them.
    """
    stack: list[_Call] = []
    for span in sorted(thread, key=lambda span: (_ns(span["ts"]), -span["dur"])):
        while stack and stack[-1].end_ns <= _ns(span["ts"]):
            stack.pop()
        if span["cat"] not in LAUNCHES:
            first = FIRST_FACTOR.get(span["name"])
            dims = span.get("args", {}).get("Input Dims", [])
            stack.append(
                _Call(span["name"], _end(span), [] if first is None else dims[first : first + 2])
            )
        yield span, tuple(stack)


class Roles:
    """Names of matrix products by their shape.

    With T tokens and W [out, in]: y is T x out, dx is T x in, and dW is out x in or its transpose.
    """

    def __init__(self, shape: ModelShape, tokens: int, weights_train: bool):
        """Build the tables of names.

        `tokens`: rows of x in a micro-batch. `weights_train`: whether the matrices themselves get
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
            for wgrad in {(out, columns, tokens), (columns, out, tokens)} if weights_train else ():
                self.backward[wgrad].append(f"{role} wgrad")

    def name(self, shape: Shape, in_backward: bool) -> str:
        """Return role and shape.

        All roles of an equal shape are named. A shape without a role is named by the shape alone.
        """
        forward = self.forward.get(shape, [])
        backward = self.backward.get(shape, [])
        names = (
            (backward or [f"{name} again" for name in forward])
            if in_backward
            else (forward or backward)
        )
        size = " x ".join(map(str, shape))
        return f"{' or '.join(names)}: {size}" if names else size

    def product(self, calls: Sequence[_Call]) -> tuple[str, int]:
        """Return label and FLOPs of the innermost product in `calls`.

        Its FLOPs count once, however many kernels it has.
        """
        call = next((call for call in reversed(calls) if len(call.factors) == 2), None)
        if call is None:
            return "", 0
        (rows, inner), (_, columns) = call.factors
        flops = 0 if call.counted else 2 * rows * columns * inner
        call.counted = True
        return self.name(
            (rows, columns, inner),
            any(outer.name.startswith("autograd::engine") for outer in calls),
        ), flops


def _ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def _end(span: Mapping) -> int:
    return _ns(span["ts"]) + _ns(span["dur"])
