"""Test products by Transformer Engine, with a stand-in for versions 2.20.2 and ROCm's fork."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from signal_to_noise import sqnr_db
from stand_in_engines import let_run_on_a_cpu

from common import engines
from common.kernels import fp8, transformer_engine

pytestmark = pytest.mark.quick


class Float8TensorStorage:
    def __init__(self, *, data, fp8_scale_inv, fp8_dtype, fake_dtype=None, data_transpose=None):
        assert data.dtype == torch.uint8 and fake_dtype == torch.bfloat16
        dtype = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}[fp8_dtype]
        self.values = data.view(dtype).double() * fp8_scale_inv.double()


class Library:
    """general_gemm computes B A with the transposes that `layout` names; `layouts` has them."""

    def __init__(self):
        self.layouts = []

    def general_gemm(
        self,
        A,
        B,
        out_dtype=None,
        quantization_params=None,
        gelu=False,
        gelu_in=None,
        alpha=1.0,
        beta=None,
        accumulate=False,
        layout="TN",
        out=None,
        bias=None,
        use_split_accumulator=False,
        grad=False,
    ):
        assert layout in ("TN", "NN", "NT") and not use_split_accumulator
        first, second = (
            x.values if isinstance(x, Float8TensorStorage) else x.double() for x in (A, B)
        )
        assert isinstance(A, Float8TensorStorage) or (A.is_contiguous() and B.is_contiguous())
        self.layouts.append(layout)
        first = first.t() if layout[0] == "T" else first
        second = second.t() if layout[1] == "T" else second
        return (second @ first).to(out_dtype), None, None, None


@pytest.fixture
def library(monkeypatch):
    library = Library()
    modules = {
        "transformer_engine.pytorch": SimpleNamespace(DotProductAttention=None),
        transformer_engine.GEMM: library,
        transformer_engine.STORAGE: SimpleNamespace(Float8TensorStorage=Float8TensorStorage),
        "transformer_engine_torch": SimpleNamespace(
            DType=SimpleNamespace(kFloat8E4M3=4, kFloat8E5M2=5)
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in transformer_engine.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    let_run_on_a_cpu(monkeypatch, engines.PRODUCTS, "transformer_engine", "2.20.2")
    return library


@pytest.mark.parametrize(
    ("a_transposed", "b_transposed", "layout"),
    [(False, True, "TN"), (False, False, "NN"), (True, False, "NT")],
)
def test_bf16_products_of_each_layout_are_exact(library, a_transposed, b_transposed, layout):
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    if a_transposed:
        a = a.t().contiguous().t()
    if b_transposed:
        b = b.t().contiguous().t()
    assert torch.equal(fp8.product(a, b), (a.double() @ b.double()).bfloat16())
    assert library.layouts == [layout]


def test_a_product_that_no_layout_fits_is_an_error(library):
    a, b = torch.randn(7, 5).bfloat16(), torch.randn(3, 7).bfloat16()
    with pytest.raises(RuntimeError, match="layout"):
        fp8.product(a.t(), b.t())


@pytest.mark.parametrize("gradient", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_products_take_our_numbers_and_scales(library, gradient):
    a = torch.randn(16, 32).to(gradient)
    b = torch.randn(48, 32).to(torch.float8_e4m3fn)
    found = fp8.product(a, b.t(), torch.tensor([0.5]), torch.tensor([3.0]))
    assert sqnr_db(found, 1.5 * a.double() @ b.double().t()) > 45
    assert library.layouts == ["TN"]


@pytest.fixture
def cudnn(tmp_path, monkeypatch):
    """A wheel of cuDNN. Yields its folder and the list of libraries that are loaded from it."""
    folder = tmp_path / "nvidia" / "cudnn"
    (folder / "lib").mkdir(parents=True)
    for name in ("adv", "cnn", "graph", "ops"):
        (folder / "lib" / f"libcudnn_{name}.so.9").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: spec)
    loaded: list[str] = []
    load = lambda path, mode: loaded.append(Path(path).name)  # noqa: E731
    monkeypatch.setattr(transformer_engine.ctypes, "CDLL", load)
    return folder, loaded


@pytest.mark.parametrize("own", [True, False])
def test_transformer_engine_loads_the_cudnn_of_torch(monkeypatch, library, cudnn, own):
    """The system's cuDNN beside torch's ended the import with an undefined symbol, on an H200."""
    folder, loaded = cudnn
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    if not own:
        monkeypatch.delenv("CUDNN_HOME")
    transformer_engine.require()
    assert os.environ["CUDNN_HOME"] == ("/opt/cudnn" if own else str(folder))
    assert loaded == [f"libcudnn_{name}.so.9" for name in ("graph", "ops", "cnn", "adv")]


def test_without_a_cudnn_wheel_no_library_is_loaded(monkeypatch, cudnn):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", missing)
    transformer_engine.load_cudnn_of_torch()
    assert cudnn[1] == []


def test_the_environment_allows_fused_attention_only(monkeypatch, library):
    for name in transformer_engine.ENVIRONMENT:
        monkeypatch.delenv(name)
    transformer_engine.require()
    assert os.environ["NVTE_FUSED_ATTN"] == "1" and os.environ["NVTE_UNFUSED_ATTN"] == "0"
    assert os.environ["NVTE_CK_IS_V3_ATOMIC_FP32"] == "1"
