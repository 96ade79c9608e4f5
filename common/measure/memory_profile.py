"""Memory profile (profile --memory): the allocations that make up a GPU's peak memory.

The source is torch's history of the allocations during some steps. All ranks run the steps. Rank 0
records the history and writes the files. snapshot.pickle has torch's own format, because
pytorch.org/memory_viz opens no other. This package never reads it: memory.json and memory.html are
made from the snapshot in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import benchmarks
from common.errors import write_text
from common.gpu_kinds import GIB
from common.html import page
from common.html.page import Block, Section
from common.measure import report
from common.measure.files import write_json
from common.paths import ROOT
from common.sharding.processes import Processes
from common.training.assembly import Assembly

SNAPSHOT = "snapshot.pickle"
SUMMARY = "memory.json"
PAGE = "memory.html"
PROJECT = f"{ROOT}/"  # prefix of file names in this project's stack frames
# Packages whose objects refer to the tensors that live as long as the run.
PACKAGES = ("common", *benchmarks.names())
# Kinds of allocations. They are keys in memory.json.
BEFORE = "other, from before these steps"
UNNAMED = "no frame of ours: autograd, workspaces"
QUANTIZED = "quantized weights"
# Action -> sign of its change of allocated memory. After free_requested the memory is still in use.
ALLOCATED = {"alloc": 1, "free_completed": -1}
# Action -> sign of its change of reserved memory.
RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
LARGEST = 40  # number of places in the files
PRINTED = 12  # number of places on the terminal


class Piece(NamedTuple):
    """One allocation.

    `size`: requested bytes. `kind`: what it is for. `place`: the innermost stack frame of this
    project, "" if there is none.
    """

    size: int
    kind: str
    place: str = ""


class History(NamedTuple):
    """Memory at the beginning and after each event of a snapshot, in bytes.

    `times_ms`: times in milliseconds. `reserved`: memory that torch reserved from the driver.
    `allocated`: allocated memory in total. `kinds`: allocated memory by kind. `peak`: the
    allocations that exist at the peak.
    """

    times_ms: list[float]
    reserved: list[int]
    allocated: list[int]
    kinds: dict[str, list[int]]
    peak: list[Piece]

    @property
    def top(self) -> int:
        """Index of the peak."""
        return self.allocated.index(max(self.allocated))


def record(
    step: Callable[[], object], steps: int, folder: Path, assembly: Assembly, processes: Processes
) -> tuple[History, int] | None:
    """Run `steps` steps and, on rank 0, record their allocations. All ranks must call it.

    Rank 0 writes folder/snapshot.pickle, and returns the history and the peak by torch's own
    counter, in bytes. Other ranks return None. Raises OSError.
    """
    device = processes.device
    records = processes.rank == 0
    processes.barrier()
    if records:
        known = owners(assembly)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    for _ in range(steps):
        step()
    torch.cuda.synchronize(device)
    if not records:
        return None
    counted = torch.cuda.max_memory_allocated(device)
    snapshot = torch.cuda.memory._snapshot()
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
    torch.cuda.memory._record_memory_history(None)
    return history_of(snapshot, device.index, known), counted


def owners(assembly: Assembly) -> dict[int, str]:
    """Return address -> kind of the allocation, for each tensor that lives as long as the run."""
    kinds: dict[str, Iterable[Tensor]] = {
        "AdamW moments": assembly.optimizer.state_tensors(),
        "master weights": assembly.optimizer.weights,
        "FP8 scales": assembly.linear.state().values(),
        "weights": assembly.model.parameters(),
        QUANTIZED: _tensors_in(
            [quantizer.cached for quantizer in assembly.linear.quantizers], set()
        ),
        "frozen base, buffers": _tensors_in(assembly, set()),
    }
    kind_of_address: dict[int, str] = {}
    for kind, tensors in kinds.items():
        for tensor in tensors:
            kind_of_address.setdefault(tensor.untyped_storage().data_ptr(), kind)
    return kind_of_address


def _tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in `thing`, through containers, modules and this project's objects."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors_in(part, seen)
    elif isinstance(thing, torch.nn.Module) or type(thing).__module__.split(".")[0] in PACKAGES:
        yield from _tensors_in(getattr(thing, "__dict__", {}), seen)


def history_of(snapshot: dict, device: int, known: dict[int, str]) -> History:
    """Return the history in a snapshot, as torch.cuda.memory._snapshot() returns and documents it.

    The history need not begin with the first allocation of the process. `device`: index of the GPU.
    `known`: address -> kind, see `owners`.
    """
    actions = ALLOCATED | RESERVED
    trace = [event for event in snapshot["device_traces"][device] if event["action"] in actions]
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    sizes = _sizes_at_start(segments, trace)
    changes = [RESERVED.get(event["action"], 0) * event["size"] for event in trace]
    reserved_at_start = sum(segment["total_size"] for segment in segments) - sum(changes)
    reserved = list(accumulate(changes, initial=reserved_at_start))
    changes = [ALLOCATED.get(event["action"], 0) * event["size"] for event in trace]
    allocated = list(accumulate(changes, initial=sum(sizes.values())))
    pieces = {address: Piece(size, known.get(address, BEFORE)) for address, size in sizes.items()}
    kinds, peak = _replay(pieces, trace, allocated.index(max(allocated)))
    start_us = trace[0]["time_us"] if trace else 0
    times_ms = [0.0, *((event["time_us"] - start_us) / 1e3 for event in trace)]
    return History(times_ms, reserved, allocated, kinds, peak)


def _sizes_at_start(segments: list[dict], trace: list[dict]) -> dict[int, int]:
    """Return address -> bytes of the allocations before the first event of `trace`.

    `segments` have the allocations after the last event, from which the events are undone.
    """
    sizes = {}
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                sizes[block["address"]] = block["requested_size"]
    for event in reversed(trace):
        if event["action"] == "alloc":
            sizes.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            sizes[event["addr"]] = event["size"]
    return sizes


def _replay(
    pieces: dict[int, Piece], trace: list[dict], top: int
) -> tuple[dict[str, list[int]], list[Piece]]:
    """Return the bytes of each kind after each event, and the allocations after event `top`.

    `pieces`: address -> allocation before the first event.
    """
    pieces = dict(pieces)
    peak = list(pieces.values())
    bytes_of: dict[str, int] = {}
    for piece in pieces.values():
        bytes_of[piece.kind] = bytes_of.get(piece.kind, 0) + piece.size
    steps = [bytes_of]
    for number, event in enumerate(trace, start=1):
        bytes_of = dict(bytes_of)
        if event["action"] == "alloc":
            piece = Piece(event["size"], *kind_and_place(event["frames"]))
            pieces[event["addr"]] = piece
            bytes_of[piece.kind] = bytes_of.get(piece.kind, 0) + piece.size
        elif event["action"] == "free_completed":
            piece = pieces.pop(event["addr"])
            bytes_of[piece.kind] -= piece.size
        steps.append(bytes_of)
        if number == top:
            peak = list(pieces.values())
    kinds = {kind: [step.get(kind, 0) for step in steps] for kind in steps[-1]}
    return kinds, peak


def kind_and_place(frames: list[dict]) -> tuple[str, str]:
    """Return kind and place of an allocation during a step.

    `frames`: its stack frames, innermost first.
    """
    ours = []
    for frame in frames:
        file = frame["filename"]
        if file.startswith(PROJECT) and "/site-packages/" not in file:
            ours.append(frame)
    if not ours:
        return UNNAMED, ""
    file = ours[0]["filename"].removeprefix(PROJECT)
    names = {frame["name"] for frame in ours}
    place = f"{file}:{ours[0]['line']} {ours[0]['name']}"
    if "quantize_weight" in names:
        return QUANTIZED, place
    if file.startswith("common/sharding/") or file == "common/kernels/accumulate.py":
        return "gradients, communication", place
    if file in ("common/kernels/cross_entropy.py", "common/model/llama.py"):
        return "embedding, head, loss", place
    return "workspace of a backward" if "backward" in names else "activations", place


def document(history: History, counted: int, facts: dict) -> dict:
    """Return the content of memory.json. All sizes are in bytes.

    `counted`: peak by torch's own counter. `facts`: facts of the run, which are included.
    """
    top = history.top
    places: dict[tuple[str, str], list[int]] = {}
    for piece in history.peak:
        places.setdefault((piece.kind, piece.place), []).append(piece.size)
    largest = sorted(places.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    kinds = [(kind, values[top]) for kind, values in history.kinds.items()]
    kinds.sort(key=lambda item: -item[1])
    return facts | {
        "peak": history.allocated[top],
        "peak_by_torch": counted,
        "reserved": history.reserved[top],
        "kinds": {kind: size for kind, size in kinds if size},
        "fragmentation": history.reserved[top] - history.allocated[top],
        "largest": [
            {"kind": kind, "place": place, "bytes": sum(sizes), "count": len(sizes)}
            for (kind, place), sizes in largest
        ],
    }


def write(folder: Path, history: History, profile: dict) -> str:
    """Write memory.json and memory.html in `folder` and return the table for a terminal.

    Raises StorageError.
    """
    write_json(folder / SUMMARY, profile)
    config = f"{profile['benchmark']} {profile['config']}"
    title = f"memory · {config} · {profile['device']} · {report.date(profile)}"
    write_text(folder / PAGE, page.render(title, _page_sections(history, profile)))
    return _terminal_table(profile)


def _page_sections(history: History, profile: dict) -> list[Section]:
    _, peak = _heading(profile)
    heads = ("allocated in", "held by", "GiB", "number")
    return [
        ("Headline", [{"tiles": _tiles(profile)}]),
        ("Machine and software", [page.table((), report.profile_facts(profile).rows)]),
        (
            "At the peak",
            [
                {"notes": [peak]},
                page.table(("held by", "GiB", "share"), _kinds(profile)),
                {"links": [SNAPSHOT, SUMMARY]},
            ],
        ),
        ("Over the steps", [_chart(history)]),
        ("The largest at the peak", [page.table(heads, _largest(profile), (0, 1))]),
    ]


def _chart(history: History) -> Block:
    """Return the chart of reserved and allocated memory, in total and by kind, over the time."""
    values_of = {"reserved": history.reserved, "allocated": history.allocated} | history.kinds
    curves = []
    for color, (name, values) in enumerate(values_of.items()):
        points = [(ms, value / GIB) for ms, value in zip(history.times_ms, values, strict=True)]
        curves.append(page.Curve(name, points, color))
    return page.chart("GiB", "ms", curves, reduce=max)


def _terminal_table(profile: dict) -> str:
    lines = [*_heading(profile), ""]
    for name, size, share in _kinds(profile):
        lines.append(f"{name:<42}{size:>10}{share:>8}")
    lines.append("")
    for place, kind, size, count in _largest(profile)[:PRINTED]:
        lines.append(f"{size:>8} GiB {place} ({kind}, {count})")
    return "\n".join(lines)


def _tiles(profile: dict) -> list[tuple[str, str]]:
    return [
        ("Peak memory", f"{profile['peak'] / GIB:.2f} GiB"),
        ("Reserved at the peak", f"{profile['reserved'] / GIB:.2f} GiB"),
        ("Planned", f"{profile['plan'] / GIB:.2f} GiB"),
    ]


def _heading(profile: dict) -> tuple[str, str]:
    """Return two lines: what was profiled, and the peak."""
    peak = profile["peak"] / GIB
    counted = profile["peak_by_torch"] / GIB
    planned = profile["plan"] / GIB
    return (
        f"MEMORY {report.profiled(profile)}",
        f"peak {peak:.2f} GiB of tensors "
        f"({counted:.2f} by torch's counter, which rounds up to blocks); "
        f"plan: {planned:.2f}, in {profile['moment']}",
    )


def _kinds(profile: dict) -> list[tuple[str, str, str]]:
    """Return the table's row for each kind of allocation at the peak: name, GiB and share."""
    rows = profile["kinds"] | {"fragmentation: reserved, not allocated": profile["fragmentation"]}
    return [
        (name, f"{size / GIB:.2f}", f"{size / profile['reserved']:.1%}")
        for name, size in rows.items()
    ]


def _largest(profile: dict) -> list[tuple[str, str, str, str]]:
    """Return the table's row for each of the places with the most memory at the peak."""
    rows = []
    for row in profile["largest"]:
        place = row["place"]
        if not place:
            place = "no frame of ours" if row["kind"] == UNNAMED else "before these steps"
        rows.append((place, row["kind"], f"{row['bytes'] / GIB:.3f}", f"{row['count']:,}"))
    return rows
