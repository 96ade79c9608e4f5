"""Quantizing: the kernel against the reference, saturation, NaN and inf."""

import math

import pytest
import torch
from kernel_checks import DEVICE, normal, unrounded

from common.kernels.fp8 import AMAX, SATURATED, SCALE
from common.kernels.quantize import (
    IMPLEMENTATIONS,
    RESCALE,
    quantize_reference,
    quantize_triton,
)
from common.model.linear_layers import HEADROOM, HISTORY, DelayedScaling

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("transposed", [True, False], ids=["both layouts", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(128, 64), (300, 200), (1, 7), (37, 100)], ids=str)
def test_the_kernel_does_what_the_reference_does(shape, dtype, transposed):
    x = normal(*shape, seed=3, size=3.0, dtype=dtype)
    states = []
    for function in (quantize_reference, quantize_triton):
        scaling, (quantizer,) = unrounded({"transposed": transposed}, largest=448.0)
        results = [function(x, quantizer)]  # the first step: two passes
        scaling.step_done()
        results.append(function(x * 1.5, quantizer))  # one pass; beyond the headroom: saturates
        quantizer.recording = False
        results.append(function(x * 9, quantizer))
        states.append((results, quantizer.state.clone()))
    (expected, state), (found, kernel_state) = states
    assert torch.allclose(state, kernel_state, rtol=1e-6, atol=0)
    assert kernel_state[SATURATED] > 0 or shape == (1, 7)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a.rowwise, b.rowwise, rtol=1e-6, atol=0)
        assert (b.columnwise is None) == (not transposed) and (
            not transposed or torch.equal(b.columnwise, b.rowwise.t())
        )


def test_without_a_quantizer_the_tensor_itself_comes_back():
    x = normal(3, 4)
    for function in IMPLEMENTATIONS.values():
        plain = function(x, None)
        assert plain.rowwise is x and plain.inverse_scale is None and plain.columnwise is None


@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
def test_what_exceeds_the_history_saturates_and_is_counted(engine):
    scaling, (quantizer,) = unrounded({}, largest=448.0)
    IMPLEMENTATIONS[engine](torch.ones(4, 4, device=DEVICE), quantizer)
    scaling.step_done()
    x = torch.ones(4, 4, device=DEVICE)
    x[0, 0], x[1, 1], x[2, 2] = 100.0, -100.0, 1.2
    rowwise = IMPLEMENTATIONS[engine](x, quantizer).rowwise
    assert rowwise[0, 0] == 448.0 and rowwise[1, 1] == -448.0 and rowwise.isfinite().all()
    assert scaling.take_saturated() == 2 and scaling.take_saturated() == 0, (
        "1.2 is within the headroom"
    )
    assert quantizer.state[AMAX] == 100.0, "the next scale is chosen from it"


@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_becomes_nan_and_changes_no_other_element(
    engine, first_step, bad
):
    """A run with an infinite value must stop as with NaN, not continue with the largest number."""
    scaling, (quantizer,) = unrounded({})
    x = torch.full((3, 5), 0.5, device=DEVICE)
    if not first_step:
        IMPLEMENTATIONS[engine](x, quantizer)
        scaling.step_done()
    x[1, 2] = bad
    quantized = IMPLEMENTATIONS[engine](x, quantizer)
    values = quantized.rowwise * quantized.inverse_scale
    assert torch.equal(values.isnan(), x != 0.5)
    assert (values[x == 0.5] == 0.5).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_both_engines_follow_the_same_scales_after_a_number_that_is_not_finite(bad):
    """NaN is left out of the amax.

    An infinite value keeps the old scale until it leaves the history.
    """
    states = {}
    for name, engine in IMPLEMENTATIONS.items():
        scaling, (quantizer,) = unrounded({}, largest=448.0)
        found = states[name] = []
        for step in range(HISTORY + 3):
            x = torch.full((3, 5), 1.0 + step, device=DEVICE)
            if step == 1:
                x[1, 2] = bad
            engine(x, quantizer)
            scaling.step_done()
            found.append(quantizer.state[SCALE].item())
    assert states["triton"] == pytest.approx(states["reference"], rel=1e-6)
    largest = 2.0 if math.isnan(bad) else 1.0
    assert states["triton"][1] == pytest.approx(448.0 / (HEADROOM * largest))
    assert states["triton"][-1] == pytest.approx(448.0 / (HEADROOM * (HISTORY + 3)))


@pytest.mark.parametrize("old", [0.0, 3.0])
@pytest.mark.parametrize("amax", [0.0, 1e-30, 1.5e-12, 0.3, 7.0, 1e30, math.inf])
def test_both_engines_set_the_same_scale_bit_for_bit(amax, old):
    states = []
    for function in RESCALE.values():
        state = torch.zeros(4, device=DEVICE)
        state[SCALE], state[AMAX], state[SATURATED] = old, amax, 5.0
        function(state, 448.0)
        states.append(state)
    expected, found = states
    assert torch.equal(expected, found)
    assert found[AMAX] == 0.0 and found[SATURATED] == 5.0


@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
def test_each_cast_of_a_weight_is_scaled_by_its_own_amax(engine):
    _, (quantizer,) = unrounded({"weight": True}, largest=448.0)
    for amax in (5.0, 2.0):
        x = torch.full((4, 4), 1.0, device=DEVICE)
        x[1, 2] = -amax
        quantized = IMPLEMENTATIONS[engine](x, quantizer)
        assert quantized.rowwise[1, 2] == -448.0
        assert quantized.inverse_scale == pytest.approx(amax / 448.0)


@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
def test_inf_becomes_nan_in_real_fp8(gradient):
    scaling = DelayedScaling()
    quantizer = scaling.quantizer(gradient=gradient)
    scaling.allocate(DEVICE)
    x = torch.ones(16, 16, device=DEVICE)
    x[3, 3] = float("inf")
    quantized = quantize_reference(x, quantizer)
    assert torch.equal(quantized.rowwise.float().isnan(), x.isinf()) and torch.equal(
        quantized.columnwise.float().isnan(), x.isinf()
    )
