"""Test products by cuBLASLt with a fake library that computes what its descriptors say."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_checks import NO_AMD
from signal_to_noise import sqnr_db
from stand_in_engines import let_run_on_a_cpu

from common import engines
from common.kernels import cublaslt, fp8
from common.kernels.quantize import quantize_reference
from common.model.linear_layers import DelayedScaling

pytestmark = [pytest.mark.quick, NO_AMD]

DTYPES = {number: dtype for dtype, number in cublaslt.TYPES.items()}


class StandIn:
    """A fake cuBLASLt.

    Its algorithm i takes times[i] ms. Algorithms in `inexact` change the last element. Each product
    returns `status` (0: success).
    """

    def __init__(self, times=(3.0, 2.0, 1.0), inexact=(), status=0):
        self.times = times
        self.inexact = inexact
        self.status = status
        self.objects = {}
        self.launched = []

    def make(self, out, **facts):
        out._obj.value = len(self.objects) + 1
        self.objects[out._obj.value] = facts
        return 0

    def cublasLtMatmulDescCreate(self, out, compute, scale):
        assert (compute, scale) == (68, 0), "sums and scales in fp32"
        return self.make(out)

    def cublasLtMatrixLayoutCreate(self, out, dtype, rows, columns, stride):
        return self.make(
            out, dtype=DTYPES[dtype], shape=(rows.value, columns.value), stride=stride.value
        )

    def cublasLtMatmulPreferenceCreate(self, out):
        return self.make(out)

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        return self.cublasLtMatmulDescSetAttribute(preference, attribute, value, size)

    def cublasLtMatmulDescSetAttribute(self, thing, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[thing.value][attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, operation, first, second, out, same, preference, asked, found, count
    ):
        assert self.objects[preference.value] == {1: 0}, "no workspace"
        count._obj.value = min(asked, len(self.times))
        for number in range(count._obj.value):
            found[number].algorithm[0] = number
        return 0

    def matrix(self, address, layout):
        """Columns first."""
        facts = self.objects[layout.value]
        (rows, columns), stride, dtype = facts["shape"], facts["stride"], facts["dtype"]
        size = ((columns - 1) * stride + rows) * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        return (
            torch.frombuffer(memory, dtype=torch.uint8)
            .view(dtype)
            .as_strided((rows, columns), (1, stride))
        )

    def cublasLtMatmul(
        self,
        handle,
        operation,
        one,
        a,
        a_layout,
        b,
        b_layout,
        zero,
        c,
        c_layout,
        d,
        d_layout,
        offer,
        space,
        size,
        stream,
    ):
        assert (one._obj.value, zero._obj.value, space, size.value, stream.value) == (
            1.0,
            0.0,
            None,
            0,
            7,
        )
        facts, number = self.objects[operation.value], offer._obj.algorithm[0]
        first, second = self.matrix(a, a_layout).double(), self.matrix(b, b_layout).double()
        made = (first.t() if facts[3] else first) @ (second.t() if facts[4] else second)
        for attribute in (17, 18):
            if attribute in facts:
                made *= ctypes.c_float.from_address(facts[attribute]).value
        assert facts[25] == (17 in facts), "fast sums in FP8 alone"
        out = self.matrix(d, d_layout)
        assert c.value == d.value and c_layout.value == d_layout.value
        out.copy_(made)
        if number in self.inexact:
            out[-1, -1] = out[-1, -1] * 1.01
        self.launched.append(number)
        return self.status


@pytest.fixture
def use(monkeypatch, tmp_path):
    def use(library):
        let_run_on_a_cpu(monkeypatch, engines.PRODUCTS, "cublaslt")
        monkeypatch.setattr(cublaslt, "library", lambda: library)
        monkeypatch.setattr(cublaslt, "choices_path", lambda: tmp_path / "cache" / "choices.json")
        monkeypatch.setattr(cublaslt, "handle", lambda: None)
        monkeypatch.setattr(cublaslt, "PRODUCTS", {})
        monkeypatch.setattr(cublaslt, "CHOICES", [])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))

        def milliseconds(launch, count):
            launch()
            return library.times[library.launched[-1]]

        monkeypatch.setattr(cublaslt, "milliseconds", milliseconds)
        return library

    return use


def of_layout(rows, columns, transposed):
    x = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return x.bfloat16()


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_bf16_products_of_every_layout_are_exact(use, a_transposed, b_transposed):
    use(StandIn())
    a, b = of_layout(5, 7, a_transposed), of_layout(7, 3, b_transposed)
    found = cublaslt.product(a, b)
    assert torch.equal(found, (a.double() @ b.double()).bfloat16()) and found.is_contiguous()


def test_products_of_views_of_wider_matrices_are_exact(use):
    use(StandIn())
    a, b = torch.randn(5, 20).bfloat16()[:, 4:11], torch.randn(9, 7).bfloat16()[2:5].t()
    assert torch.equal(cublaslt.product(a, b), (a.double() @ b.double()).bfloat16())


def test_fprop_dgrad_and_wgrad_use_cublaslt_in_fp8_and_bf16(use):
    library, scaling = use(StandIn()), DelayedScaling()
    quantizers = [scaling.quantizer(gradient=gradient) for gradient in (False, False, True)]
    scaling.allocate(torch.device("cpu"))
    x, w, g = torch.randn(32, 16), 1e-2 * torch.randn(48, 16), 1e3 * torch.randn(32, 48)
    truths = x @ w.t(), g @ w, g.t() @ x
    for n, weight, gradient in (
        [
            quantize_reference(t.bfloat16(), quantizer)
            for t, quantizer in zip((x, w, g), quantizers, strict=True)
        ],
        [fp8.QuantizedTensor(t.bfloat16()) for t in (x, w, g)],
    ):
        library.launched.clear()
        for found, truth in zip(
            (fp8.fprop(n, weight), fp8.dgrad(gradient, weight), fp8.wgrad(gradient, n)),
            truths,
            strict=True,
        ):
            assert found.dtype == torch.bfloat16 and sqnr_db(found, truth) > 22
        assert library.launched, "torch computed it"


def test_each_call_uses_its_own_scales(use):
    use(StandIn())
    a, b = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e5m2)
    for of_a, of_b in ((1.0, 1.0), (2.0, 8.0), (0.5, 4.0)):
        assert (
            cublaslt.product(a, b.t(), torch.tensor([of_a]), torch.tensor([of_b]))
            == 16 * of_a * of_b
        ).all()


@pytest.mark.parametrize(
    ("times", "inexact", "chosen"),
    [
        ((3.0, 2.0, 1.0), (), 2),
        ((3.0, 2.0, 1.0), (2,), 1),  # other bits are not taken, however fast
        ((3.0, 2.995, 4.0), (), 0),  # what could be noise is no reason
        ((1.0,), (), 0),
        ((9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), (), 7),  # the first eight are asked for
    ],
)
def test_each_shape_gets_the_fastest_algorithm_with_the_bits_of_the_first(
    use, times, inexact, chosen
):
    library = use(StandIn(times, inexact))
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    expected = (a.double() @ b.double()).bfloat16()
    assert torch.equal(cublaslt.product(a, b), expected)
    library.launched.clear()
    for _ in range(3):
        assert torch.equal(cublaslt.product(a, b), expected)
    assert library.launched == [chosen] * 3
    assert len(cublaslt.CHOICES) == 1 and f"the first {1e3 * times[0]:.1f}" in cublaslt.CHOICES[0]
    cublaslt.product(a[:8], b)
    assert len(library.launched) > 4 and len(cublaslt.CHOICES) == 2


def test_short_products_use_the_first_algorithm(use):
    library = use(StandIn((0.04, 0.01)))
    a = torch.randn(16, 32).bfloat16()
    for _ in range(2):
        cublaslt.product(a, a.t())
    assert library.launched[-1] == 0
    assert library.launched.count(1) <= 2  # its bits are compared, and it is launched for one time
    assert not cublaslt.CHOICES and not cublaslt.choices_path().exists()


@pytest.mark.parametrize("status", [0, 13])
def test_an_algorithm_that_fails_or_leaves_elements_out_is_not_chosen(use, monkeypatch, status):
    library = use(StandIn((2.0, 1.0)))
    right = library.cublasLtMatmul

    def leaves_out(*arguments):
        number = arguments[12]._obj.algorithm[0]
        if number == 1:
            library.launched.append(number)
            return status
        return right(*arguments)

    monkeypatch.setattr(library, "cublasLtMatmul", leaves_out)
    a = torch.randn(16, 16).bfloat16()
    for _ in range(2):
        cublaslt.product(a, a)
    assert library.launched[-1] == 0


def test_unsupported_products_raise_an_error(use):
    use(StandIn(status=15))
    a = torch.randn(16, 16)
    with pytest.raises(RuntimeError, match="status 15"):
        cublaslt.product(a.bfloat16(), a.bfloat16())
    with pytest.raises(RuntimeError, match="float32"):
        cublaslt.product(a, a)
    with pytest.raises(RuntimeError, match="strides"):
        cublaslt.product(a.bfloat16()[:, ::2], a.bfloat16()[::2])
    use(StandIn(times=()))
    with pytest.raises(RuntimeError, match="offers no algorithm"):
        cublaslt.product(a.bfloat16(), a.bfloat16())


def test_a_later_start_reuses_the_chosen_algorithm_without_timing(use, monkeypatch):
    a = torch.randn(16, 32).bfloat16()
    use(StandIn((3.0, 1.0, 2.0)))
    expected = cublaslt.product(a, a.t())
    library = use(StandIn((1.0, 3.0, 2.0)))  # another order now would choose another
    monkeypatch.setattr(cublaslt, "milliseconds", None)
    for _ in range(2):
        assert torch.equal(cublaslt.product(a, a.t()), expected)
    assert library.launched[-1] == 1 and "earlier start" in cublaslt.CHOICES[0]


@pytest.mark.parametrize("damage", ["", "[1]", '{"x": 1}', None])
def test_a_damaged_choices_file_or_changed_bits_lead_to_a_new_choice(use, damage):
    a = torch.randn(16, 32).bfloat16()
    use(StandIn((3.0, 1.0, 2.0)))
    cublaslt.product(a, a.t())
    if damage is not None:
        cublaslt.choices_path().write_text(damage)
    library = use(StandIn((3.0, 1.0, 2.0), inexact=() if damage is not None else (1,)))
    for _ in range(2):
        cublaslt.product(a, a.t())
    assert library.launched[-1] == (1 if damage is not None else 0)


def test_products_work_without_a_writable_cache(use, monkeypatch):
    use(StandIn())
    monkeypatch.setattr(cublaslt, "choices_path", lambda: Path("/proc/nowhere/choices.json"))
    a = torch.randn(16, 32).bfloat16()
    assert torch.equal(cublaslt.product(a, a.t()), cublaslt.product(a, a.t()))


def test_cublaslt_is_not_called_unless_it_is_pinned(use, monkeypatch):
    library = use(StandIn())
    monkeypatch.delenv("MATMUL_ENGINE")
    fp8.product(torch.ones(16, 16), torch.ones(16, 16))
    assert not library.launched
