"""The hand-written block against the plain one under autograd, in full precision and in FP8."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fp8_llama import fp8_llama
from plain_block import Block
from signal_to_noise import sqnr_db
from tiny import TINY

from common.errors import ConfigError
from common.kernels.rope import rope_tables
from common.model.fused_block import FusedBlock
from common.model.linear_layers import DelayedScaling, LinearLayers
from common.self_test.kernel_cases import Sizes

pytestmark = pytest.mark.quick

SHAPE = replace(TINY.shape, hidden_size=64, ffn_hidden_size=112, num_heads=4, num_kv_heads=2)
QK_NORM = replace(SHAPE, explicit_head_dim=32, qk_norm=True)
SHAPES = {"llama": SHAPE, "qwen3": QK_NORM}
BATCH, SEQUENCE = 2, 48


def pair(dtype=torch.float32, fp8=False, recompute=False, shape=SHAPE):
    """A plain block and a fused one with the same weights; the scales of the latter."""
    torch.manual_seed(0)
    scaling = DelayedScaling() if fp8 else LinearLayers()
    plain, fused = Block(shape), FusedBlock(shape, "reference", scaling, recompute)
    scaling.allocate(torch.device("cpu"))
    for name, parameter in plain.named_parameters():
        # Heads after their norms are as large as without: 0.05 * sqrt(64). Larger ones sharpen the
        # softmax, which amplifies the noise of FP8.
        torch.nn.init.normal_(
            parameter, 0.4 if "rotation" in name else 1.0 if "norm" in name else 0.0, 0.05
        )
    fused.load_state_dict(plain.state_dict())
    return plain.to(dtype), fused.to(dtype), scaling


def run(block, dtype=torch.float32, seed=1):
    """Output, gradient of the input, gradients of the weights by name."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(BATCH, SEQUENCE, SHAPE.hidden_size, generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    d_out = (1e-4 * torch.randn(BATCH, SEQUENCE, SHAPE.hidden_size, generator=generator)).to(dtype)
    block.zero_grad()
    out = block(x, *rope_tables(block.shape, SEQUENCE, "cpu"))
    out.backward(d_out)
    return {
        "output": out.detach(),
        "input": x.grad,
        **{name: p.grad for name, p in block.named_parameters()},
    }


@pytest.mark.parametrize("family", SHAPES)
def test_output_and_gradients_are_those_of_the_plain_block(family):
    plain, fused, _ = pair(shape=SHAPES[family])
    expected, got = run(plain), run(fused)
    assert expected.keys() == got.keys() and len(got) == {"llama": 8, "qwen3": 10}[family]
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max())), (
            name
        )


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_recompute_changes_no_bit_and_counts_nothing_twice(fp8, family):
    dtype = torch.bfloat16 if fp8 else torch.float32
    results, states = [], []
    for recompute in (False, True):
        _, fused, scaling = pair(dtype, fp8, recompute, SHAPES[family])
        for step in range(2):
            results.append(run(fused, dtype, seed=step))
            states += [tensor.clone() for tensor in scaling.state().values()]
            scaling.step_done()
    for plain, recomputed in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    half = len(states) // 2
    assert (
        all(torch.equal(a, b) for a, b in zip(states[:half], states[half:], strict=True))
        and (half > 0) == fp8
    )


@pytest.mark.parametrize("family", SHAPES)
def test_fp8_is_as_exact_as_its_casts_allow(family):
    """A product of two casts has 28.5 dB (e4m3 x e4m3) or 24.6 dB (e5m2 x e4m3).

    The gradient of the first norm passes through four of the latter, and their noise adds: 24.6 -
    10 log10(4) = 18.6 dB.
    """
    plain, fused, scaling = pair(torch.bfloat16, fp8=True, shape=SHAPES[family])
    for step in range(3):
        got = run(fused, torch.bfloat16, seed=step)
        truth = run(plain.float(), torch.float32, seed=step)
        for name, value in truth.items():
            assert sqnr_db(got[name].float(), value) > 18, f"step {step}: {name}"
        assert sqnr_db(got["o.weight"].float(), truth["o.weight"]) < 40, (
            "these products are not in FP8"
        )
        scaling.step_done()


def test_weights_are_cast_once_per_step():
    _, fused, scaling = pair(torch.bfloat16, fp8=True)
    run(fused, torch.bfloat16)
    scaling.step_done()
    first = run(fused, torch.bfloat16)["output"]
    with torch.no_grad():
        fused.down.weight.mul_(2)
    assert torch.equal(run(fused, torch.bfloat16)["output"], first), (
        "the cast weights are kept until the step is done"
    )
    scaling.step_done()
    assert not torch.equal(run(fused, torch.bfloat16)["output"], first)


def test_without_gradient_nothing_is_kept_and_no_scale_moves():
    model, scaling = fp8_llama(SHAPE, SEQUENCE)
    tokens = torch.randint(
        0, SHAPE.vocab_size, (1, SEQUENCE), generator=torch.Generator().manual_seed(0)
    )
    loss, count = model(tokens, tokens)
    (loss / count).sum().backward()
    scaling.step_done()
    before = [tensor.clone() for tensor in scaling.state().values()]
    model.eval()
    with torch.no_grad():
        evaluated, _ = model(tokens, tokens)
    assert evaluated.grad_fn is None
    assert all(torch.equal(a, b) for a, b in zip(before, scaling.state().values(), strict=True))
    model.train()
    trained, _ = model(tokens, tokens)
    assert not torch.equal(before[0], scaling.scales)
    assert torch.equal(evaluated, trained)  # of the same numbers in FP8


def test_a_second_backward_is_refused():
    _, fused, _ = pair()
    x = torch.randn(BATCH, SEQUENCE, SHAPE.hidden_size, requires_grad=True)
    out = fused(x, *rope_tables(SHAPE, SEQUENCE, "cpu")).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        out.backward()


def test_backward_frees_the_saved_tensors():
    def live_bytes():
        return sum(each.nbytes for each in gc.get_objects() if torch.is_tensor(each))

    _, fused, _ = pair()
    x = torch.randn(BATCH, SEQUENCE, SHAPE.hidden_size, requires_grad=True)
    out = fused(x, *rope_tables(SHAPE, SEQUENCE, "cpu"))
    gc.collect()
    before = live_bytes()
    out.sum().backward()
    saved = 2 * x.nbytes + 3 * BATCH * SEQUENCE * SHAPE.ffn_hidden_size * x.itemsize
    assert live_bytes() < before - saved, "residual, attention, gate, up and h are kept"


def test_heads_that_triton_cannot_hold_are_refused_before_it_compiles():
    """The block refuses them, and so does the self-test that runs before."""
    shape = replace(SHAPE, explicit_head_dim=24)
    FusedBlock(shape, "reference", LinearLayers())
    with pytest.raises(ConfigError, match="24"):
        FusedBlock(shape, "triton", LinearLayers())
    config = SimpleNamespace(kernels="triton")
    with pytest.raises(ConfigError, match="24"):
        Sizes.of(config, shape, 16, 0)
