"""Test that kernels write both layouts from one tile on AMD, equal and without a second kernel."""

import pytest
import torch
from kernel_checks import DEVICE, normal, unrounded

from common.kernels import qk_norm, quantize, rms_norm, rope, swiglu
from common.kernels.fp8 import SATURATED

BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM = 2, 37, 3, 1, 16
ROWS, COLUMNS = BATCH * SEQUENCE, 100


def rope_backward(quantizer, size):
    cos, sin = (normal(SEQUENCE, HEAD_DIM // 2, seed=seed) for seed in (1, 2))
    return rope.rope_packed_backward_triton(*gradients(size), cos, sin, quantizer)


def qk_norm_backward(quantizer, size):
    cos, sin = (normal(SEQUENCE, HEAD_DIM // 2, seed=seed) for seed in (1, 2))
    weights = (normal(HEAD_DIM, seed=3), normal(HEAD_DIM, seed=4))
    before = normal(ROWS, (HEADS + KV_HEADS) * HEAD_DIM)
    return qk_norm.qk_norm_rope_backward_triton(
        gradients(size), before, weights, 1e-5, cos, sin, quantizer
    )[0]


def gradients(size):
    return [
        normal(BATCH, SEQUENCE, heads, HEAD_DIM, size=size) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def swiglu_backward(quantizer, size):
    d_h, gate_up = normal(ROWS, COLUMNS, size=size), normal(ROWS, 2 * COLUMNS, seed=1)
    return swiglu.swiglu_quantized_backward_triton(d_h, gate_up, quantizer)


TILED = {
    "quantize": lambda quantizer, size: quantize.quantize_triton(
        normal(ROWS, COLUMNS, size=size), quantizer
    ),
    "RoPE backward": rope_backward,
    "norm and RoPE backward": qk_norm_backward,
    "SwiGLU": lambda quantizer, size: swiglu.swiglu_quantized_triton(
        normal(ROWS, 2 * COLUMNS, size=size), quantizer
    )[0],
    "SwiGLU backward": swiglu_backward,
}


def results(run):
    """Return the tensors of a first step, a saturating second step and an evaluation, and the
    state.
    """
    scaling, (quantizer,) = unrounded({})
    found = [run(quantizer, 1.0)]
    scaling.step_done()
    found.append(run(quantizer, 3.0))
    quantizer.recording = False
    found.append(run(quantizer, 9.0))
    return found, quantizer.state


@pytest.mark.parametrize("op", TILED)
def test_the_columnwise_layout_is_the_transpose_of_the_rowwise_one(op, monkeypatch):
    expected, expected_state = results(TILED[op])
    monkeypatch.setattr(quantize, "BOTH_FROM_ONE_TILE", True)
    for module in (quantize, swiglu):
        monkeypatch.setattr(module, "fill_columnwise", pytest.fail)
    found, state = results(TILED[op])
    assert torch.equal(state, expected_state) and state[SATURATED] > 0
    for plain, both in zip(expected, found, strict=True):
        assert torch.equal(both.rowwise, plain.rowwise)
        assert torch.equal(both.columnwise, plain.rowwise.t()) and both.columnwise.is_contiguous()


def test_whole_rows_leave_the_columns_to_a_second_kernel(monkeypatch):
    """A tile has one or two rows, so writing columns would be slower than a transpose."""
    monkeypatch.setattr(quantize, "BOTH_FROM_ONE_TILE", True)
    _, (quantizer,) = unrounded({})
    _, normed, _ = rms_norm.add_rms_norm_triton(
        normal(ROWS, COLUMNS), None, torch.ones(COLUMNS, device=DEVICE), 1e-5, quantizer
    )
    assert torch.equal(normed.columnwise, normed.rowwise.t())


def test_both_layouts_come_from_one_tile_on_amd_only():
    assert bool(torch.version.hip) == quantize.BOTH_FROM_ONE_TILE
