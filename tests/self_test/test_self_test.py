"""Test the self-test on a CPU: no bad result without a fault, and each planted fault named."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import TINY, run_config
from torch.nn import functional as F

from common.errors import PreflightError
from common.kernels import lora, qk_norm
from common.kernels.fp8 import QuantizedTensor
from common.model.block_ops import KERNEL_ENGINES
from common.model.shapes import ModelShape
from common.self_test import attention, products, run
from common.self_test.kernel_cases import Sizes
from common.self_test.kernels import output_db
from common.self_test.results import OpResult, SelfTestResult
from common.self_test.run import require_sound, self_test
from common.training.metrics import Events
from common.training.timed_run import run_self_test

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
SHAPE = ModelShape(2, 32, 48, 4, 2, 64, 10000.0)
# In fp32: Triton's interpreter rounds wrongly to e4m3, and bf16 adapters are beyond it
# (tests/helpers/kernel_checks.py).
PRETRAINING = Sizes(SHAPE, 32, 2, fp8=False, lora_rank=0, kernels="triton", dtype=torch.float32)
ADAPTERS = replace(PRETRAINING, lora_rank=16)
PRODUCTS = replace(PRETRAINING, fp8=True, kernels="reference", dtype=torch.bfloat16)


def bad_ops(sizes):
    return [each.op for each in self_test(sizes, CPU).bad]


@pytest.mark.parametrize(
    "sizes", [PRETRAINING, ADAPTERS, PRODUCTS], ids=["pre-training", "adapters", "FP8 products"]
)
def test_a_sound_machine_passes_and_the_generator_stays_as_it_was(sizes):
    before = torch.get_rng_state()
    result = self_test(sizes, CPU)
    assert not result.bad, [str(each) for each in result.bad]
    assert torch.equal(torch.get_rng_state(), before)
    assert result.attention == "flash" and result.seconds > 0
    ops = {each.op for each in result.results}
    assert {
        "attention",
        "attention backward dQ",
        "attention backward dK",
        "attention backward dV",
        "bf16 product head dgrad" if sizes is PRODUCTS else "float32 product head dgrad",
    } <= ops
    assert ("FP8 product gate_up wgrad" in ops) == sizes.fp8
    kernels = {op for op in ops if op.startswith("triton")}
    assert ("triton adapter up backward" in kernels) == (sizes is ADAPTERS) and (
        "triton AdamW" in kernels
    ) == (sizes is PRETRAINING)
    shapes = {each.op.partition("product ")[2]: each.shape for each in result.results}
    assert shapes["gate_up dgrad"] == str(
        (sizes.tokens, SHAPE.hidden_size, 2 * SHAPE.ffn_hidden_size)
    )
    assert sizes is ADAPTERS or shapes["gate_up wgrad"] == str(
        (2 * SHAPE.ffn_hidden_size, SHAPE.hidden_size, sizes.tokens)
    )
    require_sound(result, CPU)


class Attention(torch.autograd.Function):
    """Right but for `spoil` of the gradient of the queries."""

    spoil = staticmethod(lambda gradient: gradient)

    @staticmethod
    def forward(ctx, q):
        return q.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Attention.spoil(gradient)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g: g * 0.9,
        lambda g: torch.where(torch.arange(g.shape[1])[:, None, None] == 3, torch.inf, g),
    ],
)
def test_a_wrong_or_infinite_gradient_of_attention_is_found(monkeypatch, spoil):
    """16-bit atomics give such gradients on gfx942."""
    right = attention.causal_attention
    monkeypatch.setattr(Attention, "spoil", staticmethod(spoil))
    monkeypatch.setattr(
        attention, "causal_attention", lambda q, k, v: right(Attention.apply(q), k, v)
    )
    assert bad_ops(PRODUCTS) == ["attention backward dQ"]


def test_attention_is_tested_as_ranks_that_share_sequences_compute_it(monkeypatch):
    """A chunk of queries against all keys, and the causal mask aligned to the last key."""
    shared = replace(PRODUCTS, context_parallel=2)
    good = [each for each in self_test(shared, CPU).results if each.op.startswith("attention")]
    assert len(good) == 4 and all(each.good for each in good)
    assert good[0].shape == "[2, 16 of 64, 4/2, 8]"

    def aligned_to_the_first_key(q, k, v):
        parts = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setattr(attention, "causal_attention", aligned_to_the_first_key)
    assert bad_ops(shared)[:2] == ["attention", "attention backward dQ"]


def test_keys_are_tested_in_the_memory_layout_of_ranks_that_share_sequences(monkeypatch):
    right = attention.causal_attention

    def reads_as_dense(q, k, v):
        return right(q, k.as_strided(k.shape, torch.empty(k.shape).stride()), v)

    monkeypatch.setattr(attention, "causal_attention", reads_as_dense)
    assert not bad_ops(PRODUCTS)
    assert bad_ops(replace(PRODUCTS, context_parallel=2))[:1] == ["attention"]


def test_attention_that_raises_is_one_finding(monkeypatch):
    def none_left(q, k, v):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(attention, "causal_attention", none_left)
    result = self_test(PRODUCTS, CPU)
    assert [str(each) for each in result.bad] == [
        "attention [2, 32, 4/2, 8]: No available kernel. Aborting execution. (minimum 30 dB)"
    ]


def test_products_with_a_wrong_scale_and_with_elements_left_out_are_found(monkeypatch):
    right, mm = products.fprop, torch.mm
    monkeypatch.setattr(
        products,
        "fprop",
        lambda a, b: (
            right(a, b)
            * (0.5 if a.rowwise.shape[1] == 64 and a.rowwise.dtype == torch.float8_e5m2 else 1)
        ),
    )

    def without_last_row(a, b, out):
        mm(a[:-1], b, out=out[:-1])
        return out

    monkeypatch.setattr(torch, "mm", without_last_row)
    found = self_test(PRODUCTS, CPU)
    names = {each.op for each in found.bad}
    assert {"FP8 product o wgrad", "FP8 product qkv dgrad", "bf16 product head fprop"} <= names
    assert (
        not {"FP8 product qkv fprop", "FP8 product down dgrad", "bf16 product head wgrad"} & names
    )
    left_out = next(each for each in found.bad if each.op == "bf16 product head fprop")
    assert "not finite" in str(left_out) and left_out.shape == "(64, 64, 32)"


@pytest.mark.parametrize("sizes", [PRETRAINING, ADAPTERS], ids=["pre-training", "adapters"])
def test_norms_of_query_and_key_heads_are_tested_where_the_model_has_them(monkeypatch, sizes):
    sizes = replace(sizes, shape=replace(SHAPE, qk_norm=True))
    result = self_test(sizes, CPU)
    assert not result.bad, [str(each) for each in result.bad]
    ops = [each.op for each in result.results if "RoPE" in each.op]
    assert ops == ["triton QK norm + RoPE", "triton QK norm + RoPE backward"]
    triton = qk_norm.IMPLEMENTATIONS["triton"]

    def wrong(gradients, *rest):
        d_qkv, d_weights = triton.norm_rope_backward(gradients, *rest)
        return d_qkv._replace(rowwise=d_qkv.rowwise * 0.5), d_weights

    monkeypatch.setitem(
        qk_norm.IMPLEMENTATIONS, "triton", replace(triton, norm_rope_backward=wrong)
    )
    assert bad_ops(sizes) == ["triton QK norm + RoPE backward"]


def test_an_output_that_a_kernel_leaves_out_is_wrong():
    truth = torch.ones(2, 2)
    assert output_db(truth, None) == -math.inf
    assert output_db(QuantizedTensor(truth), truth) == -math.inf
    assert output_db(None, None) == math.inf


def test_a_wrong_kernel_is_named(monkeypatch):
    swiglu = KERNEL_ENGINES["triton"].swiglu

    def nearly(gate_up, quantizer, kept=None):
        h, kept_gate_up = swiglu(gate_up, quantizer, kept)
        h.rowwise[-1] *= 1.5
        return h, kept_gate_up

    def does_not_compile(*_):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setitem(
        KERNEL_ENGINES,
        "triton",
        replace(KERNEL_ENGINES["triton"], swiglu=nearly, rope_=does_not_compile),
    )
    monkeypatch.setitem(
        lora.IMPLEMENTATIONS,
        "triton",
        replace(lora.IMPLEMENTATIONS["triton"], down=lambda x, norm, a, dropout: x @ a.t()),
    )
    assert bad_ops(ADAPTERS) == ["triton RoPE", "triton SwiGLU", "triton adapter down"]


def test_the_error_names_op_shape_versions_and_known_issue(monkeypatch):
    monkeypatch.setattr(run, "gpu_architecture", lambda device: "gfx942")
    # pytorch.org's wheel for ROCm 7.1, as in invoke-ai/InvokeAI#9297
    monkeypatch.setattr(
        run.known_issues, "installed", lambda: {"torch": "2.10.0+rocm7.1", "rocm": "7.1.25424"}
    )
    bad = [
        OpResult(f"attention backward {name}", "[2, 8192, 32/8, 128]", least=30.0)
        for name in ("dQ", "dK")
    ]
    with pytest.raises(PreflightError) as caught:
        require_sound(SelfTestResult(results=bad), CPU)
    assert (
        "attention backward dQ [2, 8192, 32/8, 128]: not finite" in caught.value.what
        and "1 more" in caught.value.what
    )
    assert (
        "gfx942 with torch 2.10.0+rocm7.1, rocm 7.1.25424" in caught.value.why
        and "ck-16-bit-atomics" in caught.value.why
    )
    assert "TORCH_ROCM_FA_PREFER_CK" in caught.value.do
    monkeypatch.undo()
    with pytest.raises(PreflightError) as caught:
        require_sound(SelfTestResult(results=bad), CPU)
    assert caught.value.why.startswith("CPU with torch")


def test_a_run_writes_what_it_found_and_does_not_start_where_it_is_wrong(tmp_path, monkeypatch):
    phases = []
    heartbeat = SimpleNamespace(write=lambda step, phase: phases.append(phase))
    reports = SimpleNamespace(heartbeat=heartbeat, events=Events(tmp_path / "events.jsonl"))
    run_self_test(run_config(), TINY, SimpleNamespace(device=CPU, world_size=1), reports)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (
        event["event"] == "self_test"
        and event["attention"] == "flash"
        and event["ops"] == 19
        and "dB" in event["worst"]
    )
    assert any("attention" in phase for phase in phases)
    monkeypatch.setattr(
        products,
        "dgrad",
        lambda g, weight: torch.zeros(g.rowwise.shape[0], weight.rowwise.shape[1]),
    )
    with pytest.raises(PreflightError, match="float32 product qkv dgrad"):
        run_self_test(run_config(), TINY, SimpleNamespace(device=CPU, world_size=1), reports)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
