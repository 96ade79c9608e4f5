"""Test the report of a run: complete and self-contained, and no crash for an incomplete run."""

import fcntl
import json
import os
import re
import shutil
import sys

import pytest
import synthetic_run
import synthetic_series
from page import Page, read_page
from synthetic_run import (
    events,
    records,
    spread,
    start,
    step_event,
    write_good,
    write_records,
    write_run,
)

from common.records import ledger
from common.records.run_states import NO_END, words
from llama31_8b import rules
from submission import provenance, rcp, report
from submission.figures import figures_of
from submission.run import Run
from submission.series import read_series, ten_runs

pytestmark = pytest.mark.quick


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path)


def page(run_dir) -> str:
    assert report.main([str(run_dir)]) == 0
    return read_page(run_dir / "report.html")


def charts(text: str) -> dict[str, dict]:
    """Return charts by the first word of their labels."""
    return {chart["label"].split(",")[0]: chart for chart in Page(text).charts}


def test_the_page_names_the_engines_after_the_self_test(run_dir):
    """versions.json names those before it."""
    path = run_dir / "versions.json"
    versions = json.loads(path.read_text()) | {"engines": {"attention": "an engine rejected later"}}
    path.write_text(json.dumps(versions))
    text = page(run_dir)
    assert "attention cudnn-of-the-test" in text and "an engine rejected later" not in text


def test_the_page_shows_variables_and_host_settings(run_dir):
    path = run_dir / "versions.json"
    ran = {"variables": {"NCCL_ALGO": "Ring"}, "system_tuning": {"governor": "good"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | ran))
    text = page(run_dir)
    shown = text.partition("Provenance")[2].partition("<details")[0]
    assert "NCCL_ALGO Ring" in shown and "governor good" in shown


def test_the_variables_that_pin_a_series_to_its_first_runs_engines_are_no_difference(tmp_path):
    runs = []
    for name, pins in (("first", {}), ("second", {"ATTENTION_ENGINE": "sdpa"})):
        (tmp_path / name).mkdir()
        path = write_run(tmp_path / name) / "versions.json"
        versions = json.loads(path.read_text()) | {"variables": {"NCCL_ALGO": "Ring", **pins}}
        path.write_text(json.dumps(versions))
        runs.append((name, Run.read(tmp_path / name / "result.txt")))
    differing, same = provenance.compared_facts(runs)
    assert dict(same)["variables"] == "NCCL_ALGO Ring" and "variables" not in dict(differing)


def test_the_report_of_a_good_run_is_complete(run_dir):
    log = run_dir / "result.txt"
    # A config that the repository has.
    log.write_text(log.read_text().replace("A_TEST_1x8", "MI355X_1x8"))
    text = page(run_dir)
    for part in (
        "Target reached",
        "target 3.3",
        "49,152",
        "8.2500",
        "<dt>TFLOP/s/GPU</dt><dd>480</dd>",
        "init 30.0 s",
    ):
        assert part in text
    for part in (
        "0123abc",
        "2.13.0",
        "1234567",
        "global_batch_size = 32",
        "An Organisation",
        "8 x MI355X",
        "NEXP=10",
        "cudnn-of-the-test",
    ):
        assert part in text
    assert (
        "MFU" not in text
        and "miniature" not in text
        and "Anomalies" not in text
        and 'class="banner good"' in text
    )
    train, evaluation = charts(text)["loss"]["series"]
    assert (
        evaluation["data"][0] == [12288, 24576, 36864, 49152]
        and evaluation["dots"]
        and len(train["data"][0]) == 50
    )
    assert (
        charts(text)["loss"]["target"] == 3.3
        and charts(text)["step time"]["series"][0]["data"][1][6] == 900
    )
    assert set(Page(text).links) == {path.name for path in run_dir.iterdir()} - {"report.html"}
    assert {"Loss", "Evaluations", "Provenance"} <= set(Page(text).inside), (
        "the sections are listed at the top"
    )


def test_the_charts_of_training_are_drawn_over_steps(run_dir):
    found = charts(page(run_dir))
    for label, value in (
        ("tokens/s/GPU", 9000.0),
        ("gradient norm", 1.0),
        ("learning rate", 8e-4),
    ):
        steps, values = found[label]["series"][0]["data"]
        assert steps == list(range(1, 51)) and set(values) == {value}
        assert found[label]["x"] == "optimizer steps"
    assert found["step time"]["series"][0]["data"][0] == list(range(1, 51))


def test_the_heading_names_benchmark_machine_and_time(run_dir):
    (run_dir / "config.toml").write_text('gpu = "MI355X"\nnodes = 2\ngpus_per_node = 8\n')
    heading = re.search("<h1>(.*)</h1>", page(run_dir))[1]
    assert heading.startswith("llama31_8b · 16 x MI355X · 20") and heading.endswith(" UTC")


def test_important_facts_stand_first_and_the_others_are_folded(run_dir):
    shown, _, folded = page(run_dir).partition("<h2>Provenance</h2>")[2].partition("<details>")
    names = re.findall('<td class="">([a-z_]+)</td><td', shown)
    first = ["submission_platform", "config_filename", "commit", "seed", "torch", "engines"]
    assert names == first
    assert "global_batch_size" in folded.partition("</details>")[0]


def test_a_log_that_is_not_clean_is_not_green(run_dir):
    text = page(run_dir)
    assert (
        "not clean" in text and 'class="banner good"' not in text and 'class="banner warn"' in text
    )


def test_what_is_unknown_and_what_is_hidden_is_left_out(run_dir):
    (run_dir / ".reserve").write_text("")
    versions = json.loads((run_dir / "versions.json").read_text())
    (run_dir / "versions.json").write_text(json.dumps(versions | {"driver": None}))
    text = page(run_dir)
    assert (
        ".reserve" not in Page(text).links
        and "driver" not in text
        and "result.txt" in Page(text).links
    )


def test_the_report_is_self_contained(run_dir):
    text = page(run_dir)
    assert not re.search(r"https?:|src=|@import|url\(", text)


def test_the_checkers_findings_are_on_the_page(run_dir):
    assert "NOT CLEAN: 1 error," in page(run_dir) and "A_TEST_1x8.toml" in page(run_dir)


def test_a_long_curve_is_thinned_to_the_mean_of_the_loss_and_the_slowest_step(run_dir):
    steps = [event for event in events(2000) if event["event"] == "step"]
    steps[1234]["step_time_ms"] = 5000.0
    for event in steps:
        event["loss"] = event["step"] % 2
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in steps))
    found = charts(page(run_dir))
    assert found["loss"]["series"][0]["data"] == [
        [1000 + 4000 * part for part in range(500)],
        [0.5] * 500,
    ]
    assert max(found["step time"]["series"][0]["data"][1]) == 5000.0


def test_step_time_and_speed_are_those_of_the_same_steps(run_dir):
    """Most steps take 100 ms, but two of three records of the speed include a slow step."""
    lines = []
    for times_ms in ([100, 100, 100], [100, 100, 700], [100, 100, 400]):
        for time_ms in times_ms:
            lines.append(step_event(len(lines) + 1, 16 * len(lines) + 16, step_time_ms=time_ms))
        rate = 8192 * 1e3 * len(times_ms) / sum(times_ms)
        lines[-1] |= {"tokens_per_s_per_gpu": rate, "tflops_per_gpu": rate / 1e3, "mfu": None}
    lines.append(step_event(10, 160, step_time_ms=100))  # of a record that was not written
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = figures_of(Run.read(run_dir / "result.txt"))
    assert figures["step, ms"] == 200.0
    assert figures["tokens/s/GPU, median"] == pytest.approx(8192 / 0.2)
    assert figures["TFLOP/s/GPU"] == pytest.approx(8.192 / 0.2)
    assert figures["MFU"] is None


def test_the_speed_of_a_run_is_that_of_the_list_of_runs(run_dir, monkeypatch):
    monkeypatch.setattr(Run, "tokens_per_s_per_gpu", 1234.0)
    assert figures_of(Run.read(run_dir / "result.txt"))["tokens/s/GPU"] == 1234.0


def test_a_miniature_is_called_no_benchmark_result(tmp_path):
    write_good(tmp_path / "result.txt", rules.MINIATURE)
    assert "not a benchmark result" in page(tmp_path)


def test_an_aborted_run_gives_its_reason(run_dir):
    (run_dir / "result.txt").unlink()
    log = start(run_dir / "result.txt")
    log.block_start(0)
    log.abort(640)
    failure = {
        "kind": "hang",
        "exit_code": 13,
        "what": "no progress for 600 s",
        "why": "rank 3 is missing",
        "do": "look at rank 3",
    }
    (run_dir / "failure.json").write_text(json.dumps(failure))
    text = page(run_dir)
    assert "hang" in text and "rank 3 is missing" in text and "Target reached" not in text


def test_the_page_that_the_launcher_writes_before_the_ledger_gives_the_reason(run_dir):
    (run_dir / "result.txt").unlink()
    start(run_dir / "result.txt").block_start(0)
    failure = {"kind": "interrupted", "exit_code": 143, "what": "stopped by signal 15"}
    entry = {"attempt": 1, "run": run_dir.name, "seed": 1}
    series = ledger.SeriesRecord(starts={1: entry})
    assert Run.read(run_dir / "result.txt", 1, series).reason == NO_END
    (run_dir / "failure.json").write_text(json.dumps(failure))
    assert Run.read(run_dir / "result.txt", 1, series).reason == "stopped by signal 15"


def test_a_good_run_whose_launcher_lives_has_no_reason_yet(run_dir):
    entry = {"attempt": 1, "run": run_dir.name, "seed": 1}
    series = ledger.SeriesRecord(starts={1: entry})
    run = Run.read(run_dir / "result.txt", 1, series, alive=True)
    assert (run.state, run.cause) == ("success", "")
    assert Run.read(run_dir / "result.txt", 1, series).cause == NO_END


def test_phases_of_a_run_that_broke_off_come_from_its_log(run_dir):
    spread(run_dir / "result.txt", 1000)
    (run_dir / "events.jsonl").write_text(json.dumps(events()[0]) + "\n")
    text = page(run_dir)
    assert (
        "init 30.0 s, 71.4%" in text
        and "train 4.0 s" in text
        and "eval 8.0 s" in text
        and "warmup" not in text
    )


def test_a_run_that_gave_up_says_so(run_dir):
    log = records(run_dir / "result.txt")
    log[-1]["metadata"]["status"] = "aborted"
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "<strong>Did not converge</strong>" in page(run_dir)


def test_a_success_that_is_none_is_not_believed(run_dir):
    log = records(run_dir / "result.txt")
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "no evaluation reached" in page(run_dir)


def test_all_text_is_escaped(run_dir):
    evil = "<script>alert('x')</script>&"
    (run_dir / "config.toml").write_text(evil)
    (run_dir / "versions.json").write_text(json.dumps({evil: evil, "deep": {evil: [evil]}}))
    (run_dir / "failure.json").write_text(
        json.dumps({"kind": evil, "what": evil, "why": evil, "do": evil})
    )
    log = records(run_dir / "result.txt")
    for record in log:
        if record["key"] in ("submission_org", "seed", "eval_accuracy"):
            record["value"] = evil
    write_records(run_dir / "result.txt", log)
    text = page(run_dir)
    assert "<script>alert" not in text and "&lt;script&gt;" in text


def test_nothing_is_written_into_a_directory_that_is_no_run(tmp_path, capsys):
    (tmp_path / "photo.jpg").touch()
    for folder, said in ((tmp_path, "not a run"), (tmp_path / "result_0.txt", "does not exist")):
        assert report.main([str(folder)]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_run_that_failed_before_its_log_gets_a_report(tmp_path):
    (tmp_path / "failure.json").write_text(
        json.dumps({"kind": "preflight", "what": "the GPU does not answer"})
    )
    text = page(tmp_path)
    assert words("preflight") in text.lower() and "not answer" in text
    assert "cannot read" in text and "events.jsonl is missing" in text


def test_a_log_with_a_prefix_gives_the_same_page_but_for_the_verdict(run_dir):
    before = page(run_dir).partition("<h2>Verdict of the checker")
    path = run_dir / "result.txt"
    path.write_text("".join(f"0: {line}\n" for line in path.read_text().splitlines()))
    after = page(run_dir).partition("<h2>Verdict of the checker")
    assert before[1] and after[0] == before[0] and after[2] != before[2]


def test_a_log_that_the_official_checker_refuses_is_no_good_run(run_dir):
    log = records(run_dir / "result.txt")
    log[synthetic_run.find(log, "opt_gradient_clip_norm")]["value"] = 5.0
    write_records(run_dir / "result.txt", log)
    text = page(run_dir)
    assert "official checker refuses" in text and "opt_gradient_clip_norm" in text


@pytest.mark.parametrize("name", ["result.txt", "events.jsonl", "versions.json", "config.toml"])
@pytest.mark.parametrize("keep", [0, 1, 700, -20])
def test_files_that_are_cut_off_do_not_stop_it(run_dir, name, keep):
    path = run_dir / name
    path.write_bytes(path.read_bytes()[:keep])
    page(run_dir)


def test_junk_does_not_stop_it(run_dir):
    junk = [
        [],
        1,
        None,
        "x",
        {"event": 5},
        {"event": "step"},
        {"event": "step", "samples": [1], "loss": {}, "step_time_ms": "x"},
    ]
    junk += [
        {"event": "eval", "samples": [1]},
        {"event": "eval", "samples": 5, "loss": "NaN"},
        {"event": "phase", "name": [1], "seconds": 1},
    ]
    junk += [
        {"event": "phase", "name": "init", "seconds": "x"},
        {"event": "step", "samples": -5, "loss": float("nan"), "step_time_ms": 0},
    ]
    junk += [
        {"event": "step", "samples": -5, "loss": 10**400, "step_time_ms": 0},
        {"event": "step", "samples": -5, "loss": 1},
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in junk))
    (run_dir / "versions.json").write_text("[1]")
    (run_dir / "failure.json").write_text("{")
    log = records(run_dir / "result.txt")
    log[-3]["metadata"]["samples_count"] = [1]
    log[-1]["metadata"] = {}
    write_records(run_dir / "result.txt", log)
    page(run_dir)


def test_a_long_run_gives_a_small_page(run_dir):
    """Each curve is in the page twice, for the chart and for its still picture, both thinned."""
    sizes = []
    for steps in (6_000, 12_000):
        with open(run_dir / "events.jsonl", "w") as file:
            file.writelines(json.dumps(event) + "\n" for event in events(steps))
        sizes.append(len(page(run_dir)))
    assert sizes[1] < 75_000 and sizes[1] < 1.1 * sizes[0], sizes


def test_a_missing_directory_is_a_usage_error(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err


# A series.


@pytest.fixture
def series(tmp_path):
    """Ledger directory of twelve attempts.

    The third missed its target, and the eleventh never started its clock.
    """
    plans = synthetic_series.plans([13, 14, 16, 13, 14, 13, 13, 13, 13, 14, 13, 13])
    plans[2].fails, plans[10].fails = "missed", "early"
    return synthetic_series.write(tmp_path, synthetic_run.PRETRAINING, plans)


def test_the_report_of_a_series_is_complete(series):
    text = page(series)
    for part in (
        "score of attempts",
        "10 of 12 attempts are good",
        "RCP test passed",
        "band: RCP",
        "step, ms",
        "package --help",
    ):
        assert part in text
    point = rcp.point_at("llama31_8b", 16, "6.1.0")
    for part in (
        f"{point.mean:,.2f}",
        f"{point.minimum:,.2f}",
        "the GPU does not answer",
    ):
        assert part in text
    for part in (
        synthetic_series.COMMIT,
        "MI355X_1x8.toml",
        "2.13.0",
        '<td class="">16</td>',
        synthetic_series.SERIES,
    ):
        assert part in text
    names = [curve["name"] for curve in charts(text)["evaluation loss"]["series"]]
    assert len(names) == 11 and "attempt 1" in names and "attempt 3, did not converge" in names, (
        "all but the eleventh, which never began"
    )
    assert "differ" not in text and charts(text)["evaluation loss"]["band"] == [
        point.minimum,
        point.mean,
    ]
    assert f"{ten_runs(read_series([series])).score:.3f} minutes" in text


def test_the_report_of_a_series_is_self_contained_and_small(series):
    text = page(series)
    assert not re.search(r"https?:|src=|@import|url\(", text) and len(text) < 100_000


def test_what_differs_among_the_runs_is_shown(tmp_path):
    plans = synthetic_series.plans([13] * 10)
    plans[4].changes = {"driver": "6.15", "commit": "feedfacefeedface"}
    text = page(synthetic_series.write(tmp_path, synthetic_run.PRETRAINING, plans))
    assert "runs differ" in text
    assert (
        "attempt 5: 6.15" in text
        and "attempt 1, 2, 3, 4, 6, 7, 8, 9, 10: 6.14" in text
        and "attempt 5: feedface" in text
    )


def test_a_series_without_ten_in_a_row_has_no_score(tmp_path):
    plans = synthetic_series.plans([13] * 12)
    plans[5].fails = plans[6].fails = "killed"
    text = page(synthetic_series.write(tmp_path, synthetic_run.PRETRAINING, plans))
    assert (
        "10 of 12 attempts are good" in text
        and "0 of 3 windows" in text
        and "NEXP=20" in text
        and "--resume" in text
    )
    assert f">{words('rank_lost')}: " in text and "died" in text


def test_a_series_of_miniatures_is_no_benchmark_result(tmp_path):
    plans = synthetic_series.plans([4, 5, 4])
    text = page(
        synthetic_series.write(tmp_path, synthetic_run.PRETRAINING, plans, rules=rules.MINIATURE)
    )
    assert (
        "not a benchmark result" in text
        and "3 of 3 attempts are good" in text
        and "RCP test" not in text
    )


def test_pages_of_several_runs_on_a_cpu_do_not_speak_of_gpus(tmp_path):
    folder = synthetic_series.write(
        tmp_path, synthetic_run.PRETRAINING, synthetic_series.plans([4, 5]), rules=rules.MINIATURE
    )
    runs = [path.parent for path in sorted(folder.glob("*/config.toml"))]
    for run in runs:
        (run / "config.toml").write_text(
            (run / "config.toml").read_text().replace('gpu = "MI355X"', 'gpu = "CPU"')
        )
    assert report.main(list(map(str, runs))) == 0
    compared = read_page(next(runs[0].glob("compared_with_*.html")))
    heads = re.findall(
        r"<(?:th|td)[^>]*>([^<]*[GC]PU[^<]*)</t[hd]>",
        page(folder).partition('id="Provenance"')[0] + compared.partition('id="Loss"')[0],
    )
    assert "tokens/s/CPU" in heads and not any("GPU" in head for head in heads), heads


def test_runs_without_a_ledger_are_a_series_too(series):
    (series / "attempts.jsonl").unlink()
    text = page(series)
    assert "10 of 12 attempts are good" in text and "did not converge" in text


def test_the_series_that_is_asked_for(series, capsys):
    other = synthetic_series.plans([13] * 10)
    for plan in other:
        plan.seed += 1
    synthetic_series.write(
        series.parent, synthetic_run.PRETRAINING, other, series="20270101-000000-fedcba"
    )
    assert "10 of 10 attempts" in page(series)
    assert report.main([str(series), "--series", synthetic_series.SERIES[:10]]) == 0
    assert "10 of 12 attempts" in (series / "report.html").read_text()
    assert report.main([str(series), "--series", "2029"]) == 2
    assert "no series 2029" in capsys.readouterr().err


def test_a_run_of_a_series_has_its_own_report_with_the_band(series):
    text = page(sorted(series.glob("*/result.txt"))[0].parent)
    assert (
        "Target reached" in text and "band: RCP" in text and len(charts(text)["loss"]["band"]) == 2
    )


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
        ledger.write(
            '{"event": "end"\n[]\n{"event": "start", "series": "'
            + synthetic_series.SERIES
            + '", "attempt": 13}\n'
        )
    text = page(series)
    assert "<script>alert" not in text
    assert "of 12 attempts are good" in text, (
        "the appended start has no run and no seed: no line of a ledger"
    )


# A folder of single runs.


SINGLE_RUNS = (("a", "interrupted"), ("b", "success"), ("c", "target_missed"))


@pytest.fixture
def single_runs(tmp_path):
    """LOGDIR of three single runs of llama31_8b, of which the second is good."""
    folder = tmp_path / "results" / "llama31_8b"
    for second, (name, kind) in enumerate(SINGLE_RUNS):
        run = folder / f"run_{name}"
        run.mkdir(parents=True)
        write_run(run)
        if kind == "interrupted":
            (run / "result.txt").unlink()
            log = start(run / "result.txt")
            log.block_start(0)
            log.abort(640)
        if kind == "target_missed":
            log = records(run / "result.txt")
            log[-1]["metadata"]["status"] = "aborted"
            log[-3]["value"] = 3.9
            write_records(run / "result.txt", log)
        enter(folder, name, second, kind)
    return folder.parent


def enter(folder, name, second, kind=None):
    """Enter the single run run_<name> into the ledger, without an end for no `kind`."""
    path = folder / ledger.NAME
    facts = {"config": "MI355X_1x8.toml", "commit": "0123456789abcdef"}
    ledger.append(path, {"event": "series", "series": name, "goal": 1, "facts": facts})
    line = {"series": name, "attempt": 1, "run": f"run_{name}", "seed": 7}
    line["started"] = f"2026-11-23T10:00:0{second}Z"
    ledger.append(path, {"event": "start"} | line)
    if kind:
        code = 0 if kind == "success" else 10
        end = {"exit_code": code, "kind": kind, "reason": "", "minutes": 2.5}
        ledger.append(path, {"event": "end"} | line | end)


@pytest.mark.parametrize("folder", [".", "llama31_8b"])
def test_the_page_of_single_runs_lists_each_with_its_state(single_runs, folder):
    good = single_runs / "llama31_8b" / "run_b"
    page(good)
    text = page(single_runs / folder)
    for _, kind in SINGLE_RUNS:
        assert words(kind) in text
    assert "<dt>runs</dt><dd>3</dd>" in text
    assert f"<dt>{words('success')}</dt><dd>1</dd>" in text
    assert 'class="banner bad"' not in text and "attempts are good" not in text
    link = os.path.relpath(good / "report.html", single_runs / folder)
    assert Page(text).links == [link]
    assert text.index("run_c") < text.index("run_b") < text.index("run_a"), "the newest first"


def test_the_page_of_a_logdir_lists_also_runs_that_lie_beside_its_ledgers(single_runs):
    shutil.copytree(single_runs / "llama31_8b" / "run_b", single_runs / "copied")
    text = page(single_runs)
    assert "<dt>runs</dt><dd>4</dd>" in text and "attempts are good" not in text


def test_a_series_in_the_folder_is_reported_as_one(single_runs, tmp_path):
    enter(single_runs / "llama31_8b", "d", 4)
    path = single_runs / "llama31_8b" / ledger.NAME
    path.write_text(path.read_text().replace('"goal": 1', '"goal": 10'))
    assert "attempt" in page(single_runs / "llama31_8b")
    assert "<dt>runs</dt>" in page(single_runs)


def test_a_run_has_its_state_from_the_ledger(single_runs):
    text = page(single_runs / "llama31_8b" / "run_a")
    assert '<div class="banner warn"><strong>Interrupted' in text
    assert "did not converge" not in text.lower() and "FAILED" not in text
    assert 'class="banner bad"' not in text


@pytest.fixture
def running(single_runs):
    """A run whose launcher is alive; a function that ends it."""
    folder = single_runs / "llama31_8b"
    run = folder / "run_d"
    shutil.copytree(folder / "run_b", run)
    write_records(run / "result.txt", records(run / "result.txt")[:-4])
    enter(folder, "d", 4)
    path = folder / "series_d.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def end():
            shutil.copy(folder / "run_b" / "result.txt", run)
            enter(folder, "d", 4, "success")
            file.close()

        yield run, end


@pytest.mark.parametrize("of_all_runs", [False, True])
def test_watch_writes_the_page_until_the_run_ends(running, monkeypatch, capsys, of_all_runs):
    run, end = running
    folder = run.parent.parent if of_all_runs else run
    pages = []

    def sleep(seconds):
        pages.append(read_page(folder / "report.html"))
        if len(pages) == 2:
            end()

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main([str(folder), "--watch"]) == 0
    last = read_page(folder / "report.html")
    assert len(pages) == 2
    refresh = 'http-equiv="refresh" content="10"'
    assert all(refresh in text and "unning" in text for text in pages)
    assert refresh not in last and "unning" not in last
    if not of_all_runs:
        assert '<div class="banner info"><strong>Running' in pages[0]
        assert '<div class="banner bad">' not in pages[0] and "--watch" in next_steps(pages[0])


def test_watch_waits_for_the_directory_of_a_run(running, monkeypatch, capsys):
    run, end = running
    later = run.with_name("not_yet")
    run.rename(later)
    waits = []

    def sleep(seconds):
        if not run.exists():
            waits.append(seconds)
            assert "waiting" in capsys.readouterr().out
            later.rename(run)
        else:
            end()

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.main([str(run), "--watch"]) == 0
    assert waits == [report.WAIT_S]
    assert "Target reached" in read_page(run / "report.html")


def test_watch_of_a_run_that_has_ended_writes_its_page_once(single_runs, monkeypatch):
    monkeypatch.setattr(report.time, "sleep", lambda seconds: pytest.fail("waits"))
    run = single_runs / "llama31_8b" / "run_b"
    assert report.main([str(run), "--watch"]) == 0
    assert "Target reached" in read_page(run / "report.html")
    assert report.main([str(run), str(run), "--watch"]) == 2


# Runs beside each other.


@pytest.fixture
def two(run_dir, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "slower"
    shutil.copytree(run_dir, other)
    lines = [
        event | ({"step_time_ms": 1000.0} if event["event"] == "step" else {}) for event in events()
    ]
    (other / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    (other / "config.toml").write_text(
        'gpu = "MI355X"\nglobal_batch_size = 32\n[env]\nNCCL_MAX_CTAS = "8"\n'
    )
    page(other)
    return run_dir, other


def test_runs_are_put_beside_each_other(two):
    one, other = two
    before = sorted(path.name for path in other.iterdir())
    assert report.main([str(one), str(other)]) == 0
    text = read_page(one / "compared_with_slower.html")
    assert '<td class="n">905.0</td><td class="n">1,000.0</td><td class="n">+10.5%</td>' in text
    assert "A: -\nB: NCCL_MAX_CTAS 8" in text
    assert [curve["name"] for curve in charts(text)["evaluation loss"]["series"]] == ["A", "B"]
    assert {label: len(chart["series"]) for label, chart in charts(text).items()} == dict.fromkeys(
        charts(text), 2
    ) and len(charts(text)) == 3
    assert (
        sorted(path.name for path in other.iterdir()) == before
        and not (one / "report.html").exists()
    )


def test_the_page_of_many_runs_has_a_name_that_a_file_may_have(two):
    one, other = two
    others = [other]
    for number in range(6):
        others.append(shutil.copytree(other, other.with_name(f"{number}_{'x' * 41}")))
    assert report.main(list(map(str, [one, *others]))) == 0
    assert [path.name for path in one.glob("compared_with_slower_and_0*_and_3_more.html")]


def test_a_run_is_not_compared_with_itself(two, capsys):
    one, other = two
    assert report.main([str(one), str(other), str(one / "result.txt")]) == 2
    assert "twice" in capsys.readouterr().err


def test_series_is_refused_where_there_is_none_to_select(two, capsys):
    one, other = two
    assert report.main([str(one), "--series", "2026"]) == 2
    assert report.main([str(one), str(other), "--series", "2026"]) == 2
    assert "--series" in capsys.readouterr().err
    assert not (one / "report.html").exists()


def test_what_differs_between_runs_is_named(two):
    one, other = two
    (one / "config.toml").write_text(
        'gpu = "MI355X"\nglobal_batch_size = 32\nrecompute_layers = 3\n[env]\nNCCL_MAX_CTAS = "4"\n'
    )
    assert report.main([str(one), str(other)]) == 0
    text = read_page(one / "compared_with_slower.html")
    assert "A: NCCL_MAX_CTAS 4\nB: NCCL_MAX_CTAS 8" in text and "recompute_layers" in text


def test_what_differs_comes_first_and_names_the_curves_and_the_seeds(two):
    one, other = two
    for run, rate in ((one, 0.003), (other, 0.001)):
        (run / "config.toml").write_text(f'gpu = "MI355X"\nopt_base_learning_rate = {rate}\n')
    log = other / "result.txt"
    assert report.main([str(one), str(other)]) == 0
    text = read_page(one / "compared_with_slower.html")
    assert text.index("What differs") < text.index("Results")
    names = [curve["name"] for curve in charts(text)["evaluation loss"]["series"]]
    assert names == ["A, opt_base_learning_rate 0.003", "B, opt_base_learning_rate 0.001"]
    assert "seeds differ" not in text
    changed = [
        line | {"value": 12345} if line["key"] == "seed" else line
        for line in synthetic_run.records(log)
    ]
    synthetic_run.write_records(log, changed)
    assert report.main([str(one), str(other)]) == 0
    text = read_page(one / "compared_with_slower.html")
    assert "seeds differ" in text and "B: 12345" in text


def test_a_series_is_not_put_beside_a_run(run_dir, series, capsys):
    assert report.main([str(run_dir), str(series)]) == 2
    assert "score A --against B" in capsys.readouterr().err and not list(run_dir.glob("*.html"))


# What to do next.


def next_steps(text: str) -> str:
    return text.partition("What to do next")[2].partition("</ol>")[0]


def test_what_to_do_next_follows_from_how_the_run_ended(run_dir, tmp_path_factory):
    good = next_steps(page(run_dir))
    assert (
        "NEXP=10 ./run_and_time.sh llama31_8b" in good
        and f"./run_and_time.sh check {run_dir}" in good
    )
    (run_dir / "failure.json").write_text(json.dumps({"kind": "hang", "do": "look at rank 3"}))
    write_records(run_dir / "result.txt", records(run_dir / "result.txt")[:-1])
    lost = next_steps(page(run_dir))
    assert "look at rank 3" in lost and "NEXP=10" not in lost
    small = tmp_path_factory.mktemp("small")
    log = records(write_good(small / "result.txt", rules.MINIATURE))
    log[-1]["time_ms"] += 60_000  # a run of no time is none
    write_records(small / "result.txt", log)
    assert "./run_and_time.sh llama31_8b plan" in next_steps(page(small))


def test_without_jinja2_there_is_one_line_about_it(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert report.main([str(run_dir)]) == 18
    assert (
        "pip install jinja2" in capsys.readouterr().err and not (run_dir / "report.html").exists()
    )
