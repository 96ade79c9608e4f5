"""Test FP8 scales and their history, cast weights, and the three products of a linear layer."""

import math
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import NO_AMD, sqnr_db
from kernel_checks import normal as normal_on_device
from stand_in_engines import let_run_on_a_cpu
from torch.profiler import ProfilerActivity, profile

from common import engines
from common.kernels import architecture, fp8
from common.kernels.fp8 import (
    AMAX,
    HEADROOM,
    HISTORY,
    INVERSE,
    SATURATED,
    SCALE,
    QuantizedTensor,
    Quantizer,
    dgrad,
    fp8_dtypes,
    fprop,
    quantize_weight,
    wgrad,
)
from common.kernels.quantize import quantize_reference
from common.model.linear_layers import DelayedScaling

pytestmark = [pytest.mark.quick, NO_AMD]

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def normal(*shape, seed=0):
    return normal_on_device(*shape, seed=seed).cpu()


def quantizers(count=2, **kind):
    scaling = DelayedScaling()
    made = [scaling.quantizer(**kind) for _ in range(count)]
    scaling.allocate(CPU)
    return scaling, made


def value_of(quantized: QuantizedTensor) -> torch.Tensor:
    return quantized.rowwise.float() * quantized.inverse_scale


@pytest.mark.parametrize("gradient, bound", [(False, 31.0), (True, 25.0)], ids=["e4m3", "e5m2"])
def test_a_cast_is_as_exact_as_its_format_allows(gradient, bound):
    _, (quantizer, _) = quantizers(gradient=gradient)
    # tiny, as gradients are: without a scale all would be zero.
    quantized = quantize_reference(normal(64, 96) * 1e-7, quantizer)
    assert sqnr_db(value_of(quantized), normal(64, 96) * 1e-7) > bound
    assert (
        torch.equal(quantized.columnwise.float(), quantized.rowwise.t().float())
        and quantized.columnwise.is_contiguous()
    )


@pytest.mark.parametrize(
    "arch, e4m3",
    [
        ("gfx942", torch.float8_e4m3fnuz),
        ("gfx950", torch.float8_e4m3fn),
        ("sm_90", torch.float8_e4m3fn),
    ],
)
def test_the_formats_are_those_of_the_gpu(monkeypatch, arch, e4m3):
    assert (
        fp8_dtypes(CPU) == (torch.float8_e4m3fn, torch.float8_e5m2)
        and architecture.architecture(CPU) == "sm_90"
    )
    monkeypatch.setattr(fp8, "architecture", lambda device: arch)
    assert fp8_dtypes(CPU)[0] == e4m3


def test_the_first_step_scales_by_the_tensor_itself_and_later_ones_by_history():
    scaling, (quantizer, other) = quantizers()
    sizes = (1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)
    for step, size in enumerate(sizes):
        x = normal(8, 8) / normal(8, 8).abs().max() * size
        quantize_reference(x, quantizer)
        quantize_reference(x, other)
        if step == 0:
            assert quantizer.state[SCALE] == pytest.approx(448.0), (
                "no history: the scale of this very tensor, without headroom"
            )
        scaling.step_done()
        largest = max(sizes[max(0, step - HISTORY + 1) : step + 1])
        assert quantizer.state[SCALE] == pytest.approx(448.0 / (HEADROOM * largest)), (
            f"after step {step}"
        )
        assert quantizer.state[INVERSE] == pytest.approx(1 / float(quantizer.state[SCALE]))


def test_an_evaluation_changes_no_scale_and_records_nothing():
    scaling, (quantizer, _) = quantizers()
    quantize_reference(torch.ones(2, 2), quantizer)
    scaling.step_done()
    before = scaling.scales.clone()
    scaling.start_pass(False)
    quantize_reference(torch.full((2, 2), 1e4), quantizer)
    assert torch.equal(scaling.scales, before)
    scaling.start_pass(True)
    quantize_reference(torch.full((2, 2), 1e4), quantizer)
    assert quantizer.state[AMAX] == 1e4 and quantizer.state[SATURATED] == 4


def test_the_amax_of_a_step_is_that_of_all_its_micro_batches_also_in_the_first_step():
    scaling, (quantizer, _) = quantizers()
    for size in (3.0, 1.0):
        quantize_reference(torch.full((2, 2), size), quantizer)
    scaling.step_done()
    assert quantizer.state[SCALE] == pytest.approx(448.0 / (HEADROOM * 3.0))


def test_a_weight_is_scaled_by_its_current_amax():
    scaling, (quantizer,) = quantizers(1, weight=True)
    for size in (1.0, 5.0, 0.1):
        quantize_reference(torch.full((2, 2), size), quantizer)
        assert quantizer.state[SCALE] == pytest.approx(448.0 / size)
        scaling.step_done()
        assert quantizer.state[SCALE] == pytest.approx(448.0 / size), "a step leaves it alone"


@pytest.mark.parametrize("size", [1e-7, 1.0, 300.0])
@pytest.mark.parametrize("zero_steps", [1, HISTORY + 2])
def test_a_tensor_that_begins_with_zeros_does_not_saturate_when_values_come(zero_steps, size):
    """The scale 4.48e14 of tiny values once made everything after the zeros saturate for a step."""
    scaling, (quantizer, other) = quantizers()
    for step in range(zero_steps):
        quantized = quantize_reference(torch.zeros(3, 5), quantizer)
        quantize_reference(torch.ones(3, 5), other)
        assert torch.isfinite(quantizer.state).all() and not quantized.rowwise.float().any(), (
            f"step {step}"
        )
        scaling.step_done()
        assert quantizer.state[SCALE] == quantizer.state[INVERSE] == 1.0
    quantize_reference(normal(16, 16).clamp(-1, 1) * size, quantizer)
    assert scaling.take_saturated() == 0
    scaling.step_done()
    assert (
        sqnr_db(
            value_of(quantize_reference(normal(16, 16).clamp(-1, 1) * size, quantizer)),
            normal(16, 16).clamp(-1, 1) * size,
        )
        > 30
    )


def test_zeros_after_values_leave_the_scale():
    scaling, (quantizer, _) = quantizers()
    quantize_reference(torch.ones(2, 2), quantizer)
    for _ in range(HISTORY + 2):
        scaling.step_done()
        assert quantizer.state[SCALE] == pytest.approx(448.0 / HEADROOM)
        quantize_reference(torch.zeros(2, 2), quantizer)


@pytest.mark.parametrize("bad", [INF, NAN, 3e38], ids=str)
def test_an_amax_that_gives_no_scale_leaves_the_old_one(bad):
    """3e38: its product with the headroom is beyond fp32."""
    scaling, (quantizer, other) = quantizers()
    scaling.step_done()
    for step in range(HISTORY + 2):
        x = torch.ones(4, 4)
        if step == 1:
            x[0, 0] = bad
        values = value_of(quantize_reference(x, quantizer))
        quantize_reference(torch.ones(4, 4), other)
        assert values[1:].isfinite().all() and values[0, 0].isnan() == (
            step == 1 and not math.isfinite(bad)
        ), f"step {step}"
        scaling.step_done()
        assert quantizer.state[SCALE] == pytest.approx(448.0 / HEADROOM), f"after step {step}"
        assert (
            quantizer.state[INVERSE] == pytest.approx(HEADROOM / 448.0)
            and other.state[SCALE] == quantizer.state[SCALE]
        )


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_a_first_tensor_that_is_not_finite_has_a_scale_all_the_same(bad):
    """NaN is ignored. An infinite element gives scale 1 until it leaves the history."""
    scaling, (quantizer, _) = quantizers()
    x = torch.ones(4, 4)
    x[0, 0] = bad
    values = value_of(quantize_reference(x, quantizer))
    assert values[0, 0].isnan() and (values[1:] == 1.0).all(), (
        "NaN reaches the loss, from this element alone"
    )
    for _ in range(HISTORY):
        scaling.step_done()
        assert quantizer.state[SCALE] == pytest.approx(1.0 if bad == INF else 448.0 / HEADROOM)
        quantize_reference(torch.ones(4, 4), quantizer)
    scaling.step_done()
    assert quantizer.state[SCALE] == pytest.approx(448.0 / HEADROOM)


def test_reset_is_the_state_before_the_first_step():
    scaling, (quantizer, _) = quantizers()
    fresh = (scaling.scales.clone(), scaling.history.clone(), quantizer.two_pass)
    quantize_reference(torch.ones(2, 2), quantizer)
    scaling.step_done()
    assert not quantizer.two_pass
    scaling.reset()
    assert (
        torch.equal(scaling.scales, fresh[0])
        and torch.equal(scaling.history, fresh[1])
        and quantizer.two_pass
    )


def test_a_weight_is_cast_once_per_optimizer_step():
    scaling, (quantizer,) = quantizers(1, weight=True)
    weight = torch.randn(4, 6)
    cast = quantize_weight(weight, quantizer, quantize_reference)
    assert torch.equal(cast.rowwise.float(), quantize_reference(weight, quantizer).rowwise.float())
    assert quantize_weight(weight, quantizer, quantize_reference) is cast
    for renew in (scaling.step_done, scaling.reset):
        weight *= -1
        renew()
        again = quantize_weight(weight, quantizer, quantize_reference)
        assert torch.equal(again.rowwise.float(), -cast.rowwise.float())
        cast = again
    assert quantize_weight(weight, None, quantize_reference).rowwise is weight


def test_products_match_fp32_products_of_the_stored_values():
    """Products reach 50 dB against fp32 products of the stored values (torchao's own bound).

    The error of two casts is bounded against the true products.
    """
    scaling = DelayedScaling()
    x_quantizer = scaling.quantizer()
    w_quantizer = scaling.quantizer(weight=True)
    g_quantizer = scaling.quantizer(gradient=True)
    scaling.allocate(CPU)
    x = normal(48, 64).bfloat16()
    w = normal(32, 64, seed=1).bfloat16()
    g = normal(48, 32, seed=2).bfloat16()
    n = quantize_reference(x, x_quantizer)
    weight = quantize_reference(w, w_quantizer)
    gradient = quantize_reference(g, g_quantizer)
    for ours, stored, true, bound in (
        (fprop(n, weight), value_of(n) @ value_of(weight).t(), x.float() @ w.float().t(), 27.0),
        (
            dgrad(gradient, weight),
            value_of(gradient) @ value_of(weight),
            g.float() @ w.float(),
            23.0,
        ),
        (wgrad(gradient, n), value_of(gradient).t() @ value_of(n), g.float().t() @ x.float(), 23.0),
    ):
        assert sqnr_db(ours.float(), stored) > 50 and sqnr_db(ours.float(), true) > bound
    plain = QuantizedTensor(x), QuantizedTensor(w), QuantizedTensor(g)
    assert torch.equal(fprop(plain[0], plain[1]), x @ w.t())
    assert torch.equal(dgrad(plain[2], plain[1]), g @ w) and torch.equal(
        wgrad(plain[2], plain[0]), g.t() @ x
    )


def test_what_is_saved_for_wgrad_has_one_layout_only():
    _, (quantizer, _) = quantizers()
    saved = quantize_reference(normal(8, 16), quantizer).for_wgrad()
    assert saved.rowwise.numel() == 0 and saved.columnwise.shape == (16, 8)
    plain = QuantizedTensor(normal(8, 16))
    assert plain.for_wgrad() is plain


def test_a_quantizer_has_no_memory_before_allocate():
    assert Quantizer().state.is_meta


def ranges_of(run):
    """Return the names of the ranges that `run` opens under torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return [event.name for event in profiler.events() if event.name.startswith("gemm")]


def test_an_engines_products_have_a_range_with_their_size_under_a_profiler_only(monkeypatch):
    let_run_on_a_cpu(monkeypatch, engines.PRODUCTS, "cublaslt")
    engine = SimpleNamespace(require=lambda: None, product=lambda a, b, *scales: a @ b)
    monkeypatch.setattr(engines, "module_of", lambda chosen: engine)
    x, g, weight = (QuantizedTensor(normal(*size)) for size in ((32, 16), (32, 48), (48, 16)))

    def products():
        return fprop(x, weight), dgrad(g, weight), wgrad(g, x)

    sizes = ["32 x 48 x 16", "32 x 16 x 48", "48 x 16 x 32"]
    assert ranges_of(products) == [f"gemm: {size}" for size in sizes]

    def refuse(name):
        raise AssertionError(f"a step without a profiler opens the range {name}")

    monkeypatch.setattr(fp8.profiler, "record_function", refuse)
    products()


def test_torchs_own_products_need_no_range():
    assert ranges_of(lambda: fp8.product(normal(32, 16), normal(16, 8))) == []
