"""`throughput gemm` and `throughput mlp` on a CPU."""

import argparse
import json

import pytest
import torch

from common.measure import published, report
from common.measure.tables import Table
from throughput import gemm, mlp
from throughput.__main__ import main
from throughput.options import shape_of
from throughput.result import Result

pytestmark = pytest.mark.quick

SHAPE = (32, 48, 64)


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """The content of result.json of one small shape."""
    folder = tmp_path_factory.mktemp("gemm") / "out"
    assert main(["gemm", "--device", "cpu", "--shape", "32x48x64", "--out", str(folder)]) == 0
    return json.loads((folder / "result.json").read_text())


def test_every_way_is_timed_once(products):
    rows = [row for row in products["rows"] if row["table"] == "gemm"]
    ways = [(row["precision"], row["call"]) for row in rows]
    fp8 = [("fp8", "_scaled_mm tensorwise"), ("fp8", "_scaled_mm rowwise")]
    assert (
        ways
        == [(precision, call) for precision in ("fp16", "bf16") for call in ("matmul", "linear")]
        + fp8
    )
    for row in rows:
        assert "error" not in row and row["ms"] > 0 and row["samples"] >= 1
        assert (
            row["tflops"] == pytest.approx(2 * 32 * 48 * 64 / (row["ms"] * 1e9))
            and row["percent"] is None
        )
        width = 1 if row["precision"] == "fp8" else 2
        assert row["intensity"] == pytest.approx(
            2 * 32 * 48 * 64 / (width * (32 * 48 + 48 * 64) + 2 * 32 * 64)
        )


def test_summary_copy_and_roofs(products):
    summary = [row for row in products["rows"] if row["table"] == "summary"]
    assert len(summary) == 6 and all(
        row["average"] == row["best"] and row["shapes"] == 1 for row in summary
    )
    (copy,) = [row for row in products["rows"] if row["table"] == "copy"]
    assert copy["gbps"] == pytest.approx(2 * 64 * 2**20 / copy["ms"] / 1e6)
    assert (
        products["notes"]["roofline"]["bandwidth"][1] == pytest.approx(copy["gbps"] / 1e3)
        and products["notes"]["roofline"]["peaks"] == []
    )


def test_averages_over_different_numbers_of_shapes_are_not_compared(products):
    """As of one --shape and of all, or if one shape runs out of memory."""
    data = products | {"tables": [Table.from_dict(fields) for fields in products["tables"]]}
    summary = [row for row in data["rows"] if row["table"] == "summary"]
    more = data | {"rows": [row | {"shapes": 7} for row in summary]}
    sections = report.comparison_sections([("one", data), ("all", more)])
    (averages,) = [section for section in sections if section.title.startswith("Average")]
    assert len(averages.rows) == 2 * len(summary)
    assert {row[-1] for row in averages.rows} == {"-"}


def test_the_average_counts_each_shape_once_and_leaves_failures_out(tmp_path):
    made = Result(
        "gemm",
        gemm.TABLES,
        tmp_path / "a",
        "cuda",
        {"kind": "H200", "peak_tflops_16_bits": 989.4, "peak_tflops_fp8": 1978.9},
        {},
    )
    way = {
        "table": "gemm",
        "precision": "bf16",
        "call": "matmul",
        "library": "cublas",
        "percent": None,
    }
    made.add(way | {"shape": "1x1x1", "tflops": 100.0})
    made.add(way | {"shape": "2x2x2", "tflops": 300.0})
    made.add(way | {"shape": "3x3x3", "error": "out of memory"})
    made.add({"table": "copy", "copy": "within device memory", "gbps": 4000.0})
    gemm.summarize(made)
    assert (
        made.rows[-1]["average"],
        made.rows[-1]["best"],
        made.rows[-1]["best_shape"],
        made.rows[-1]["shapes"],
    ) == (
        200.0,
        300.0,
        "2x2x2",
        2,
    )
    gemm.note_roofs(made)
    roofs = made.data["notes"]["roofline"]
    assert roofs["bandwidth"][1] == 4.0 and [level for _, level in roofs["peaks"]] == [
        989.4,
        1978.9,
    ]


@pytest.mark.parametrize("call", ["matmul", "linear"])
def test_what_is_timed_in_16_bits_is_the_product(call):
    work, width = gemm.launch_of(SHAPE, "bf16", call, "cpu")
    a, b = work.args
    expected = a.double() @ (b if call == "matmul" else b.t()).double()
    assert width == 2 and torch.allclose(work().double(), expected, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("scaling", gemm.SCALINGS)
def test_what_is_timed_in_fp8_is_the_product_of_normal_numbers(scaling):
    torch.manual_seed(0)
    work, width = gemm.launch_of((64, 256, 128), "fp8", f"_scaled_mm {scaling}", "cpu")
    a, w = work.args
    assert width == 1 and a.element_size() == 1 and not w.is_contiguous()
    scale_a, scale_w = work.keywords["scale_a"], work.keywords["scale_b"]
    assert scale_a.numel() == (64 if scaling == "rowwise" else 1) and scale_w.numel() == (
        128 if scaling == "rowwise" else 1
    )
    x, y = a.double() * scale_a.double(), w.double() * scale_w.double()
    assert x.std().item() == pytest.approx(1.0, abs=0.05) and y.std().item() == pytest.approx(
        1.0, abs=0.05
    )
    assert torch.allclose(work().double(), x @ y, rtol=2**-7, atol=0.2)


def test_quantized_rows_have_their_own_scales():
    x = torch.tensor([[1.0, -2.0], [100.0, 50.0]])
    for dimension, scales in ((None, [100.0, 100.0]), (1, [2.0, 100.0])):
        stored, scale = gemm.quantized(x, dimension)
        assert torch.allclose(stored.float() * scale, x, rtol=2**-3)
        assert torch.allclose(scale.expand(2, 1).flatten() * 448, torch.tensor(scales))


def test_a_library_that_torch_does_not_take_is_an_error_and_the_old_one_comes_back(monkeypatch):
    class Taken:
        name = "Cublas"

    asked = []

    def prefer(library=None):
        asked.append(library)
        return Taken()

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    with gemm.preferred("hipblas"), gemm.preferred(""):
        pass
    with pytest.raises(RuntimeError, match="cublas instead"), gemm.preferred("cublaslt"):
        pass
    assert asked[1] == "hipblas" and asked[4] == "cublaslt" and isinstance(asked[-1], Taken)


def test_on_amd_the_libraries_have_their_names_there(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gemm.libraries() == ["hipblas", "hipblaslt", "ck"]


def test_a_gpu_is_measured_on_the_published_shapes():
    shapes = {"x".join(map(str, shape)) for shape in gemm.shapes(None, "cuda")}
    for name in ("gemm_llama_70b", "gemm_square"):
        assert {row["shape"] for row in published.tables()[name].rows} <= shapes
    assert len(shapes) == 7 and all(max(shape) <= 512 for shape in gemm.shapes(None, "cpu"))
    with pytest.raises(argparse.ArgumentTypeError):
        shape_of("4096x4096")


def test_the_published_times_and_rates_agree():
    """Each was printed by itself: 2 M K N / ms is the TFLOP/s, within the rounding of ms."""
    for row in published.tables()["gemm_llama_70b"].rows:
        m, k, n = map(int, row["shape"].split("x"))
        assert 2 * m * k * n / (row["ms"] * 1e9) == pytest.approx(row["tflops"], rel=0.006)


def test_mlp_counts_its_weights_and_biases(tmp_path):
    folder = tmp_path / "a"
    assert (
        main(
            [
                "mlp",
                "--device",
                "cpu",
                "--steps",
                "2",
                "--warmup",
                "1",
                "--batch",
                "4",
                "--out",
                str(folder),
            ]
        )
        == 0
    )
    rows = json.loads((folder / "result.json").read_text())["rows"]
    assert [row["precision"] for row in rows] == ["bf16", "fp32"]
    for row in rows:
        assert row["parameters"] == 256 * 512 + 512 + 512 * 512 + 512 + 512 * 256 + 256
        assert row["samples_per_s"] == pytest.approx(4e3 / row["ms"]) and row["samples"] == 2
        assert row["tflops"] == pytest.approx(6 * row["parameters"] * row["samples_per_s"] / 1e12)
    wide = mlp.SIZES["cuda"]
    assert "-".join(map(str, wide)) == published.tables()["mlp"].rows[0]["model"]
