"""Compare the hand-written LoRA block with autograd: values, masks, FP8, and memory."""

from dataclasses import replace

import pytest
import torch
from fused_lora import (
    RANK,
    SMALL,
    WIDE,
    P,
    data,
    fused_block,
    plain_block,
    results,
    saved_bytes_per_token,
)
from signal_to_noise import sqnr_db

from common.kernels import fp8
from common.kernels.lora import Dropout, keep_mask
from common.model.fused_lora_block import SavedByLoraBlock
from common.model.shapes import LLAMA2_70B, ModelShape

pytestmark = pytest.mark.quick


def fix_masks(plain, fused, monkeypatch):
    """Both blocks get the same two masks. Returns them."""
    dropouts = tuple(Dropout(torch.tensor([seed]), P) for seed in (31, 2**50 + 3))
    monkeypatch.setattr(fused, "draw_dropouts", lambda device: dropouts)
    for layer, dropout in zip((plain.qkv, plain.o), dropouts, strict=True):

        def masked(x, p, training, dropout=dropout):
            mask = keep_mask(x[..., 0].numel(), x.shape[-1], dropout).view(x.shape)
            return x * mask / (1 - P)

        layer.drop = masked


@pytest.mark.parametrize("dropout", [0.0, P])
def test_output_and_gradients_are_those_of_autograd(dropout, monkeypatch):
    plain = plain_block(dropout=dropout)
    fused = fused_block(plain, dropout)
    if dropout:
        fix_masks(plain, fused, monkeypatch)
    x, d_out, tables = data()
    expected, found = results(plain, x, d_out, tables), results(fused, x, d_out, tables)
    assert (
        set(found)
        == {"output", "d_x", "qkv.lora_a", "qkv.lora_b", "o.lora_a", "o.lora_b"}
        == set(expected)
    )
    for name, value in expected.items():
        assert found[name].dtype == torch.float32 and found[name].shape == value.shape
        assert (found[name] - value).norm() < 1e-5 * value.norm(), name


@pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])
def test_fp8_stays_near_bf16(fnuz, monkeypatch):
    if fnuz:
        formats = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # the CPU multiplies them too
        monkeypatch.setattr(fp8, "fp8_dtypes", lambda device: formats)
    plain = plain_block(WIDE, torch.bfloat16)
    x, d_out, tables = data(WIDE, torch.bfloat16, 1, 32)
    exact = results(fused_block(plain), x, d_out, tables)
    block = fused_block(plain, fp8=True)
    for _ in range(2):  # the first step takes its scales from the tensors themselves
        found = results(block, x, d_out, tables)
        block.base.scaling.step_done()
    exact["output"] -= x  # without the residual stream, which passes by all FP8
    found["output"] -= x
    for name in exact:
        assert sqnr_db(found[name], exact[name]) >= 20, name
    assert not any(quantizer.transposed for quantizer in vars(block.quantizers).values()), (
        "no product reads a transposed activation or gradient"
    )
    e4m3, e5m2 = formats if fnuz else (torch.float8_e4m3fn, torch.float8_e5m2)
    assert (
        block.quantizers.h.dtype
        == block.quantizers.kept_gate_up.dtype
        == block.base.operands["down"].rowwise.dtype
        == e4m3
    )
    assert block.quantizers.d_out.dtype == e5m2
    assert block.base.scaling.take_saturated() == 0, "the same numbers again: nothing saturates"


def test_an_evaluation_stores_no_copy_in_8_bits_and_computes_the_same():
    block = fused_block(plain_block(SMALL, torch.bfloat16), fp8=True)
    x, _, tables = data(dtype=torch.bfloat16, sequence=24)
    asked, swiglu = [], block.ops.swiglu

    def watched(gate_up, quantizer, stored):
        asked.append(stored)
        return swiglu(gate_up, quantizer, stored)

    block.ops = replace(block.ops, swiglu=watched)
    outputs = [block.train()(x, *tables)]
    with torch.no_grad():
        outputs.append(block.eval()(x, *tables))
    assert (
        torch.equal(*outputs)
        and asked == [block.quantizers.kept_gate_up, None]
        and asked[0] is not None
    )


def test_a_second_backward_is_refused():
    x, d_out, tables = data()
    out = fused_block(plain_block())(x.requires_grad_(), *tables)
    out.backward(d_out, retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        out.backward(d_out)


def test_dropout_is_drawn_anew_each_time_and_only_in_training():
    x, _, tables = data()
    block = fused_block(plain_block(), P)
    torch.manual_seed(3)
    first, second = block(x, *tables), block(x, *tables)
    torch.manual_seed(3)
    assert torch.equal(first, block(x, *tables)) and not torch.equal(first, second)
    masks = [keep_mask(16, 64, dropout) for dropout in block.draw_dropouts(x)]
    assert not torch.equal(*masks), "the two adapters have masks of their own"
    without = fused_block(plain_block(), 0.0)(x, *tables)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(block(x, *tables), without)
    assert torch.equal(block.eval()(x, *tables), without)
    assert torch.equal(torch.get_rng_state(), state), (
        "evaluation draws nothing: training goes on as without it"
    )


def test_an_evaluation_saves_nothing_for_backward(monkeypatch):
    x, _, tables = data()
    block = fused_block(plain_block()).eval()
    kept = []
    run = block.run
    monkeypatch.setattr(
        block, "run", lambda *arguments, **named: kept.append(run(*arguments, **named)) or kept[-1]
    )
    with torch.no_grad():
        assert block(x, *tables).grad_fn is None
    assert kept[0][1] is None
    block(x, *tables)
    assert isinstance(kept[1][1], SavedByLoraBlock)


def test_each_pass_requests_and_releases_the_weights_of_its_layer_once():
    x, d_out, tables = data()
    block = fused_block(plain_block(), layer=7)
    results(block, x, d_out, tables)
    assert block.base.calls == ["forward 7", "release 7", "backward 7", "release 7"]


def storages(saved):
    """Return bytes by address of all tensors in `saved` and in the autograd graph of attention."""
    graph, nodes = [saved.attention[0].grad_fn], []
    while graph:
        node = graph.pop()
        nodes.append(node)
        graph += [function for function, _ in node.next_functions if function is not None]
    held = [
        getattr(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_")
    ]
    found, values = {}, [*vars(saved).values(), *held]
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (tuple, list)):
            values += value
    return found


@pytest.mark.parametrize("in_fp8", [False, True])
def test_saved_tensors_take_the_stated_bytes_per_token(in_fp8):
    x, _, tables = data(dtype=torch.bfloat16, batch=1, sequence=256)
    block = fused_block(plain_block(dtype=torch.bfloat16), P, in_fp8)
    _, saved = block.run(x, *tables, True)
    found = storages(saved)
    for constant in (
        (block.base.scaling.scales, saved.dropouts[0].seed) if in_fp8 else (saved.dropouts[0].seed,)
    ):
        found.pop(constant.untyped_storage().data_ptr(), None)
    assert sum(found.values()) == 256 * saved_bytes_per_token(SMALL, RANK, in_fp8)


def test_saved_bytes_per_token_of_the_70b():
    assert saved_bytes_per_token(LLAMA2_70B, 16, True) == 127_304
    assert saved_bytes_per_token(LLAMA2_70B, 16, False) == 127_304 + 57_344


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the blocks here are on the CPU, where kernels need Triton's interpreter",
)
@pytest.mark.parametrize(
    "expanded", [False, True], ids=["", "one number, expanded, as sum() hands it back"]
)
def test_both_engines_agree_with_the_same_seed(expanded):
    plain = plain_block(ModelShape(1, 64, 96, 4, 2, 64, 10000.0))
    x, d_out, tables = data(plain.shape)
    upstream = d_out[0, 0, 0].expand(d_out.shape) if expanded else d_out
    found = []
    for kernels in ("reference", "triton"):
        torch.manual_seed(11)
        found.append(results(fused_block(plain, P, kernels=kernels), x, upstream, tables))
    for name, value in found[0].items():
        assert (found[1][name] - value).norm() < 1e-5 * value.norm(), name
