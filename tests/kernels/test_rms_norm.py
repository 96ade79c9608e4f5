"""Compare the kernels for RMSNorm with residual add to plain torch and to the reference."""

import pytest
import torch
from kernel_checks import DEVICE, UnroundedQuantizer

from common.kernels import rms_norm
from common.kernels.architecture import Tile
from common.kernels.fp8 import AMAX, INVERSE, SATURATED, SCALE, QuantizedTensor
from common.kernels.quantize import AMAX_ONLY
from common.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_backward_reference,
    rms_norm_backward_triton,
    rms_norm_reference,
    rms_norm_triton,
)

EPS = 1e-5
SHAPES = [(37, 100), (5, 300), (16, 64), (1, 8)]


@pytest.fixture(autouse=True)
def ragged_tiles(monkeypatch):
    """Use several rows per tile and tiles per program, so that small shapes end within a tile."""
    forward, backward = rms_norm.add_rms_norm_settings, rms_norm.rms_norm_backward_settings

    def small_forward(arch: str, num_columns: int) -> Tile:
        tile = forward(arch, num_columns)
        return tile._replace(rows=32 * 4096 // tile.columns)

    def small_backward(arch: str, num_columns: int, weight_grad: bool) -> Tile:
        return backward(arch, num_columns, weight_grad)._replace(repeats=3 if weight_grad else 1)

    monkeypatch.setattr(rms_norm, "add_rms_norm_settings", small_forward)
    monkeypatch.setattr(rms_norm, "rms_norm_backward_settings", small_backward)


def quantizer_with(transposed=True, two_pass=False, recording=True):
    """One that has a scale and has recorded something."""
    quantizer = UnroundedQuantizer(transposed=transposed)
    quantizer.largest, quantizer.dtype = 4.0, torch.float32
    quantizer.two_pass, quantizer.recording = two_pass, recording
    quantizer.state = torch.zeros(4, device=DEVICE)
    quantizer.state[SCALE], quantizer.state[INVERSE] = 3.0, 1 / 3.0
    quantizer.state[AMAX], quantizer.state[SATURATED] = 0.25, 7.0
    return quantizer


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, branch, d_n, d_residual = (torch.randn(shape, generator=generator) for _ in range(4))
    weight = 1 + 0.3 * torch.randn(shape[1], generator=generator)
    if shape[0] > 4:
        x[1] = branch[1] = 0.0
        x[3] *= 1e15 if dtype == torch.float32 else 1e4
    return [tensor.to(DEVICE, dtype) for tensor in (x, branch, weight, d_n, d_residual)]


def cast(tensors, dtype):
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def check(what, ours, plain, truth):
    """Row by row: a huge row must not hide the others."""
    ours, plain, truth = (t.double().reshape(-1, truth.shape[-1]) for t in (ours, plain, truth))
    allowed = 2 * (plain - truth).norm(dim=1) + 2e-7 * truth.norm(dim=1)
    worst = ((ours - truth).norm(dim=1) - allowed).max()
    assert worst <= 0, f"{what}: {worst:.2e} above twice the error of plain torch"


def by_autograd(x, branch, weight, d_n, d_residual):
    """n, d_x and d_weight in the inputs' dtype.

    The residual is the leaf, since the kernel and torch round it alike.
    """
    residual = (x if branch is None else x + branch).detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    if x.dtype == torch.float64:
        n = residual * (residual.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight
    else:
        n = rms_norm_reference(residual, weight, EPS)
    (n * d_n).sum().backward()
    d_x = residual.grad if d_residual is None else residual.grad + d_residual
    return n.detach(), d_x, weight.grad


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "forward, backward",
    [
        (add_rms_norm_triton, rms_norm_backward_triton),
        (add_rms_norm_reference, rms_norm_backward_reference),
    ],
    ids=["triton", "reference"],
)
def test_unquantized_results_are_as_exact_as_plain_torch(
    forward, backward, shape, dtype, with_residual
):
    x, branch, weight, d_n, d_residual = inputs(shape, dtype)
    if not with_residual:
        branch = d_residual = None
    residual, n, rstd = forward(x, branch, weight, EPS, None)
    assert residual is x if branch is None else torch.equal(residual, x + branch), (
        "the residual is torch's sum"
    )
    d_x, none, d_weight = backward(d_n, residual, rstd, weight, d_residual, None)
    assert none is None and n.columnwise is None and n.inverse_scale is None
    assert n.rowwise.dtype == d_x.dtype == d_weight.dtype == dtype and rstd.dtype == torch.float32
    plain = by_autograd(x, branch, weight, d_n, d_residual)
    truth = by_autograd(residual.double(), None, *cast((weight, d_n, d_residual), torch.float64))
    in_fp32 = by_autograd(residual.float(), None, *cast((weight, d_n, d_residual), torch.float32))
    torch.testing.assert_close(
        rstd.double(), (residual.double().pow(2).mean(-1) + EPS).rsqrt(), rtol=1e-6, atol=0
    )
    check("n", n.rowwise, plain[0], truth[0])
    check("d_x", d_x, plain[1], truth[1])
    exact = backward(d_n, residual, rstd, weight.float(), d_residual, None)[2]
    check("d_weight", exact, in_fp32[2], truth[2])  # computed in fp32, whatever the inputs
    assert torch.equal(d_weight, exact.to(dtype)), "and rounded once"
    frozen = backward(d_n, residual, rstd, weight, d_residual, None, weight_grad=False)
    assert frozen[2] is None and torch.equal(frozen[0], d_x)


def check_quantized(quantized, value, quantizer, before):
    """`value`: fp32, exactly what the kernel quantized. Returns how many elements saturated."""
    amax = value.abs().max()
    scale = quantizer.largest / amax if quantizer.two_pass else before[SCALE]
    assert torch.equal(quantizer.state[SCALE], scale)
    assert torch.equal(
        quantized.rowwise, (value * scale).clamp(-quantizer.largest, quantizer.largest)
    )
    assert (quantized.columnwise is not None) == quantizer.transposed
    if quantizer.transposed:
        assert (
            torch.equal(quantized.columnwise, quantized.rowwise.t())
            and quantized.columnwise.is_contiguous()
        )
    assert quantized.inverse_scale.data_ptr() == quantizer.state[INVERSE:].data_ptr()
    assert quantizer.state[AMAX] == (
        torch.maximum(before[AMAX], amax) if quantizer.recording else before[AMAX]
    )
    saturated = (
        ((value * scale).abs() > quantizer.largest).sum()
        if quantizer.recording and not quantizer.two_pass
        else 0
    )
    assert quantizer.state[SATURATED] == before[SATURATED] + saturated
    return int(saturated)


OPTIONS = [
    {},
    {"transposed": False},
    {"two_pass": True},
    {"recording": False},
    {"two_pass": True, "recording": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_results_are_casts_of_the_unquantized_ones(shape, options):
    x, branch, weight, d_n, d_residual = inputs(shape, torch.float32)
    residual, plain, rstd = add_rms_norm_triton(x, branch, weight, EPS, None)
    quantizer = quantizer_with(**options)
    before = quantizer.state.clone()
    quantized = add_rms_norm_triton(x, branch, weight, EPS, quantizer)
    assert torch.equal(quantized[0], residual) and torch.equal(quantized[2], rstd)
    saturated = check_quantized(quantized[1], plain.rowwise, quantizer, before)
    assert saturated > 0 or not quantizer.recording or quantizer.two_pass or shape == (1, 8), (
        "the test must see saturation"
    )

    # For backward: what is rounded, and only then quantized.
    x_half, _, *half = inputs(shape, torch.float16)
    saved = [
        half[1],
        x_half,
        add_rms_norm_triton(x_half, None, half[0], EPS, None)[2],
        half[0],
        half[2],
    ]
    d_x, _, d_weight = rms_norm_backward_triton(*saved, None)
    quantizer = quantizer_with(**options)
    quantized = rms_norm_backward_triton(*saved, quantizer)
    assert torch.equal(quantized[0], d_x) and torch.equal(quantized[2], d_weight)
    check_quantized(quantized[1], d_x.float(), quantizer, before)

    for reference, triton, arguments in (
        (add_rms_norm_reference, add_rms_norm_triton, (x, branch, weight, EPS)),
        (
            rms_norm_backward_reference,
            rms_norm_backward_triton,
            (d_n, residual, rstd, weight, d_residual),
        ),
    ):
        quantizers = [quantizer_with(**options), quantizer_with(**options)]
        a, b = reference(*arguments, quantizers[0])[1], triton(*arguments, quantizers[1])[1]
        torch.testing.assert_close(a.rowwise, b.rowwise, rtol=1e-5, atol=1e-6)
        for entry in (SCALE, INVERSE, AMAX):
            torch.testing.assert_close(
                quantizers[0].state[entry], quantizers[1].state[entry], rtol=1e-6, atol=0
            )
        assert (a.columnwise is None) == (b.columnwise is None)


def test_the_pass_for_the_amax_writes_only_the_amax(monkeypatch):
    def amax_only(quantizer, shape, like, launch):
        out = QuantizedTensor(torch.full(shape, 99.0, device=DEVICE))
        launch(out, AMAX_ONLY)
        return out

    x, branch, weight, d_n, d_residual = inputs((37, 100), torch.float32)
    residual, plain, rstd = add_rms_norm_triton(x, branch, weight, EPS, None)
    d_x, _, _ = rms_norm_backward_triton(d_n, residual, rstd, weight, d_residual, None)
    monkeypatch.setattr(rms_norm, "quantize_with", amax_only)
    for run, value in (
        (
            lambda quantizer: add_rms_norm_triton(x, branch, weight, EPS, quantizer)[1],
            plain.rowwise,
        ),
        (
            lambda quantizer: rms_norm_backward_triton(
                d_n, residual, rstd, weight, d_residual, quantizer
            )[1],
            d_x,
        ),
    ):
        quantizer = quantizer_with()
        assert (run(quantizer).rowwise == 99).all()
        assert (
            quantizer.state[AMAX] == max(0.25, value.abs().max())
            and quantizer.state[SATURATED] == 7
            and quantizer.state[SCALE] == 3
        )


def test_a_nan_reaches_its_row_and_no_other():
    x, _, weight, *_ = inputs((37, 100), torch.float32)
    x[2, 5] = float("nan")
    assert torch.equal(
        add_rms_norm_triton(x, None, weight, EPS, None)[1].rowwise.isnan().any(1).cpu(),
        torch.arange(37) == 2,
    )


def test_the_norm_under_autograd_agrees_with_the_reference():
    """The model's head calls the norm under autograd."""
    x, _, weight, d_n, _ = inputs((6, 100), torch.float32)
    found = []
    for function in (rms_norm_reference, rms_norm_triton):
        leaves = x.view(2, 3, 100).clone().requires_grad_(), weight.clone().requires_grad_()
        n = function(*leaves, EPS)
        n.backward(d_n.view(2, 3, 100))
        found.append((n.detach(), *(leaf.grad for leaf in leaves)))
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    frozen = x.clone().requires_grad_()
    rms_norm_triton(frozen, weight, EPS).sum().backward()
    assert frozen.grad is not None and weight.grad is None
