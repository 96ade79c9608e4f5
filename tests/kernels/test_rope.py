"""RoPE on the packed projection, forward in place and backward to an FP8 operand: interpreter, four GPU targets, GPU."""

from pathlib import Path

import pytest
import torch
from compiling import TARGETS, check_compiles, fp8_pointer, run_in_interpreter

from common.kernels import rope
from common.kernels.fp8 import AMAX_ONLY, CLIPPED, PLAIN, STORE, STORE_AND_RECORD, DelayedScaling
from common.kernels.rope import (
    rope_packed_backward_reference,
    rope_packed_backward_triton,
    rope_packed_reference_,
    rope_packed_triton_,
    rope_reference,
    rope_tables,
)
from common.model.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]

INTERPRETED = """
import torch
from common.kernels import rope
from common.kernels.fp8 import AMAX, AMAX_ONLY, CLIPPED, SCALE, QuantizedTensor, Quantizer, DelayedScaling
from common.kernels.rope import (
    rope_packed_backward_reference, rope_packed_backward_triton, rope_packed_reference_, rope_packed_triton_, rope_reference
)

class Exact(Quantizer):  # the interpreter of triton mis-rounds e4m3: what is stored here is the scaled and clamped value itself
    largest = 2.0

def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

def error(value, truth):
    return (value.double() - truth).norm() / truth.norm()

def tables(sequence, half):
    angles = torch.outer(torch.arange(sequence).double(), 100.0 ** (-torch.arange(half).double() / half))
    return angles.cos().float(), angles.sin().float()

def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

def strided(kind, *shape, seed, dtype):
    "The same numbers in the memory orders in which attention may leave them."
    batch, sequence, heads, head_dim = shape
    x = normal(*shape, seed=seed, dtype=dtype)
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "position first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "part of something":
        return torch.full((batch, sequence, heads + 3, head_dim + 5), 6e4, dtype=dtype)[:, :, 1:-2, 2:-3].copy_(x)
    return x

for batch, sequence, heads, kv_heads, head_dim in ((2, 24, 3, 1, 16), (3, 25, 4, 2, 32), (1, 70, 4, 4, 64), (2, 24, 3, 1, 128)):
    cos, sin = tables(sequence, head_dim // 2)
    all_heads = heads + 2 * kv_heads
    for dtype in (torch.float32, torch.float16):
        qkv = normal(batch * sequence, all_heads * head_dim, seed=0, dtype=dtype)
        unpacked = qkv.view(batch, sequence, all_heads, head_dim)
        turned = heads + kv_heads
        expected = torch.cat((rope_reference(unpacked[:, :, :turned], cos, sin), unpacked[:, :, turned:]), dim=2)
        truth = rotated(unpacked[:, :, :turned].double(), cos, sin)
        for function in (rope_packed_reference_, rope_packed_triton_):
            ours = qkv.clone()
            assert function(ours, cos, sin, heads, kv_heads) is ours
            ours = ours.view_as(unpacked)
            assert torch.equal(ours[:, :, turned:], unpacked[:, :, turned:]), "the values are not rotated"
            assert torch.equal(ours[:, 0], unpacked[:, 0]) and not torch.equal(ours[:, 1], unpacked[:, 1]), "position 0 of each sequence"
            plain = error(expected[:, :, :turned], truth)
            assert plain < (1e-6 if dtype == torch.float32 else 1e-3) and error(ours[:, :, :turned], truth) <= 2 * plain
            assert torch.allclose(ours, expected, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=1e-6)

        # Backward: against autograd in fp64, in every memory order.
        leaf = unpacked.double().requires_grad_()
        upstream = normal(batch, sequence, all_heads, head_dim, seed=4, dtype=dtype)
        (torch.cat((rotated(leaf[:, :, :turned], cos, sin), leaf[:, :, turned:]), dim=2) * upstream.double()).sum().backward()
        truth = leaf.grad.view_as(qkv)
        for kind in ("contiguous", "heads first", "position first", "part of something"):
            d_q = strided(kind, batch, sequence, heads, head_dim, seed=1, dtype=dtype).copy_(upstream[:, :, :heads])
            d_k = strided(kind, batch, sequence, kv_heads, head_dim, seed=2, dtype=dtype).copy_(upstream[:, :, heads:turned])
            d_v = strided(kind, batch, sequence, kv_heads, head_dim, seed=3, dtype=dtype).copy_(upstream[:, :, turned:])
            plain = rope_packed_backward_reference(d_q, d_k, d_v, cos, sin, None)
            ours = rope_packed_backward_triton(d_q, d_k, d_v, cos, sin, None)
            assert ours.rowwise.shape == qkv.shape and ours.rowwise.dtype == dtype and ours.columnwise is None and ours.scale is None
            assert error(plain.rowwise, truth) < (1e-6 if dtype == torch.float32 else 1e-3)
            assert error(ours.rowwise, truth) <= 2 * error(plain.rowwise, truth), kind
            values = ours.rowwise.view(batch, sequence, all_heads, head_dim)[:, :, turned:]
            assert torch.equal(values, d_v), "copied, not rotated"

    # As an operand: first step (two passes), later ones (one pass, some values beyond the headroom), evaluation (nothing recorded).
    d_q, d_k, d_v = upstream.float().split((heads, kv_heads, kv_heads), dim=2)
    for transposed in (True, False):
        scaling = DelayedScaling("delayed")
        quantizer = Exact(gradient=True, transposed=transposed)
        scaling.quantizers = [quantizer]
        scaling.allocate(torch.device("cpu"))
        quantizer.dtype = torch.float32
        for step, size in enumerate((1.0, 1.0, 2.0, 3.0)):
            scaling.record(step < 3)
            parts = d_q * size, d_k * size, d_v * size
            exact = rope_packed_backward_triton(*parts, cos, sin, None).rowwise
            operand = rope_packed_backward_triton(*parts, cos, sin, quantizer)
            scaled = exact * quantizer.state[SCALE]
            assert torch.equal(operand.rowwise, scaled.clamp(-2.0, 2.0))
            assert (operand.columnwise is not None) == transposed
            assert not transposed or torch.equal(operand.columnwise, operand.rowwise.t()) and operand.columnwise.is_contiguous()
            assert torch.equal(operand.scale, 1 / quantizer.state[SCALE : SCALE + 1])
            assert quantizer.state[AMAX] == (exact.abs().max() if step < 3 else 0.0)
            assert quantizer.state[CLIPPED] == ((scaled.abs() > 2.0).sum() if step in (1, 2) else 0)
            assert step != 2 or quantizer.state[CLIPPED] > 0, "the test must see saturation"
            before = scaling.state.clone()
            reference = rope_packed_backward_reference(*parts, cos, sin, quantizer)
            assert torch.allclose(reference.rowwise, operand.rowwise, rtol=1e-5, atol=1e-6) and (reference.columnwise is None) != transposed
            scaling.state.copy_(before)
            scaling.state[:, CLIPPED] = 0.0
            if step < 3:
                scaling.step_done()

# The pass for the amax writes nothing else.
quantizer.state.zero_()
rows = torch.full(exact.shape, 7.0)
whole = rope_packed_backward_triton(d_q, d_k, d_v, cos, sin, None).rowwise
rope._rope_packed_backward_kernel[(heads + 2 * kv_heads, 1)](
    d_q, d_k, d_v, cos, sin, rows, quantizer.state, batch * sequence, sequence, heads, kv_heads,
    *d_q.stride()[:3], *d_k.stride()[:3], *d_v.stride()[:3], AMAX_ONLY, 2.0, head_dim // 2, 64,
)
assert (rows == 7.0).all() and quantizer.state.tolist() == [0.0, 0.0, whole.abs().max(), 0.0]

try:
    rope_packed_backward_triton(d_q.transpose(2, 3).contiguous().transpose(2, 3), d_k, d_v, cos, sin, None)
    raise SystemExit("a strided head_dim must be refused")
except AssertionError as error:
    assert "contiguous along head_dim" in str(error)
print("agreed")
"""


def test_the_kernels_in_the_interpreter():
    run_in_interpreter(INTERPRETED)


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_the_forward_kernel_compiles_for(target):
    types = {"qkv_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    types |= dict.fromkeys(("num_pairs", "sequence", "rotated_heads", "all_heads"), "i32")
    check_compiles(target, rope._rope_packed_kernel, types, {"HALF": 64, "BLOCK": rope.BLOCK_PAIRS}, rope.NUM_WARPS)


@pytest.mark.parametrize("target", TARGETS, ids=[str(t[1]) for t in TARGETS])
def test_the_backward_kernel_compiles_for(target):
    pointer = fp8_pointer(target[1], gradient=True)
    common = dict.fromkeys(("d_q_ptr", "d_k_ptr", "d_v_ptr"), "*bf16") | {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    strides = [f"{of}_{over}" for of in "qkv" for over in ("batch", "position", "head")]
    common |= dict.fromkeys(["num_rows", "sequence", "heads", "kv_heads", *strides], "i32")
    sizes = {"HALF": 64, "BLOCK_ROWS": rope.BLOCK_ROWS_BACKWARD}
    for mode in (AMAX_ONLY, STORE, STORE_AND_RECORD):
        types = common | {"rows_ptr": pointer, "state_ptr": "*fp32"}
        constants = sizes | {"MODE": mode.value, "LARGEST": 57344.0}
        check_compiles(target, rope._rope_packed_backward_kernel, types, constants, rope.NUM_WARPS_BACKWARD, f"mode {mode.value}")
    constants = sizes | {"MODE": PLAIN.value, "LARGEST": 0.0, "state_ptr": None}
    check_compiles(target, rope._rope_packed_backward_kernel, common | {"rows_ptr": "*bf16"}, constants, rope.NUM_WARPS_BACKWARD, "bf16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch, sequence, heads, kv_heads", [(2, 8192, 32, 8), (1, 8192, 64, 8), (3, 100, 3, 1)])
def test_on_a_gpu_the_kernels_do_what_torch_does(batch, sequence, heads, kv_heads):
    device, head_dim = torch.device("cuda"), 128
    cos, sin = rope_tables(ModelShape(1, heads * head_dim, 256, heads, kv_heads, 71, 500000.0), sequence, device)
    all_heads, turned = heads + 2 * kv_heads, heads + kv_heads
    qkv = torch.randn(batch * sequence, all_heads * head_dim, device=device, dtype=torch.bfloat16)
    unpacked = qkv.view(batch, sequence, all_heads, head_dim)
    truth = rope_reference(unpacked[:1, :, :turned].double(), cos, sin)
    plain, ours = (
        rope_packed_reference_(qkv.clone(), cos, sin, heads, kv_heads),
        rope_packed_triton_(qkv.clone(), cos, sin, heads, kv_heads),
    )
    errors = [(x.view_as(unpacked)[:1, :, :turned].double() - truth).norm() for x in (plain, ours)]
    assert errors[1] <= 2 * errors[0]
    assert torch.equal(ours.view_as(unpacked)[:, :, turned:], unpacked[:, :, turned:])
    assert (ours != plain).sum() <= 1e-3 * ours.numel()  # a fused multiply-add rounds once where torch rounds twice

    upstream = torch.randn(batch, all_heads, sequence, head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2) * 1e-4
    parts = upstream.split((heads, kv_heads, kv_heads), dim=2)
    results = []
    for function in (rope_packed_backward_reference, rope_packed_backward_triton):
        scaling = DelayedScaling("delayed")
        quantizer = scaling.quantizer(gradient=True)
        scaling.allocate(device)
        function(*parts, cos, sin, quantizer)  # two passes
        scaling.step_done()
        results.append((function(*parts, cos, sin, quantizer), scaling.state.clone()))
        assert not scaling.state[:, CLIPPED].any()
    (expected, state), (got, kernel_state) = results
    assert torch.allclose(state, kernel_state, rtol=1e-5, atol=0)
    assert (expected.rowwise.view(torch.uint8) != got.rowwise.view(torch.uint8)).sum() <= 1e-4 * got.rowwise.numel()
    assert torch.equal(got.columnwise.view(torch.uint8), got.rowwise.view(torch.uint8).t())
    truth = torch.cat((rope_reference(upstream[:1, :, :turned].double(), cos, -sin), upstream[:1, :, turned:].double()), dim=2).flatten()
    errors = [(x.rowwise[:sequence].double() * x.scale).flatten().sub_(truth).norm() for x in (expected, got)]
    assert errors[1] <= 1.12 * errors[0]  # 1 dB
