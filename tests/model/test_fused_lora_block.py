"""The hand-written LoRA block against autograd through the plain one: values, masks, FP8, what is kept, what is asked of the base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common.model.block import Block
from compiling import run_in_interpreter
from torch import nn
from torch.nn import functional as F

from common.kernels import fp8
from common.kernels.fp8 import DelayedScaling, QuantizedTensor, quantize_reference
from common.kernels.lora import Dropout, keep_mask
from common.kernels.rope import rope_tables
from common.model.fused_lora_block import FusedLoraBlock, Saved, saved_bytes_per_token
from common.model.lora import LoRALinear
from common.model.shapes import LLAMA2_70B, ModelShape

ROOT = Path(__file__).resolve().parents[2]
SMALL = ModelShape(1, 48, 80, 4, 2, 64, 10000.0)  # dimensions that no tile divides
WIDE = ModelShape(2, 1024, 2048, 8, 2, 64, 10000.0)  # at its start the branches stand out of the residual stream's rounding
NAMES = ("qkv", "o", "gate_up", "down")
RANK, ALPHA, P = 4, 8.0, 0.25
BATCH, SEQUENCE = 2, 19


class MemoryBase:
    """Both layouts in memory; notes what it is asked for."""

    def __init__(self, matrices: dict[str, torch.Tensor], scaling: DelayedScaling | None):
        self.calls = []
        quantizers = {name: scaling.quantizer(weight=True) if scaling else None for name in matrices}
        if scaling:
            scaling.allocate(next(iter(matrices.values())).device)
        self.operands = {name: quantize_reference(matrix, quantizers[name]) for name, matrix in matrices.items()}

    def forward_operands(self, layer):
        self.calls.append(f"forward {layer}")
        return {name: operand._replace(columnwise=None) for name, operand in self.operands.items()}

    def backward_operands(self, layer):
        self.calls.append(f"backward {layer}")
        empty = torch.empty(0, 0)
        return {
            name: x if x.scale is None else QuantizedTensor(empty, x.rowwise.t().contiguous(), x.scale) for name, x in self.operands.items()
        }

    def release(self, layer):
        self.calls.append(f"release {layer}")


def plain_block(shape=SMALL, dtype=torch.float32, dropout=0.0):
    """A block with weights as at the start of training, and adapters of which B is already a little off zero."""
    torch.manual_seed(1)
    block = Block(shape, "reference", False)
    std = 0.02 * (WIDE.hidden_size / shape.hidden_size) ** 0.5  # init_weights' 0.02; narrower, as large sums
    for name, parameter in block.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
        else:
            nn.init.normal_(parameter, 0.0, std / 2 if name in ("o.weight", "down.weight") else std)
    block.to(dtype).requires_grad_(False)
    for name in ("qkv", "o"):
        layer = LoRALinear(getattr(block, name), RANK, ALPHA, dropout)
        nn.init.kaiming_uniform_(layer.lora_a, a=5**0.5)
        nn.init.normal_(layer.lora_b, 0.0, 0.01)
        setattr(block, name, layer)
    return block


def fused_block(plain, dropout=0.0, recipe=None, fp8_swiglu_input=False, e5m2_gradients=True, layer=0, kernels="reference"):
    scaling = DelayedScaling(recipe) if recipe else None
    matrices = {name: getattr(plain, name).base.weight if name in ("qkv", "o") else getattr(plain, name).weight for name in NAMES}
    block = FusedLoraBlock(plain.shape, layer, None, kernels, RANK, ALPHA, dropout, scaling, fp8_swiglu_input, e5m2_gradients)
    block.base = MemoryBase(matrices, scaling)
    block.base.scaling = scaling
    block.to(plain.attention_norm.weight.dtype)
    for name in ("qkv", "o"):
        setattr(block, name, getattr(block, name).float())
    block.load_state_dict({name: t for name, t in plain.state_dict().items() if name in block.state_dict()})
    return block


def data(shape=SMALL, dtype=torch.float32, batch=BATCH, sequence=SEQUENCE):
    generator = torch.Generator().manual_seed(5)
    x, d_out = (torch.randn(batch, sequence, shape.hidden_size, generator=generator).to(dtype) for _ in range(2))
    return x, d_out, rope_tables(shape, sequence, "cpu")


def results(block, x, d_out, tables, **options):
    """Output, and gradients of the input and of every adapter by name."""
    leaf = x.clone().requires_grad_()
    trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
    out = block(leaf, *tables, **options)
    gradients = torch.autograd.grad(out, [leaf, *trained.values()], d_out)
    return {"output": out.detach(), "d_x": gradients[0]} | dict(zip(trained, gradients[1:], strict=True))


def fix_masks(plain, fused, monkeypatch):
    """Both blocks get the same two masks. Returns them."""
    dropouts = tuple(Dropout(torch.tensor([seed]), P) for seed in (31, 2**50 + 3))
    monkeypatch.setattr(fused, "draw_dropouts", lambda device: dropouts)
    for layer, dropout in zip((plain.qkv, plain.o), dropouts, strict=True):

        def down(x, lora_a, p, dropout=dropout):
            mask = keep_mask(x[..., 0].numel(), x.shape[-1], dropout).view(x.shape)
            return F.linear(x * mask / (1 - P), lora_a)

        layer.down = down


@pytest.mark.parametrize("dropout", [0.0, P])
def test_it_computes_what_autograd_does(dropout, monkeypatch):
    plain = plain_block(dropout=dropout)
    fused = fused_block(plain, dropout)
    if dropout:
        fix_masks(plain, fused, monkeypatch)
    x, d_out, tables = data()
    expected, found = results(plain, x, d_out, tables), results(fused, x, d_out, tables)
    assert set(found) == {"output", "d_x", "qkv.lora_a", "qkv.lora_b", "o.lora_a", "o.lora_b"} == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32 and found[name].shape == value.shape
        assert (found[name] - value).norm() < 1e-5 * value.norm(), name


def decibels(truth, value):
    return float(20 * torch.log10(truth.double().norm() / (truth.double() - value.double()).norm()))


@pytest.mark.parametrize(
    "fnuz, e5m2_gradients, recipe",
    [(False, True, "current"), (False, False, "delayed"), (True, True, "delayed"), (True, False, "current")],
    ids=["ocp e5m2 current", "ocp e4m3 delayed", "fnuz e5m2 delayed", "fnuz e4m3 current"],
)
def test_fp8_stays_near_bf16(fnuz, e5m2_gradients, recipe, monkeypatch):
    if fnuz:
        formats = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # the CPU multiplies them too
        monkeypatch.setattr(fp8, "fp8_dtypes", lambda device: formats)
    plain = plain_block(WIDE, torch.bfloat16)
    x, d_out, tables = data(WIDE, torch.bfloat16, 1, 128)
    exact = results(fused_block(plain), x, d_out, tables)
    block = fused_block(plain, recipe=recipe, fp8_swiglu_input=True, e5m2_gradients=e5m2_gradients)
    for _ in range(2):  # the first step of `delayed` scales as `current` does
        found = results(block, x, d_out, tables)
        block.base.scaling.step_done()
    exact["output"] -= x  # without the residual stream, which passes by all FP8
    found["output"] -= x
    for name in exact:
        assert decibels(exact[name], found[name]) >= 20, name
    assert not any(quantizer.transposed for quantizer in vars(block.quantizers).values()), (
        "no product reads a transposed activation or gradient"
    )
    e4m3, e5m2 = formats if fnuz else (torch.float8_e4m3fn, torch.float8_e5m2)
    assert block.quantizers.h.dtype == block.quantizers.stored_gate_up.dtype == block.base.operands["down"].rowwise.dtype == e4m3
    assert block.quantizers.d_out.dtype == (e5m2 if e5m2_gradients else e4m3)
    assert block.base.scaling.take_clipped() == 0, "the same numbers again: nothing saturates"


@pytest.mark.parametrize("recipe", [None, "current", "delayed"])
def test_recompute_gives_the_same_bits_and_counts_once(recipe):
    plain = plain_block(SMALL, torch.bfloat16)
    x, d_out, tables = data(dtype=torch.bfloat16, sequence=24)
    outcomes = []
    for recompute in (False, True):
        block = fused_block(plain, P, recipe, fp8_swiglu_input=recipe is not None)
        torch.manual_seed(7)
        for _ in range(2):
            found = results(block, x, d_out * 100, tables, recompute=recompute)
            if recipe:
                amaxes, clipped = block.base.scaling.state[:, fp8.AMAX].clone(), block.base.scaling.state[:, fp8.CLIPPED].clone()
                block.base.scaling.step_done()
                block.base.scaling.state[:, fp8.SCALE] *= 2  # so that `delayed` saturates in the second step, and counts
        outcomes.append((found, (amaxes, clipped) if recipe else None, torch.rand(1)))
        assert not recipe or all(quantizer.recording for quantizer in block.base.scaling.quantizers)
    (kept, counts_kept, next_kept), (again, counts_again, next_again) = outcomes
    for name, value in kept.items():
        assert torch.equal(value, again[name]), name
    assert torch.equal(next_kept, next_again), "the generator has moved as far"
    if recipe:
        assert torch.equal(torch.stack(counts_kept), torch.stack(counts_again))
        assert counts_kept[0].count_nonzero() == 9, "every quantizer of the block, none of the weights"
        assert counts_kept[1].count_nonzero() == (9 if recipe == "delayed" else 0)


def test_an_evaluation_stores_no_copy_in_8_bits_and_computes_the_same():
    block = fused_block(plain_block(SMALL, torch.bfloat16), recipe="current", fp8_swiglu_input=True)
    x, _, tables = data(dtype=torch.bfloat16, sequence=24)
    asked, swiglu = [], block.ops.swiglu

    def watched(gate_up, quantizer, stored):
        asked.append(stored)
        return swiglu(gate_up, quantizer, stored)

    block.ops = replace(block.ops, swiglu=watched)
    with torch.no_grad():
        outputs = [block.train(training)(x, *tables) for training in (True, False)]
    assert torch.equal(*outputs) and asked == [block.quantizers.stored_gate_up, None] and asked[0] is not None


def test_backward_runs_once():
    x, d_out, tables = data()
    for recompute in (False, True):
        out = fused_block(plain_block())(x.requires_grad_(), *tables, recompute=recompute)
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
    masks = [keep_mask(16, 64, dropout) for dropout in block.draw_dropouts(x.device)]
    assert not torch.equal(*masks), "the two adapters have masks of their own"
    without = fused_block(plain_block(), 0.0)(x, *tables)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert torch.equal(block(x, *tables), without)
    assert torch.equal(block.eval()(x, *tables), without)
    assert torch.equal(torch.get_rng_state(), state), "evaluation draws nothing: training goes on as without it"


def test_evaluation_keeps_nothing(monkeypatch):
    x, _, tables = data()
    block = fused_block(plain_block()).eval()
    kept = []
    run = block.run
    monkeypatch.setattr(block, "run", lambda *arguments, **named: kept.append(run(*arguments, **named)) or kept[-1])
    with torch.no_grad():
        assert block(x, *tables).grad_fn is None
    block(x, *tables, recompute=True)
    assert [saved for _, saved in kept] == [None, None], "nor does recompute before it is backward's turn"
    block(x, *tables)
    assert isinstance(kept[2][1], Saved)


def test_what_the_base_is_asked_for():
    x, d_out, tables = data()
    block = fused_block(plain_block(), layer=7)
    results(block, x, d_out, tables)
    assert block.base.calls == ["forward 7", "release 7", "backward 7", "release 7"]
    block.base.calls.clear()
    results(block, x, d_out, tables, recompute=True)
    assert block.base.calls == ["forward 7", "release 7", "forward 7", "release 7", "backward 7", "release 7"]


def storages(saved):
    """Bytes by address of all that `saved` holds, and of what autograd's graph of attention holds."""
    graph, nodes = [saved.attention[0].grad_fn], []
    while graph:
        node = graph.pop()
        nodes.append(node)
        graph += [function for function, _ in node.next_functions if function is not None]
    held = [getattr(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_")]
    found, values = {}, [*vars(saved).values(), *held]
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (tuple, list)):
            values += value
    return found


@pytest.mark.parametrize("recipe, fp8_swiglu_input", [(None, False), ("current", False), ("current", True)])
def test_it_keeps_as_many_bytes_as_it_says(recipe, fp8_swiglu_input):
    x, _, tables = data(dtype=torch.bfloat16, batch=1, sequence=256)
    block = fused_block(plain_block(dtype=torch.bfloat16), P, recipe, fp8_swiglu_input)
    _, saved = block.run(x, *tables, True, block.draw_dropouts(x.device))
    found = storages(saved)
    for constant in (block.base.scaling.state, saved.dropouts[0].seed) if recipe else (saved.dropouts[0].seed,):
        found.pop(constant.untyped_storage().data_ptr(), None)
    assert sum(found.values()) == 256 * saved_bytes_per_token(SMALL, RANK, fp8_swiglu_input)


def test_bytes_of_the_70b():
    assert saved_bytes_per_token(LLAMA2_70B, 16, True) == 127_304
    assert saved_bytes_per_token(LLAMA2_70B, 16, False) == 127_304 + 57_344


INTERPRETED = """
import torch
from test_fused_lora_block import P, data, fused_block, plain_block, results
from common.model.shapes import ModelShape

plain = plain_block(ModelShape(1, 64, 96, 4, 2, 64, 10000.0))
x, d_out, tables = data(plain.shape)
for upstream in (d_out, d_out[0, 0, 0].expand(d_out.shape)):  # the second as sum() hands it back: one number, expanded
    found = []
    for kernels in ("reference", "triton"):
        torch.manual_seed(11)
        found.append(results(fused_block(plain, P, kernels=kernels), x, upstream, tables))
    for name, value in found[0].items():
        assert (found[1][name] - value).norm() < 1e-5 * value.norm(), name
print("agreed")
"""


def test_both_engines_agree_with_the_same_seed():
    run_in_interpreter(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", [None, "delayed"], ids=["bf16", "fp8"])
def test_on_a_gpu_both_engines_compute_the_same(recipe):
    """The whole block at width 1024 with the same masks, Triton against plain torch on the same GPU: only rounding separates them."""
    plain = plain_block(WIDE, torch.bfloat16).to("cuda")
    x, d_out, tables = data(WIDE, torch.bfloat16, sequence=256)
    x, d_out, tables = x.cuda(), d_out.cuda(), [table.cuda() for table in tables]
    dropouts = tuple(Dropout(torch.tensor([seed], device="cuda"), P) for seed in (31, 2**50 + 3))
    blocks = [fused_block(plain, P, recipe, bool(recipe), kernels=kernels).to("cuda") for kernels in ("reference", "triton")]
    for block in blocks:
        block.draw_dropouts = lambda device: dropouts
    for step in range(3):
        reference, triton = (results(block, x, d_out, tables) for block in blocks)
        for name, value in reference.items():
            error = (triton[name].double() - value.double()).norm() / value.double().norm()
            assert error < 10 ** (-25 / 20), f"step {step}: {name} {error:.1e}"
        for block in blocks:
            if block.base.scaling is not None:
                block.base.scaling.step_done()
