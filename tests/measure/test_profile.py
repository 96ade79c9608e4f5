"""Test the profile command: kernel classes, traces, and the whole command on the miniature.

The GPU traces are made by hand after those of torch's profiler. The real trace is a CPU's.
"""

import ast
import gzip
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from child_path import python_path
from page import read_page
from stand_in_engines import let_run_on_a_cpu
from torch.profiler import ProfilerActivity, profile, record_function

from common import engines
from common.errors import CheckFailed
from common.kernels import fp8
from common.measure import profile_comparison, report, time_profile
from common.measure.kernel_time import (
    CLASSES,
    TraceEvent,
    breakdown,
    class_of,
    class_of_name,
    exposed_ns,
)
from common.measure.time_profile import TRACE, document
from common.measure.trace import Roles, timeline
from common.model.shapes import ModelShape
from common.paths import ROOT
from throughput import __main__ as command

GEMM, NCCL, COPY, ADD = (
    "nvjet_tst_128x256",
    "ncclDevKernel_AllGather_RING_LL(args)",
    "Memcpy DtoD (Device -> Device)",
    "elementwise_kernel",
)


def kernel(name, start, duration, stream=7, kind="kernel", **more):
    return TraceEvent(name, start, start + duration, stream, kind, **more)


def ms_of(events, start, end):
    return rows_of(breakdown(events, start, end))


def rows_of(found):
    return {row.name: row for row in found["classes"]}


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT", "GEMM"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1", "GEMM"),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, "
            "int>>>(...)",
            "GEMM",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "GEMM"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1", "GEMM"),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>(...)", "GEMM"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_23_128x64", "attention"),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>(...)",
            "attention",
        ),
        (
            "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(...)",
            "attention",
        ),
        ("_ZN5aiter29fmha_fwd_hd128_bf16_causal_E", "attention"),
        ("attn_fwd", "attention"),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_"
            "object_at__tensor0000o41112104113",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_"
            "object_at__tensor0000o11101213",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocess"
            "FlashAttentionBackwardPreprocess_object_at__tensorptr",
            "attention",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocess"
            "FlashAttentionBackwardPostprocess_object_at__tensorptr",
            "attention",
        ),
        ("bwd_kernel_dk_dv", "attention"),
        (
            "void cunn_SoftMaxForward<8, BFloat16, float, float, LogSoftMaxForwardEpilogue>(...)",
            "cross-entropy",
        ),
        ("void fused_rope_forward_kernel<__nv_bfloat16>(...)", "RoPE"),
        (NCCL, "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., "
            "FusedAdamMathFunctor<float, 4>>(...)",
            "optimizer",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., "
            "LpNormFunctor<float, ...>>(...)",
            "optimizer",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>(...)",
            "elementwise",
        ),
        ("Memcpy HtoD (Pageable -> Device)", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "communication"),
        (
            "void at::native::(anonymous namespace)::compute_grad_weight<BFloat16, int>(...)",
            "other",
        ),
        ("cudaDeviceProperties_kernel", "other"),  # "rope" stands in it
        ("some_new_kernel", "other"),
    ],
)
def test_a_name_has_a_class(name, expected):
    assert class_of_name(name) == expected


CLASSES_OF_FILES = {
    "cross_entropy": "cross-entropy",
    "rms_norm": "norm",
    "rope": "RoPE",
    "qk_norm": "RoPE",
    "swiglu": "SwiGLU",
    "quack_swiglu": "SwiGLU",
    "quantize": "casts",
    "transpose": "casts",
    "accumulate": "communication",
    "adamw": "optimizer",
    "lora": "GEMM",
}


def test_our_kernels_are_known_by_name():
    found = 0
    for path in sorted((ROOT / "common/kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name.endswith("_kernel")
                and "triton.jit" in map(ast.unparse, node.decorator_list)
            ):
                assert path.stem in CLASSES_OF_FILES, (
                    "a new kernel file: give its kernels a class in kernel_time.NAMES, and say "
                    "here which"
                )
                assert class_of_name(node.name) == CLASSES_OF_FILES[path.stem], node.name
                found += 1
    assert found >= 5


@pytest.mark.parametrize(
    ("name", "within", "expected"),
    [
        (ADD, ("Optimizer.step#AdamW.step", "aten::mul_"), "optimizer"),
        (COPY, ("weight_shards::reduce", "aten::copy_"), "communication"),
        (GEMM, ("weight_shards::gather", "aten::mm"), "GEMM"),  # its own name says enough
        ("new_name", ("aten::linear", "aten::mm"), "GEMM"),
        ("new_name", ("aten::add",), "elementwise"),
        ("new_name", ("new_op",), "other"),
        (
            ADD,
            (
                "autograd::engine::evaluate_function: LogSoftmaxBackward0",
                "LogSoftmaxBackward0",
                "aten::mul",
            ),
            "elementwise",
        ),
        (ADD, ("aten::cross_entropy_loss", "mlperf_llama::swiglu"), "SwiGLU"),  # the nearest
    ],
)
def test_a_name_that_says_little_takes_the_class_around_its_launch(name, within, expected):
    assert class_of(kernel(name, 0, 1, within=within)) == expected


# --- instants -------------------------------------------------------------------------------------


def test_gaps_are_idle_and_communication_behind_compute_is_hidden():
    rows = ms_of(
        [kernel(GEMM, 10, 50), kernel(NCCL, 40, 50, stream=20), kernel(ADD, 100, 10)], 0, 120
    )
    assert (rows["GEMM"].exposed_ns, rows["GEMM"].hidden_ns, rows["GEMM"].launches) == (50, 0, 1)
    assert (
        rows["communication"].exposed_ns,
        rows["communication"].kernel_ns,
        rows["communication"].hidden_ns,
    ) == (30, 50, 20)
    assert (rows["elementwise"].exposed_ns, rows["idle"].exposed_ns) == (10, 30)
    assert list(rows) == list(CLASSES)


def test_compute_on_a_side_stream_comes_before_communication_and_after_the_main_stream():
    events = [kernel(GEMM, 0, 60), kernel(ADD, 40, 40, stream=9), kernel(NCCL, 0, 100, stream=20)]
    rows = ms_of(events, 0, 100)
    assert [rows[name].exposed_ns for name in ("GEMM", "elementwise", "communication", "idle")] == [
        60,
        20,
        20,
        0,
    ]
    assert rows["elementwise"].hidden_ns == 20


def test_copies_of_a_side_stream_count_where_nothing_computes():
    rows = ms_of(
        [
            kernel(GEMM, 0, 60),
            kernel(COPY, 30, 50, stream=9, kind="copy"),
            kernel(NCCL, 0, 100, stream=20),
        ],
        0,
        100,
    )
    assert [rows[name].exposed_ns for name in ("GEMM", "elementwise", "communication")] == [
        60,
        20,
        20,
    ]


def test_of_two_on_one_stream_the_one_that_started_last_has_the_instant():
    rows = ms_of([kernel(GEMM, 0, 50), kernel(ADD, 10, 20), kernel("rms_norm", 45, 20)], 0, 65)
    assert [rows[name].exposed_ns for name in ("GEMM", "elementwise", "norm")] == [25, 20, 20]
    assert rows["GEMM"].hidden_ns == 25


def test_what_reaches_beyond_the_window_counts_inside_only():
    rows = ms_of([kernel(GEMM, 0, 30), kernel(ADD, 90, 30), kernel("rms_norm", 200, 5)], 20, 100)
    assert [(rows[n].exposed_ns, rows[n].kernel_ns) for n in ("GEMM", "elementwise", "norm")] == [
        (10, 10),
        (10, 10),
        (0, 0),
    ]
    assert rows["norm"].launches == 0 and rows["idle"].exposed_ns == 60


def test_nothing_at_all_is_idle():
    assert ms_of([], 5, 25)["idle"].exposed_ns == 20


def instant_by_instant(events, kinds, start, end):
    """The rule again, for each instant by itself."""
    busy = {}
    for event, kind in zip(events, kinds, strict=True):
        if kind != "communication" and event.kind != "copy":
            busy[event.stream] = busy.get(event.stream, 0) + event.end_ns - event.start_ns
    main = max(busy, key=lambda stream: busy[stream], default=None)
    own, idle = [0] * len(events), 0
    for now in range(start, end):
        running = [i for i, event in enumerate(events) if event.start_ns <= now < event.end_ns]
        if not running:
            idle += 1
            continue

        def order(i):
            return (
                kinds[i] == "communication",
                events[i].stream != main,
                events[i].kind == "copy",
                -events[i].start_ns,
                -i,
            )

        own[min(running, key=order)] += 1
    return own, idle


@pytest.mark.parametrize("seed", range(200))
def test_every_instant_belongs_to_one(seed):
    draw = random.Random(seed)
    names = [
        (GEMM, "kernel"),
        (ADD, "kernel"),
        (NCCL, "kernel"),
        (COPY, "copy"),
        ("what", "kernel"),
    ]
    events = []
    for _ in range(draw.randrange(12)):
        name, kind = draw.choice(names)
        events.append(
            kernel(name, draw.randrange(100), draw.randrange(40), draw.randrange(3), kind)
        )
    start, end = 15, 15 + draw.randrange(1, 90)
    kinds = [class_of(event) for event in events]
    own, idle = exposed_ns(events, kinds, start, end)
    assert (own, idle) == instant_by_instant(events, kinds, start, end)
    found = breakdown(events, start, end)
    rows = rows_of(found)
    assert sum(row.exposed_ns for row in rows.values()) == end - start
    assert all(row.kernel_ns >= row.exposed_ns for name, row in rows.items() if name != "idle")
    assert sum(row.exposed_ns for row in found["products"]) == rows["GEMM"].exposed_ns
    assert sum(row.exposed_ns for row in found["others"]) == rows["other"].exposed_ns


# --- roles of products ----------------------------------------------------------------------------

# Qkv [60, 40], o [40, 40], gate_up [96, 40], down [40, 48], head [90, 40].
SHAPE = ModelShape(2, 40, 48, 4, 1, 90, 10000.0)
ROLES = Roles(SHAPE, 16, weights_train=True)


@pytest.mark.parametrize(
    ("shape", "backward", "expected"),
    [
        ((16, 60, 40), False, "qkv: 16 x 60 x 40"),
        ((16, 60, 40), True, "qkv again: 16 x 60 x 40"),
        ((16, 40, 60), True, "qkv dgrad: 16 x 40 x 60"),
        ((60, 40, 16), True, "qkv wgrad: 60 x 40 x 16"),
        ((40, 60, 16), True, "qkv wgrad: 40 x 60 x 16"),
        ((16, 40, 40), False, "o: 16 x 40 x 40"),
        ((16, 40, 40), True, "o dgrad: 16 x 40 x 40"),
        ((40, 40, 16), True, "o wgrad: 40 x 40 x 16"),
        ((16, 96, 40), False, "gate_up: 16 x 96 x 40"),
        ((16, 48, 40), True, "down dgrad: 16 x 48 x 40"),
        ((90, 40, 16), True, "head wgrad: 90 x 40 x 16"),
        ((7, 8, 9), False, "7 x 8 x 9"),
    ],
)
def test_a_shape_has_a_role(shape, backward, expected):
    assert Roles(SHAPE, 16, weights_train=True).name(shape, backward) == expected


def test_frozen_matrices_have_no_wgrad():
    roles = Roles(SHAPE, 16, weights_train=False)
    assert (
        roles.name((60, 40, 16), True) == "60 x 40 x 16"
        and roles.name((16, 40, 60), True) == "qkv dgrad: 16 x 40 x 60"
    )


def test_what_an_epilogue_computes_follows_the_role():
    assert ROLES.name((16, 96, 40), False, " + SwiGLU") == "gate_up + SwiGLU: 16 x 96 x 40"
    assert ROLES.name((16, 96, 40), True, " + SwiGLU") == "gate_up again + SwiGLU: 16 x 96 x 40"
    assert ROLES.name((7, 8, 9), False, " + SwiGLU") == "7 x 8 x 9 + SwiGLU"


def test_weights_of_equal_shape_are_all_named():
    assert (
        Roles(ModelShape(2, 40, 30, 4, 1, 90, 10000.0), 16, True).name((16, 60, 40), False)
        == "qkv or gate_up: 16 x 60 x 40"
    )


# --- traces ---------------------------------------------------------------------------------------

MAIN, BACKWARD = 100, 101  # threads


def span(cat, name, ts, dur, tid=MAIN, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def launch(correlation, ts, tid=MAIN, cat="cuda_runtime"):
    return span(cat, "cudaLaunchKernel", ts, 1, tid, correlation=correlation)


def ran(name, ts, dur, correlation, stream=7, cat="kernel"):
    return span(cat, name, ts, dur, 7, correlation=correlation, stream=stream)


def step(number, ts, dur):
    return span("user_annotation", f"ProfilerStep#{number}", ts, dur)


def gpu_trace():
    """A lead-in and two steps; the host is far ahead of the GPU. Microseconds."""
    records = [
        step(0, 0, 10),
        step(1, 10, 10),
        step(2, 20, 10),
        {"ph": "M", "name": "process_name"},
    ]
    for number, begin in enumerate((0, 10, 20)):
        dims = {"Input Dims": [[16, 40], [40, 60]]}
        records += [
            span("cpu_op", "aten::mm", begin + 1, 2, **dims),
            launch(10 * number + 1, begin + 1.5),
            launch(10 * number + 2, begin + 2.5, cat="cuda_driver"),
            span(
                "cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 4, 2, BACKWARD
            ),
            span(
                "cpu_op",
                "aten::mm",
                begin + 4.2,
                1,
                BACKWARD,
                **{"Input Dims": [[16, 60], [60, 40]]},
            ),
            launch(10 * number + 3, begin + 4.5, BACKWARD),
            span("user_annotation", "weight_shards::reduce", begin + 7, 1, BACKWARD),
            launch(10 * number + 4, begin + 7.5, BACKWARD),
        ]
        at = 100 + 50 * number
        records += [
            ran(GEMM, at, 20, 10 * number + 1),
            ran("void cublasLt::splitKreduce_kernel<32>()", at + 20, 1, 10 * number + 2),
            ran("brand_new_gpu_kernel", at + 21, 9, 10 * number + 3),
            ran(COPY, at + 30, 10, 10 * number + 4, stream=9, cat="gpu_memcpy"),
        ]
    return {"traceEvents": records}


def test_a_gpu_trace_becomes_whole_periods():
    events, start, end, steps = timeline(gpu_trace(), ROLES)
    assert (start, end, steps) == (130_000, 230_000, 2)
    found = breakdown(events, start, end)
    rows = rows_of(found)
    assert [rows[name].exposed_ns for name in ("GEMM", "communication", "idle", "other")] == [
        60_000,
        20_000,
        20_000,
        0,
    ]
    assert rows["GEMM"].launches == 6
    forward, backward = found["products"]
    assert (forward.name, forward.exposed_ns, forward.launches) == ("qkv: 16 x 60 x 40", 42_000, 4)
    assert (backward.name, backward.exposed_ns) == ("qkv dgrad: 16 x 40 x 60", 18_000)
    assert forward.flops == backward.flops == 2 * 2 * 16 * 60 * 40, (
        "once for each product, however many kernels"
    )


def test_products_that_no_torch_op_launches_have_the_shape_of_their_range():
    node = "autograd::engine::evaluate_function: FusedBlockFunctionBackward"
    records = [
        step(0, 0, 5),
        launch(1, 1),
        step(1, 10, 20),
        span("user_annotation", "gemm: 16 x 60 x 40", 11, 2),
        launch(2, 11.5),
        launch(3, 12.5, cat="cuda_driver"),
        span("user_annotation", "gemm + SwiGLU: 16 x 96 x 40", 14, 1),
        launch(4, 14.5, cat="cuda_driver"),
        launch(5, 15.5),
        span("cpu_op", node, 20, 6, BACKWARD),
        span("user_annotation", "gemm + SwiGLU: 16 x 48 x 40", 21, 1, BACKWARD),
        launch(6, 21.5, BACKWARD, cat="cuda_driver"),
        span("user_annotation", "gemm: 60 x 40 x 16", 23, 1, BACKWARD),
        launch(7, 23.5, BACKWARD),
        ran(ADD, 40, 10, 1),
        ran(GEMM, 50, 20, 2),
        ran("Memset (Device)", 70, 1, 3, cat="gpu_memset"),
        ran("kernel_cutlass_kernel_quackepiloguefrontendGemmMod_forward", 71, 30, 4),
        ran("_finish_swiglu_kernel", 101, 4, 5),
        ran("kernel_cutlass_kernel_quackepiloguefrontendGemmMod_backward", 105, 15, 6),
        ran(GEMM, 120, 10, 7),
    ]
    found = breakdown(*timeline({"traceEvents": records}, ROLES)[:3])
    products = {row.name: (row.exposed_ns, row.flops) for row in found["products"]}
    assert products == {
        "gate_up + SwiGLU: 16 x 96 x 40": (30_000, 2 * 16 * 96 * 40),
        "qkv: 16 x 60 x 40": (21_000, 2 * 16 * 60 * 40),
        "down dgrad + SwiGLU: 16 x 48 x 40": (15_000, 2 * 16 * 48 * 40),
        "qkv wgrad: 60 x 40 x 16": (10_000, 2 * 60 * 40 * 16),
    }
    assert rows_of(found)["SwiGLU"].exposed_ns == 4_000


def test_a_products_engine_is_seen_through_torchs_profiler(monkeypatch, tmp_path):
    """The stand-in computes without a torch op that is a matrix product, as an engine does."""
    let_run_on_a_cpu(monkeypatch, engines.PRODUCTS, "cublaslt")
    product = lambda a, b, *scales: (a.unsqueeze(2) * b).sum(1)  # noqa: E731
    engine = SimpleNamespace(require=lambda: None, product=product)
    monkeypatch.setattr(engines, "module_of", lambda chosen: engine)
    x, g, weight = torch.ones(16, 40), torch.ones(16, 60), torch.ones(60, 40)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for number in range(3):
            with record_function(f"ProfilerStep#{number}"):
                fp8.product(x, weight.t())
                fp8.product(g.t(), x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    products = breakdown(*timeline(trace, ROLES)[:3])["products"]
    flops = {row.name: row.flops for row in products}
    size = 2 * 16 * 60 * 40
    assert flops == {"qkv: 16 x 60 x 40": 2 * size, "qkv wgrad: 60 x 40 x 16": 2 * size}


def test_an_adapters_product_that_adds_in_place_has_a_rate():
    records = [
        step(0, 0, 10),
        step(1, 12, 88),
        span("cpu_op", "aten::addmm_", 20, 30, **{"Input Dims": [[16, 60], [16, 4], [4, 60]]}),
    ]
    (row,) = breakdown(*timeline({"traceEvents": records}, ROLES)[:3])["products"]
    assert (row.name, row.flops) == ("16 x 60 x 4", 2 * 16 * 60 * 4)


def test_what_a_step_leaves_to_a_side_stream_moves_no_border():
    """The gather of weights is slow beside the next forward pass, absent after the last step."""
    records = [*gpu_trace()["traceEvents"], launch(91, 9.8), launch(92, 29.8)]
    records += [
        ran("ncclDevKernel_AllGather", 140, 45, 91, stream=20),
        ran("ncclDevKernel_AllGather", 240, 5, 92, stream=20),
    ]
    assert timeline({"traceEvents": records}, ROLES)[1:] == (130_000, 230_000, 2)


def test_kernels_of_a_graph_stand_under_their_own_name():
    records = [
        record for record in gpu_trace()["traceEvents"] if record.get("cat") not in ("cpu_op",)
    ]
    found = breakdown(*timeline({"traceEvents": records}, ROLES)[:3])
    assert {row.name for row in found["products"]} == {
        GEMM,
        "void cublasLt::splitKreduce_kernel<32>()",
    }
    assert [row.name for row in found["others"]] == ["brand_new_gpu_kernel"]


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (lambda record: record.get("cat") != "user_annotation", "0 steps"),
        (
            lambda record: not record["name"].startswith(("ProfilerStep#1", "ProfilerStep#2")),
            "1 steps",
        ),
        (
            lambda record: record.get("cat") not in ("cuda_runtime", "cuda_driver"),
            "no kernel belongs to ProfilerStep#0",
        ),
    ],
)
def test_a_trace_without_the_facts_is_refused(keep, words):
    records = [record for record in gpu_trace()["traceEvents"] if keep(record)]
    with pytest.raises(CheckFailed, match=words):
        timeline({"traceEvents": records}, ROLES)


def test_on_a_cpu_each_op_has_the_time_it_calls_no_other():
    records = [
        step(0, 0, 10),
        step(1, 12, 88),
        span("cpu_op", "aten::linear", 20, 30),
        span("cpu_op", "aten::mm", 25, 20, **{"Input Dims": [[16, 40], [40, 60]]}),
        span("user_annotation", "weight_shards::gather", 60, 20),
        span("cpu_op", "aten::copy_", 65, 10),
        span("user_annotation", "gloo:all_reduce", 70, 20, BACKWARD),
        span("cpu_op", "aten::add", 70, 25, BACKWARD),  # of a thread that does not step
    ]
    events, start, end, steps = timeline({"traceEvents": records}, ROLES)
    assert (start, end, steps) == (10_000, 100_000, 1)
    rows = ms_of(events, start, end)
    assert rows["GEMM"].exposed_ns == 20_000 and rows["elementwise"].exposed_ns == 10_000
    assert rows["communication"].exposed_ns == 25_000 and rows["communication"].hidden_ns == 5_000
    assert rows["elementwise"].launches == 1, "linear goes on after mm, but was called once"
    assert rows["idle"].exposed_ns == 35_000 and rows["GEMM"].flops == 2 * 16 * 60 * 40


# --- the document and its table -------------------------------------------------------------------

FACTS = {
    "benchmark": "llama31_8b",
    "config": "H200_1x4",
    "precision": "bf16",
    "layers": 2,
    "world_size": 4,
    "device": "NVIDIA H200",
}
FACTS |= {"torch": "2.11", "steps": 2, "tokens_per_step_per_rank": 1000}
FACTS |= {"started": 1.7e9, "command": "./run_and_time.sh x profile", "commit": "abc"}


def table(clock_ms=0.05):
    events = [
        kernel(GEMM, 0, 60_000, label="qkv: 1 x 2 x 3", flops=12),
        kernel("<new>", 60_000, 20_000),
        kernel(NCCL, 50_000, 40_000, 20),
    ]
    return document(breakdown(events, 0, 100_000), 100_000, 2, FACTS) | {
        "clock_ms": clock_ms,
        "bench_ms": 0.04,
    }


def test_the_document_is_per_step():
    found = table()
    rows = {row["name"]: row for row in found["classes"]}
    assert found["window_ms"] == 0.05 and sum(
        row["ms"] for row in found["classes"]
    ) == pytest.approx(0.05)
    assert (rows["GEMM"]["ms"], rows["GEMM"]["share"], rows["GEMM"]["us_per_token"]) == (
        0.03,
        0.6,
        0.03,
    )
    assert (
        rows["communication"]["ms"],
        rows["communication"]["kernel_ms"],
        rows["communication"]["hidden_ms"],
    ) == (0.005, 0.02, 0.015)
    assert found["products"][0]["tflops"] == pytest.approx(12 / 60e-6 / 1e12)


def test_the_rate_of_products_leaves_out_the_time_of_those_without_a_shape():
    product = kernel(GEMM, 0, 60_000, label="qkv: 1 x 2 x 3", flops=12)
    adapter = kernel("_down_kernel", 60_000, 40_000)
    found = document(breakdown([product, adapter], 0, 100_000), 100_000, 1, FACTS)
    rows = {row["name"]: row for row in found["classes"]}
    assert rows["GEMM"]["kernel_ms"] == pytest.approx(0.1)
    assert rows["GEMM"]["tflops"] == pytest.approx(12 / 60e-6 / 1e12)
    assert [row["tflops"] for row in found["products"]] == [rows["GEMM"]["tflops"], None]


def test_the_table_names_unknown_kernels_and_says_where_the_clock_disagrees():
    shown = time_profile.text(table())
    assert (
        "<new>" in shown
        and "NOTE" not in shown
        and "qkv: 1 x 2 x 3" in shown
        and "costs +25.0%" in shown
    )
    assert "NOTE: trace" in time_profile.text(table(clock_ms=0.0506))


def test_the_page_has_a_table_of_each_part_and_bars_of_the_classes(tmp_path):
    made = table(clock_ms=0.0506)
    report.write(tmp_path, time_profile.title(made), time_profile.sections(made))
    text = read_page(tmp_path / "page.html")
    assert [text.count(f"<h2>By {title}</h2>") for title in time_profile.PARTS.values()] == [
        1,
        1,
        1,
    ]
    assert "&lt;new&gt;" in text and '<td class="n">60.0%</td>' in text and "NOTE: trace" in text
    assert "NVIDIA H200 · 2023-11-14</h1>" in text and "./run_and_time.sh x profile" in text
    assert 'class="tiles"' in text and "us_per_token" not in text
    assert text.count('<figure class="bars">') == 1 and "behind other kernels" in text


def test_two_profiles_are_compared_kernel_by_kernel(tmp_path, capsys):
    def profile(name, gemm_ns, more):
        end = gemm_ns + 40_000
        events = [kernel(GEMM, 0, gemm_ns, label="qkv: 1 x 2 x 3"), kernel(ADD, gemm_ns, 10_000)]
        made = document(breakdown([*events, *more], 0, end), end, 1, FACTS)
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(json.dumps(made | {"clock_ms": 1.0}))
        return made

    before = profile("before", 60_000, [kernel("old_rope", 70_000, 20_000)])
    after = profile("after", 90_000, [kernel("new_rope", 100_000, 5_000)])
    changes = {change.name: change for change in profile_comparison.changes(before, after)}
    assert next(iter(changes)) == "qkv: 1 x 2 x 3" and changes["old_rope"].status == "gone"
    assert changes["new_rope"].status == "new" and changes["new_rope"].kind == "RoPE"
    difference = after["window_ms"] - before["window_ms"]
    assert sum(change.ms for change in changes.values()) == pytest.approx(difference)
    folders = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert command.main(["compare", *folders, "--out", str(tmp_path / "both")]) == 0
    table = (tmp_path / "both" / "table.md").read_text()
    assert "| GEMM | qkv: 1 x 2 x 3 | 0.060 | 60.0% | 0.090 | 69.2% | +0.030 | 100% |" in table
    assert 'class="tiles"' in (tmp_path / "both" / "page.html").read_text()
    assert command.main(["compare", folders[0], "--out", str(tmp_path / "one")]) == 2
    without_tokens = {key: before[key] for key in before if key != "tokens_per_step_per_rank"}
    for spoilt in (
        {},
        without_tokens,
        before | {"window_ms": 0},
        before | {"kernels": [{"name": "x"}]},
        before | {"classes": [{"name": "x", "ms": "1"}]},
    ):
        (tmp_path / "before" / "profile.json").write_text(json.dumps(spoilt))
        assert command.main(["compare", *folders, "--out", str(tmp_path / "bad")]) == 15


# --- the command ----------------------------------------------------------------------------------


def profile_command(tmp_path, *arguments, device="cpu"):
    environment = os.environ | {
        "PYTHONPATH": python_path(ROOT),
        "LOGDIR": str(tmp_path / "results"),
    }
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "profile",
        "--device",
        device,
        *arguments,
    ]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )


def read_profile(tmp_path):
    """The one profile in LOGDIR, after what must hold of each."""
    (folder,) = (tmp_path / "results/profiles").iterdir()
    found = json.loads((folder / "profile.json").read_text())
    rows = {row["name"]: row for row in found["classes"]}
    assert list(rows) == list(CLASSES)
    assert sum(row["ms"] for row in rows.values()) == pytest.approx(found["window_ms"], rel=1e-9)
    assert found["window_ms"] == pytest.approx(found["clock_ms"], rel=0.01)
    return folder, found, rows


def test_profile_of_the_miniature(tmp_path):
    small = ["--layers", "2", "--steps", "1", "--warmup", "1", "--set", "micro_batch_size=4"]
    done = profile_command(tmp_path, *small)
    assert done.returncode == 0, done.stderr
    folder, found, rows = read_profile(tmp_path)
    page = read_page(folder / "page.html")
    assert "kernel class" in page and "./run_and_time.sh llama31_8b profile --device cpu" in page
    with gzip.open(folder / TRACE, "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 1000
    assert all(
        rows[name]["ms"] > 0
        for name in (
            "GEMM",
            "attention",
            "SwiGLU",
            "cross-entropy",
            "optimizer",
            "elementwise",
            "idle",
        )
    )
    assert rows["other"]["share"] < 0.02
    roles = {row["name"].split(":")[0] for row in found["products"]}
    assert {
        f"{role}{way}"
        for role in ("qkv", "o", "gate_up", "down", "head")
        for way in ("", " dgrad", " wgrad")
    } <= roles
    assert (found["layers"], found["steps"], found["tokens_per_step_per_rank"]) == (2, 1, 16 * 128)
    assert (
        "BENCH llama31_8b" in done.stdout
        and "PROFILE llama31_8b" in done.stdout
        and str(folder) in done.stderr
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_profile_of_the_miniature_on_a_gpu(tmp_path):
    config = ["--config", str(ROOT / "configs/llama31_8b/CPU_1x1.toml"), "--set", "gpu=H200"]
    done = profile_command(tmp_path, *config, device="cuda")
    assert done.returncode == 0, done.stderr
    _, found, rows = read_profile(tmp_path)
    assert found["device"] != "cpu"
    assert all(
        rows[name]["ms"] > 0
        for name in (
            "GEMM",
            "attention",
            "norm",
            "SwiGLU",
            "cross-entropy",
            "optimizer",
            "elementwise",
        )
    )
    assert rows["other"]["share"] < 0.02, found["others"]
    assert any(row["name"].startswith("head dgrad") and row["tflops"] for row in found["products"])


def test_a_profile_is_never_overwritten(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/profile.json").write_text("mine")
    done = profile_command(tmp_path, "--out", str(tmp_path / "old"))
    assert done.returncode == 2 and str(tmp_path / "old") in done.stderr
    assert (tmp_path / "old/profile.json").read_text() == "mine"


def test_no_steps_are_refused(tmp_path):
    done = profile_command(tmp_path, "--steps", "0", "--out", str(tmp_path / "new"))
    assert done.returncode == 2 and "--steps" in done.stderr and not (tmp_path / "new").exists()


def test_print_says_where_it_would_go(tmp_path):
    done = profile_command(tmp_path, "--print", "--out", str(tmp_path / "new"))
    assert (
        done.returncode == 0
        and "--steps 2 " in done.stdout
        and done.stdout.endswith(f"--profile {tmp_path / 'new'}\n")
        and not (tmp_path / "new").exists()
    )


def test_a_name_that_is_cut_ends_in_an_ellipsis():
    assert profile_comparison.cut("o dgrad", 7) == "o dgrad"
    assert profile_comparison.cut("head: 2048 x 128 x 2048", 21) == "head: 2048 x 128 x 2…"
