"""A trace of torch's profiler (Chrome trace JSON, as Perfetto loads it) -> the events of its steps, ready for kernel_time.py. No torch.

Steps are the ranges `ProfilerStep#<n>`, the name torch's own schedule uses. The first is a lead-in: the window runs from its end to
the end of the last, so that gaps between steps are inside. On a GPU a step ends with the last kernel launched in it, on a CPU with
the range itself. On a CPU the events are the ops of the thread that steps, each with the time in which it calls no other op, and
gloo's own threads as further streams.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckFailed
from throughput.kernel_time import AUTOGRAD, Event, class_of, main_stream

STEP = "ProfilerStep#"
LAUNCHES = ("cuda_runtime", "cuda_driver")  # ROCm's are called cuda_runtime as well
ON_GPU = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
# Which inputs of an op are the two factors of its product.
FACTORS = {"aten::mm": (0, 1), "aten::_scaled_mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}

Shape = tuple[int, int, int]  # M, N, K of [M, K] x [K, N]


@dataclass(frozen=True)
class Weight:
    """A matrix of the model, [out, in]: y = x W^T."""

    role: str
    rows: int
    columns: int
    trains: bool


@dataclass(frozen=True)
class Timeline:
    events: tuple[Event, ...]
    start_ns: int
    end_ns: int
    steps: int


@dataclass
class _Call:
    """An op or range while it runs."""

    name: str
    end_ns: int
    dims: list
    counted: bool = False  # its product has been


@dataclass(frozen=True)
class _Span:
    """One stretch of a thread's time: a launch, or time that an op spends itself."""

    name: str
    start_ns: int
    end_ns: int
    calls: tuple[_Call, ...]
    correlation: int | None  # of a launch
    resumed: bool = False


def load(path: Path) -> dict:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def timeline(trace: Mapping, weights: Sequence[Weight], tokens: int) -> Timeline:
    """`weights` and `tokens` (rows of x in a micro-batch) give products their roles. Raises CheckFailed if there is nothing to read."""
    spans = [record for record in trace["traceEvents"] if record.get("ph") == "X"]
    steps = sorted((s for s in spans if s.get("cat") == "user_annotation" and s["name"].startswith(STEP)), key=lambda s: s["ts"])
    if len(steps) < 2:
        raise CheckFailed(f"the trace holds {len(steps)} steps", "a lead-in and at least one more are needed", "profile --steps 1 or more")
    roles = Roles(weights, tokens)
    on_gpu = [span for span in spans if span.get("cat") in ON_GPU]
    threads = defaultdict(list)
    for span in spans:
        if span.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES):
            threads[span["tid"]].append(span)
    if not on_gpu:
        events = list(_ops(threads.pop(steps[0]["tid"]), roles))
        for number, others in enumerate(threads.values(), start=1):
            events += [Event(s["name"], _ns(s["ts"]), _ns(s["dur"]), number, "op") for s in others if s["name"].startswith("gloo:")]
        return Timeline(tuple(events), _end(steps[0]), _end(steps[-1]), len(steps) - 1)
    launches = {span.correlation: span for calls in threads.values() for span in _walk(calls) if span.correlation is not None}
    kernels = [_kernel(span, launches.get(span["args"].get("correlation")), roles) for span in on_gpu]
    # The gathers that a step launches last run into the next one, or, after the last step, alone and thus sooner: the main stream counts.
    main = main_stream(kernels, [class_of(kernel) for kernel in kernels])
    on_main = [span for span, kernel in zip(on_gpu, kernels, strict=True) if kernel.stream == main]
    ends = [_last_end(step, on_main, launches) for step in (steps[0], steps[-1])]
    return Timeline(tuple(kernels), ends[0], ends[1], len(steps) - 1)


def _kernel(span: Mapping, launch: _Span | None, roles: Roles) -> Event:
    calls = launch.calls if launch else ()
    label, flops = roles.product(calls)
    within = tuple(call.name for call in calls)
    stream = int(span["args"].get("stream", 0))
    return Event(span["name"], _ns(span["ts"]), _ns(span["dur"]), stream, ON_GPU[span["cat"]], within, label=label, flops=flops)


def _last_end(step: Mapping, on_gpu: Sequence[Mapping], launches: Mapping[int, _Span]) -> int:
    """When the last of the kernels `on_gpu` that were launched in `step` ended."""
    begin, end = _ns(step["ts"]), _end(step)
    ends = [_end(span) for span in on_gpu if (launch := launches.get(span["args"].get("correlation"))) and begin <= launch.start_ns <= end]
    if not ends:
        why = "launches and kernels of the trace do not match: another profiler may be attached, or kernels may not be traced here"
        raise CheckFailed(f"no kernel belongs to {step['name']}", why, "see trace.json.gz")
    return max(ends)


def _ops(thread: Sequence[Mapping], roles: Roles) -> Iterator[Event]:
    """The ops of a CPU thread, one after the other. What ranges and autograd nodes spend themselves is Python and bookkeeping: left out."""
    ranges = {span["name"] for span in thread if span["cat"] == "user_annotation"}
    for span in _walk(thread):
        if span.correlation is None and span.name not in ranges and not AUTOGRAD.search(span.name):
            label, flops = roles.product(span.calls)
            within = tuple(call.name for call in span.calls[:-1])
            length = span.end_ns - span.start_ns
            yield Event(span.name, span.start_ns, length, 0, "op", within, 0 if span.resumed else 1, label, flops)


def _walk(thread: Sequence[Mapping]) -> Iterator[_Span]:
    """Cut the nested spans of one thread into stretches, each with the calls around it, outermost first."""
    stack: list[_Call] = []
    now, resumed = 0, False
    ordered = sorted(thread, key=lambda span: (_ns(span["ts"]), -span["dur"]))

    def until(moment: int) -> Iterator[_Span]:
        nonlocal now, resumed
        while stack:
            stop = min(moment, stack[-1].end_ns)
            if stop > now or not resumed:
                yield _Span(stack[-1].name, now, stop, tuple(stack), None, resumed)
            now = stop
            if stack[-1].end_ns > moment:
                return
            stack.pop()
            resumed = True

    for span in ordered:
        begin, end = _ns(span["ts"]), _end(span)
        yield from until(begin)
        if span["cat"] in LAUNCHES:
            yield _Span(span["name"], begin, end, tuple(stack), span.get("args", {}).get("correlation", -1))
            continue
        # Rounding may let a call outlive its caller by a nanosecond.
        stack.append(_Call(span["name"], min(end, stack[-1].end_ns) if stack else end, span.get("args", {}).get("Input Dims", [])))
        now, resumed = begin, False
    yield from until(max((call.end_ns for call in stack), default=0))


class Roles:
    """Names of products by their shape. With T tokens, W [out, in]: y is T x out, dx T x in, dW out x in or its transpose."""

    def __init__(self, weights: Sequence[Weight], tokens: int):
        self.forward: dict[Shape, list[str]] = defaultdict(list)
        self.backward: dict[Shape, list[str]] = defaultdict(list)
        for weight in dict.fromkeys(weights):
            out, columns = weight.rows, weight.columns
            self.forward[tokens, out, columns].append(weight.role)
            self.backward[tokens, columns, out].append(f"{weight.role} dgrad")
            if weight.trains:
                for shape in dict.fromkeys([(out, columns, tokens), (columns, out, tokens)]):
                    self.backward[shape].append(f"{weight.role} wgrad")

    def name(self, shape: Shape, in_backward: bool) -> str:
        """Role and shape; roles of equal shape are all named, and a shape without role stands for itself."""
        forward, backward = self.forward.get(shape, []), self.backward.get(shape, [])
        names = (backward or [f"{name} again" for name in forward]) if in_backward else (forward or backward)
        size = " x ".join(map(str, shape))
        return f"{' or '.join(names)}: {size}" if names else size

    def product(self, calls: Sequence[_Call]) -> tuple[str, int]:
        """Label and FLOPs of the innermost product among `calls`; its FLOPs are given out once, however many kernels it has."""
        call = next((call for call in reversed(calls) if call.name in FACTORS and _shape(call)), None)
        if call is None:
            return "", 0
        batch, shape = _shape(call) or (0, (0, 0, 0))
        flops = 0 if call.counted else 2 * batch * shape[0] * shape[1] * shape[2]
        call.counted = True
        return self.name(shape, any(outer.name.startswith("autograd::engine") for outer in calls)), flops


def _shape(call: _Call) -> tuple[int, Shape] | None:
    """(batch, (M, N, K)) of a product; None if the trace has no shapes."""
    factors = [call.dims[i] for i in FACTORS[call.name] if i < len(call.dims)]
    if len(factors) != 2 or any(len(factor) not in (2, 3) for factor in factors):
        return None
    left, right = factors
    return (left[0] if len(left) == 3 else 1), (left[-2], right[-1], left[-1])


def _ns(microseconds: float) -> int:
    return round(1000 * microseconds)


def _end(span: Mapping) -> int:
    return _ns(span["ts"]) + _ns(span["dur"])
