"""The adapter's kernels against an fp64 truth in the interpreter, their dropout mask, and compiled for the four GPU targets."""

from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, run_in_interpreter

from common.kernels import lora
from common.kernels.lora import Dropout, keep_mask

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch
from common.kernels.fp8 import DelayedScaling, quantize_triton
from common.kernels.lora import ENGINES, Dropout, Norm, keep_mask

def error(value, truth):
    return float((value.double() - truth).norm() / truth.norm())

def check(what, ours, plain, truth):
    assert error(ours, truth) <= 2 * error(plain, truth) + 1e-6, f"{what}: {error(ours, truth):.2e}, plain torch {error(plain, truth):.2e}"

reference, kernels = ENGINES["reference"], ENGINES["triton"]
# Rows and columns that fill no tile; rank 4 is padded to 16, and 24 to 32. The last ones need several row parts of several tiles.
for M, K, N, R, dtype in ((70, 1100, 300, 16, torch.float32), (33, 48, 40, 4, torch.float16), (1, 8, 8, 24, torch.float32), (1100, 40, 24, 16, torch.float16)):
    random = torch.Generator().manual_seed(M)
    x, g, d_n, a, b, weight = (torch.randn(s, generator=random).to(dtype) for s in ((M, K), (M, N), (M, K), (R, K), (N, R), (K,)))
    rstd = torch.rand(M, generator=random) + 0.5
    for norm in (None, Norm(rstd, weight)):
        for dropout in (None, Dropout(torch.tensor([2**40 + 77]), 0.1)):
            case = f"{(M, K, N, R)} {dtype} norm {norm is not None} dropout {dropout is not None}"
            keep = keep_mask(M, K, dropout).double() / (1 - round(0.1 * 65536) / 65536) if dropout else torch.ones(M, K).double()
            n = x.double() * (rstd[:, None].double() * weight.double() if norm else 1)
            t_true = (n * keep) @ a.double().t()
            t_plain, t_ours = reference.down(x, norm, a, dropout), kernels.down(x, norm, a, dropout)
            assert t_ours.dtype == dtype
            check("T " + case, t_ours, t_plain, t_true)
            factor = 2.0 / (1 - round(0.1 * 65536) / 65536) if dropout else 2.0
            p_true, d_b_true = g.double() @ b.double() * factor, 2 * g.double().t() @ t_plain.double()
            p_plain, d_b_plain, _ = reference.up_backward(g, t_plain, b, 2.0, dropout, None)
            p_ours, d_b_ours, operand = kernels.up_backward(g, t_plain, b, 2.0, dropout, None)
            assert operand.rowwise is g and operand.scale is None
            check("P " + case, p_ours, p_plain, p_true)
            check("dB " + case, d_b_ours, d_b_plain, d_b_true)
            mask = (keep != 0).double()
            d_a_true = p_plain.double().t() @ (n * mask)
            d_n_true = d_n.double() + (p_plain.double() @ a.double()) * mask
            d_n_plain, d_n_ours = d_n.clone(), d_n.clone()
            d_a_plain = reference.down_backward_(d_n_plain, x, norm, p_plain, a, dropout)
            d_a_ours = kernels.down_backward_(d_n_ours, x, norm, p_plain, a, dropout)
            check("dA " + case, d_a_ours, d_a_plain, d_a_true)
            check("d_n " + case, d_n_ours, d_n_plain, d_n_true)
            assert d_a_ours.dtype == d_b_ours.dtype == torch.float32
            assert torch.equal(d_a_ours, kernels.down_backward_(d_n.clone(), x, norm, p_plain, a, dropout)), "sums in a fixed order"

# The kernel's own mask, element for element: T P^T A adds exactly 1 wherever an element stays.
dropout = Dropout(torch.tensor([123456789123]), 0.3)
shown = torch.zeros(45, 1003)
kernels.down_backward_(shown, torch.zeros(45, 1003), None, torch.ones(45, 1), torch.ones(1, 1003), dropout)
assert torch.equal(shown, keep_mask(45, 1003, dropout).float())

# g in FP8 on the way: the same bytes, scales and counts as the cast in a kernel of its own, in both recipes.
x = torch.randn(70, 300, generator=random)
t, b = torch.randn(70, 16, generator=random), torch.randn(300, 16, generator=random)
for recipe in ("current", "delayed"):
    scaling = DelayedScaling(recipe)
    fused, alone = (scaling.quantizer(gradient=True, transposed=False) for _ in range(2))
    scaling.allocate(torch.device("cpu"))
    for step in range(3):
        g = x * (1 + step)  # the second step of `delayed` saturates
        p, d_b, operand = kernels.up_backward(g, t, b, 2.0, None, fused)
        expected = quantize_triton(g, alone)
        assert torch.equal(operand.rowwise.view(torch.uint8), expected.rowwise.view(torch.uint8)) and operand.columnwise is None
        assert torch.equal(fused.state, alone.state) and operand.scale.data_ptr() == fused.scale.data_ptr()
        plain = reference.up_backward(g, t, b, 2.0, None, None)
        assert torch.allclose(p, plain[0], atol=1e-3) and torch.allclose(d_b, plain[1], atol=1e-3), "two passes add nothing twice"
        scaling.step_done()
    assert (fused.state[3] > 0) == (recipe == "delayed")
print("agreed")
"""


def test_kernels_in_the_interpreter_are_as_exact_as_plain_torch():
    run_in_interpreter(INTERPRETED)


def test_the_mask_drops_the_share_it_should_everywhere():
    rows, columns, p = 512, 1024, 0.1
    seed = torch.tensor([2**62 + 5])
    mask = keep_mask(rows, columns, Dropout(seed, p))
    assert mask.shape == (rows, columns) and mask.dtype == torch.bool
    dropped = (~mask).double()
    for name, share, count in (
        ("all", dropped.mean(), rows * columns),
        ("of each of the 8 numbers of a call", dropped.view(rows, -1, 8).mean((0, 1)), rows * columns / 8),
        ("in each row", dropped.mean(1), columns),
        ("in each column", dropped.mean(0), rows),
    ):
        # 5 sigma: of 1024 columns one in 3 million would be so far off
        assert ((share - p).abs() < 5 * (p * (1 - p) / count) ** 0.5).all(), name
    # Neighbours in both directions, and other seeds (either half of the key), are independent: both dropped with p^2.
    others = [keep_mask(rows, columns, Dropout(seed + step, p)) for step in (1, 2**32)]
    pairs = [(mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask[:, 2:], mask[:, :-2]), *((mask, other) for other in others)]
    for first, second in pairs:
        assert float((~first & ~second).double().mean()) == pytest.approx(p * p, rel=0.1)


def test_the_mask_belongs_to_row_and_column_not_to_the_shape():
    dropout = Dropout(torch.tensor([9]), 0.25)
    assert torch.equal(keep_mask(64, 96, dropout)[:5, :13], keep_mask(5, 13, dropout))
    assert dropout.threshold == 16384 and dropout.kept == 0.75


def test_philox_is_the_published_one():
    """Known answer of Philox4x32-7 (Random123's kat_vectors): counter and key zero. 5f6fb709 0d893f64 4f121f81 4f730a48."""
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    numbers = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    seed = torch.tensor([0])
    for column, number in enumerate(numbers):
        for threshold, stays in ((number, True), (number + 1, False)):
            dropout = Dropout(seed, threshold / lora.STEPS)
            assert dropout.threshold == threshold
            assert bool(keep_mask(1, 8, dropout)[0, column]) is stays


def tile_constants(tile):
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages}


def shipped_kernels(arch, rank=16):
    fp8 = "*fp8e5b16" if arch == "gfx942" else "*fp8e5"  # Triton's words for e5m2 FNUZ and OCP
    rows = {"num_rows": "i32", "num_columns": "i32"}
    for normed in (True, False):
        norm = {"rstd_ptr": "*fp32", "weight_ptr": "*bf16"}
        common = {"RANK": rank, "BLOCK_RANK": 16, "THRESHOLD": 6554} | ({} if normed else dict.fromkeys(norm))
        norm = norm if normed else {}
        tile = lora.DOWN
        pointers = {"x_ptr": "*bf16", "a_ptr": "*bf16", "seed_ptr": "*i64", "partial_ptr": "*fp32", "columns_each": "i32", "factor": "fp32"}
        yield "down", lora._down_kernel, pointers | norm | rows, common | tile_constants(tile), tile.warps
        tile = lora.DOWN_BACKWARD
        pointers = {"d_n_ptr": "*bf16", "x_ptr": "*bf16", "p_ptr": "*bf16", "a_ptr": "*bf16", "seed_ptr": "*i64", "partial_ptr": "*fp32"}
        sizes = rows | {"rows_each": "i32"}
        constants = common | tile_constants(tile)
        yield "down backward", lora._down_backward_kernel, pointers | norm | sizes, constants, tile.warps
    tile = lora.UP_BACKWARD
    for mode in (2, 3):  # STORE_AND_RECORD, the one that does everything, and PLAIN
        pointers = {"g_ptr": "*bf16", "t_ptr": "*bf16", "b_ptr": "*bf16", "p_partial_ptr": "*fp32", "b_partial_ptr": "*fp32"}
        sizes = rows | {"rows_each": "i32", "p_factor": "fp32", "b_factor": "fp32"}
        out = {} if mode == 3 else {"rows_ptr": fp8, "state_ptr": "*fp32"}
        none = {"rows_ptr": None, "state_ptr": None} if mode == 3 else {}
        constants = none | {"MODE": mode, "LARGEST": 57344.0, "RANK": rank, "BLOCK_RANK": 16} | tile_constants(tile)
        yield f"up backward, mode {mode}", lora._up_backward_kernel, pointers | out | sizes, constants, tile.warps


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_every_kernel_compiles_for(target):
    for name, kernel, types, constants, warps in shipped_kernels(target[1]):
        check_compiles(target, kernel, types, constants, warps, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("normed", [False, True], ids=["o", "qkv"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_on_a_gpu_the_kernels_are_as_exact_as_plain_torch(normed, p):
    """At the 70B's sizes: error against fp64 within twice that of plain torch in bf16, with the same mask; FP8 rows bit for bit."""
    from common.kernels.fp8 import DelayedScaling

    generator = torch.Generator("cuda").manual_seed(0)
    rows, inputs, outputs, rank = 8192, 8192, 10240 if normed else 8192, 16

    def normal(*shape, std=1.0):
        return (std * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()

    x, a, b, g, d_n = (
        normal(rows, inputs),
        normal(rank, inputs, std=0.01),
        normal(outputs, rank),
        normal(rows, outputs),
        normal(rows, inputs),
    )
    norm = lora.Norm(torch.rand(rows, generator=generator, device="cuda") + 0.5, normal(inputs)) if normed else None
    dropout = Dropout(torch.tensor([2**40 + 7], device="cuda"), p) if p else None
    found = {}
    for name, cast in (("reference", torch.bfloat16), ("triton", torch.bfloat16), ("truth", torch.float64)):
        engine = lora.ENGINES["triton" if name == "triton" else "reference"]
        scaling = DelayedScaling("delayed")
        quantizer = scaling.quantizer(gradient=True, transposed=False)
        scaling.allocate(torch.device("cuda"))
        normal_form = lora.Norm(norm.rstd, norm.weight.to(cast)) if norm else None
        t = engine.down(x.to(cast), normal_form, a.to(cast), dropout)
        p_out, d_b, operand = engine.up_backward(g.to(cast), t, b.to(cast), 2.0, dropout, None if name == "truth" else quantizer)
        d_input = d_n.to(cast, copy=True)
        d_a = engine.down_backward_(d_input, x.to(cast), normal_form, p_out, a.to(cast), dropout)
        found[name] = {"t": t, "p": p_out, "d_b": d_b, "d_n": d_input, "d_a": d_a}
        found[name + " rows"] = operand.rowwise
    assert torch.equal(found["reference rows"].view(torch.uint8), found["triton rows"].view(torch.uint8))
    for name, truth in found["truth"].items():
        errors = [float((found[way][name].double() - truth).norm() / truth.norm()) for way in ("triton", "reference")]
        assert errors[0] <= 2 * errors[1] + 1e-6, f"{name}: {errors[0]:.2e}, plain torch {errors[1]:.2e}"
