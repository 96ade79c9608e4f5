"""Limits of `throughput suite --against` from repeated suites."""

import json
from collections.abc import Iterable

import pytest

from common.paths import ROOT
from tests.tools import suite_limits
from throughput import baseline
from throughput.baseline import Baseline, BaselineRow

pytestmark = pytest.mark.quick

GEMM = {"shape": "8x8x8", "precision": "bf16", "call": "matmul", "library": "cublas"}


def suite(llama: float, copy: float = 4000.0, gemm: float = 700.0) -> Baseline:
    rows = (
        BaselineRow("llama", {"layers": 8}, "tokens_per_s_per_gpu", llama),
        BaselineRow("copy", {"copy": "within device memory"}, "gbps", copy),
        BaselineRow("gemm", GEMM, "tflops", gemm),
    )
    return Baseline("H200", f"measured on card {llama}", rows)


HEALTHY = [suite(100.0), suite(101.0, gemm=600.0), suite(99.0), suite(98.0, 4400.0), suite(100.5)]


def test_a_limit_is_twice_the_largest_distance_from_the_median_within_bounds():
    rows, entries = suite_limits.combined(HEALTHY)
    assert [row.value for row in rows] == [100.0, 4000.0, 700.0]
    limits = {entry["table"]: entry["limit"] for entry in entries}
    assert limits == {"llama": 0.04, "copy": None}, "10 % apart is no sign; products are declared"
    assert suite_limits.combined(HEALTHY[:1])[1][0]["limit"] == baseline.TOLERANCE


def test_each_suite_is_judged_by_the_others():
    for number, one in enumerate(HEALTHY):
        assert suite_limits.slow_rows(one, HEALTHY[:number] + HEALTHY[number + 1 :]) == []
    [row] = suite_limits.slow_rows(suite(95.0), HEALTHY)
    assert "llama" in row and "-5.0%" in row and "4.0%" in row
    slowed = suite(90.0, gemm=100.0)
    medians = suite_limits.combined(HEALTHY)[0]
    alike = suite_limits.slowed_alike(HEALTHY[1], medians, slowed)
    assert alike.rows[0].value == pytest.approx(90.9)
    assert len(suite_limits.slow_rows(alike, HEALTHY)) == 1


def test_what_it_writes_is_a_baseline_with_limits(tmp_path, monkeypatch):
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"source": "", "measured": [], "declared": []}))
    monkeypatch.setattr(baseline, "LIMITS", limits)
    monkeypatch.setattr(baseline, "BASELINES", tmp_path)
    older = (
        BaselineRow("llama", {"layers": 32}, "tokens_per_s_per_gpu", 30.0),
        BaselineRow("gemm", GEMM | {"library": None}, "tflops", 1.0),
        BaselineRow("copy", {}, "gbps", 1.0),
    )
    baseline.write(tmp_path / "H200.json", Baseline("H200", "one suite", older))
    suite_limits.write(HEALTHY, ["a", "b", "c", "d", "e"])
    written = baseline.read(tmp_path / "H200.json")
    assert [row.value for row in written.rows] == [100.0, 4000.0, 700.0, 30.0, 1.0]
    assert "5 suites" in written.source and "one suite" in written.source
    assert "card 98.0" in written.source and "card 98.0" in json.loads(limits.read_text())["source"]
    entry = baseline.limit_of(written.rows[0], baseline.read_limits())
    assert entry == 0.04


SUITES = ROOT / "tests/throughput/suites"  # one H200, 2026-11-29: alone, and beside slow_gpu 0.1


def below(rows: Iterable[BaselineRow]) -> list[str]:
    """Return the tables of the rows below the shipped H200 baseline and its limits."""
    limits = baseline.read_limits()
    shipped = baseline.read(baseline.BASELINES / "H200.json").rows
    known = {suite_limits.key_of(row): row.value for row in shipped}
    tables = []
    for row in rows:
        limit = baseline.limit_of(row, limits)
        reference = known.get(suite_limits.key_of(row))
        if limit is not None and reference and row.value < reference * (1 - limit):
            tables.append(row.table)
    return tables


def test_the_shipped_limits_tell_a_healthy_gpu_from_one_that_was_slowed_for_real():
    healthy = baseline.read(SUITES / "healthy_H200.json")
    slowed = baseline.read(SUITES / "slowed_H200.json")
    assert below(healthy.rows) == []
    assert {"llama", "gpt", "flux"} <= set(below(slowed.rows))
    shipped = baseline.read(baseline.BASELINES / "H200.json")
    for one in (healthy, shipped):
        alike = suite_limits.slowed_alike(one, healthy.rows, slowed)
        assert {"llama", "gpt", "flux"} <= set(below(alike.rows))
