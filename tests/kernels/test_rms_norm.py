"""RMSNorm with the residual add, forward and backward: in the interpreter, compiled for the four GPU targets, and on a GPU."""

from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, fp8_pointer, run_in_interpreter

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch
from common.kernels import rms_norm as module
from common.kernels.fp8 import AMAX, AMAX_ONLY, CLIPPED, INVERSE, SCALE, QuantizedTensor, Quantizer
from common.kernels.rms_norm import add_rms_norm_triton, rms_norm_backward_triton, rms_norm_reference

EPS = 1e-5
module.FORWARD_ROWS, module.WEIGHT_GRAD_BLOCKS = 32, 3  # ragged blocks for the small shapes here
SHAPES = ((37, 100), (5, 300), (16, 64), (1, 8))


class Exact(Quantizer):  # the interpreter rounds wrongly to FP8: here values are scaled and clamped, and stay in fp32
    largest = 4.0

    def __init__(self, transposed=True, two_pass=False, recording=True, scale=3.0):
        super().__init__(transposed=transposed)
        self.dtype, self.two_pass, self.recording = torch.float32, two_pass, recording
        self.state = torch.zeros(4)
        self.state[SCALE], self.state[INVERSE] = scale, 1 / scale
        self.state[AMAX], self.state[CLIPPED] = 0.25, 7.0  # were there before


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, branch, d_n, d_residual = (torch.randn(shape, generator=generator) for _ in range(4))
    weight = 1 + 0.3 * torch.randn(shape[1], generator=generator)
    if shape[0] > 4:
        x[1] = branch[1] = 0.0
        x[3] *= 1e15 if dtype == torch.float32 else 1e4
    return [tensor.to(dtype) for tensor in (x, branch, weight, d_n, d_residual)]


def check(what, ours, plain, truth):
    # Row by row: a huge row must not hide the others.
    ours, plain, truth = (t.double().reshape(-1, truth.shape[-1]) for t in (ours, plain, truth))
    allowed = 2 * (plain - truth).norm(dim=1) + 2e-7 * truth.norm(dim=1)
    worst = ((ours - truth).norm(dim=1) - allowed).max()
    assert worst <= 0, f"{what}: {worst:.2e} above twice the error of plain torch"


def plainly(x, branch, weight, d_n, d_residual):
    # Autograd in the inputs' dtype; the residual is the leaf, since both round it alike.
    residual = (x if branch is None else x + branch).detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    n = rms_norm_reference(residual, weight, EPS) if x.dtype != torch.float64 else (
        residual * (residual.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight
    )
    (n * d_n).sum().backward()
    d_x = residual.grad if d_residual is None else residual.grad + d_residual
    return n.detach(), d_x, weight.grad


for shape in SHAPES:
    for dtype in (torch.float32, torch.float16):
        x, branch, weight, d_n, d_residual = inputs(shape, dtype)
        for b, d in ((branch, d_residual), (None, None)):
            residual, operand, rstd = add_rms_norm_triton(x, b, weight, EPS, None)
            assert residual is x if b is None else torch.equal(residual, x + b), "the residual is torch's sum"
            d_x, none, d_weight = rms_norm_backward_triton(d_n, residual, rstd, weight, d, None)
            assert none is None and operand.columnwise is None and operand.scale is None
            assert operand.rowwise.dtype == d_x.dtype == d_weight.dtype == dtype and rstd.dtype == torch.float32
            plain = plainly(x, b, weight, d_n, d)
            doubles = [None if t is None else t.double() for t in (weight, d_n, d)]
            truth = plainly(residual.double(), None, *doubles)
            fp32 = plainly(residual.float(), None, *(None if t is None else t.float() for t in (weight, d_n, d)))
            torch.testing.assert_close(rstd.double(), (residual.double().pow(2).mean(-1) + EPS).rsqrt(), rtol=1e-6, atol=0)
            check(f"output {shape} {dtype}", operand.rowwise, plain[0], truth[0])
            check(f"d_x {shape} {dtype}", d_x, plain[1], truth[1])
            exact = rms_norm_backward_triton(d_n, residual, rstd, weight.float(), d, None)[2]
            check(f"d_weight {shape} {dtype}", exact, fp32[2], truth[2])  # computed in fp32, whatever the inputs
            assert torch.equal(d_weight, exact.to(dtype)), "and rounded once"
            frozen = rms_norm_backward_triton(d_n, residual, rstd, weight, d, None, weight_grad=False)
            assert frozen[2] is None and torch.equal(frozen[0], d_x)
            # The references are as exact.
            r_residual, r_operand, r_rstd = module.add_rms_norm_reference(x, b, weight, EPS, None)
            assert torch.equal(r_residual, residual) and r_operand.rowwise.dtype == dtype
            r_d_x, none, r_d_weight = module.rms_norm_backward_reference(d_n, residual, r_rstd, weight, d, None)
            assert none is None and r_d_x.dtype == r_d_weight.dtype == dtype
            check(f"reference output {shape} {dtype}", r_operand.rowwise, plain[0], truth[0])
            check(f"reference d_x {shape} {dtype}", r_d_x, plain[1], truth[1])
            r_exact = module.rms_norm_backward_reference(d_n, residual, r_rstd, weight.float(), d, None)[2]
            check(f"reference d_weight {shape} {dtype}", r_exact, fp32[2], truth[2])
            assert torch.equal(r_d_weight, r_exact.to(dtype))
            assert module.rms_norm_backward_reference(d_n, residual, r_rstd, weight, d, None, weight_grad=False)[2] is None


def verify(what, operand, value, quantizer, before):
    # `value`: fp32, exactly what the kernel quantized.
    amax = value.abs().max()
    scale = quantizer.largest / amax if quantizer.two_pass else before[SCALE]
    assert torch.equal(quantizer.state[SCALE], scale), what
    assert torch.equal(operand.rowwise, (value * scale).clamp(-quantizer.largest, quantizer.largest)), what
    assert (operand.columnwise is not None) == quantizer.transposed, what
    if quantizer.transposed:
        assert torch.equal(operand.columnwise, operand.rowwise.t()) and operand.columnwise.is_contiguous(), what
    assert operand.scale.data_ptr() == quantizer.state[INVERSE:].data_ptr(), what
    assert quantizer.state[AMAX] == (torch.maximum(before[AMAX], amax) if quantizer.recording else before[AMAX]), what
    clipped = ((value * scale).abs() > quantizer.largest).sum() if quantizer.recording and not quantizer.two_pass else 0
    assert quantizer.state[CLIPPED] == before[CLIPPED] + clipped, what
    return clipped


some_clipped = 0
for shape in SHAPES:
    x, branch, weight, d_n, d_residual = inputs(shape, torch.float32)
    residual, plain, rstd = add_rms_norm_triton(x, branch, weight, EPS, None)
    x_half, _, *half = inputs(shape, torch.float16)  # for backward: what is rounded, and what only then is quantized
    saved = [half[1], x_half, add_rms_norm_triton(x_half, None, half[0], EPS, None)[2], half[0], half[2]]
    d_x, _, d_weight = rms_norm_backward_triton(*saved, None)
    for options in ({}, {"transposed": False}, {"two_pass": True}, {"recording": False}, {"two_pass": True, "recording": False}):
        what = f"{shape} {options}"
        quantizer = Exact(**options)
        before = quantizer.state.clone()
        quantized = add_rms_norm_triton(x, branch, weight, EPS, quantizer)
        assert torch.equal(quantized[0], residual) and torch.equal(quantized[2], rstd), what
        some_clipped += verify("forward " + what, quantized[1], plain.rowwise, quantizer, before)
        quantizer = Exact(**options)
        quantized = rms_norm_backward_triton(*saved, quantizer)
        assert torch.equal(quantized[0], d_x) and torch.equal(quantized[2], d_weight), what
        some_clipped += verify("backward " + what, quantized[1], d_x.float(), quantizer, before)
        for function, arguments in (
            ("add_rms_norm", (x, branch, weight, EPS)),
            ("rms_norm_backward", (d_n, residual, rstd, weight, d_residual)),
        ):
            quantizers = [Exact(**options), Exact(**options)]
            a, b = (getattr(module, f"{function}_{name}")(*arguments, r)[1] for name, r in zip(("reference", "triton"), quantizers))
            torch.testing.assert_close(a.rowwise, b.rowwise, rtol=1e-5, atol=1e-6)
            for entry in (SCALE, INVERSE, AMAX):
                torch.testing.assert_close(quantizers[0].state[entry], quantizers[1].state[entry], rtol=1e-6, atol=0)
            assert (a.columnwise is None) == (b.columnwise is None)
assert some_clipped > 0

# For the amax alone, nothing of the operand is written.
sentinel = {}
def amax_only(quantizer, shape, like, launch):
    sentinel["operand"] = QuantizedTensor(torch.full(shape, 99.0), torch.full(shape[::-1], 99.0), quantizer.scale)
    launch(sentinel["operand"], AMAX_ONLY)
    return sentinel["operand"]
quantize_with, module.quantize_with = module.quantize_with, amax_only
for run, value in (
    (lambda quantizer: add_rms_norm_triton(x, branch, weight, EPS, quantizer), plain.rowwise),
    (lambda quantizer: rms_norm_backward_triton(*saved, quantizer), d_x.float()),
):
    quantizer = Exact()
    run(quantizer)
    assert (sentinel["operand"].rowwise == 99).all() and (sentinel["operand"].columnwise == 99).all()
    assert quantizer.state[AMAX] == max(0.25, value.abs().max()) and quantizer.state[CLIPPED] == 7 and quantizer.state[SCALE] == 3

# A NaN reaches every output of its row, and no other row.
module.quantize_with = quantize_with
x, branch, weight, d_n, d_residual = inputs((37, 100), torch.float32)
x[2, 5] = float("nan")
assert torch.equal(add_rms_norm_triton(x, branch, weight, EPS, None)[1].rowwise.isnan().any(1), torch.arange(37) == 2)
print("agreed")
"""


def test_in_the_interpreter_it_is_as_exact_as_plain_torch():
    run_in_interpreter(INTERPRETED)


def forms(arch):
    """(name, kernel, argument types, constants, warps) of every form that the two benchmarks run."""
    from common.kernels import rms_norm as module
    from common.kernels.fp8 import AMAX_ONLY, PLAIN, STORE, STORE_AND_RECORD

    fp8_modes = {"amax only": AMAX_ONLY, "store": STORE, "store and record": STORE_AND_RECORD}
    # Pre-training wants the norms' gradients; over a frozen base they do not train.
    for hidden, trained in ((4096, True), (8192, False)):
        for name, mode in ({"plain": PLAIN} | fp8_modes).items():
            state = None if mode is PLAIN else "*fp32"
            shared = {"NUM_COLUMNS": hidden, "MODE": mode.value, "LARGEST": 240.0}
            rows, columns = module._fit(module.FORWARD_ROWS, hidden)
            for branch in ("*bf16", None):
                types = {argument: "*bf16" for argument in ("x_ptr", "weight_ptr", "residual_ptr")}
                types |= {"branch_ptr": branch, "rstd_ptr": "*fp32", "state_ptr": state, "num_rows": "i32"}
                types |= {"rows_ptr": "*bf16" if mode is PLAIN else fp8_pointer(arch)}
                constants = shared | {"EPS": 1e-5, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}
                yield f"forward {hidden} {name} {branch}", module._add_rms_norm_kernel, types, constants, module.FORWARD_WARPS
            rows, columns = module._fit(module.BACKWARD_ROWS, hidden)
            types = {argument: "*bf16" for argument in ("d_n_ptr", "residual_ptr", "weight_ptr", "d_residual_ptr", "d_x_ptr")}
            types |= {"rstd_ptr": "*fp32", "d_weight_ptr": "*fp32" if trained else None, "state_ptr": state, "num_rows": "i32"}
            types |= {"rows_ptr": None if mode is PLAIN else fp8_pointer(arch, gradient=True)}
            blocks, warps, stages = 1, module.BACKWARD_WARPS, 1
            if trained:
                blocks, warps, stages = module.WEIGHT_GRAD_BLOCKS, module.WEIGHT_GRAD_WARPS, module.WEIGHT_GRAD_STAGES
            constants = shared | {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns, "BLOCKS": blocks, "STAGES": stages}
            yield f"backward {hidden} {name}", module._rms_norm_backward_kernel, types, constants, warps
    types = {"partial_ptr": "*fp32", "out_ptr": "*bf16"}
    constants = {"num_rows": 256, "num_columns": 4096, "BLOCK_ROWS": module.SUM_ROWS, "BLOCK_COLUMNS": module.SUM_COLUMNS}
    yield "weight gradient", module._rms_norm_weight_grad_kernel, types, constants, module.SUM_WARPS


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_every_form_compiles_for(target):
    for name, kernel, types, constants, warps in forms(target[1]):
        constants = constants | {argument: None for argument, kind in types.items() if kind is None}
        types = {argument: kind for argument, kind in types.items() if kind is not None}
        assert types.keys() | constants.keys() == set(kernel.arg_names), name
        check_compiles(target, kernel, types, constants, warps, name)


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_a_form_that_spills_is_found_for(target):
    rows = 8 if target[1] == "gfx950" else 4  # of 4096 numbers each, for one warp
    name, kernel, types, constants, _ = next(iter(forms(target[1])))
    constants |= {argument: None for argument, kind in types.items() if kind is None} | {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": 4096}
    with pytest.raises(AssertionError, match="spills"):
        check_compiles(target, kernel, {argument: kind for argument, kind in types.items() if kind}, constants, 1, name)


def error(value, truth):
    return ((value.double() - truth).norm() / truth.norm()).item()


def decibels(operand, truth):
    return -20 * torch.log10(torch.tensor(error(operand.rowwise.float() * operand.scale, truth)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(16384, 4096), (8192, 8192), (8195, 4096), (37, 100)], ids=str)
@pytest.mark.parametrize("form", ["plain", "rows", "both layouts"])
def test_on_the_gpu_it_is_as_exact_as_plain_torch(shape, form):
    from common.kernels import rms_norm as module
    from common.kernels.fp8 import AMAX, CLIPPED, SCALE, DelayedScaling

    torch.manual_seed(0)
    x, branch, d_n, d_residual = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    weight = (1 + 0.3 * torch.randn(shape[1], device="cuda")).bfloat16()
    scaling = DelayedScaling("delayed")
    quantizers = [None] * 4
    if form != "plain":
        quantizers = [scaling.quantizer(gradient=gradient, transposed=form != "rows") for gradient in (False, True, False, True)]
        scaling.allocate(x.device)
    for growth in (1, 2):  # in two passes; then in one, with values that saturate under the scale of the first
        weight = weight * growth
        r_x, r_n, r_rstd = module.add_rms_norm_reference(x, branch, weight, 1e-5, quantizers[0])
        residual, n, rstd = module.add_rms_norm_triton(x, branch, weight, 1e-5, quantizers[2])
        assert torch.equal(residual, r_x)
        torch.testing.assert_close(rstd, r_rstd, rtol=1e-6, atol=0)
        gradients = (d_n, residual, rstd, weight, d_residual)
        r_d_x, r_g, r_d_weight = module.rms_norm_backward_reference(*gradients, quantizers[1])
        d_x, g, d_weight = module.rms_norm_backward_triton(*gradients, quantizers[3])
        again = module.rms_norm_backward_triton(*gradients, quantizers[3])
        assert torch.equal(again[0], d_x) and torch.equal(again[2], d_weight), "the same in every run"

        leaves = [t.double().requires_grad_() for t in (residual, weight)]
        true_n = leaves[0] * (leaves[0].pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * leaves[1]
        true_n.backward(d_n.double())
        true_d_x, true_d_weight = leaves[0].grad + d_residual.double(), leaves[1].grad
        assert error(d_x, true_d_x) <= 2 * error(r_d_x, true_d_x)
        engines = (module.rms_norm_backward_triton, module.rms_norm_backward_reference)
        in_fp32, r_in_fp32 = (engine(d_n, residual, rstd, weight.float(), d_residual, None)[2] for engine in engines)
        assert error(in_fp32, true_d_weight) <= 2 * error(r_in_fp32, true_d_weight) + 1e-6
        assert error(d_weight, true_d_weight) <= 2 * error(r_d_weight, true_d_weight) + 1e-6
        if form == "plain":
            assert error(n.rowwise, true_n.detach()) <= 2 * error(r_n.rowwise, true_n.detach())
            assert g is None
            continue
        for ours, theirs, truth in ((n, r_n, true_n.detach()), (g, r_g, true_d_x)):
            other = ours.rowwise.view(torch.uint8) != theirs.rowwise.view(torch.uint8)
            assert other.sum() <= max(1, 1e-4 * other.numel())  # ties
            assert abs(decibels(ours, truth) - decibels(theirs, truth)) < 1
            assert (ours.columnwise is None) == (form == "rows")
            if ours.columnwise is not None:
                assert torch.equal(ours.columnwise.view(torch.uint8), ours.rowwise.view(torch.uint8).t())
        # Backward ran twice: it counted twice.
        for reference, ours, runs in ((quantizers[0], quantizers[2], 1), (quantizers[1], quantizers[3], 2)):
            for entry in (SCALE, AMAX):
                torch.testing.assert_close(ours.state[entry], reference.state[entry], rtol=2**-8, atol=0)
            torch.testing.assert_close(ours.state[CLIPPED], runs * reference.state[CLIPPED], rtol=1e-3, atol=2)
        assert growth == 1 or quantizers[2].state[CLIPPED] > 0
        scaling.step_done()
