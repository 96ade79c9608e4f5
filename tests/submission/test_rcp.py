"""Compare the RCP test that the product calls with published tables and known verdicts."""

import json
import sys
from pathlib import Path

import pytest

from common.benchmarks import closed, divisions
from common.errors import PreflightError
from common.records.rcp import mean_samples
from submission import rcp

pytestmark = pytest.mark.quick

_8B, LORA = "llama31_8b", "llama2_70b_lora"
RULESETS = ("5.1.0", "6.0.0", "6.1.0")

# Mean, sigma, lowest mean that passes, max speed-up, in the pruned set; as mlperf-logging 4.1.68
# computes them.
MEASURED = [
    (_8B, 16, 161_109.33, 4_387.69, 157_919.55, 1.02020),
    (_8B, 32, 178_858.67, 7_165.07, 173_649.76, 1.03000),
    (_8B, 64, 226_645.33, 10_623.97, 218_921.87, 1.03528),
    (_8B, 96, 278_640.00, 11_417.48, 270_339.66, 1.03070),
    (_8B, 128, 344_746.67, 24_352.26, 327_042.94, 1.05413),
    (LORA, 8, 3_178.67, 299.91, 2_960.63, 1.07364),
    (LORA, 16, 4_032.00, 411.35, 3_732.96, 1.08011),
    (LORA, 128, 11_264.00, 844.80, 10_649.84, 1.05767),
]
# Mean and lowest mean that passes, between the points of the pruned set.
INTERPOLATED = [
    (_8B, 20, 165_546.67, 161_920.58),
    (_8B, 24, 169_984.00, 165_862.49),
    (_8B, 40, 190_805.33, 185_075.98),
    (_8B, 48, 202_752.00, 196_405.66),
    (_8B, 56, 214_698.67, 207_735.34),
    (_8B, 72, 239_644.00, 231_922.13),
    (_8B, 80, 252_642.67, 244_779.26),
    (_8B, 112, 311_693.33, 298_932.28),
    (LORA, 12, 3_605.33, 3_351.59),
    (LORA, 24, 4_548.57, 4_232.98),
    (LORA, 32, 5_065.14, 4_727.46),
    (LORA, 40, 5_581.71, 5_221.94),
    (LORA, 48, 6_098.29, 5_716.42),
    (LORA, 64, 7_131.43, 6_705.38),
    (LORA, 72, 7_648.00, 7_199.86),
    (LORA, 96, 9_197.71, 8_683.30),
]
FOUND, BETWEEN, BELOW = (
    "RCP found",
    "RCP Interpolation",
    "RCP not found but slower convergence on smaller batch size",
)
NO_RUN = 1e9  # samples of a run that does not reach the target

# Benchmark, global batch, runs as (samples, count), passed, message, factor.
CASES = [
    (_8B, 32, [(172_032, 10)], False, FOUND, 1.039682),
    (_8B, 32, [(172_032, 7), (184_320, 3)], True, FOUND, 1.021442),
    (_8B, 32, [(172_032, 8), (184_320, 2)], False, FOUND, None),
    (_8B, 32, [(172_000, 5), (184_288, 4), (196_576, 1)], True, FOUND, 1.004012),
    (_8B, 32, [(172_032, 5), (184_320, 4), (196_608, 1)], True, FOUND, 1.003831),
    (_8B, 32, [(184_320, 10)], True, FOUND, 1.0),
    (_8B, 16, [(147_456, 2), (159_744, 8)], True, FOUND, None),
    (_8B, 16, [(147_456, 3), (159_744, 7)], False, FOUND, None),
    (LORA, 8, [(2688, 3), (3072, 7)], True, FOUND, 1.0681),
    (LORA, 8, [(2688, 5), (3072, 5)], False, FOUND, None),
    (_8B, 8, [(159_744, 10)], True, BELOW, 1.00855),
    (_8B, 8, [(147_456, 10)], False, "Missing RCP, please submit RCP with BS = 8", None),
    (_8B, 256, [(500_000, 10)], False, "Missing RCP, please submit RCP with BS = 256", 1.0),
    (_8B, 24, [(159_744, 2), (172_032, 8)], True, BETWEEN, 1.0),
    (_8B, 24, [(159_744, 10)], False, BETWEEN, None),
    (LORA, 64, [(6912, 6), (7296, 4)], True, BETWEEN, None),
    (
        LORA,
        32,
        [(5376, 10)],
        True,
        BETWEEN,
        1.0,
    ),  # the pruned set has no point at 32, and is the milder one here
    (_8B, 32, [(184_320, 9), (NO_RUN, 1)], True, FOUND, 1.0),
    (_8B, 32, [(184_320, 8), (NO_RUN, 2)], False, "Insufficient convergence", 1.0),
]


def runs_of(counts) -> list[float]:
    return [value for value, count in counts for _ in range(count)]


@pytest.mark.parametrize("benchmark, batch, mean, sigma, minimum, speedup", MEASURED)
def test_measured_points(benchmark, batch, mean, sigma, minimum, speedup):
    point = rcp.point_at(benchmark, batch, "6.1.0")
    assert [round(value, 2) for value in (point.mean, point.sigma, point.minimum)] == [
        mean,
        sigma,
        minimum,
    ]
    assert point.mean / point.minimum == pytest.approx(speedup, abs=6e-6)
    assert mean_samples(divisions(benchmark)["closed"], batch) == point.mean


@pytest.mark.parametrize("benchmark, batch, mean, minimum", INTERPOLATED)
def test_interpolated_points(benchmark, batch, mean, minimum):
    point = rcp.point_at(benchmark, batch, "6.1.0")
    assert (round(point.mean, 2), round(point.minimum, 2)) == (mean, minimum)


def test_a_batch_that_was_never_run_has_no_mean():
    assert mean_samples(divisions(_8B)["closed"], 24) is None
    assert rcp.point_at(_8B, 129, "6.1.0") is None


def test_where_a_run_lies():
    point = rcp.point_at(_8B, 32, "6.1.0")
    assert point.z_score(point.mean + point.sigma) == pytest.approx(1)


def official():
    return pytest.importorskip(
        "mlperf_logging.rcp_checker.rcp_checker", reason="mlperf-logging is not installed"
    )


@pytest.mark.parametrize("benchmark", closed())
def test_reference_runs_are_those_of_every_ruleset(benchmark):
    folder = Path(official().__file__).parent
    for ruleset in RULESETS:
        records = json.loads(
            (folder / f"training_{ruleset}" / f"rcps_{benchmark}.json").read_text()
        ).values()
        lists = {
            record["BS"]: sorted(record.get("samples to converge") or record["Epochs to converge"])
            for record in records
        }
        assert lists == {
            batch: sorted(runs_of(runs))
            for batch, runs in divisions(benchmark)["closed"].reference_runs.items()
        }


def write_bare_log(path: Path, benchmark: str, batch: int, samples: float) -> None:
    """The four lines that the RCP checker reads."""
    status = "aborted" if samples == NO_RUN else "success"
    lines = [("submission_benchmark", benchmark, {}), ("global_batch_size", batch, {})]
    lines += [
        ("eval_accuracy", 1.0, {"samples_count": samples}),
        ("run_stop", None, {"status": status}),
    ]
    path.write_text(
        "".join(
            f":::MLLOG {json.dumps({'key': key, 'value': value, 'metadata': about})}\n"
            for key, value, about in lines
        )
    )


@pytest.mark.parametrize("benchmark, batch, counts, passed, message, factor", CASES)
def test_verdicts(benchmark, batch, counts, passed, message, factor, tmp_path):
    samples = runs_of(counts)
    logs = [tmp_path / f"log {index}" for index in range(len(samples))]
    for path, value in zip(logs, samples, strict=True):
        write_bare_log(path, benchmark, batch, value)
    verdict = rcp.judge(logs, "6.1.0")
    assert (verdict.passed, verdict.message) == (passed, message)
    if factor is not None:
        digits = 6e-5 if factor in (1.0681, 1.00855) else 6e-7
        assert verdict.factor == pytest.approx(factor, abs=digits)
    # The checker writes scaling.json elsewhere.
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in logs}


def test_a_crash_of_the_official_checker_is_a_failure_in_one_line(tmp_path, caplog, capsys):
    logs = [tmp_path / str(index) for index in range(3)]
    for path in logs:
        path.write_text(
            ':::MLLOG {"key": "submission_benchmark", "value": "llama31_8b"}\n'
            ':::MLLOG {"key": "eval_accuracy"}\n'
        )
    verdict = rcp.judge(logs, "6.1.0")
    assert not verdict.passed and "KeyError: 'metadata'" in verdict.message
    assert not caplog.records and capsys.readouterr() == ("", "")


def test_without_the_official_package_there_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlperf_logging.rcp_checker", None)
    with pytest.raises(PreflightError, match="imported"):
        rcp.judge([tmp_path / "log"] * 3, "6.1.0")
