"""SwiGLU that leaves its outputs as FP8 operands: kernels in the interpreter, compiled for four GPU targets, and on a GPU."""

from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, fp8_pointer, run_in_interpreter

from common.kernels import swiglu
from common.kernels.fp8 import AMAX_ONLY, CLIPPED, PLAIN, STORE, STORE_AND_RECORD, DelayedScaling, QuantizedTensor
from common.kernels.swiglu import (
    swiglu_operand_backward_reference,
    swiglu_operand_backward_triton,
    swiglu_operand_reference,
    swiglu_operand_triton,
)

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import itertools
import torch
from common.kernels import swiglu
from common.kernels.fp8 import AMAX, AMAX_ONLY, CLIPPED, SCALE, QuantizedTensor, Quantizer, DelayedScaling
from common.kernels.swiglu import (
    swiglu_operand_backward_reference, swiglu_operand_backward_triton, swiglu_operand_reference, swiglu_operand_triton
)

class Exact(Quantizer):  # the interpreter of triton mis-rounds e4m3: what is stored here is the scaled and clamped value itself
    largest = 2.0

def normal(*shape, seed, dtype=torch.float32, size=1.5):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)

def error(value, truth):
    return (value.double() - truth).norm() / truth.norm()

def truth_of(gate_up, d_h):
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up
    h.backward(d_h.double())
    return h.detach(), leaf.grad

def made(*kinds):
    scaling = DelayedScaling("delayed")
    scaling.quantizers = [Exact(**kind) for kind in kinds]
    scaling.allocate(torch.device("cpu"))
    for quantizer in scaling.quantizers:
        quantizer.dtype = torch.float32
    return scaling, scaling.quantizers

def check_stored(operand, values, quantizer, recorded):
    "An operand is clamp(scale * values), and its transpose; what was recorded is the largest value and the number that saturated."
    scaled = values * quantizer.state[SCALE]
    assert torch.equal(operand.rowwise, scaled.clamp(-2.0, 2.0)), "rows"
    assert (operand.columnwise is not None) == quantizer.transposed
    assert not quantizer.transposed or torch.equal(operand.columnwise, operand.rowwise.t()) and operand.columnwise.is_contiguous()
    assert torch.equal(operand.scale, 1 / quantizer.state[SCALE : SCALE + 1])
    assert quantizer.state[AMAX] == (values.abs().max() if recorded else 0.0)

# As exact as plain torch, without any scale.
for shape in ((37, 100), (64, 64), (130, 72), (1, 1)):
    for dtype in (torch.float32, torch.float16):
        gate_up, d_h = normal(shape[0], 2 * shape[1], seed=0, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
        results = []
        for forward, backward in (
            (swiglu_operand_reference, swiglu_operand_backward_reference), (swiglu_operand_triton, swiglu_operand_backward_triton)
        ):
            h, kept = forward(gate_up, None)
            assert kept is gate_up and h.columnwise is None and h.scale is None and h.rowwise.dtype == dtype
            results.append((h.rowwise, backward(d_h, kept, None).rowwise))
        for truth, plain, ours in zip(truth_of(gate_up, d_h), *results, strict=True):
            assert ours.dtype == dtype and ours.shape == truth.shape
            assert error(plain, truth) < (1e-6 if dtype == torch.float32 else 1e-3)
            assert error(ours, truth) <= 2 * error(plain, truth) + 3e-7, (shape, dtype, error(ours, truth), error(plain, truth))

# Far from zero the sigmoid is 0 or 1, never nan; nan itself stays.
gate_up = torch.tensor([[-3e4, -200.0, 200.0, 3e4, float("nan"), 2.0, 2.0, 2.0, 2.0, 2.0]])
h, _ = swiglu_operand_triton(gate_up, None)
assert h.rowwise[0, :4].tolist() == [0.0, 0.0, 400.0, 6e4] and h.rowwise[0, 4].isnan()
d = swiglu_operand_backward_triton(torch.ones(1, 5), gate_up, None).rowwise[0]
assert d.tolist()[:4] == [0.0, 0.0, 2.0, 2.0] and d.tolist()[5:9] == [0.0, 0.0, 200.0, 3e4] and d[4].isnan() and d[9].isnan()

# As operands: first step (two passes), later ones (one pass, some values beyond the headroom), evaluation (nothing recorded).
gate_up, d_h = normal(37, 200, seed=2), normal(37, 100, seed=3)
for transposed in (True, False):
    scaling, (quantizer, gradient_quantizer, stored) = made(dict(transposed=transposed), dict(transposed=transposed, gradient=True), dict(transposed=False))
    for step, size in enumerate((1.0, 1.0, 2.0, 3.0)):
        x, g = gate_up * size, d_h * size
        scaling.record(step < 3)
        h_exact, d_exact = swiglu_operand_triton(x, None)[0].rowwise, swiglu_operand_backward_triton(g, x, None).rowwise
        h, kept = swiglu_operand_triton(x, quantizer, stored)
        check_stored(h, h_exact, quantizer, step < 3)
        check_stored(kept, x, stored, step < 3)
        assert torch.equal(swiglu_operand_triton(x, quantizer)[0].rowwise, h.rowwise), "the kept copy changes nothing in h"
        d = swiglu_operand_backward_triton(g, x, gradient_quantizer)
        check_stored(d, d_exact, gradient_quantizer, step < 3)
        before = scaling.state.clone()
        reference, reference_kept = swiglu_operand_reference(x, quantizer, stored)
        assert torch.allclose(reference.rowwise, h.rowwise, rtol=1e-5, atol=1e-6) and torch.equal(reference_kept.rowwise, kept.rowwise)
        reference_d = swiglu_operand_backward_reference(g, x, gradient_quantizer)
        assert torch.allclose(reference_d.rowwise, d.rowwise, rtol=1e-5, atol=1e-6) and (reference_d.columnwise is None) != transposed
        scaling.state.copy_(before)
        beyond = ((h_exact * quantizer.state[SCALE]).abs() > 2).sum(), ((d_exact * gradient_quantizer.state[SCALE]).abs() > 2).sum()
        clipped = 2 * beyond[0], beyond[1], ((x * stored.state[SCALE]).abs() > 2).sum()  # h was made twice
        assert scaling.state[:, CLIPPED].tolist() == [float(c) if step in (1, 2) else 0.0 for c in clipped], step
        assert step != 2 or min(clipped) > 0, "the test must see saturation"
        scaling.state[:, CLIPPED] = 0.0
        if step < 3:
            scaling.step_done()

# From the kept copy: the gradient at the values that it stands for.
for dtype in (torch.float32, torch.float16):
    scaling, (stored,) = made(dict(transposed=False))
    stored.dtype = dtype
    for size in (1.0, 3.0):
        h, kept = swiglu_operand_triton(gate_up * size, None, stored)
        assert h.scale is None and kept.rowwise.dtype == dtype
        values = kept.rowwise.float() * kept.scale
        d = swiglu_operand_backward_triton(d_h, kept, None).rowwise
        assert error(d, truth_of(values, d_h)[1]) < 1e-6
        assert error(swiglu_operand_backward_reference(d_h, kept, None).rowwise, truth_of(values, d_h)[1]) < 1e-6
        scaling.step_done()
    assert values.abs().max() < gate_up.abs().max() * 3, "the second one saturated, and backward saw it so"

# Two passes of two quantizers are two launches, and however they differ both come out right.
class Counting:
    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0
    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]
kernel = swiglu._swiglu_operand_kernel
h_exact = swiglu_operand_triton(gate_up, None)[0].rowwise
for two_pass, kept_two_pass in itertools.product((None, False, True), (None, False, True)):
    scaling, (quantizer, stored) = made(dict(), dict(transposed=False))
    scaling.state[:] = torch.tensor([0.25, 4.0, 0.0, 0.0])
    quantizer.two_pass, stored.two_pass = bool(two_pass), bool(kept_two_pass)
    swiglu._swiglu_operand_kernel = Counting(kernel)
    h, kept = swiglu_operand_triton(gate_up, None if two_pass is None else quantizer, None if kept_two_pass is None else stored)
    assert swiglu._swiglu_operand_kernel.launches == 1 + bool(two_pass or kept_two_pass)
    if two_pass is None:
        assert torch.equal(h.rowwise, h_exact)
    else:
        check_stored(h, h_exact, quantizer, True)
    if kept_two_pass is None:
        assert kept is gate_up
    else:
        check_stored(kept, gate_up, stored, True)
swiglu._swiglu_operand_kernel = kernel

# Before there is a history the amax of a step is that of all its micro-batches too, and evaluation leaves no trace.
scaling, (quantizer, stored) = made(dict(), dict(transposed=False))
for recording, size in ((True, 1.0), (True, 0.5), (False, 2.0)):
    scaling.record(recording)
    h, kept = swiglu_operand_triton(gate_up * size, quantizer, stored)
    assert quantizer.state[AMAX] == h_exact.abs().max() and stored.state[AMAX] == gate_up.abs().max()
    assert torch.equal(kept.rowwise, (gate_up * size * stored.state[SCALE]).clamp(-2.0, 2.0)) and kept.rowwise.abs().max() > 1.999

# The pass for the amax writes nothing else.
_, (quantizer, stored, gradient_quantizer) = made(dict(), dict(transposed=False), dict(gradient=True))
h, kept = QuantizedTensor(torch.full((37, 100), 7.0)), torch.full((37, 200), 7.0)
kernel[(2, 1)](gate_up, h.rowwise, quantizer.state, kept, stored.state, 37, 100, AMAX_ONLY, 2.0, AMAX_ONLY, 2.0, 64, 64)
d = QuantizedTensor(torch.full((37, 200), 7.0))
swiglu._swiglu_operand_backward_kernel[(2, 1)](
    d_h, gate_up, None, d.rowwise, gradient_quantizer.state, 37, 100, AMAX_ONLY, 2.0, 64, 64
)
assert all((x == 7.0).all() for x in (h.rowwise, kept, d.rowwise))
assert quantizer.state.tolist()[2:] == [h_exact.abs().max(), 0.0] and stored.state.tolist()[2:] == [gate_up.abs().max(), 0.0]
assert gradient_quantizer.state.tolist()[2:] == [swiglu_operand_backward_triton(d_h, gate_up, None).rowwise.abs().max(), 0.0]

try:
    swiglu_operand_triton(gate_up, None, gradient_quantizer)
    raise SystemExit("a transposed copy would hold what was in memory")
except AssertionError as error:
    assert "kept copy" in str(error)
print("agreed")
"""


def test_the_kernels_in_the_interpreter():
    run_in_interpreter(INTERPRETED)


SIZES = {"num_rows": "i32"}  # ffn is a constant
FFN = 14336
MODES = [AMAX_ONLY.value, STORE.value, STORE_AND_RECORD.value]


def outputs(pointer, mode):
    """(types, constants) of an operand's pointers, as a launch in this mode passes them."""
    if mode == PLAIN.value:
        return {"rows_ptr": "*bf16"}, {"state_ptr": None, "MODE": mode, "LARGEST": 0.0}
    return {"rows_ptr": pointer, "state_ptr": "*fp32"}, {"MODE": mode, "LARGEST": 448.0}


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
@pytest.mark.parametrize("keeps", [False, True], ids=["keeps bf16", "keeps fp8"])
def test_the_forward_kernel_compiles_for(target, keeps):
    pointer = fp8_pointer(target[1])
    for mode in (*MODES, PLAIN.value):
        types, constants = outputs(pointer, mode)
        constants |= {"BLOCK_ROWS": swiglu.TILE_ROWS, "BLOCK_COLUMNS": swiglu.TILE_COLUMNS, "ffn": FFN}
        if keeps:
            types |= {"kept_ptr": pointer, "kept_state_ptr": "*fp32"}
            constants |= {"KEPT_MODE": STORE_AND_RECORD.value if mode == PLAIN.value else mode, "KEPT_LARGEST": 448.0}
        else:
            constants |= {"kept_ptr": None, "kept_state_ptr": None, "KEPT_MODE": PLAIN.value, "KEPT_LARGEST": 0.0}
        types |= {"gate_up_ptr": "*bf16"} | SIZES
        check_compiles(target, swiglu._swiglu_operand_kernel, types, constants, swiglu.TILE_WARPS, f"mode {mode}")


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
@pytest.mark.parametrize("keeps", [False, True], ids=["from bf16", "from fp8"])
def test_the_backward_kernel_compiles_for(target, keeps):
    pointer = fp8_pointer(target[1], gradient=True)
    for mode in (*MODES, PLAIN.value):
        types, constants = outputs(pointer, mode)
        constants |= {"BLOCK_ROWS": swiglu.TILE_ROWS_BACKWARD, "BLOCK_COLUMNS": swiglu.TILE_COLUMNS_BACKWARD, "ffn": FFN}
        if keeps:
            types |= {"kept_ptr": fp8_pointer(target[1]), "kept_scale_ptr": "*fp32"}
        else:
            types |= {"kept_ptr": "*bf16"}
            constants |= {"kept_scale_ptr": None}
        types |= {"d_h_ptr": "*bf16"} | SIZES
        check_compiles(target, swiglu._swiglu_operand_backward_kernel, types, constants, swiglu.TILE_WARPS_BACKWARD, f"mode {mode}")


def sqnr_db(operand: QuantizedTensor, truth: torch.Tensor) -> float:
    value = operand.rowwise[: len(truth)].double() * operand.scale
    return float(20 * torch.log10(truth.norm() / (value - truth).norm()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keeps", [False, True], ids=["keeps bf16", "keeps fp8"])
@pytest.mark.parametrize("num_rows, ffn", [(16384, 14336), (8192, 28672), (300, 208)])
def test_on_a_gpu_the_kernels_store_what_torch_casts(num_rows, ffn, keeps):
    """All bytes but 1e-4 of them: sigmoids that differ in the last bit meet a rounding boundary now and then."""
    device = torch.device("cuda")
    gate_up = torch.randn(num_rows, 2 * ffn, device=device, dtype=torch.bfloat16)
    d_h = torch.randn(num_rows, ffn, device=device, dtype=torch.bfloat16) * 1e-4
    leaf = gate_up[:256].double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    h_truth = torch.nn.functional.silu(gate) * up
    h_truth.backward(d_h[:256].double())
    truths = h_truth.detach(), leaf.grad
    results = []
    for forward, backward in (
        (swiglu_operand_reference, swiglu_operand_backward_reference),
        (swiglu_operand_triton, swiglu_operand_backward_triton),
    ):
        scaling = DelayedScaling("delayed")
        quantizer, gradient, stored = scaling.quantizer(), scaling.quantizer(gradient=True), scaling.quantizer(transposed=False)
        scaling.allocate(device)
        for step in range(2):  # two passes, then one
            h, kept = forward(gate_up, quantizer, stored if keeps else None)
            d = backward(d_h, kept, gradient)
            if step == 0:
                scaling.step_done()
        assert not scaling.state[:, CLIPPED].any()
        assert (kept is gate_up) != keeps
        results.append(((h, d), kept, scaling.state.clone()))
    (expected, kept, state), (got, kernel_kept, kernel_state) = results
    assert torch.allclose(state, kernel_state, rtol=1e-5, atol=0)
    for a, b, truth in zip(expected, got, truths, strict=True):
        assert (a.rowwise.view(torch.uint8) != b.rowwise.view(torch.uint8)).sum() <= 1e-4 * a.rowwise.numel()
        assert torch.equal(b.columnwise.view(torch.uint8), b.rowwise.view(torch.uint8).t())
        assert sqnr_db(b, truth) > sqnr_db(a, truth) - 1
    if keeps:
        assert torch.equal(kept.rowwise.view(torch.uint8), kernel_kept.rowwise.view(torch.uint8)), "gate and up are only cast"
