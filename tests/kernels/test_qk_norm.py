"""Compare the kernels for RMSNorm of query and key heads with RoPE to fp64."""

import pytest
import torch
from kernel_checks import DEVICE, error, normal, same_up_to_rounding, unrounded
from test_rope import MEMORY_ORDERS, SHAPES, parts_of, rotated, tables

from common.kernels import qk_norm, rope
from common.kernels.fp8 import AMAX, SATURATED, SCALE
from common.kernels.quantize import AMAX_ONLY

pytestmark = pytest.mark.quick

EPS = 1e-3  # large enough that forgetting it shows
FORWARDS = [engine.norm_rope_ for engine in qk_norm.IMPLEMENTATIONS.values()]
BACKWARDS = [engine.norm_rope_backward for engine in qk_norm.IMPLEMENTATIONS.values()]
LONG = (1, 280, 1, 1, 16)  # more rows than one program takes
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def weights_of(head_dim, dtype):
    return tuple(1 + normal(head_dim, seed=seed, dtype=dtype) / 3 for seed in (7, 8))


def truth_of(x, weights, cos, sin, heads):
    """The formula in fp64; x: [batch, sequence, heads + kv_heads, head_dim]."""
    x_hat = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return rotated(
        torch.cat((x_hat[:, :, :heads] * weights[0], x_hat[:, :, heads:] * weights[1]), dim=2),
        cos,
        sin,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_norms_and_rotates_queries_and_keys_alone(shape, dtype):
    batch, sequence, heads, kv_heads, head_dim = shape
    cos, sin = tables(sequence, head_dim // 2)
    all_heads, rotated_heads = heads + 2 * kv_heads, heads + kv_heads
    qkv = normal(batch * sequence, all_heads * head_dim, dtype=dtype)
    weights = weights_of(head_dim, dtype)
    unpacked = qkv.view(batch, sequence, all_heads, head_dim)
    truth = truth_of(
        unpacked[:, :, :rotated_heads].double(),
        [weight.double() for weight in weights],
        cos,
        sin,
        heads,
    )
    for function in FORWARDS:
        ours = qkv.clone()
        before = function(ours, weights, EPS, cos, sin, heads, kv_heads, True)
        assert torch.equal(before, unpacked[:, :, :rotated_heads].reshape(batch * sequence, -1))
        assert torch.equal(
            ours.view_as(unpacked)[:, :, rotated_heads:], unpacked[:, :, rotated_heads:]
        ), "the values stay"
        assert error(ours.view_as(unpacked)[:, :, :rotated_heads], truth) < TOLERANCE[dtype]
        again = qkv.clone()
        assert function(again, weights, EPS, cos, sin, heads, kv_heads, False) is None
        assert same_up_to_rounding(again, ours)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        *((SHAPES[0], torch.float16, kind) for kind in MEMORY_ORDERS),
        *((shape, torch.float32, "contiguous") for shape in (*SHAPES[:3], LONG)),
    ],
    ids=str,
)
def test_backward_is_every_gradient_in_every_memory_order(shape, dtype, kind):
    batch, sequence, heads, kv_heads, head_dim = shape
    cos, sin = tables(sequence, head_dim // 2)
    rotated_heads = heads + kv_heads
    x, weights = (
        normal(batch, sequence, rotated_heads, head_dim, dtype=dtype),
        weights_of(head_dim, dtype),
    )
    upstream = normal(batch, sequence, rotated_heads + kv_heads, head_dim, seed=4, dtype=dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, *weights)]
    (
        truth_of(leaves[0], leaves[1:], cos, sin, heads) * upstream[:, :, :rotated_heads].double()
    ).sum().backward()
    parts, before = parts_of(upstream, heads, kv_heads, kind), x.flatten(2).flatten(0, 1)
    plain, ours = (function(parts, before, weights, EPS, cos, sin, None) for function in BACKWARDS)
    for quantized, d_weights in (plain, ours):
        d_qkv = quantized.rowwise.view_as(upstream)
        assert (
            d_qkv.dtype == dtype
            and quantized.columnwise is None
            and quantized.inverse_scale is None
        )
        assert error(d_qkv[:, :, :rotated_heads], leaves[0].grad) < TOLERANCE[dtype]
        assert torch.equal(d_qkv[:, :, rotated_heads:], parts[2]), "copied"
        for d_weight, leaf in zip(d_weights, leaves[1:], strict=True):
            assert d_weight.dtype == dtype and error(d_weight, leaf.grad) < TOLERANCE[dtype]
    frozen, nothing = qk_norm.qk_norm_rope_backward_triton(
        parts, before, weights, EPS, cos, sin, None, weight_grad=False
    )
    assert nothing == () and same_up_to_rounding(frozen.rowwise, ours[0].rowwise)


@pytest.mark.slow
def test_quantized_gradients_in_first_and_later_steps_and_an_evaluation():
    """Two passes; one pass, in the third step with values beyond the headroom; nothing recorded.

    The weights' gradients are the same in all.
    """
    batch, sequence, heads, kv_heads, head_dim = SHAPES[0]
    cos, sin = tables(sequence, head_dim // 2)
    before = normal(batch * sequence, (heads + kv_heads) * head_dim)
    weights = weights_of(head_dim, torch.float32)
    upstream = normal(batch, sequence, heads + 2 * kv_heads, head_dim, seed=4)
    scaling, (quantizer,) = unrounded({"gradient": True})
    for step, size in enumerate((1.0, 1.0, 2.0, 3.0)):
        scaling.start_pass(step < 3)
        arguments = parts_of(upstream * size, heads, kv_heads), before, weights, EPS, cos, sin
        exact, d_weights = qk_norm.qk_norm_rope_backward_triton(*arguments, None)
        quantized, again = qk_norm.qk_norm_rope_backward_triton(*arguments, quantizer)
        scaled = exact.rowwise * quantizer.state[SCALE]
        assert same_up_to_rounding(quantized.rowwise, scaled.clamp(-2.0, 2.0))
        assert all(same_up_to_rounding(a, b) for a, b in zip(again, d_weights, strict=True))
        assert torch.equal(quantized.columnwise, quantized.rowwise.t())
        assert quantizer.state[AMAX] == (exact.rowwise.abs().max() if step < 3 else 0.0)
        assert quantizer.state[SATURATED] == ((scaled.abs() > 2.0).sum() if step in (1, 2) else 0)
        assert step != 2 or quantizer.state[SATURATED] > 0, "the test must see saturation"
        state = scaling.scales.clone()
        reference, _ = qk_norm.qk_norm_rope_backward_reference(*arguments, quantizer)
        assert torch.allclose(reference.rowwise, quantized.rowwise, rtol=1e-4, atol=1e-5)
        scaling.scales.copy_(state)
        scaling.scales[:, SATURATED] = 0.0
        if step < 3:
            scaling.step_done()


def test_the_pass_for_the_amax_writes_only_the_amax():
    batch, sequence, heads, kv_heads, head_dim = SHAPES[0]
    cos, sin = tables(sequence, head_dim // 2)
    before = normal(batch * sequence, (heads + kv_heads) * head_dim)
    weights = weights_of(head_dim, torch.float32)
    parts = parts_of(normal(batch, sequence, heads + 2 * kv_heads, head_dim), heads, kv_heads)
    whole = qk_norm.qk_norm_rope_backward_triton(parts, before, weights, EPS, cos, sin, None)[
        0
    ].rowwise
    largest = whole.view(batch * sequence, -1, head_dim)[:, :heads].abs().max()  # of the queries
    out, partial, (_, (quantizer,)) = (
        torch.full_like(whole, 7.0),
        torch.full((heads, 1, head_dim), 7.0, device=DEVICE),
        unrounded({}),
    )
    qk_norm._qk_norm_rope_backward_kernel[(heads, 1)](
        *(
            parts[0],
            before,
            weights[0],
            cos,
            sin,
            out,
            out.t(),
            partial,
            quantizer.state,
            batch * sequence,
            sequence,
            *parts[0].stride()[:3],
        ),
        *(0, heads + kv_heads, heads + 2 * kv_heads, EPS, AMAX_ONLY, 2.0, head_dim // 2, 16, 3),
    )
    assert (
        (out == 7.0).all()
        and (partial == 7.0).all()
        and quantizer.state.tolist() == [0.0, 0.0, largest, 0.0]
    )


def test_with_heads_of_unit_norm_and_weights_of_one_only_rope_remains():
    """Heads of mean square 1, weights 1: what is left is the rotation."""
    batch, sequence, heads, kv_heads, head_dim = SHAPES[2]
    cos, sin = tables(sequence, head_dim // 2)
    qkv = normal(batch * sequence, heads + 2 * kv_heads, head_dim)
    qkv = (qkv / qkv.square().mean(-1, keepdim=True).sqrt()).flatten(1)
    ones = torch.ones(head_dim, device=DEVICE)
    for function, rotate in zip(
        FORWARDS, (rope.rope_packed_reference_, rope.rope_packed_triton_), strict=True
    ):
        ours, expected = qkv.clone(), rotate(qkv.clone(), cos, sin, heads, kv_heads)
        function(ours, (ones, ones), 0.0, cos, sin, heads, kv_heads, False)
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_strided_head_dim_is_refused():
    cos, sin = tables(24, 8)
    d_q, d_k, d_v = parts_of(normal(2, 24, 5, 16), 3, 1)
    strided = d_q.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(AssertionError, match="contiguous along head_dim"):
        qk_norm.qk_norm_rope_backward_triton(
            (strided, d_k, d_v), normal(48, 64), weights_of(16, torch.float32), EPS, cos, sin, None
        )
