"""The report of a run: complete and self-contained when the run is, and never a crash when it is not."""

import json
import re
import shutil

import pytest
import synthetic_log
import synthetic_series
from page import Page
from synthetic_log import records, start, write_good, write_records

from llama31_8b import rules
from submission import rcp, report
from submission.series import read_series, ten_runs


def events(steps: int = 50, interval: int = 12288) -> list[dict]:
    lines: list[dict] = [{"event": "phase", "name": "init", "seconds": 30.0, "time_s": 0.0}]
    for step in range(1, steps + 1):
        measured = {"tokens_per_s_per_gpu": 9000.0, "tflops_per_gpu": 480.0, "mfu": None, "memory_gib": 100.5}
        values = {"loss": 10 / step**0.3, "grad_norm": 1.0, "learning_rate": 8e-4, "time_s": step, "step_time_ms": 900 + step % 7}
        lines.append({"event": "step", "step": step, "samples": step * 1000, **values, **measured})
    lines += [{"event": "eval", "step": n, "samples": n * interval, "loss": 3.4, "seconds": 8.25, "time_s": 60.0} for n in (1, 2, 3, 4)]
    lines += [{"event": "phase", "name": name, "seconds": 100.0, "time_s": 200.0} for name in ("train", "eval")]
    lines.append({"event": "self_test", "attention": "cudnn-of-the-test", "seconds": 5.0, "ops": 30, "worst": "attention: 50.0 dB"})
    return [*lines, {"event": "verdict", "status": "success", "samples": 4 * interval, "loss": 3.3, "minutes": 5.0}]


def spread(path, milliseconds: int) -> None:
    """So much time between the records of the log; two of these are an evaluation."""
    log = records(path)
    write_records(path, [record | {"time_ms": log[0]["time_ms"] + milliseconds * index} for index, record in enumerate(log)])


@pytest.fixture
def run_dir(tmp_path):
    write_good(tmp_path / "result.txt")
    spread(tmp_path / "result.txt", 4125)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
    (tmp_path / "config.toml").write_text('gpu = "MI355X"\nglobal_batch_size = 32\n')
    (tmp_path / "versions.json").write_text(json.dumps({"commit": "0123abc", "torch": "2.13.0", "gpus": ["MI355X"] * 8}))
    return tmp_path


def page(run_dir) -> str:
    assert report.main([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert Page(text).links == []
    return text


def test_the_report_of_a_good_run_is_complete(run_dir):
    text = page(run_dir)
    for part in ("Target reached", "training sequences", "loss, nats per token", "step time, ms", "target 3.3", "49,152", "8.2500"):
        assert part in text
    for part in ("0123abc", "2.13.0", "1234567", "global_batch_size = 32", "An Organisation", "480.0 TFLOP/s per GPU", "cudnn-of-the-test"):
        assert part in text
    assert "MFU" not in text and "miniature" not in text and "Could not be read" not in text
    assert text.count('<circle class="point"') == 4 and "prefers-color-scheme: dark" in text


def test_the_report_is_self_contained(run_dir):
    text = page(run_dir)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text) and "script" not in Page(text).tags


def test_a_miniature_is_called_no_benchmark_result(tmp_path):
    write_good(tmp_path / "result.txt", rules.MINIATURE)
    assert "this is not a benchmark result" in page(tmp_path)


def test_an_aborted_run_gives_its_reason(run_dir):
    (run_dir / "result.txt").unlink()
    log = start(run_dir / "result.txt")
    log.block_start(0)
    log.abort(640)
    failure = {"kind": "hang", "exit_code": 13, "what": "no progress for 600 s", "why": "rank 3 is missing", "do": "look at rank 3"}
    (run_dir / "failure.json").write_text(json.dumps(failure))
    text = page(run_dir)
    assert "did not converge: hang" in text and "rank 3 is missing" in text and "Target reached" not in text


def test_phases_of_a_run_that_broke_off_come_from_its_log(run_dir):
    spread(run_dir / "result.txt", 1000)
    (run_dir / "events.jsonl").write_text(json.dumps(events()[0]) + "\n")
    text = page(run_dir)
    assert '<td class="n">30.0</td><td class="n">0.0</td><td class="n">4.0</td><td class="n">8.0</td>' in text


def test_a_run_that_gave_up_says_so(run_dir):
    log = records(run_dir / "result.txt")
    log[-1]["metadata"]["status"] = "aborted"
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "<b>did not converge</b>" in page(run_dir)


def test_a_success_that_is_none_is_not_believed(run_dir):
    log = records(run_dir / "result.txt")
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "did not converge: the official checker refuses its log: no evaluation reached the target" in page(run_dir)


def test_all_text_is_escaped(run_dir):
    evil = "<script>alert('x')</script>&"
    (run_dir / "config.toml").write_text(evil)
    (run_dir / "versions.json").write_text(json.dumps({evil: evil, "deep": {evil: [evil]}}))
    (run_dir / "failure.json").write_text(json.dumps({"kind": evil, "what": evil, "why": evil, "do": evil}))
    log = records(run_dir / "result.txt")
    for record in log:
        if record["key"] in ("submission_org", "seed", "eval_accuracy"):
            record["value"] = evil
    write_records(run_dir / "result.txt", log)
    text = page(run_dir)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_nothing_is_written_into_a_directory_that_is_no_run(tmp_path, capsys):
    (tmp_path / "photo.jpg").touch()
    for folder in (tmp_path, tmp_path / "result_0.txt"):
        assert report.main([str(folder)]) == 2
        assert "no such run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_run_that_failed_before_its_log_gets_a_report(tmp_path):
    (tmp_path / "failure.json").write_text(json.dumps({"kind": "preflight", "what": "the GPU does not answer"}))
    text = page(tmp_path)
    assert "never started its clock: preflight" in text and "the GPU does not answer" in text
    assert "cannot read" in text and "events.jsonl is missing" in text


def test_a_log_with_a_prefix_gives_the_same_page(run_dir):
    text = page(run_dir)
    path = run_dir / "result.txt"
    path.write_text("".join(f"0: {line}\n" for line in path.read_text().splitlines()))
    assert page(run_dir) == text


def test_a_log_that_the_official_checker_refuses_is_no_good_run(run_dir):
    log = records(run_dir / "result.txt")
    log[synthetic_log.find(log, "opt_gradient_clip_norm")]["value"] = 5.0
    write_records(run_dir / "result.txt", log)
    text = page(run_dir)
    assert "did not converge: the official checker refuses its log" in text and "opt_gradient_clip_norm" in text


@pytest.mark.parametrize("name", ["result.txt", "events.jsonl", "versions.json", "config.toml"])
@pytest.mark.parametrize("keep", [0, 1, 700, -20])
def test_files_that_are_cut_off_do_not_stop_it(run_dir, name, keep):
    path = run_dir / name
    path.write_bytes(path.read_bytes()[:keep])
    page(run_dir)


def test_junk_does_not_stop_it(run_dir):
    junk = [[], 1, None, "x", {"event": 5}, {"event": "step"}, {"event": "step", "samples": [1], "loss": {}, "step_time_ms": "x"}]
    junk += [
        {"event": "eval", "samples": [1]},
        {"event": "eval", "samples": 5, "loss": "NaN"},
        {"event": "phase", "name": [1], "seconds": 1},
    ]
    junk += [{"event": "phase", "name": "init", "seconds": "x"}, {"event": "step", "samples": -5, "loss": float("nan"), "step_time_ms": 0}]
    junk += [{"event": "step", "samples": -5, "loss": 10**400, "step_time_ms": 0}, {"event": "step", "samples": -5, "loss": 1}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in junk))
    (run_dir / "versions.json").write_text("[1]")
    (run_dir / "failure.json").write_text("{")
    log = records(run_dir / "result.txt")
    log[-3]["metadata"]["samples_count"] = [1]
    log[-1]["metadata"] = {}
    write_records(run_dir / "result.txt", log)
    page(run_dir)


def test_a_long_run_gives_a_small_page(run_dir):
    with open(run_dir / "events.jsonl", "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events(steps=12_000))
    assert len(page(run_dir)) < 60_000


def test_a_missing_directory_is_a_usage_error(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "no such run" in capsys.readouterr().err


# A series.


@pytest.fixture
def series(tmp_path):
    """Twelve attempts: the third missed the target, the eleventh never started its clock; the directory of the ledger."""
    plans = synthetic_series.plans([13, 14, 16, 13, 14, 13, 13, 13, 13, 14, 13, 13])
    plans[2].fails, plans[10].fails = "missed", "early"
    return synthetic_series.write(tmp_path, synthetic_log.PRETRAINING, plans)


def test_the_report_of_a_series_is_complete(series):
    text = page(series)
    for part in (
        "score of attempts",
        "10 of 12 attempts are good",
        "RCP test passed",
        "RCP band",
        "minutes",
        "training sequences",
        "step, ms",
    ):
        assert part in text
    point = rcp.point_at("llama31_8b", 16, "6.1.0")
    for part in (
        f"{point.mean:,.2f}",
        f"{point.minimum:,.2f}",
        "the GPU does not answer",
        "the target was not reached",
        "never started its clock",
    ):
        assert part in text
    for part in (synthetic_series.COMMIT, "MI355X_1x8.toml", "2.13.0", "global_batch_size = 16", synthetic_series.SERIES):
        assert part in text
    assert text.count('<polyline class="run"') == 10 and text.count('<polyline class="run other"') == 2
    assert "differ" not in text and text.count('class="band"') == 1
    assert f"{ten_runs(read_series([series])).score:.3f} minutes" in text


def test_the_report_of_a_series_is_self_contained_and_small(series):
    text = page(series)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text) and "script" not in Page(text).tags
    assert "prefers-color-scheme: dark" in text and len(text) < 100_000


def test_what_differs_among_the_runs_is_shown(tmp_path):
    plans = synthetic_series.plans([13] * 10)
    plans[4].changes = {"driver": "6.15", "commit": "feedfacefeedface"}
    text = page(synthetic_series.write(tmp_path, synthetic_log.PRETRAINING, plans))
    assert "The runs differ in what should be the same" in text
    assert "attempt 5: 6.15" in text and "attempt 1, 2, 3, 4, 6, 7, 8, 9, 10: 6.14" in text and "attempt 5: feedface" in text


def test_a_series_without_ten_in_a_row_has_no_score(tmp_path):
    plans = synthetic_series.plans([13] * 12)
    plans[5].fails = "killed"
    text = page(synthetic_series.write(tmp_path, synthetic_log.PRETRAINING, plans))
    assert "11 of 12 attempts are good" in text and "no score: no 10 consecutive attempts" in text and "<b>score</b>" not in text
    assert ">lost<" in text and "died without a message" in text


def test_a_series_of_miniatures_is_no_benchmark_result(tmp_path):
    plans = synthetic_series.plans([4, 5, 4])
    text = page(synthetic_series.write(tmp_path, synthetic_log.PRETRAINING, plans, rules=rules.MINIATURE))
    assert "this is not a benchmark result" in text and "3 of 3 attempts are good" in text and "RCP test" not in text


def test_runs_without_a_ledger_are_a_series_too(series):
    (series / "attempts.jsonl").unlink()
    text = page(series)
    assert "10 of 12 attempts are good" in text and "did not converge" in text


def test_the_series_that_is_asked_for(series, capsys):
    other = synthetic_series.plans([13] * 10)
    for plan in other:
        plan.seed += 1
    synthetic_series.write(series.parent, synthetic_log.PRETRAINING, other, series="20270101-000000-fedcba")
    assert "10 of 10 attempts" in page(series)
    assert report.main([str(series), "--series", synthetic_series.SERIES[:10]]) == 0
    assert "10 of 12 attempts" in (series / "report.html").read_text()
    assert report.main([str(series), "--series", "2029"]) == 2
    assert "no series 2029" in capsys.readouterr().err


def test_a_run_of_a_series_has_its_own_report_with_the_band(series):
    text = page(sorted(series.glob("*/result.txt"))[0].parent)
    assert "Target reached" in text and "RCP band, from the least mean of a series" in text and text.count('class="band"') == 1


def test_spoilt_files_of_a_series_do_not_stop_its_report(series):
    evil = "<script>alert('x')</script>"
    runs = sorted(path.parent for path in series.glob("*/result.txt"))
    (runs[0] / "result.txt").write_text("")
    (runs[1] / "events.jsonl").write_bytes(b"\xff\xfe{")
    (runs[3] / "versions.json").write_text(json.dumps({evil: [evil]}))
    (runs[4] / "config.toml").unlink()
    log = records(runs[5] / "result.txt")
    for record in log:
        record["value"] = [evil] if record["key"] not in ("run_stop", "eval_accuracy") else evil
        record["metadata"] = {"samples_count": evil, "status": "success"}
    write_records(runs[5] / "result.txt", log)
    shutil.rmtree(runs[6])
    with (series / "attempts.jsonl").open("a") as ledger:
        ledger.write('{"event": "end"\n[]\n{"event": "start", "series": "' + synthetic_series.SERIES + '", "attempt": 13}\n')
    text = page(series)
    assert "<script" not in text and "of 13 attempts are good" in text
