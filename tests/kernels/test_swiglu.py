"""Compare the SwiGLU kernels to fp64 and to the reference, for every combination of launches."""

import itertools

import pytest
import torch
from kernel_checks import DEVICE, error, normal, same_up_to_rounding, unrounded

from common.kernels import swiglu
from common.kernels.fp8 import AMAX, SATURATED, SCALE
from common.kernels.quantize import AMAX_ONLY
from common.kernels.swiglu import (
    swiglu_quantized_backward_reference,
    swiglu_quantized_backward_triton,
    swiglu_quantized_reference,
    swiglu_quantized_triton,
)

pytestmark = pytest.mark.quick

KEPT = {"transposed": False}


def gate_up_and_d_h():
    return normal(37, 200, seed=2, size=1.5), normal(37, 100, seed=3, size=1.5)


def truth_of(gate_up, d_h):
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up
    h.backward(d_h.double())
    return h.detach(), leaf.grad


def check_stored(quantized, values, quantizer, recorded):
    """clamp(scale * values), and its transpose; what was recorded is the largest value.

    `values` are from another form of the kernel, which a compiler may round otherwise.
    """
    scaled = values * quantizer.state[SCALE]
    assert same_up_to_rounding(quantized.rowwise, scaled.clamp(-2.0, 2.0))
    assert (quantized.columnwise is not None) == quantizer.transposed
    assert not quantizer.transposed or (
        torch.equal(quantized.columnwise, quantized.rowwise.t())
        and quantized.columnwise.is_contiguous()
    )
    assert torch.equal(quantized.inverse_scale, 1 / quantizer.state[SCALE : SCALE + 1])
    assert quantizer.state[AMAX] == (values.abs().max() if recorded else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(37, 100), (64, 64), (130, 72), (1, 1)], ids=str)
def test_unquantized_results_are_as_exact_as_plain_torch(shape, dtype):
    gate_up = normal(shape[0], 2 * shape[1], dtype=dtype, size=1.5)
    d_h = normal(*shape, seed=1, dtype=dtype, size=1.5)
    results = []
    for forward, backward in (
        (swiglu_quantized_reference, swiglu_quantized_backward_reference),
        (swiglu_quantized_triton, swiglu_quantized_backward_triton),
    ):
        h, kept = forward(gate_up, None)
        assert (
            kept is gate_up
            and h.columnwise is None
            and h.inverse_scale is None
            and h.rowwise.dtype == dtype
        )
        results.append((h.rowwise, backward(d_h, kept, None).rowwise))
    for truth, plain, ours in zip(truth_of(gate_up, d_h), *results, strict=True):
        assert ours.dtype == dtype and ours.shape == truth.shape
        assert error(plain, truth) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert error(ours, truth) <= 2 * error(plain, truth) + 3e-7


def test_far_from_zero_the_sigmoid_is_0_or_1_and_nan_stays_nan():
    gate_up = torch.tensor(
        [[-3e4, -200.0, 200.0, 3e4, float("nan"), 2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE
    )
    h, _ = swiglu_quantized_triton(gate_up, None)
    assert h.rowwise[0, :4].tolist() == [0.0, 0.0, 400.0, 6e4] and h.rowwise[0, 4].isnan()
    d = swiglu_quantized_backward_triton(torch.ones(1, 5, device=DEVICE), gate_up, None).rowwise[0]
    assert (
        d.tolist()[:4] == [0.0, 0.0, 2.0, 2.0]
        and d.tolist()[5:9] == [0.0, 0.0, 200.0, 3e4]
        and d[4].isnan()
        and d[9].isnan()
    )


@pytest.mark.parametrize("transposed", [True, False], ids=["both layouts", "rowwise"])
def test_quantized_results_in_first_and_later_steps_and_an_evaluation(transposed):
    """Two passes; one pass, in the third step with values beyond the headroom; nothing recorded."""
    gate_up, d_h = gate_up_and_d_h()
    scaling, (quantizer, gradient, kept_quantizer) = unrounded(
        {"transposed": transposed}, {"transposed": transposed, "gradient": True}, KEPT
    )
    for step, size in enumerate((1.0, 1.0, 2.0, 3.0)):
        x, g, recording = gate_up * size, d_h * size, step < 3
        scaling.start_pass(recording)
        h_exact = swiglu_quantized_triton(x, None)[0].rowwise
        d_exact = swiglu_quantized_backward_triton(g, x, None).rowwise
        h, kept = swiglu_quantized_triton(x, quantizer, kept_quantizer)
        check_stored(h, h_exact, quantizer, recording)
        check_stored(kept, x, kept_quantizer, recording)
        assert torch.equal(swiglu_quantized_triton(x, quantizer)[0].rowwise, h.rowwise), (
            "the kept copy changes nothing in h"
        )
        d = swiglu_quantized_backward_triton(g, x, gradient)
        check_stored(d, d_exact, gradient, recording)
        before = scaling.scales.clone()
        reference, reference_kept = swiglu_quantized_reference(x, quantizer, kept_quantizer)
        assert torch.allclose(reference.rowwise, h.rowwise, rtol=1e-5, atol=1e-6) and torch.equal(
            reference_kept.rowwise, kept.rowwise
        )
        reference_d = swiglu_quantized_backward_reference(g, x, gradient)
        assert (
            torch.allclose(reference_d.rowwise, d.rowwise, rtol=1e-5, atol=1e-6)
            and (reference_d.columnwise is None) != transposed
        )
        scaling.scales.copy_(before)
        saturated = [
            ((x * q.state[SCALE]).abs() > 2).sum()
            for x, q in ((h_exact, quantizer), (d_exact, gradient), (x, kept_quantizer))
        ]
        counts = [2 * saturated[0], saturated[1], saturated[2]]  # h was made twice
        assert scaling.scales[:, SATURATED].tolist() == [
            float(c) if step in (1, 2) else 0.0 for c in counts
        ], step
        assert step != 2 or min(counts) > 0, "the test must see saturation"
        scaling.scales[:, SATURATED] = 0.0
        if recording:
            scaling.step_done()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_computes_the_gradient_at_the_values_that_were_kept(dtype):
    gate_up, d_h = gate_up_and_d_h()
    scaling, (kept_quantizer,) = unrounded(KEPT)
    kept_quantizer.dtype = dtype
    for size in (1.0, 3.0):
        h, kept = swiglu_quantized_triton(gate_up * size, None, kept_quantizer)
        assert h.inverse_scale is None and kept.rowwise.dtype == dtype
        values = kept.rowwise.float() * kept.inverse_scale
        truth = truth_of(values, d_h)[1]
        assert error(swiglu_quantized_backward_triton(d_h, kept, None).rowwise, truth) < 1e-6
        assert error(swiglu_quantized_backward_reference(d_h, kept, None).rowwise, truth) < 1e-6
        scaling.step_done()
    assert values.abs().max() < gate_up.abs().max() * 3, (
        "the second one saturated, and backward saw it so"
    )


@pytest.mark.parametrize(
    "two_pass, kept_two_pass", list(itertools.product((None, False, True), repeat=2))
)
def test_two_quantizers_take_two_launches_at_most(monkeypatch, two_pass, kept_two_pass):
    kernel, launches = swiglu._swiglu_quantized_kernel, []

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    gate_up, _ = gate_up_and_d_h()
    h_exact = swiglu_quantized_triton(gate_up, None)[0].rowwise
    scaling, (quantizer, kept_quantizer) = unrounded({}, KEPT)
    scaling.scales[:] = torch.tensor([0.25, 4.0, 0.0, 0.0])
    quantizer.two_pass, kept_quantizer.two_pass = bool(two_pass), bool(kept_two_pass)
    monkeypatch.setattr(swiglu, "_swiglu_quantized_kernel", Counting())
    h, kept = swiglu_quantized_triton(
        gate_up,
        None if two_pass is None else quantizer,
        None if kept_two_pass is None else kept_quantizer,
    )
    assert len(launches) == 1 + bool(two_pass or kept_two_pass)
    if two_pass is None:
        assert torch.equal(h.rowwise, h_exact)
    else:
        check_stored(h, h_exact, quantizer, True)
    if kept_two_pass is None:
        assert kept is gate_up
    else:
        check_stored(kept, gate_up, kept_quantizer, True)


def test_the_first_step_records_the_amax_of_all_its_micro_batches_and_no_evaluation():
    gate_up, _ = gate_up_and_d_h()
    h_exact = swiglu_quantized_triton(gate_up, None)[0].rowwise
    scaling, (quantizer, kept_quantizer) = unrounded({}, KEPT)
    for recording, size in ((True, 1.0), (True, 0.5), (False, 2.0)):
        scaling.start_pass(recording)
        _, kept = swiglu_quantized_triton(gate_up * size, quantizer, kept_quantizer)
        assert (
            quantizer.state[AMAX] == h_exact.abs().max()
            and kept_quantizer.state[AMAX] == gate_up.abs().max()
        )
        assert torch.equal(
            kept.rowwise, (gate_up * size * kept_quantizer.state[SCALE]).clamp(-2.0, 2.0)
        )
        assert kept.rowwise.abs().max() > 1.999


def test_the_pass_for_the_amax_writes_only_the_amax():
    gate_up, d_h = gate_up_and_d_h()
    _, (quantizer, kept_quantizer, gradient) = unrounded({}, KEPT, {"gradient": True})
    h, kept, d = (torch.full((37, columns), 7.0, device=DEVICE) for columns in (100, 200, 200))
    tail = (37, 100, AMAX_ONLY, 2.0)
    swiglu._swiglu_quantized_kernel[(2, 1)](
        gate_up,
        h,
        h.t(),
        quantizer.state,
        kept,
        kept_quantizer.state,
        *tail,
        AMAX_ONLY,
        2.0,
        64,
        64,
    )
    swiglu._swiglu_quantized_backward_kernel[(2, 1)](
        d_h, gate_up, None, d, d.t(), gradient.state, *tail, 64, 64
    )
    assert all((x == 7.0).all() for x in (h, kept, d))
    for state, value in (
        (quantizer.state, swiglu_quantized_triton(gate_up, None)[0].rowwise),
        (kept_quantizer.state, gate_up),
        (gradient.state, swiglu_quantized_backward_triton(d_h, gate_up, None).rowwise),
    ):
        assert state.tolist() == [0.0, 0.0, value.abs().max(), 0.0]


def test_a_transposed_copy_of_the_input_is_refused():
    _, (transposed,) = unrounded({})
    with pytest.raises(AssertionError, match="kept copy"):
        swiglu_quantized_triton(gate_up_and_d_h()[0], None, transposed)
