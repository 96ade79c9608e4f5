"""Test that every launcher refuses tensors with strides that its kernel does not support.

The kernel would compute with other elements, or read memory out of bounds.
"""

import pytest
import torch
from kernel_checks import DEVICE, normal

from common.kernels import (
    accumulate,
    cross_entropy,
    lora,
    qk_norm,
    quantize,
    rms_norm,
    rope,
    swiglu,
    transpose,
)
from common.model.linear_layers import DelayedScaling

M, D = 16, 32
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def quantizer():
    scaling = DelayedScaling()
    made = scaling.quantizer()
    scaling.allocate(DEVICE)
    return made


def tables():
    return normal(M, HEAD_DIM // 2, seed=1), normal(M, HEAD_DIM // 2, seed=2)


def head_gradients():
    return [normal(1, M, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def of_quantize():
    return lambda x: quantize.quantize_triton(x, quantizer()), [normal(M, D)]


def of_norm():
    return lambda x, branch, weight: rms_norm.add_rms_norm_triton(x, branch, weight, 1e-5, None), [
        normal(M, D),
        normal(M, D),
        normal(D),
    ]


def of_norm_backward():
    def call(d_n, residual, rstd, weight, d_residual):
        return rms_norm.rms_norm_backward_triton(d_n, residual, rstd, weight, d_residual, None)

    return call, [normal(M, D), normal(M, D), normal(M), normal(D), normal(M, D)]


def of_rope():
    return lambda qkv, cos, sin: rope.rope_packed_triton_(qkv, cos, sin, HEADS, KV_HEADS), [
        normal(M, QKV),
        *tables(),
    ]


def of_rope_backward():
    return lambda cos, sin: rope.rope_packed_backward_triton(*head_gradients(), cos, sin, None), [
        *tables()
    ]


def of_head_norms():
    def call(qkv, q_weight, k_weight, cos, sin):
        return qk_norm.qk_norm_rope_triton_(
            qkv, (q_weight, k_weight), 1e-5, cos, sin, HEADS, KV_HEADS, True
        )

    return call, [normal(M, QKV), normal(HEAD_DIM), normal(HEAD_DIM), *tables()]


def of_head_norms_backward():
    def call(before, q_weight, k_weight, cos, sin):
        return qk_norm.qk_norm_rope_backward_triton(
            head_gradients(), before, (q_weight, k_weight), 1e-5, cos, sin, None
        )

    return call, [
        normal(M, (HEADS + KV_HEADS) * HEAD_DIM),
        normal(HEAD_DIM),
        normal(HEAD_DIM),
        *tables(),
    ]


def of_swiglu():
    return lambda gate_up: swiglu.swiglu_quantized_triton(gate_up, None), [normal(M, 2 * D)]


def of_swiglu_backward():
    return lambda d_h, gate_up: swiglu.swiglu_quantized_backward_triton(d_h, gate_up, None), [
        normal(M, D),
        normal(M, 2 * D),
    ]


def of_transpose():
    return transpose.transpose_triton, [
        torch.zeros(M, D, dtype=torch.uint8),
        torch.zeros(D, M, dtype=torch.uint8),
    ]


def of_accumulate():
    return accumulate.accumulate_triton, [normal(M, D), normal(M, D), normal(2, M, D)]


def of_rows():
    ids = torch.arange(M, device=DEVICE)
    return lambda total, rows: accumulate.add_rows_triton(total, ids, rows, 0, 1), [
        normal(M, D),
        normal(M, D),
    ]


def of_cross_entropy():
    labels = torch.zeros(1, M, dtype=torch.int64, device=DEVICE)
    return lambda logits: cross_entropy.cross_entropy_forward(logits, labels), [normal(1, M, D)]


def of_adapter():
    def call(x, rstd, weight, lora_a):
        return lora.down_triton(x, lora.Norm(rstd, weight), lora_a, None)

    return call, [normal(M, D), normal(M), normal(D), normal(16, D)]


# Name of an operation -> the function above that returns (a function that launches the operation's
# kernel, the contiguous tensors that it takes).
OPS = {
    name.removeprefix("of_"): made
    for name, made in list(globals().items())
    if name.startswith("of_")
}
# (operation, position of one of its tensors)
PLACES = []
for operation, make in OPS.items():
    _, operands = make()
    PLACES += [(operation, place) for place in range(len(operands))]


def with_gaps(x):
    """Return the numbers of x as every other element of a tensor that is twice as wide."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


@pytest.mark.parametrize("op", OPS)
def test_contiguous_tensors_are_taken(op):
    call, tensors = OPS[op]()
    call(*tensors)


@pytest.mark.parametrize(("op", "place"), PLACES)
def test_a_tensor_with_gaps_is_refused(op, place):
    call, tensors = OPS[op]()
    tensors[place] = with_gaps(tensors[place])
    with pytest.raises(AssertionError, match="contiguous"):
        call(*tensors)


def test_the_norm_under_autograd_copies_what_has_gaps():
    """A gradient may be expanded, as that of a sum is: all of its strides are 0."""
    x, weight = with_gaps(normal(2, 3, D)), normal(D, seed=1)
    found = []
    for function in rms_norm.IMPLEMENTATIONS.values():
        leaf = x.detach().requires_grad_()
        out = function(leaf, weight, 1e-5)
        out.sum().backward()
        found.append((out.detach(), leaf.grad))
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
