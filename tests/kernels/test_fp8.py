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
    Operand,
    Role,
    Scaling,
    dgrad,
    matmul,
    quantise_reference,
    wgrad,
)

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def sqnr_db(value, truth):
    return float(20 * torch.log10(truth.double().norm() / (value.double() - truth.double()).norm()))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def roles(recipe="delayed", count=2, **kind):
    scaling = Scaling(recipe)
    made = [scaling.role(**kind) for _ in range(count)]
    scaling.allocate(CPU)
    return scaling, made


def value_of(operand: Operand) -> torch.Tensor:
    return operand.rows.float() * operand.scale


@pytest.mark.parametrize("gradient, bound", [(False, 31.0), (True, 25.0)], ids=["e4m3", "e5m2"])
def test_a_cast_loses_what_its_format_loses(gradient, bound):
    _, (role, _) = roles(gradient=gradient)
    operand = quantise_reference(normal(64, 96) * 1e-7, role)  # tiny, as gradients are: without a scale all would be zero
    assert sqnr_db(value_of(operand), normal(64, 96) * 1e-7) > bound
    assert torch.equal(operand.columns.float(), operand.rows.t().float()) and operand.columns.is_contiguous()


def test_the_first_step_scales_by_the_tensor_itself_and_later_ones_by_history():
    scaling, (role, other) = roles()
    for step, size in enumerate((1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)):
        x = normal(8, 8) / normal(8, 8).abs().max() * size
        quantise_reference(x, role)
        quantise_reference(x, other)
        if step == 0:
            assert role.state[SCALE] == pytest.approx(448.0), "no history: current scaling, which wastes nothing"
        scaling.step_done()
        largest = max((1.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.5)[max(0, step - HISTORY + 1) : step + 1])
        assert role.state[SCALE] == pytest.approx(448.0 / (HEADROOM * largest)), f"after step {step}"
        assert role.state[INVERSE] == pytest.approx(1 / float(role.state[SCALE]))


def test_what_exceeds_the_history_saturates_and_is_counted():
    scaling, (role, _) = roles()
    quantise_reference(torch.ones(4, 4), role)
    scaling.step_done()
    x = torch.ones(4, 4)
    x[0, 0], x[1, 1], x[2, 2] = 100.0, -100.0, 1.2
    operand = quantise_reference(x, role)
    assert operand.rows.float().abs().max() == 448.0 and torch.isfinite(operand.rows.float()).all()
    assert operand.rows[1, 1].float() == -448.0
    assert scaling.take_clipped() == 2 and scaling.take_clipped() == 0, "1.2 is within the headroom"
    assert role.state[AMAX] == 100.0, "the next scale knows"


def test_current_scaling_never_saturates_and_keeps_no_history():
    scaling, (role, _) = roles("current")
    for size in (1.0, 1000.0, 1e-6):
        operand = quantise_reference(normal(8, 8) * size, role)
        assert sqnr_db(value_of(operand), normal(8, 8) * size) > 30
        scaling.step_done()
    assert scaling.take_clipped() == 0


def test_evaluation_leaves_no_trace():
    scaling, (role, _) = roles()
    quantise_reference(torch.ones(2, 2), role)
    scaling.step_done()
    before = scaling.state.clone()
    scaling.record(False)
    quantise_reference(torch.full((2, 2), 1e4), role)
    assert torch.equal(scaling.state, before)
    scaling.record(True)
    quantise_reference(torch.full((2, 2), 1e4), role)
    assert role.state[AMAX] == 1e4 and role.state[CLIPPED] == 4


def test_the_amax_of_a_step_is_that_of_all_its_micro_batches_also_in_the_first_step():
    scaling, (role, _) = roles()
    for size in (3.0, 1.0):
        quantise_reference(torch.full((2, 2), size), role)
    scaling.step_done()
    assert role.state[SCALE] == pytest.approx(448.0 / (HEADROOM * 3.0))


def test_a_weight_is_scaled_by_what_it_is_now():
    scaling = Scaling("delayed")
    role = scaling.role(weight=True)
    scaling.allocate(CPU)
    for size in (1.0, 5.0, 0.1):
        quantise_reference(torch.full((2, 2), size), role)
        assert role.state[SCALE] == pytest.approx(448.0 / size)
        scaling.step_done()


def test_zeros_have_a_finite_scale_and_leave_the_old_one():
    scaling, (role, other) = roles()
    for step in range(HISTORY + 2):
        operand = quantise_reference(torch.zeros(3, 5), role)
        quantise_reference(torch.ones(3, 5), other)
        assert torch.isfinite(role.state).all() and not operand.rows.float().any(), f"step {step}"
        scaling.step_done()


def test_nan_stays_nan():
    _, (role, _) = roles()
    x = torch.ones(2, 2)
    x[0, 0] = float("nan")
    assert torch.isnan(value_of(quantise_reference(x, role))).any(), "a run that computes nonsense must stop"


def test_reset_is_the_state_before_the_first_step():
    scaling, (role, _) = roles()
    fresh = (scaling.state.clone(), scaling.history.clone(), role.two_pass)
    quantise_reference(torch.ones(2, 2), role)
    scaling.step_done()
    assert not role.two_pass
    scaling.reset()
    assert torch.equal(scaling.state, fresh[0]) and torch.equal(scaling.history, fresh[1]) and role.two_pass


def test_products_read_what_casts_wrote():
    """>= 50 dB against fp32 products of the stored values (torchao's bound for its own), and the loss of two casts against the true ones."""
    scaling = Scaling("delayed")
    x_role, w_role, g_role = scaling.role(), scaling.role(weight=True), scaling.role(gradient=True)
    scaling.allocate(CPU)
    x, w, g = normal(48, 64).bfloat16(), normal(32, 64, seed=1).bfloat16(), normal(48, 32, seed=2).bfloat16()
    n, weight, gradient = quantise_reference(x, x_role), quantise_reference(w, w_role), quantise_reference(g, g_role)
    for ours, stored, true, bound in (
        (matmul(n, weight, True), value_of(n) @ value_of(weight).t(), x.float() @ w.float().t(), 27.0),
        (dgrad(gradient, weight, False), value_of(gradient) @ value_of(weight), g.float() @ w.float(), 23.0),
        (wgrad(gradient, n, False), value_of(gradient).t() @ value_of(n), g.float().t() @ x.float(), 23.0),
    ):
        assert sqnr_db(ours.float(), stored) > 50 and sqnr_db(ours.float(), true) > bound
    plain = Operand(x), Operand(w), Operand(g)
    assert torch.equal(matmul(plain[0], plain[1], True), x @ w.t())
    assert torch.equal(dgrad(plain[2], plain[1], True), g @ w) and torch.equal(wgrad(plain[2], plain[0], True), g.t() @ x)


def test_a_saved_operand_holds_one_layout_only():
    _, (role, _) = roles()
    saved = quantise_reference(normal(8, 16), role).for_wgrad()
    assert saved.rows.numel() == 0 and saved.columns.shape == (16, 8)
    plain = Operand(normal(8, 16))
    assert plain.for_wgrad() is plain


INTERPRETED = """
import torch
from common.kernels import fp8, transpose
from common.kernels.fp8 import Scaling, quantise_reference, quantise_triton, CLIPPED

class Exact(fp8.Role):  # the interpreter of triton mis-rounds e4m3: what is stored here is the scaled and clamped value itself
    largest = 448.0

for shape in ((128, 64), (300, 200), (1, 7), (37, 100)):
    for dtype in (torch.float32, torch.float16):
        for transposed in (True, False):
            x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
            states = []
            for function in (quantise_reference, quantise_triton):
                scaling = Scaling("delayed")
                role = Exact(transposed=transposed)
                scaling.roles.append(role)
                scaling.allocate(torch.device("cpu"))
                role.dtype = torch.float32
                results = [function(x, role)]  # two passes: current scaling
                scaling.step_done()
                results.append(function(x * 1.5, role))  # one pass; beyond the headroom: saturates
                role.recording = False
                results.append(function(x * 9, role))
                states.append((results, role.state.clone()))
            (expected, state), (got, kernel_state) = states
            assert torch.allclose(state, kernel_state, rtol=1e-6, atol=0), (shape, state, kernel_state)
            assert kernel_state[CLIPPED] > 0 or shape == (1, 7)
            for a, b in zip(expected, got):
                assert torch.allclose(a.rows, b.rows, rtol=1e-6, atol=0)
                assert (b.columns is None) == (not transposed) and (not transposed or torch.equal(b.columns, b.rows.t()))
            plain = quantise_triton(x, None)
            assert plain.rows is x and plain.scale is None
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
        check_compiles(target, fp8._quantise_kernel, signature, constants, fp8.NUM_WARPS)
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
    for function in (quantise_reference, fp8.quantise_triton):
        scaling = Scaling("delayed")
        role = scaling.role(gradient=gradient)
        scaling.allocate(device)
        function(x, role)
        scaling.step_done()
        results.append((function(x, role), role.state.clone()))
    (expected, state), (got, kernel_state) = results
    assert torch.equal(state, kernel_state)
    assert torch.equal(expected.rows.view(torch.uint8), got.rows.view(torch.uint8))
    assert torch.equal(got.columns.view(torch.uint8), got.rows.view(torch.uint8).t())


def test_a_role_of_a_model_without_memory_has_none():
    assert Role().state.is_meta
