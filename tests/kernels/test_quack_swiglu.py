"""Products with SwiGLU in their epilogues: the kernel that finishes them, and when they are used.

A stand-in takes QuACK's place and computes in torch. tests/gpu runs QuACK.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import DEVICE, NO_AMD, normal
from stand_in_engines import let_run_on_a_cpu
from torch.profiler import ProfilerActivity, profile

from common import engines
from common.kernels import quack_swiglu
from common.kernels.fp8 import AMAX, SATURATED, SCALE, QuantizedTensor
from common.kernels.quack_swiglu import finish_swiglu, largest_byte
from common.kernels.quantize import quantize_reference
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers

pytestmark = [pytest.mark.quick, NO_AMD]

COLUMNS = 48  # of a tile
CPU = torch.device("cpu")


def partial_amax(x, halves):
    """Return the amax of each row and tile over both halves, without NaN, as QuACK does."""
    parts = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).view(len(x), halves, -1).amax(1)
    return torch.stack([part.amax(1) for part in parts.split(COLUMNS, 1)], 1).contiguous()


def store(x, quantizer):
    """Saturate values, including infinity, as QuACK does."""
    scaled = (x * quantizer.state[SCALE]).clamp(-quantizer.largest, quantizer.largest)
    return scaled.to(quantizer.dtype)


def finished(x, halves, scale, recording=True, gradient=False):
    scaling = DelayedScaling()
    quantizer = scaling.quantizer(gradient=gradient)
    scaling.allocate(torch.device(DEVICE))
    quantizer.state[:2] = torch.tensor([1 / scale, scale])
    quantizer.recording = recording
    out = store(x, quantizer)
    columnwise = torch.empty(out.shape[::-1], dtype=out.dtype, device=out.device)
    out = QuantizedTensor(out, columnwise, quantizer.inverse_scale)
    return finish_swiglu(out, quantizer, partial_amax(x, halves), COLUMNS, halves), quantizer


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
def test_the_amax_and_saturated_elements_are_recorded(halves, gradient):
    x = normal(37, halves * 112, seed=1)
    limit = 57344.0 if gradient else 448.0
    out, quantizer = finished(x, halves, limit / 2.0, gradient=gradient)
    assert quantizer.state[AMAX] == x.abs().max() > 2.0
    assert torch.equal(out.columnwise.view(torch.uint8), out.rowwise.view(torch.uint8).t())
    exact = int((x.abs() > 2.0).sum())
    rounded = int((out.rowwise.float().abs() == limit).sum())
    assert 10 < exact <= quantizer.state[SATURATED] <= rounded
    assert torch.equal(out.rowwise.view(torch.uint8), store(x, quantizer).view(torch.uint8))


def test_elements_within_the_scales_range_are_not_counted_as_saturated():
    x = normal(16, 96, seed=1)
    x[3, 5] = 440.0  # stored as 448
    _, quantizer = finished(x, 1, 1.0)
    assert quantizer.state[SATURATED] == 0 and quantizer.state[AMAX] == 440.0


def test_an_evaluation_records_nothing():
    _, quantizer = finished(normal(16, 96, seed=1), 1, 1e4, recording=False)
    assert not quantizer.state[AMAX:].any()


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("halves", [1, 2])
def test_an_infinite_element_shows_as_nan(halves, recording):
    x = normal(37, halves * 112, seed=1)
    x[4, -1] = -torch.inf
    x[9, 60] = torch.nan
    out, quantizer = finished(x, halves, 1.0, recording)
    rows = out.rowwise.float().isnan().any(1).nonzero().flatten().tolist()
    assert rows == [4, 9]
    assert out.columnwise.float().isnan().any(0).nonzero().flatten().tolist() == rows
    assert quantizer.state[AMAX].isinf() == recording


def test_largest_byte_is_that_of_the_formats_largest_number():
    assert largest_byte(torch.float8_e4m3fn) == 0x7E
    assert largest_byte(torch.float8_e5m2) == 0x7B


def values(x):
    return x.rowwise.float() * x.inverse_scale


class Quack:
    """Takes the place of common/kernels/quack_epilogues.py, and counts the calls."""

    def __init__(self):
        self.calls = []
        self.stored = []  # dtype of gate_up in each forward, None if it is not stored

    def forward(self, x, weight, scale, h, gate_up, kept_scale):
        self.calls.append("forward")
        product = (values(x) @ values(weight).t()).bfloat16()
        gate, up = product.float().chunk(2, 1)
        result = torch.nn.functional.silu(gate) * up
        h.copy_(store(result, SimpleNamespace(state=[None, scale], largest=448.0, dtype=h.dtype)))
        kept_amax = None
        if kept_scale is not None:
            form = SimpleNamespace(state=[None, kept_scale], largest=448.0, dtype=gate_up.dtype)
            gate_up.copy_(store(product.float(), form))
            kept_amax = partial_amax(product.float(), 2)
        elif gate_up is not None:
            gate_up.copy_(product)
        self.stored.append(None if gate_up is None else gate_up.dtype)
        return partial_amax(result, 1), kept_amax, COLUMNS

    def backward(self, g, weight, scale, gate_up, d_gate_up):
        self.calls.append("backward")
        d_h = (values(g) @ values(weight).t()).bfloat16().float()
        kept = gate_up.rowwise.float() if gate_up.inverse_scale is None else values(gate_up)
        gate, up = kept.chunk(2, 1)
        s = torch.sigmoid(gate)
        result = torch.cat((d_h * up * s * (1 + gate * (1 - s)), d_h * gate * s), 1)
        form = SimpleNamespace(state=[None, scale], largest=57344.0, dtype=d_gate_up.dtype)
        d_gate_up.copy_(store(result, form))
        return partial_amax(result, 2), COLUMNS


@pytest.fixture
def quack(monkeypatch):
    """QuACK's stand-in as the engine of a CPU. The operations are those of the reference."""
    let_run_on_a_cpu(monkeypatch, engines.SWIGLU, "quack", "0.6.5")
    stand_in = Quack()
    monkeypatch.setattr(quack_swiglu, "require", lambda: stand_in)
    return stand_in


class Case:
    """A step's operands and quantizers. `lora`: gate_up is kept in 8 bits."""

    def __init__(self, may_fuse_swiglu=True, lora=False):
        self.ops = replace(KERNEL_ENGINES["reference"], may_fuse_swiglu=may_fuse_swiglu)
        self.inputs = DelayedScaling()
        made = [self.inputs.quantizer(gradient=gradient) for gradient in (False, True)]
        made += [self.inputs.quantizer(weight=True) for _ in range(2)]
        self.inputs.allocate(CPU)
        sizes = ((32, 64), (32, 64), (224, 64), (64, 112))
        self.x, self.g, self.gate_up_weight, self.down_weight = (
            quantize_reference(normal(*size, seed=seed).cpu(), quantizer)
            for seed, (size, quantizer) in enumerate(zip(sizes, made, strict=True))
        )
        self.scaling = DelayedScaling()
        self.h = self.scaling.quantizer()
        self.d_gate_up = self.scaling.quantizer(gradient=True)
        self.kept = self.scaling.quantizer(transposed=False) if lora else None
        self.scaling.allocate(CPU)

    def step(self, linear=DelayedScaling):
        """Returns gate_up, h and the gradient of gate_up, then ends the step."""
        operands = self.scaling, self.ops
        gate_up, h = linear.gate_up_swiglu(
            *operands, self.x, self.gate_up_weight, self.h, self.kept
        )
        d_gate_up = linear.down_swiglu_backward(
            *operands, self.g, self.down_weight, gate_up, self.d_gate_up
        )
        state = self.scaling.scales.clone()
        self.scaling.step_done()
        return gate_up, h, d_gate_up, state


@pytest.mark.parametrize("lora", [False, True])
def test_after_the_first_step_the_epilogues_compute_what_the_kernels_do(quack, lora):
    ours = Case(lora=lora)
    kernels = Case(lora=lora)
    ours.step()
    assert not quack.calls, "the first step has no scale"
    kernels.step(LinearLayers)
    found = ours.step()
    truth = kernels.step(LinearLayers)
    assert quack.calls == ["forward", "backward"]
    if lora:
        assert found[0].rowwise.dtype == truth[0].rowwise.dtype == torch.float8_e4m3fn
        assert torch.equal(values(found[0]), values(truth[0]))
    else:
        assert torch.equal(found[0], truth[0])
    for one, other in zip(found[1:3], truth[1:3], strict=True):
        assert (
            torch.equal(one.inverse_scale, other.inverse_scale)
            and one.rowwise.dtype == other.rowwise.dtype
        )
        equal = one.rowwise.float() == other.rowwise.float()
        assert equal.float().mean() > 0.99
        assert torch.equal(one.columnwise.float(), one.rowwise.float().t())
    torch.testing.assert_close(found[3], truth[3], rtol=1e-2, atol=0.0)


def test_what_no_backward_reads_is_not_stored(quack):
    case = Case()
    case.step()
    arguments = case.ops, case.x, case.gate_up_weight, case.h, None
    kept, h = DelayedScaling.gate_up_swiglu(case.scaling, *arguments, keep=True)
    nothing, same = DelayedScaling.gate_up_swiglu(case.scaling, *arguments, keep=False)
    assert quack.stored == [torch.bfloat16, None]
    assert kept is not None and nothing is None
    assert torch.equal(h.rowwise.float(), same.rowwise.float())
    nothing, same = LinearLayers.gate_up_swiglu(case.scaling, *arguments, keep=False)
    assert nothing is None and torch.equal(h.rowwise.float(), same.rowwise.float())


def test_a_profile_shows_the_sizes_of_both_products(quack):
    case = Case()
    case.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        case.step()
    assert quack.calls == ["forward", "backward"]
    ranges = [event.name for event in profiler.events() if event.name.startswith("gemm")]
    assert ranges == ["gemm + SwiGLU: 32 x 224 x 64", "gemm + SwiGLU: 32 x 112 x 64"]


def test_the_reference_and_other_formats_are_left_alone(quack):
    case = Case(may_fuse_swiglu=False)
    case.step()
    case.step()
    plain = Case()
    plain.h = plain.d_gate_up = None
    plain.step()
    plain.step()
    assert not quack.calls


def test_a_cpu_uses_the_swiglu_kernel():
    assert swiglu_engine(CPU).engine.name == engines.KERNEL


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("/opt/packages", "site-packages folder, not in /opt/packages"),
        ("/env/lib/python3.12/site-packages", "no semantic key"),
    ],
)
def test_packages_that_quack_cannot_identify_are_not_used(monkeypatch, folder, why):
    """Its TypeError must not end the run."""
    let_run_on_a_cpu(monkeypatch, engines.SWIGLU, "quack", "0.6.5")
    monkeypatch.delenv("SWIGLU_ENGINE")
    first, last = engines.ENGINES[engines.SWIGLU]
    monkeypatch.setitem(engines.ENGINES, engines.SWIGLU, (replace(first, chosen_on=("",)), last))

    def refuse(name):
        raise TypeError("no semantic key")

    package = SimpleNamespace(origin=f"{folder}/quack/__init__.py")
    monkeypatch.setattr(quack_swiglu.importlib, "import_module", refuse)
    monkeypatch.setattr(quack_swiglu.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(engines, "module_of", lambda engine: quack_swiglu)
    choice = swiglu_engine(CPU)
    assert choice.engine.name == engines.KERNEL and why in str(choice.faster[0])
    (rejection,) = engines.rejections()
    assert "swiglu by quack" in rejection and why in rejection
