"""FP8 products with SwiGLU in their epilogues, against fp32 and against the kernels. One GPU."""

import pytest
import torch
from kernel_checks import error

from common import engines
from common.engines import SWIGLU
from common.errors import ConfigError
from common.kernels.fp8 import AMAX, INVERSE, SATURATED, SCALE
from common.kernels.quantize import quantize_triton
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import KERNEL_ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers

VARIABLE = engines.VARIABLES[SWIGLU]
CUDA = torch.device("cuda")
OPS = KERNEL_ENGINES["triton"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
sizes = pytest.mark.parametrize("rows, hidden, ffn", [(8192, 4096, 14336), (300, 256, 208)])


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    monkeypatch.setenv(VARIABLE, "quack")
    monkeypatch.setenv("MATMUL_ENGINE", "torch")  # chooses no algorithms for each size
    try:
        swiglu_engine(CUDA)
    except ConfigError as error:
        pytest.skip(f"{error.what}: {error.why}")


class Case:
    """Operands of one direction, and the quantizers of its results.

    `quantizers` has two pairs (result, kept gate_up): for the kernels, and for the epilogue.
    `lora`: gate_up is kept in 8 bits.
    """

    def __init__(self, backward, rows, hidden, ffn, lora=False):
        self.backward = backward
        generator = torch.Generator(CUDA).manual_seed(1)

        def normal(*size):
            return torch.randn(size, device=CUDA, generator=generator).bfloat16()

        inputs = DelayedScaling()
        operand_quantizer = inputs.quantizer(gradient=backward, transposed=False)
        weight_quantizer = inputs.quantizer(weight=True)
        inputs.allocate(CUDA)
        self.operand = quantize_triton(normal(rows, hidden), operand_quantizer)
        shape = (hidden, ffn) if backward else (2 * ffn, hidden)
        self.weight = quantize_triton(normal(*shape) * hidden**-0.5, weight_quantizer)
        self.gate_up = normal(rows, 2 * ffn)
        self.outputs = DelayedScaling()
        made = [self.outputs.quantizer(gradient=backward) for _ in range(2)]
        kept = [self.outputs.quantizer(transposed=False) if lora else None for _ in range(2)]
        self.outputs.allocate(CUDA)
        self.quantizers = list(zip(made, kept, strict=True))
        for quantizers in self.quantizers:
            self.result(LinearLayers, quantizers)
        self.outputs.step_done()

    def result(self, linear, quantizers, keep=True):
        """Return (quantized result,), in the forward (gate_up, quantized result)."""
        quantizer, kept = quantizers
        arguments = self.outputs, OPS, self.operand, self.weight
        if not self.backward:
            return linear.gate_up_swiglu(*arguments, quantizer, kept, keep)
        gate_up = quantize_triton(self.gate_up, kept) if kept else self.gate_up
        return (linear.down_swiglu_backward(*arguments, gate_up, quantizer),)

    def results(self):
        """Return the `result` of the kernels and of the epilogues."""
        pairs = zip((LinearLayers, DelayedScaling), self.quantizers, strict=True)
        return [self.result(linear, quantizers) for linear, quantizers in pairs]

    def states(self, column):
        """Return a column of the state of the result's two quantizers."""
        return [float(quantizer.state[column]) for quantizer, _ in self.quantizers]

    def truth(self):
        """Return the same as `result` in fp32, unquantized, from the same FP8 operands."""
        weight = self.weight.columnwise if self.backward else self.weight.rowwise
        product = torch._scaled_mm(
            self.operand.rowwise,
            weight.t(),
            scale_a=self.operand.inverse_scale,
            scale_b=self.weight.inverse_scale,
            out_dtype=torch.float32,
        )
        if not self.backward:
            gate, up = product.chunk(2, 1)
            return product, torch.nn.functional.silu(gate) * up
        gate, up = self.gate_up.float().chunk(2, 1)
        s = torch.sigmoid(gate)
        return (torch.cat((product * up * s * (1 + gate * (1 - s)), product * gate * s), 1),)


def value(result):
    """Return a bf16 or quantized result in fp32."""
    if isinstance(result, torch.Tensor):
        return result.float()
    return result.rowwise.float() * result.inverse_scale


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@sizes
def test_epilogues_are_as_exact_as_the_kernels(backward, rows, hidden, ffn):
    case = Case(backward, rows, hidden, ffn)
    truths = case.truth()
    kernels, epilogues = case.results()
    for truth, kernel, epilogue in zip(truths, kernels, epilogues, strict=True):
        errors = error(value(epilogue), truth), error(value(kernel), truth)
        print(f"{list(truth.shape)}: epilogue {errors[0]:.2e}, kernel {errors[1]:.2e}")
        assert errors[0] <= 2 * errors[1] + 1e-6
    stored = epilogues[-1]
    assert torch.equal(stored.columnwise.view(torch.uint8), stored.rowwise.view(torch.uint8).t())
    amaxes = case.states(AMAX)
    largest = float(truths[-1].abs().max())
    print(f"amax: epilogue {amaxes[1]:.5g}, kernel {amaxes[0]:.5g}, fp32 {largest:.5g}")
    assert amaxes[1] == pytest.approx(largest, rel=1e-2)  # sums of 14 bits
    assert case.states(SATURATED) == [0, 0]


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@sizes
def test_epilogues_round_as_the_kernels_do(backward, rows, hidden, ffn, lora):
    """All bits of gate_up in bf16 are equal. Numbers in FP8 may differ where the value lies on a
    boundary between two of them, because the last bits of fp32 may."""
    case = Case(backward, rows, hidden, ffn, lora)
    kernels, epilogues = case.results()
    for kernel, epilogue in zip(kernels, epilogues, strict=True):
        if isinstance(kernel, torch.Tensor):
            assert torch.equal(kernel, epilogue)
            continue
        stored = [result.rowwise.view(torch.uint8) for result in (kernel, epilogue)]
        share = float((stored[0] != stored[1]).float().mean())
        print(f"{share:.1e} of {stored[0].numel():,} bytes differ")
        assert share < 1e-5
    states = case.outputs.scales[:, AMAX].tolist()
    print(f"amaxes {states}")
    for one, other in zip(states[::2], states[1::2], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@sizes
def test_an_evaluation_computes_the_same_without_storing_gate_up(rows, hidden, ffn):
    case = Case(False, rows, hidden, ffn)
    _, h = case.result(DelayedScaling, case.quantizers[1])
    nothing, same = case.result(DelayedScaling, case.quantizers[1], keep=False)
    assert nothing is None
    assert torch.equal(h.rowwise.view(torch.uint8), same.rowwise.view(torch.uint8))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_saturated_elements_are_counted(backward):
    case = Case(backward, 1024, 512, 1024)
    for quantizer, _ in case.quantizers:
        quantizer.state[SCALE] *= 4
        quantizer.state[INVERSE] /= 4
    kernels, epilogues = case.results()
    counts = case.states(SATURATED)
    print(f"saturated: epilogue {counts[1]:g}, kernel {counts[0]:g}")
    assert counts[0] > 10 and counts[0] * 0.98 <= counts[1] <= 2 * counts[0]
    same = kernels[-1].rowwise.float() == epilogues[-1].rowwise.float()
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_nan_and_infinity_show(backward):
    case = Case(backward, 1024, 512, 1024)
    quantizers = case.quantizers[1]
    case.operand.rowwise.view(torch.uint8)[5, 7] = 0x7F
    stored = case.result(DelayedScaling, quantizers)[-1].rowwise.float()
    assert stored[5].isnan().all() and stored.isnan().sum() == stored.shape[1]
    assert quantizers[0].state[AMAX].isfinite()
    case.operand.inverse_scale.fill_(3e38)
    stored = case.result(DelayedScaling, quantizers)[-1].rowwise.float()
    assert stored.isnan().any(1).float().mean() > 0.9
    assert quantizers[0].state[AMAX].isinf()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_evaluation_records_nothing(backward):
    case = Case(backward, 256, 512, 1024)
    quantizers = case.quantizers[1]
    recorded = case.result(DelayedScaling, quantizers)[-1].rowwise.view(torch.uint8)
    quantizers[0].state[AMAX:] = 0
    quantizers[0].recording = False
    evaluated = case.result(DelayedScaling, quantizers)[-1].rowwise.view(torch.uint8)
    assert torch.equal(recorded, evaluated) and not quantizers[0].state[AMAX:].any()
