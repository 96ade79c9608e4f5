"""result.json row by row, what is counted as a failure, and table.md and page.html made of it."""

import json
import sys

import pytest
from page import Page

from common.errors import ConfigError, DataError, RunError
from common.measure import charts, report
from common.measure.tables import Column, Plot, PublishedValues, Table
from throughput import compare, result
from throughput.__main__ import parser
from throughput.result import Result
from throughput.timing import kernel_ms, spread, step_ms

pytestmark = pytest.mark.quick

TABLE = Table(
    "steps",
    "Steps",
    (
        Column("model", "Model"),
        Column("precision", "Precision"),
        Column("batch", "Batch", "", "d"),
        Column("samples_per_s", "Samples/s", "", ",.1f"),
        Column("ms", "Step", "ms", ".2f"),
    ),
    keys=("model", "precision", "batch"),
    value="samples_per_s",
    formulas=("Samples/s = batch / step < time",),
    plots=(
        Plot("bars", "Bars", "model", "samples_per_s", "precision"),
        Plot("lines", "Lines", "batch", "ms", "model"),
    ),
    published=(PublishedValues("mlp", ("model", "batch"), "samples_per_s"),),
    sort="samples_per_s",
)
ROW = {"model": "4096-8192-8192-4096", "precision": "bf16", "batch": 256}


def opened(folder, device="cuda", machine=None) -> Result:
    return Result(
        "mlp", (TABLE,), folder, device, {"gpu": "test", **(machine or {})}, {"torch": "0"}
    )


def rows_on_disk(folder) -> list[dict]:
    return json.loads((folder / "result.json").read_text())["rows"]


def test_each_row_is_on_disk_as_soon_as_it_is_measured(tmp_path, capsys):
    made = opened(tmp_path / "a")
    assert rows_on_disk(tmp_path / "a") == []
    made.add(ROW | {"samples_per_s": 1234.5}, [3.0, 1.0, 2.0])
    (row,) = rows_on_disk(tmp_path / "a")
    assert row["table"] == "steps" and row["source"] == "measured"
    assert (
        (row["ms"], row["samples"]) == (2.0, 3)
        and row["ms_p10"] == pytest.approx(1.2)
        and row["ms_p90"] == pytest.approx(2.8)
    )
    line = "4096-8192-8192-4096, bf16, Batch 256, Samples/s 1,234.5, Step 2.00 ms\n"
    assert capsys.readouterr().out == line
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"] == "running"


def test_a_failure_is_a_row_and_the_measurement_goes_on(tmp_path):
    import torch

    def fails(error):
        raise error

    made = opened(tmp_path / "a")
    assert not made.attempt(
        ROW, lambda: fails(torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
    )
    assert not made.attempt(ROW, lambda: fails(NotImplementedError("no such product\nmore")))
    with pytest.raises(RunError, match="nothing was measured"):
        made.finish()
    assert made.attempt(ROW, lambda: result.TimedRow({"samples_per_s": 1.0}, [1.0]))
    made.finish()
    assert [row.get("error") for row in rows_on_disk(tmp_path / "a")] == [
        "out of memory",
        "NotImplementedError: no such product",
        None,
    ]
    table = (tmp_path / "a" / "table.md").read_text()
    # sorted: failures last.
    assert table.index("| 1.0 |") < table.index("| bf16 | 256 | out of memory | ")
    with pytest.raises(ConfigError):
        made.attempt(ROW, lambda: fails(ConfigError("for the user")))


def test_a_percentage_is_of_the_peak_in_the_facts_or_there_is_none(tmp_path):
    made = opened(
        tmp_path / "a", machine={"peak_tflops_16_bits": 1000.0, "peak_tflops_fp8": 2000.0}
    )
    assert [made.percent(500.0, name) for name in ("bf16", "fp16", "fp8", "fp32")] == [
        50.0,
        50.0,
        25.0,
        None,
    ]
    assert opened(tmp_path / "b", machine={"kind": "unknown"}).percent(500.0, "bf16") is None


def test_an_unknown_gpu_says_that_it_has_no_peak(tmp_path):
    made = opened(tmp_path / "a", machine={"kind": "unknown"})
    made.add(ROW | {"samples_per_s": 1.0})
    made.finish()
    assert "| Dense peak | unknown for this GPU" in (tmp_path / "a" / "table.md").read_text()


def test_published_values_stand_beside_measured_ones_of_the_same_gpu(tmp_path):
    other = opened(tmp_path / "b", machine={"kind": "H200"})
    other.add(ROW | {"samples_per_s": 1000.0})
    other.finish()
    assert "ublished" not in (tmp_path / "b" / "table.md").read_text()
    made = opened(tmp_path / "a", machine={"kind": "MI350X"})
    made.add(ROW | {"samples_per_s": 1000.0})
    made.add(ROW | {"batch": 128, "samples_per_s": 10.0})
    made.finish()
    lines = (tmp_path / "a" / "table.md").read_text().splitlines()
    assert "| Model | Precision | Batch | Samples/s | Samples/s, published | Step, ms |" in lines
    assert "| 4096-8192-8192-4096 | bf16 | 256 | 1,000.0 | 124,517 | - |" in lines
    assert "| 4096-8192-8192-4096 | bf16 | 128 | 10.0 | - | - |" in lines
    assert (
        sum(line == "Measured here." for line in lines) == 1
        and sum(line.startswith("Published: article") for line in lines) == 1
    )


def test_the_page_stands_alone_in_both_color_schemes(tmp_path):
    made = opened(tmp_path / "a")
    for batch in (128, 256):
        made.add(ROW | {"batch": batch, "samples_per_s": 1000.0}, [1.0 * batch])
    made.finish()
    text = (tmp_path / "a" / "page.html").read_text()
    page = Page(text)
    (chart,) = page.charts
    assert chart["series"][0]["data"] == [[128, 256], [128, 256]]
    assert text.count('<figure class="bars">') == 1 and page.links == []
    assert (
        "prefers-color-scheme: dark" in text
        and 'name="viewport"' in text
        and "step &lt; time" in text
        and "default-src 'none'" in text
    )
    assert "@import" not in text and "url(http" not in text


def test_without_jinja2_there_is_a_table_and_a_line_how_to_make_the_page(
    tmp_path, monkeypatch, capsys
):
    made = opened(tmp_path / "a")
    made.add(ROW | {"samples_per_s": 1.0})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        made.finish()
    assert (tmp_path / "a" / "table.md").is_file() and not (tmp_path / "a" / "page.html").exists()
    out = capsys.readouterr().out
    assert "jinja2" in out and f"throughput compare {tmp_path / 'a'}" in out
    assert compared(tmp_path / "a") == 0
    assert (tmp_path / "a" / "page.html").is_file()


# --- compare --------------------------------------------------------------------------------------


def compared(*words) -> int:
    return compare.main(parser().parse_args(["compare", *map(str, words)]))


def finished(folder, values: dict[int, float], **machine):
    made = opened(folder, machine=machine)
    for batch, rate in values.items():
        made.add(ROW | {"batch": batch, "samples_per_s": rate})
    made.finish()
    return folder


def test_compare_puts_results_beside_each_other(tmp_path):
    one = finished(tmp_path / "one", {128: 100.0, 256: 200.0}, kind="H200")
    two = finished(tmp_path / "two", {256: 300.0, 512: 400.0}, kind="H100")
    assert compared(one, two, "--out", tmp_path / "both") == 0
    lines = (tmp_path / "both" / "table.md").read_text().splitlines()
    assert (
        "| Model | Precision | Batch | H200: Samples/s | H100: Samples/s | H100 / H200 |" in lines
    )
    name = ROW["model"]
    assert f"| {name} | bf16 | 256 | 200.0 | 300.0 | 1.500 |" in lines
    assert (
        f"| {name} | bf16 | 128 | 100.0 | - | - |" in lines
        and f"| {name} | bf16 | 512 | - | 400.0 | - |" in lines
    )
    assert '<figure class="bars">' in (tmp_path / "both" / "page.html").read_text()
    with pytest.raises(ConfigError, match="contains files"):
        compared(one, two, "--out", tmp_path / "both")


def test_results_of_one_kind_of_gpu_are_told_apart_by_their_directories(tmp_path):
    assert compare.named([tmp_path / "a", tmp_path / "b"], ["H200", "H200"]) == ["H200 a", "H200 b"]
    assert compare.named([tmp_path / "a", tmp_path / "a"], ["H200", "H200"]) == [
        "H200 a (1)",
        "H200 a (2)",
    ]


def test_compare_refuses_what_is_no_result_or_another_measurement(tmp_path):
    one = finished(tmp_path / "one", {128: 100.0})
    two = finished(tmp_path / "two", {128: 100.0})
    data = json.loads((two / "result.json").read_text())
    (two / "result.json").write_text(json.dumps(data | {"what": "other"}))
    with pytest.raises(ConfigError, match="mlp and other"):
        compared(one, two)
    for text in (
        "{",
        "[]",
        "{}",
        json.dumps(data | {"tables": [{"name": "x"}]}),
        json.dumps({"what": "mlp", "tables": []}),
    ):
        (two / "result.json").write_text(text)
        with pytest.raises(DataError, match=r"result\.json"):
            compared(two)
    (tmp_path / "empty").mkdir()
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "profile.json").write_text("{}")
    for good in (one, tmp_path / "profile"):
        with pytest.raises(DataError, match="empty is neither a measurement nor a profile"):
            compared(good, tmp_path / "empty")
        with pytest.raises(ConfigError, match=r"nowhere.* does not exist"):
            compared(good, tmp_path / "nowhere")


# --- plots and times ------------------------------------------------------------------------------


@pytest.mark.parametrize("peaks", [[], [["peak of H200: 989", 989.4]]])
def test_a_roofline_has_the_fastest_product_of_each_shape_and_the_roofs(peaks):
    plot = Plot("roofline", "Roofline", "intensity", "tflops", "precision")
    points = [(100.0, 60.0, "bf16"), (100.0, 50.0, "bf16"), (900.0, 600.0, "fp8")]
    roofs = {"bandwidth": ["copy: 4,000 GB/s", 4.0], "peaks": peaks}
    (block,) = charts.blocks(plot, ("FLOP/byte", "TFLOP/s"), points, roofs)
    chart = block["chart"]
    curves = {curve["name"]: curve["data"] for curve in chart["series"]}
    assert chart["log"] == {"x": 10, "y": 10}
    assert curves["bf16"] == [[100.0], [60.0]] and curves["fp8"] == [[900.0], [600.0]]
    (start, end), (low, high) = curves["copy: 4,000 GB/s"]
    assert (low, high) == (4 * start, 4 * end)
    assert high == pytest.approx(989.4 if peaks else 600.0)
    if peaks:
        assert curves["peak of H200: 989"] == [[pytest.approx(247.35), 1800.0], [989.4, 989.4]]


def test_bars_are_in_proportion_and_carry_their_numbers():
    plot = Plot("bars", "Tokens/s", "model", "tokens_per_s", "precision")
    points = [("8b", 2000.0, "bf16"), ("8b", 1000.0, "fp8"), ("70b", 20.0, "fp8")]
    (block,) = charts.blocks(plot, ("Model", "Tokens/s"), points, {})
    assert block["label"] == "Tokens/s" and list(block["colors"]) == ["bf16", "fp8"]
    (first, second), (third,) = block["bars"].values()
    widths = [float(bar[0].rstrip("%")) for bar in (first, second, third)]
    assert widths == [pytest.approx(widths[0] * part, abs=0.1) for part in (1, 0.5, 0.01)]
    assert (first[1], third[1]) == ("2,000.0", "20.0000") and second[2] == third[2] != first[2]


def test_times_are_milliseconds_of_calls_that_count():
    import time

    calls = []

    def work():
        calls.append(1)
        time.sleep(0.002)

    times = step_ms(work, "cpu", 2, 3)
    assert len(times) == 3 and len(calls) == 5 and min(times) >= 2.0
    times = kernel_ms(work, "cpu", 4.0, 10.0)
    assert sum(times) >= 10.0 and len(calls) - 5 > len(times)


def test_spread_of_one_sample_is_that_sample():
    assert spread([5.0]) == {"ms": 5.0, "ms_p10": 5.0, "ms_p90": 5.0, "samples": 1}


def test_read_gives_what_was_written(tmp_path):
    opened(tmp_path / "a").add(ROW)
    data = result.read(tmp_path / "a")
    assert data["tables"] == [TABLE] and data["rows"][0]["batch"] == 256


def test_bars_of_one_model_are_told_apart_by_further_columns():
    columns = (
        Column("model", "Model"),
        Column("seq", "Sequence", "", ",d"),
        Column("rate", "Tokens/s", "", ",.0f"),
    )
    plot = Plot("bars", "Speed", "model, seq", "rate", "precision")
    table = Table("llama", "Steps", columns, keys=("model", "seq"), value="rate", plots=(plot,))
    rows = [
        {"model": "8b", "seq": seq, "rate": 1e7 / seq, "precision": "bf16"} for seq in (4096, 8192)
    ]
    failed = {"model": "8b", "seq": 16384, "error": "out of memory"}
    (block,) = report.charts_of(plot, table, [*rows, failed], {})
    assert list(block["bars"]) == ["8b, 4,096", "8b, 8,192"]
    assert report.charts_of(plot, table, [failed], {}) == []
