"""Engines and the self-test: a wrong engine gives way, a pinned one stops the run, ranks agree."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stand_in_engines import let_run_on_a_cpu
from torch.nn import functional as F

from common import engines
from common.errors import PreflightError
from common.kernels import fp8, swiglu
from common.model.block_ops import KERNEL_ENGINES
from common.self_test import run as self_test
from common.self_test.kernel_cases import Sizes
from common.self_test.results import SelfTestResult
from common.training.metrics import ProgressLog
from common.training.reports import Reports
from common.training.timed_run import run_self_test
from llama31_8b.rules import MINIATURE

CPU = torch.device("cpu")
SIZES = Sizes(MINIATURE.shape, 32, 1, False, 0, "reference", torch.bfloat16)


def wrong_attention(q, k, v):
    parts = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*parts, is_causal=False, enable_gqa=True)
    return out.transpose(1, 2)


def wrong_product(a, b, scale_a=None, scale_b=None):
    raise RuntimeError("status 15")


WRONG = {
    engines.ATTENTION: ("flash_attention_4", {"causal_attention": wrong_attention}),
    engines.PRODUCTS: ("cublaslt", {"product": wrong_product}),
}


@pytest.fixture(params=[engines.ATTENTION, engines.PRODUCTS])
def wrong(request, monkeypatch):
    """An engine that computes wrongly, pinned. Yields the operation and its name."""
    name, functions = WRONG[request.param]
    let_run_on_a_cpu(monkeypatch, request.param, name, "9.9")
    module = SimpleNamespace(require=lambda: None, **functions)
    monkeypatch.setattr(engines, "module_of", lambda engine: module)
    return request.param, name


def choose_without_pin(monkeypatch, operation, name):
    """Let the engine be chosen on a CPU although no variable pins it."""
    monkeypatch.delenv(engines.VARIABLES[operation])
    chosen = [
        replace(engine, chosen_on=("",)) if engine.name == name else engine
        for engine in engines.ENGINES[operation]
    ]
    monkeypatch.setitem(engines.ENGINES, operation, tuple(chosen))


def test_a_pinned_engine_that_computes_wrongly_stops_the_run(wrong):
    result = self_test.self_test(SIZES, CPU)
    with pytest.raises(PreflightError):
        self_test.require_sound(result, CPU)


def test_an_unpinned_engine_that_computes_wrongly_is_replaced(wrong, monkeypatch):
    operation, name = wrong
    choose_without_pin(monkeypatch, operation, name)
    result = self_test.self_test(SIZES, CPU)
    assert not result.bad
    assert result.attention == "flash" and result.products == "torch"
    assert any(name in line and "self-test" in line for line in result.missing)
    assert fp8.product_engine(CPU, torch.bfloat16).engine.name == "torch"


def test_a_run_shows_and_records_the_engine_that_replaces_another(wrong, monkeypatch, tmp_path):
    operation, name = wrong
    choose_without_pin(monkeypatch, operation, name)
    monkeypatch.setattr(self_test.Sizes, "of", lambda *_: SIZES)
    screen = io.StringIO()
    reports = replace(Reports.open(tmp_path, 0), progress=ProgressLog(True, screen))
    rules = SimpleNamespace(shape=None, sequence_length=0, lora_rank=0)
    processes = SimpleNamespace(world_size=1, device=CPU)
    run_self_test(None, rules, processes, reports)
    (line,) = screen.getvalue().splitlines()
    assert line.startswith("NOTE") and f"{operation} by {name}" in line and "self-test" in line
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert event[operation] in ("flash", "torch")


@pytest.mark.parametrize("equal", [True, False])
def test_ranks_with_different_engines_are_refused(monkeypatch, equal):
    result = SelfTestResult(attention="flash", products="cublaslt", missing=["both lack aiter"])
    other = (("flash", "torch", ""), ["both lack aiter", "cublaslt failed its self-test"])

    monkeypatch.setattr(self_test, "of_all_ranks", lambda own: [own, own if equal else other])
    if equal:
        self_test.require_equal_engines(result)
        return
    with pytest.raises(PreflightError) as caught:
        self_test.require_equal_engines(result)
    assert "rank 1" in caught.value.what and "ATTENTION_ENGINE" in caught.value.do
    # The rank that raises is rank 0. The reason is on the other one.
    assert caught.value.why == "rank 1: cublaslt failed its self-test"


def wrong_backward(g, weight, gate_up, quantizer):
    """Return the kernel's gradient with the wrong sign."""
    d_h = fp8.dgrad(g, weight)
    return swiglu.swiglu_quantized_backward_reference(d_h, -gate_up, quantizer)


def right_gate_up(x, weight, quantizer, kept_quantizer, keep):
    gate_up = fp8.fprop(x, weight)
    return gate_up, swiglu.swiglu_quantized_reference(gate_up, quantizer)[0]


@pytest.mark.parametrize("pinned", [True, False])
def test_wrong_epilogues_are_replaced_by_the_kernel_unless_pinned(monkeypatch, pinned):
    let_run_on_a_cpu(monkeypatch, engines.SWIGLU, "quack", "9.9")
    if not pinned:
        monkeypatch.delenv(engines.VARIABLES[engines.SWIGLU])
        first, *others = engines.ENGINES[engines.SWIGLU]
        chosen = (replace(first, chosen_on=("",)), *others)
        monkeypatch.setitem(engines.ENGINES, engines.SWIGLU, chosen)
    functions = {"gate_up_swiglu": right_gate_up, "down_swiglu_backward": wrong_backward}
    module = SimpleNamespace(require=lambda: None, **functions)
    monkeypatch.setattr(engines, "module_of", lambda engine: module)
    monkeypatch.setitem(
        KERNEL_ENGINES, "reference", replace(KERNEL_ENGINES["reference"], may_fuse_swiglu=True)
    )
    result = self_test.self_test(replace(SIZES, fp8=True), CPU)
    if pinned:
        assert [finding.op for finding in result.bad] == ["SwiGLU backward in a product"]
        return
    assert not result.bad and result.swiglu == "kernel"
    assert any("quack" in line and "self-test" in line for line in result.missing)
