"""FP8 operands: scales, formats, saturation, both layouts, products; kernels in the interpreter and compiled for four GPU targets."""

from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, fp8_pointer, run_in_interpreter

from common.kernels import fp8, transpose
from common.kernels.fp8 import (
    AMAX,
    CLIPPED,
    HEADROOM,
    HISTORY,
    INVERSE,
    SCALE,
    DelayedScaling,
    QuantizedTensor,
    Quantizer,
    dgrad,
    matmul,
    quantize_reference,
    quantize_weight,
    wgrad,
)

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def sqnr_db(value, truth):
    return float(20 * torch.log10(truth.double().norm() / (value.double() - truth.double()).norm()))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantizers(recipe="delayed", count=2, **kind):
    scaling = DelayedScaling(recipe)
    made = [scaling.quantizer(**kind) for _ in range(count)]
    scaling.allocate(CPU)
    return scaling, made


def value_of(operand: QuantizedTensor) -> torch.Tensor:
    return operand.rowwise.float() * operand.scale


@pytest.mark.parametrize("gradient, bound", [(False, 31.0), (True, 25.0)], ids=["e4m3", "e5m2"])
def test_a_cast_loses_what_its_format_loses(gradient, bound):
    _, (quantizer, _) = quantizers(gradient=gradient)
    operand = quantize_reference(normal(64, 96) * 1e-7, quantizer)  # tiny, as gradients are: without a scale all would be zero
    assert sqnr_db(value_of(operand), normal(64, 96) * 1e-7) > bound
    assert torch.equal(operand.columnwise.float(), operand.rowwise.t().float()) and operand.columnwise.is_contiguous()


def test_the_first_step_scales_by_the_tensor_itself_and_later_ones_by_history():
    scaling, (quantizer, other) = quantizers()
    for step, size in enumerate((1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)):
        x = normal(8, 8) / normal(8, 8).abs().max() * size
        quantize_reference(x, quantizer)
        quantize_reference(x, other)
        if step == 0:
            assert quantizer.state[SCALE] == pytest.approx(448.0), "no history: current scaling, which wastes nothing"
        scaling.step_done()
        largest = max((1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)[max(0, step - HISTORY + 1) : step + 1])
        assert quantizer.state[SCALE] == pytest.approx(448.0 / (HEADROOM * largest)), f"after step {step}"
        assert quantizer.state[INVERSE] == pytest.approx(1 / float(quantizer.state[SCALE]))


def test_what_exceeds_the_history_saturates_and_is_counted():
    scaling, (quantizer, _) = quantizers()
    quantize_reference(torch.ones(4, 4), quantizer)
    scaling.step_done()
    x = torch.ones(4, 4)
    x[0, 0], x[1, 1], x[2, 2] = 100.0, -100.0, 1.2
    operand = quantize_reference(x, quantizer)
    assert operand.rowwise.float().abs().max() == 448.0 and torch.isfinite(operand.rowwise.float()).all()
    assert operand.rowwise[1, 1].float() == -448.0
    assert scaling.take_clipped() == 2 and scaling.take_clipped() == 0, "1.2 is within the headroom"
    assert quantizer.state[AMAX] == 100.0, "the next scale knows"


def test_current_scaling_never_saturates_and_keeps_no_history():
    scaling, (quantizer, _) = quantizers("current")
    for size in (1.0, 1000.0, 1e-6):
        operand = quantize_reference(normal(8, 8) * size, quantizer)
        assert sqnr_db(value_of(operand), normal(8, 8) * size) > 30
        scaling.step_done()
    assert scaling.take_clipped() == 0


def test_evaluation_leaves_no_trace():
    scaling, (quantizer, _) = quantizers()
    quantize_reference(torch.ones(2, 2), quantizer)
    scaling.step_done()
    before = scaling.state.clone()
    scaling.record(False)
    quantize_reference(torch.full((2, 2), 1e4), quantizer)
    assert torch.equal(scaling.state, before)
    scaling.record(True)
    quantize_reference(torch.full((2, 2), 1e4), quantizer)
    assert quantizer.state[AMAX] == 1e4 and quantizer.state[CLIPPED] == 4


def test_the_amax_of_a_step_is_that_of_all_its_micro_batches_also_in_the_first_step():
    scaling, (quantizer, _) = quantizers()
    for size in (3.0, 1.0):
        quantize_reference(torch.full((2, 2), size), quantizer)
    scaling.step_done()
    assert quantizer.state[SCALE] == pytest.approx(448.0 / (HEADROOM * 3.0))


def test_a_weight_is_scaled_by_what_it_is_now():
    scaling = DelayedScaling("delayed")
    quantizer = scaling.quantizer(weight=True)
    scaling.allocate(CPU)
    for size in (1.0, 5.0, 0.1):
        quantize_reference(torch.full((2, 2), size), quantizer)
        assert quantizer.state[SCALE] == pytest.approx(448.0 / size)
        scaling.step_done()


def test_zeros_have_a_finite_scale_and_leave_the_old_one():
    scaling, (quantizer, other) = quantizers()
    for step in range(HISTORY + 2):
        operand = quantize_reference(torch.zeros(3, 5), quantizer)
        quantize_reference(torch.ones(3, 5), other)
        assert torch.isfinite(quantizer.state).all() and not operand.rowwise.float().any(), f"step {step}"
        scaling.step_done()


def test_nan_stays_nan():
    _, (quantizer, _) = quantizers()
    x = torch.ones(2, 2)
    x[0, 0] = float("nan")
    assert torch.isnan(value_of(quantize_reference(x, quantizer))).any(), "a run that computes nonsense must stop"


def test_reset_is_the_state_before_the_first_step():
    scaling, (quantizer, _) = quantizers()
    fresh = (scaling.state.clone(), scaling.history.clone(), quantizer.two_pass)
    quantize_reference(torch.ones(2, 2), quantizer)
    scaling.step_done()
    assert not quantizer.two_pass
    scaling.reset()
    assert torch.equal(scaling.state, fresh[0]) and torch.equal(scaling.history, fresh[1]) and quantizer.two_pass


def test_products_read_what_casts_wrote():
    """>= 50 dB against fp32 products of the stored values (torchao's bound for its own), and the loss of two casts against the true ones."""
    scaling = DelayedScaling("delayed")
    x_quantizer, w_role, gradient_quantizer = scaling.quantizer(), scaling.quantizer(weight=True), scaling.quantizer(gradient=True)
    scaling.allocate(CPU)
    x, w, g = normal(48, 64).bfloat16(), normal(32, 64, seed=1).bfloat16(), normal(48, 32, seed=2).bfloat16()
    n, weight, gradient = quantize_reference(x, x_quantizer), quantize_reference(w, w_role), quantize_reference(g, gradient_quantizer)
    for ours, stored, true, bound in (
        (matmul(n, weight, True), value_of(n) @ value_of(weight).t(), x.float() @ w.float().t(), 27.0),
        (dgrad(gradient, weight, False), value_of(gradient) @ value_of(weight), g.float() @ w.float(), 23.0),
        (wgrad(gradient, n, False), value_of(gradient).t() @ value_of(n), g.float().t() @ x.float(), 23.0),
    ):
        assert sqnr_db(ours.float(), stored) > 50 and sqnr_db(ours.float(), true) > bound
    plain = QuantizedTensor(x), QuantizedTensor(w), QuantizedTensor(g)
    assert torch.equal(matmul(plain[0], plain[1], True), x @ w.t())
    assert torch.equal(dgrad(plain[2], plain[1], True), g @ w) and torch.equal(wgrad(plain[2], plain[0], True), g.t() @ x)


def test_a_saved_operand_holds_one_layout_only():
    _, (quantizer, _) = quantizers()
    saved = quantize_reference(normal(8, 16), quantizer).for_wgrad()
    assert saved.rowwise.numel() == 0 and saved.columnwise.shape == (16, 8)
    plain = QuantizedTensor(normal(8, 16))
    assert plain.for_wgrad() is plain


INTERPRETED = """
import torch
from common.kernels import fp8, transpose
from common.kernels.fp8 import DelayedScaling, quantize_reference, quantize_triton, CLIPPED

class Exact(fp8.Quantizer):  # the interpreter of triton mis-rounds e4m3: what is stored here is the scaled and clamped value itself
    largest = 448.0

for shape in ((128, 64), (300, 200), (1, 7), (37, 100)):
    for dtype in (torch.float32, torch.float16):
        for transposed in (True, False):
            x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
            states = []
            for function in (quantize_reference, quantize_triton):
                scaling = DelayedScaling("delayed")
                quantizer = Exact(transposed=transposed)
                scaling.quantizers.append(quantizer)
                scaling.allocate(torch.device("cpu"))
                quantizer.dtype = torch.float32
                results = [function(x, quantizer)]  # two passes: current scaling
                scaling.step_done()
                results.append(function(x * 1.5, quantizer))  # one pass; beyond the headroom: saturates
                quantizer.recording = False
                results.append(function(x * 9, quantizer))
                states.append((results, quantizer.state.clone()))
            (expected, state), (got, kernel_state) = states
            assert torch.allclose(state, kernel_state, rtol=1e-6, atol=0), (shape, state, kernel_state)
            assert kernel_state[CLIPPED] > 0 or shape == (1, 7)
            for a, b in zip(expected, got):
                assert torch.allclose(a.rowwise, b.rowwise, rtol=1e-6, atol=0)
                assert (b.columnwise is None) == (not transposed) and (not transposed or torch.equal(b.columnwise, b.rowwise.t()))
            plain = quantize_triton(x, None)
            assert plain.rowwise is x and plain.scale is None
print("agreed")
"""


def test_the_kernel_in_the_interpreter_does_what_the_reference_does():
    run_in_interpreter(INTERPRETED)


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
def test_the_kernel_compiles_for(target, gradient):
    stored = fp8_pointer(target[1], gradient)
    signature = {"x_ptr": "*bf16", "rows_ptr": stored, "state_ptr": "*fp32", "num_rows": "i32"}
    for mode in (fp8.AMAX_ONLY, fp8.STORE, fp8.STORE_AND_RECORD):
        constants = {"MODE": mode.value, "LARGEST": 448.0, "num_columns": 4096}
        constants |= {"BLOCK_ROWS": fp8.BLOCK_ROWS, "BLOCK_COLUMNS": fp8.BLOCK_COLUMNS}
        check_compiles(target, fp8._quantize_kernel, signature, constants, fp8.NUM_WARPS)
    signature = {"x_ptr": "*i32", "out_ptr": "*i32", "row_words": "i32", "column_words": "i32"}
    check_compiles(target, transpose._transpose_kernel, signature, {"BLOCK": transpose.BLOCK}, transpose.NUM_WARPS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16384, 4096), (8192, 28672), (300, 208)], ids=str)
def test_on_a_gpu_the_kernel_casts_as_torch_does(shape, gradient):
    device = torch.device("cuda")
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    results = []
    for function in (quantize_reference, fp8.quantize_triton):
        scaling = DelayedScaling("delayed")
        quantizer = scaling.quantizer(gradient=gradient)
        scaling.allocate(device)
        function(x, quantizer)
        scaling.step_done()
        results.append((function(x, quantizer), quantizer.state.clone()))
    (expected, state), (got, kernel_state) = results
    assert torch.equal(state, kernel_state)
    assert torch.equal(expected.rowwise.view(torch.uint8), got.rowwise.view(torch.uint8))
    assert torch.equal(got.columnwise.view(torch.uint8), got.rowwise.view(torch.uint8).t())


def test_a_role_of_a_model_without_memory_has_none():
    assert Quantizer().state.is_meta


def test_a_weight_is_cast_once_per_optimizer_step():
    scaling = DelayedScaling("delayed")
    quantizer = scaling.quantizer(weight=True)
    scaling.allocate(torch.device("cpu"))
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
