"""Every kernel against an fp32 truth in the interpreter, and compiled for the four GPU targets, on a machine without any GPU."""

import ast
from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, fp8_pointer, run_in_interpreter

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch
from common.kernels.swiglu import swiglu_reference, swiglu_triton

def error(value, truth):
    return (value.double() - truth).norm() / truth.norm()

for shape in ((2, 3, 2 * 1024), (5, 2 * 40), (1, 1, 2 * 1500)):
    for dtype in (torch.float32, torch.float16):  # not bfloat16: the interpreter of triton 3.6 truncates there instead of rounding
        generator = torch.Generator().manual_seed(0)
        x, d_out = torch.randn(shape, generator=generator).to(dtype), None
        results = {}
        for name, function, cast in (("truth", swiglu_reference, torch.float32), ("torch", swiglu_reference, dtype), ("triton", swiglu_triton, dtype)):
            leaf = x.to(cast, copy=True).requires_grad_()
            y = function(leaf)
            d_out = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            y.backward(d_out.to(cast))
            results[name] = (y.detach().double(), leaf.grad.double())
        for index, what in enumerate(("output", "gradient")):
            truth = results["truth"][index]
            ours, plain = error(results["triton"][index], truth), error(results["torch"][index], truth)
            assert ours <= 2 * plain + 1e-6, f"{what} {shape} {dtype}: error {ours:.2e}, plain torch {plain:.2e}"

from common.kernels import swiglu
from common.kernels.swiglu import _swiglu_fp8_backward, quantize_rows_reference, swiglu_fp8_reference

x = torch.randn(6, 2 * 700, generator=torch.Generator().manual_seed(2)) * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 0.0, 1.0])[:, None]
d_out = torch.randn(6, 700, generator=torch.Generator().manual_seed(3))
stored, scale = quantize_rows_reference(x)
# The interpreter of triton 3.6 loses a carry when it rounds to e4m3 (127 becomes 64): here the copy is kept in fp32, unrounded.
# What the hardware makes of it is tested on a GPU, below.
out, kernel_stored, kernel_scale = x.new_empty(6, 700), torch.empty_like(x), torch.empty_like(scale)
swiglu._swiglu_forward_fp8_kernel[(6,)](x, out, kernel_stored, kernel_scale, 700, LARGEST=448.0, FLOOR=swiglu.AMAX_FLOOR, BLOCK=256)
assert error(out.double(), swiglu_reference(x).double()) < 1e-6, "the forward result is that of the full precision"
assert torch.allclose(kernel_scale, scale, rtol=1e-6, atol=0)
assert torch.allclose(kernel_stored, (x.unflatten(-1, (2, -1)) / scale[..., None]).flatten(-2), rtol=1e-5, atol=0)
assert kernel_stored.abs().max() <= 448
leaf = x.clone().requires_grad_()
swiglu_fp8_reference(leaf).backward(d_out)
gradient = _swiglu_fp8_backward(d_out, stored, scale)
assert error(gradient.double(), leaf.grad.double()) < 1e-6, "the gradient for the same stored bytes"
plain = x.clone().requires_grad_()
swiglu_reference(plain).backward(d_out)
for row in (0, 1, 2, 3, 5):
    decibels = -20 * torch.log10(error(leaf.grad[row].double(), plain.grad[row].double()))
    assert decibels > 28, f"row {row}: {decibels:.1f} dB"  # one e4m3 cast is 31.5 dB; two meet in a product
assert not leaf.grad[4].any(), "a row of zeros"

from common.kernels.lora_down import _lora_down, dropout
generator = torch.Generator().manual_seed(0)
x, lora_a, p = torch.randn(3, 5, 1100, generator=generator), torch.randn(4, 1100, generator=generator), 0.1
seed = torch.tensor([12345])
kept = dropout(torch.ones_like(x), seed, p)
share = (kept != 0).double().mean()
assert abs(share - 0.9) < 3 * (0.9 * 0.1 / x.numel()) ** 0.5, f"kept {share}"
assert torch.equal(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / 0.9))
assert torch.equal(kept, dropout(torch.ones_like(x), seed, p)) and not torch.equal(kept, dropout(torch.ones_like(x), seed + 1, p))
ours = [x.clone().requires_grad_(), lora_a.clone().requires_grad_()]
plain = [x.double().requires_grad_(), lora_a.double().requires_grad_()]
d_out = torch.randn(3, 5, 4, generator=generator)
out = _lora_down(*ours, seed, p)
truth = (plain[0] * kept) @ plain[1].t()
out.backward(d_out)
truth.backward(d_out.double())
for ours_value, truth_value in ((out, truth), (ours[0].grad, plain[0].grad), (ours[1].grad, plain[1].grad)):
    assert error(ours_value, truth_value) < 1e-6, "the same mask forward, in dA and in dx"
print("agreed")
"""


def test_kernels_in_the_interpreter_are_as_exact_as_plain_torch():
    run_in_interpreter(INTERPRETED)


def shipped_kernels(arch):
    from common.kernels import lora_down
    from common.kernels import swiglu as module

    fp8 = fp8_pointer(arch)
    pointers = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "ffn": "i32"}
    yield "swiglu forward", module._swiglu_forward_kernel, pointers, {"BLOCK": module.BLOCK}, module.NUM_WARPS
    pointers = {"d_out_ptr": "*bf16", "gate_up_ptr": "*bf16", "d_gate_up_ptr": "*bf16", "ffn": "i32"}
    yield "swiglu backward", module._swiglu_backward_kernel, pointers, {"BLOCK": module.BLOCK}, module.NUM_WARPS
    pointers = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stored_ptr": fp8, "scale_ptr": "*fp32"}
    constants = {"ffn": 14336, "LARGEST": 448.0, "FLOOR": module.AMAX_FLOOR, "BLOCK": module.BLOCK_ROW}
    yield "swiglu forward fp8", module._swiglu_forward_fp8_kernel, pointers, constants, module.NUM_WARPS_ROW
    pointers = {"d_out_ptr": "*bf16", "stored_ptr": fp8, "scale_ptr": "*fp32", "d_gate_up_ptr": "*bf16", "ffn": "i32"}
    yield "swiglu backward fp8", module._swiglu_backward_fp8_kernel, pointers, {"BLOCK": module.BLOCK}, module.NUM_WARPS
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "seed_ptr": "*i64", "num_elements": "i32", "p": "fp32"}
    yield "dropout", lora_down._dropout_kernel, pointers, {"BLOCK": lora_down.BLOCK}, lora_down.NUM_WARPS


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_every_kernel_compiles_for(target):
    for name, kernel, signature, constants, warps in shipped_kernels(target[1]):
        check_compiles(target, kernel, signature, constants, warps, name)


def test_no_kernel_is_forgotten():
    """Every Triton kernel is compiled for the four targets by some test: each is named in a file that calls check_compiles."""
    tests = [text for path in (ROOT / "tests").rglob("test_*.py") if "check_compiles" in (text := path.read_text())]
    kernels = [
        node.name
        for path in (ROOT / "common").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    assert len(kernels) >= 15
    assert [name for name in kernels if not any(f".{name}" in text for text in tests)] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored", [False, True], ids=["bf16", "fp8"])
def test_swiglu_on_the_gpu_is_as_exact_as_plain_torch(stored):
    from common.kernels.swiglu import ENGINES

    x = torch.randn(513, 2 * 14336, device="cuda", dtype=torch.bfloat16)
    results = []
    for function, cast in (
        (ENGINES["reference"][False], torch.float32),
        (ENGINES["reference"][stored], torch.bfloat16),
        (ENGINES["triton"][stored], torch.bfloat16),
    ):
        leaf = x.to(cast, copy=True).requires_grad_()
        y = function(leaf)
        y.backward(torch.ones_like(y) * 0.5)
        results.append((y.detach().double(), leaf.grad.double()))
    for truth, plain, ours in zip(*results, strict=True):
        assert (ours - truth).norm() <= (1.12 if stored else 2) * (plain - truth).norm() + 1e-6 * truth.norm()  # 1.12: 1 dB
