"""Test `profile --memory` with a hand-made torch.cuda.memory._snapshot."""

import json
from types import SimpleNamespace

import pytest
import torch
from page import Page, read_page

from common.kernels.fp8 import QuantizedTensor
from common.measure.memory_profile import (
    BEFORE,
    UNNAMED,
    document,
    history_of,
    kind_and_place,
    owners,
    write,
)
from common.model.linear_layers import LinearLayers
from common.paths import ROOT
from common.training.assembly import Assembly

pytestmark = pytest.mark.quick

MIB = 2**20


def frame(file, name, line=7):
    return {"filename": str(ROOT / file), "name": name, "line": line}


FORWARD = [
    frame("common/kernels/swiglu.py", "swiglu", 40),
    frame("common/model/fused_block.py", "forward"),
    frame("common/measure/bench.py", "step"),
]
BACKWARD = [
    frame("common/kernels/swiglu.py", "swiglu_backward"),
    frame("common/model/fused_block.py", "backward"),
]
LOSS = [
    frame("common/kernels/cross_entropy.py", "forward"),
    frame("common/model/llama.py", "forward"),
]
REDUCE = [frame("common/sharding/reduce_scatter.py", "_means", 72)]


def event(action, addr, size_mib, frames=(), at=0):
    return {
        "action": action,
        "addr": addr,
        "size": size_mib * MIB,
        "stream": 0,
        "time_us": 1000 * at,
        "frames": list(frames),
    }


def block(address, size_mib, state="active_allocated"):
    return {
        "address": address,
        "size": size_mib * MIB,
        "requested_size": size_mib * MIB,
        "state": state,
        "frames": [],
    }


def segment(*blocks, device=0):
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(each["size"] for each in blocks),
        "blocks": list(blocks),
    }


def snapshot():
    """Weights and moments stay.

    A forward keeps 100 MiB and 20, the loss needs 50: the peak. Two blocks are free at the end, one
    lived before.
    """
    trace = [
        event("alloc", 300, 100, FORWARD, 1),
        event("alloc", 400, 20, FORWARD, 2),
        event("segment_alloc", 500, 80, (), 3),
        event("alloc", 500, 50, LOSS, 4),
        event("free_requested", 500, 50, (), 5),
        event("free_completed", 500, 50, (), 6),
        event("alloc", 500, 30, REDUCE, 7),
        event("free_completed", 300, 100, (), 8),
        event("free_completed", 600, 5, (), 9),
        event("alloc", 700, 1, (), 10),
        event("snapshot", 0, 0),
    ]
    first = segment(
        block(100, 16),
        block(200, 32),
        block(400, 20),
        block(300, 100, "inactive"),
        block(600, 5, "inactive"),
        block(700, 1),
    )
    second = segment(block(500, 80) | {"requested_size": 30 * MIB})
    return {
        "segments": [first, second, segment(block(900, 1000), device=1)],
        "device_traces": [trace, []],
    }


KNOWN = {100: "weights", 200: "AdamW moments"}


def test_the_peak_is_found_and_divided_by_who_holds_it():
    history = history_of(snapshot(), 0, KNOWN)
    assert (
        history.allocated[0] == (16 + 32 + 5) * MIB
        and max(history.allocated) == (16 + 32 + 5 + 100 + 20 + 50) * MIB
    )
    assert history.allocated[-1] == (16 + 32 + 20 + 30 + 1) * MIB, (
        "what the segments hold at the end"
    )
    assert (
        history.times_ms[history.top] == 3.0
        and history.reserved[0] == history.reserved[-1] - 80 * MIB == 174 * MIB
    )
    at_peak = {kind: values[history.top] // MIB for kind, values in history.kinds.items()}
    assert at_peak == {
        "weights": 16,
        "AdamW moments": 32,
        BEFORE: 5,
        "activations": 120,
        "embedding, head, loss": 50,
    } | {
        "gradients, communication": 0,
        UNNAMED: 0,
    }
    assert all(
        sum(values[i] for values in history.kinds.values()) == each
        for i, each in enumerate(history.allocated)
    )
    assert sorted(piece.size // MIB for piece in history.peak) == [5, 16, 20, 32, 50, 100]


@pytest.mark.parametrize(
    ("frames", "kind", "place"),
    [
        (FORWARD, "activations", "common/kernels/swiglu.py:40 swiglu"),
        (BACKWARD, "workspace of a backward", "common/kernels/swiglu.py:7 swiglu_backward"),
        (LOSS, "embedding, head, loss", "common/kernels/cross_entropy.py:7 forward"),
        (REDUCE, "gradients, communication", "common/sharding/reduce_scatter.py:72 _means"),
        (
            [frame("common/kernels/accumulate.py", "add"), *REDUCE],
            "gradients, communication",
            "common/kernels/accumulate.py:7 add",
        ),
        (
            [frame(".venv/lib/site-packages/torch/nn.py", "linear"), *FORWARD],
            "activations",
            "common/kernels/swiglu.py:40 swiglu",
        ),
        (
            [
                frame("common/kernels/quantize.py", "both"),
                frame("common/kernels/fp8.py", "quantize_weight"),
                *FORWARD,
            ],
            "quantized weights",
            None,
        ),
        ([{"filename": "/usr/lib/python3/threading.py", "name": "run", "line": 1}], UNNAMED, ""),
    ],
)
def test_an_allocation_has_a_kind_and_our_innermost_frame(frames, kind, place):
    assert kind_and_place(frames) == (kind, kind_and_place(frames)[1] if place is None else place)


FACTS = {
    "benchmark": "llama31_8b",
    "config": "H200_1x4",
    "precision": "bf16",
    "layers": 2,
    "world_size": 4,
    "device": "NVIDIA H200",
}
FACTS |= {"started": 1.7e9, "command": "./run_and_time.sh x profile --memory", "commit": "abc"}
FACTS |= {"torch": "2.11", "steps": 2, "tokens_per_step_per_rank": 1000}
FACTS |= {"plan": 230 * MIB, "moment": "the head's backward"}


def test_files_and_table_say_the_same(tmp_path):
    history = history_of(snapshot(), 0, KNOWN)
    (tmp_path / "snapshot.pickle").touch()
    made = document(history, 224 * MIB, FACTS)
    shown = write(tmp_path, history, made)
    assert json.loads((tmp_path / "memory.json").read_text()) == made
    assert (made["peak"], made["reserved"], made["fragmentation"]) == (
        223 * MIB,
        254 * MIB,
        31 * MIB,
    )
    assert (
        next(iter(made["kinds"])) == "activations" and sum(made["kinds"].values()) == made["peak"]
    )
    assert made["largest"][0] == {
        "kind": "activations",
        "place": "common/kernels/swiglu.py:40 swiglu",
        "bytes": 120 * MIB,
        "count": 2,
    }
    assert (
        "peak 0.22 GiB of tensors (0.22 by torch's counter" in shown
        and "fragmentation: reserved, not allocated" in shown
    )
    assert (
        "common/kernels/swiglu.py:40 swiglu (activations, 2)" in shown
        and "before these steps (AdamW moments, 1)" in shown
    )
    text = read_page(tmp_path / "memory.html")
    (chart,) = Page(text).charts
    assert [curve["name"] for curve in chart["series"]] == [
        "reserved",
        "allocated",
        *history.kinds,
    ] and "snapshot.pickle" in text
    assert max(chart["series"][1]["data"][1]) == pytest.approx(223 / 1024, rel=1e-5)


def test_what_lives_as_long_as_the_run_is_known_by_its_address():
    class Held:
        def __init__(self):
            self.parts = {"base": [torch.zeros(3)]}

    Held.__module__ = "common.sharding.frozen_base"
    model = torch.nn.Linear(4, 4)
    model.held, model.foreign = Held(), object()
    moments, masters = torch.zeros(2), [torch.zeros(5)]
    optimizer = type(
        "Optimizer", (), {"state_tensors": lambda self: [moments], "weights": masters}
    )()
    assembly = object.__new__(Assembly)
    cast = QuantizedTensor(torch.zeros(6), torch.zeros(7))
    linear = LinearLayers()
    linear.quantizers = [SimpleNamespace(cached=cast), SimpleNamespace(cached=None)]
    vars(assembly).update(model=model, optimizer=optimizer, linear=linear)
    named = owners(assembly)
    expected = {
        moments: "AdamW moments",
        masters[0]: "master weights",
        model.weight: "weights",
        model.bias: "weights",
    }
    expected |= {model.held.parts["base"][0]: "frozen base, buffers"} | dict.fromkeys(
        cast[:2], "quantized weights"
    )
    assert named == {tensor.untyped_storage().data_ptr(): kind for tensor, kind in expected.items()}
