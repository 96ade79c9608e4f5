"""FP8 products with SwiGLU in their epilogues, against fp32 and against the kernels. One GPU."""

import pytest
import torch
from kernel_checks import error

from common import engines
from common.engines import SWIGLU
from common.errors import ConfigError
from common.kernels.fp8 import AMAX, CLIPPED, INVERSE, SCALE
from common.kernels.quantize import quantize_triton
from common.kernels.swiglu import swiglu_engine
from common.model.block_ops import ENGINES
from common.model.linear_layers import DelayedScaling, LinearLayers

VARIABLE = engines.VARIABLES[SWIGLU]
CUDA = torch.device("cuda")
OPS = ENGINES["triton"]
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
    """Operands of one direction and two quantizers of the result: the kernels', the epilogue's."""

    def __init__(self, backward, rows, hidden, ffn):
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
        self.quantizers = [self.outputs.quantizer(gradient=backward) for _ in range(2)]
        self.outputs.allocate(CUDA)
        for quantizer in self.quantizers:
            self.result(LinearLayers, quantizer)
        self.outputs.step_done()

    def result(self, linear, quantizer):
        """The quantized result, after gate_up in the forward."""
        if self.backward:
            operands = OPS, self.operand, self.weight, self.gate_up, quantizer
            return (linear.down_swiglu_backward(self.outputs, *operands),)
        return linear.gate_up_swiglu(self.outputs, OPS, self.operand, self.weight, quantizer)

    def results(self):
        pairs = zip((LinearLayers, DelayedScaling), self.quantizers, strict=True)
        return [self.result(linear, quantizer) for linear, quantizer in pairs]

    def truth(self):
        """In fp32, of the same FP8 operands: SwiGLU's result, after gate_up in the forward."""
        weight = self.weight.columnwise if self.backward else self.weight.rowwise
        product = torch._scaled_mm(
            self.operand.rowwise,
            weight.t(),
            scale_a=self.operand.scale,
            scale_b=self.weight.scale,
            out_dtype=torch.float32,
        )
        if not self.backward:
            gate, up = product.chunk(2, 1)
            return product, torch.nn.functional.silu(gate) * up
        gate, up = self.gate_up.float().chunk(2, 1)
        s = torch.sigmoid(gate)
        return (torch.cat((product * up * s * (1 + gate * (1 - s)), product * gate * s), 1),)


def value(result):
    if isinstance(result, torch.Tensor):
        return result.float()
    return result.rowwise.float() * result.scale


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
    amaxes = [float(quantizer.state[AMAX]) for quantizer in case.quantizers]
    largest = float(truths[-1].abs().max())
    print(f"amax: epilogue {amaxes[1]:.5g}, kernel {amaxes[0]:.5g}, fp32 {largest:.5g}")
    assert amaxes[1] == pytest.approx(largest, rel=1e-2)  # sums of 14 bits
    assert [float(quantizer.state[CLIPPED]) for quantizer in case.quantizers] == [0, 0]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@sizes
def test_epilogues_round_as_the_kernels_do(backward, rows, hidden, ffn):
    """All of gate_up's bits are equal. Of the FP8 numbers, those that lie on a boundary between two
    numbers may differ, because the last bits of fp32 may."""
    case = Case(backward, rows, hidden, ffn)
    kernels, epilogues = case.results()
    if not backward:
        assert torch.equal(kernels[0], epilogues[0])
    stored = [result[-1].rowwise.view(torch.uint8) for result in (kernels, epilogues)]
    share = float((stored[0] != stored[1]).float().mean())
    amaxes = [float(quantizer.state[AMAX]) for quantizer in case.quantizers]
    print(f"{share:.1e} of {stored[0].numel():,} bytes differ; amaxes {amaxes}")
    assert share < 1e-5
    assert amaxes[0] == pytest.approx(amaxes[1], rel=1e-6)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_saturated_elements_are_counted(backward):
    case = Case(backward, 1024, 512, 1024)
    for quantizer in case.quantizers:
        quantizer.state[SCALE] *= 4
        quantizer.state[INVERSE] /= 4
    kernels, epilogues = case.results()
    counts = [float(quantizer.state[CLIPPED]) for quantizer in case.quantizers]
    print(f"saturated: epilogue {counts[1]:g}, kernel {counts[0]:g}")
    assert counts[0] > 10 and counts[0] * 0.98 <= counts[1] <= 2 * counts[0]
    same = kernels[-1].rowwise.float() == epilogues[-1].rowwise.float()
    assert same.float().mean() > 0.9


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_nan_and_infinity_show(backward):
    case = Case(backward, 1024, 512, 1024)
    quantizer = case.quantizers[1]
    case.operand.rowwise.view(torch.uint8)[5, 7] = 0x7F
    stored = case.result(DelayedScaling, quantizer)[-1].rowwise.float()
    assert stored[5].isnan().all() and stored.isnan().sum() == stored.shape[1]
    assert quantizer.state[AMAX].isfinite()
    case.operand.scale.fill_(3e38)
    stored = case.result(DelayedScaling, quantizer)[-1].rowwise.float()
    assert stored.isnan().any(1).float().mean() > 0.9
    assert quantizer.state[AMAX].isinf()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_evaluation_records_nothing(backward):
    case = Case(backward, 256, 512, 1024)
    quantizer = case.quantizers[1]
    recorded = case.result(DelayedScaling, quantizer)[-1].rowwise.view(torch.uint8)
    quantizer.state[AMAX:] = 0
    quantizer.recording = False
    evaluated = case.result(DelayedScaling, quantizer)[-1].rowwise.view(torch.uint8)
    assert torch.equal(recorded, evaluated) and not quantizer.state[AMAX:].any()
