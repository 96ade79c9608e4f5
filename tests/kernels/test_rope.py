"""Compare the kernels for RoPE on the packed projection to fp64 and to the reference."""

import pytest
import torch
from kernel_checks import DEVICE, error, normal, unrounded

from common.kernels import rope
from common.kernels.fp8 import AMAX, SATURATED, SCALE
from common.kernels.quantize import AMAX_ONLY
from common.kernels.rope import (
    rope_packed_backward_reference,
    rope_packed_backward_triton,
    rope_packed_reference_,
    rope_packed_triton_,
    rope_reference,
)

# batch, sequence, heads, kv_heads, head_dim
SHAPES = [(2, 24, 3, 1, 16), (3, 25, 4, 2, 32), (1, 70, 4, 4, 64), (2, 24, 3, 1, 128)]
MEMORY_ORDERS = ["contiguous", "heads first", "position first", "part of something"]


def tables(sequence, half):
    angles = torch.outer(
        torch.arange(sequence).double(), 100.0 ** (-torch.arange(half).double() / half)
    )
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def rotated(x, cos, sin):
    """Return x rotated in its own dtype, fp64."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def in_memory_order(kind, x):
    """The same numbers in the memory orders in which attention may leave them."""
    batch, sequence, heads, head_dim = x.shape
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "position first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "part of something":
        return x.new_full((batch, sequence, heads + 3, head_dim + 5), 6e4)[:, :, 1:-2, 2:-3].copy_(
            x
        )
    return x.contiguous()


def parts_of(upstream, heads, kv_heads, kind="contiguous"):
    return [
        in_memory_order(kind, part) for part in upstream.split((heads, kv_heads, kv_heads), dim=2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_rotates_queries_and_keys_alone(shape, dtype):
    batch, sequence, heads, kv_heads, head_dim = shape
    cos, sin = tables(sequence, head_dim // 2)
    all_heads, rotated_heads = heads + 2 * kv_heads, heads + kv_heads
    qkv = normal(batch * sequence, all_heads * head_dim, dtype=dtype)
    unpacked = qkv.view(batch, sequence, all_heads, head_dim)
    expected = torch.cat(
        (rope_reference(unpacked[:, :, :rotated_heads], cos, sin), unpacked[:, :, rotated_heads:]),
        dim=2,
    )
    truth = rotated(unpacked[:, :, :rotated_heads].double(), cos, sin)
    plain = error(expected[:, :, :rotated_heads], truth)
    assert plain < (1e-6 if dtype == torch.float32 else 1e-3)
    for function in (rope_packed_reference_, rope_packed_triton_):
        ours = qkv.clone()
        assert function(ours, cos, sin, heads, kv_heads) is ours
        ours = ours.view_as(unpacked)
        assert torch.equal(ours[:, :, rotated_heads:], unpacked[:, :, rotated_heads:]), (
            "the values are not rotated"
        )
        assert torch.equal(ours[:, 0], unpacked[:, 0]) and not torch.equal(
            ours[:, 1], unpacked[:, 1]
        ), "position 0 of each sequence"
        assert error(ours[:, :, :rotated_heads], truth) <= 2 * plain
        assert torch.allclose(
            ours, expected, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=1e-6
        )


@pytest.mark.parametrize("kind", MEMORY_ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_is_the_gradient_in_every_memory_order(shape, dtype, kind):
    batch, sequence, heads, kv_heads, head_dim = shape
    cos, sin = tables(sequence, head_dim // 2)
    all_heads, rotated_heads = heads + 2 * kv_heads, heads + kv_heads
    leaf = normal(batch, sequence, all_heads, head_dim, dtype=dtype).double().requires_grad_()
    upstream = normal(batch, sequence, all_heads, head_dim, seed=4, dtype=dtype)
    (
        torch.cat(
            (rotated(leaf[:, :, :rotated_heads], cos, sin), leaf[:, :, rotated_heads:]), dim=2
        )
        * upstream.double()
    ).sum().backward()
    truth = leaf.grad.view(batch * sequence, -1)
    parts = parts_of(upstream, heads, kv_heads, kind)
    plain = rope_packed_backward_reference(*parts, cos, sin, None)
    ours = rope_packed_backward_triton(*parts, cos, sin, None)
    assert (
        ours.rowwise.shape == truth.shape
        and ours.rowwise.dtype == dtype
        and ours.columnwise is None
        and ours.inverse_scale is None
    )
    assert error(plain.rowwise, truth) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert error(ours.rowwise, truth) <= 2 * error(plain.rowwise, truth)
    assert torch.equal(ours.rowwise.view_as(leaf)[:, :, rotated_heads:], parts[2]), (
        "copied, not rotated"
    )


@pytest.mark.parametrize("transposed", [True, False], ids=["both layouts", "rowwise"])
@pytest.mark.parametrize(
    "shape",
    # The second has a ragged second tile of rows.
    [pytest.param(SHAPES[0], marks=pytest.mark.slow), SHAPES[1]],
    ids=str,
)
def test_quantized_gradients_in_first_and_later_steps_and_an_evaluation(shape, transposed):
    """Two passes; one pass, in the third step with values beyond the headroom; nothing recorded."""
    batch, sequence, heads, kv_heads, head_dim = shape
    cos, sin = tables(sequence, head_dim // 2)
    upstream = normal(batch, sequence, heads + 2 * kv_heads, head_dim, seed=4)
    scaling, (quantizer,) = unrounded({"gradient": True, "transposed": transposed})
    for step, size in enumerate((1.0, 1.0, 2.0, 3.0)):
        scaling.start_pass(step < 3)
        parts = parts_of(upstream * size, heads, kv_heads)
        exact = rope_packed_backward_triton(*parts, cos, sin, None).rowwise
        quantized = rope_packed_backward_triton(*parts, cos, sin, quantizer)
        scaled = exact * quantizer.state[SCALE]
        assert torch.equal(quantized.rowwise, scaled.clamp(-2.0, 2.0))
        assert (quantized.columnwise is not None) == transposed
        assert not transposed or (
            torch.equal(quantized.columnwise, quantized.rowwise.t())
            and quantized.columnwise.is_contiguous()
        )
        assert torch.equal(quantized.inverse_scale, 1 / quantizer.state[SCALE : SCALE + 1])
        assert quantizer.state[AMAX] == (exact.abs().max() if step < 3 else 0.0)
        assert quantizer.state[SATURATED] == ((scaled.abs() > 2.0).sum() if step in (1, 2) else 0)
        assert step != 2 or quantizer.state[SATURATED] > 0, "the test must see saturation"
        before = scaling.scales.clone()
        reference = rope_packed_backward_reference(*parts, cos, sin, quantizer)
        assert (
            torch.allclose(reference.rowwise, quantized.rowwise, rtol=1e-5, atol=1e-6)
            and (reference.columnwise is None) != transposed
        )
        scaling.scales.copy_(before)
        scaling.scales[:, SATURATED] = 0.0
        if step < 3:
            scaling.step_done()


def test_the_pass_for_the_amax_writes_only_the_amax():
    batch, sequence, heads, kv_heads, head_dim = SHAPES[0]
    cos, sin = tables(sequence, head_dim // 2)
    parts = parts_of(normal(batch, sequence, heads + 2 * kv_heads, head_dim), heads, kv_heads)
    whole = rope_packed_backward_triton(*parts, cos, sin, None).rowwise
    out, (_, (quantizer,)) = torch.full_like(whole, 7.0), unrounded({})
    strides = (stride for part in parts for stride in part.stride()[:3])
    rope._rope_packed_backward_kernel[(heads + 2 * kv_heads, 1)](
        *parts,
        cos,
        sin,
        out,
        out.t(),
        quantizer.state,
        batch * sequence,
        sequence,
        heads,
        kv_heads,
        *strides,
        AMAX_ONLY,
        2.0,
        head_dim // 2,
        64,
    )
    assert (out == 7.0).all() and quantizer.state.tolist() == [0.0, 0.0, whole.abs().max(), 0.0]


def test_a_strided_head_dim_is_refused():
    cos, sin = tables(24, 8)
    d_q, d_k, d_v = parts_of(normal(2, 24, 5, 16), 3, 1)
    with pytest.raises(AssertionError, match="contiguous along head_dim"):
        rope_packed_backward_triton(
            d_q.transpose(2, 3).contiguous().transpose(2, 3), d_k, d_v, cos, sin, None
        )
