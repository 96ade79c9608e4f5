"""The score of a series: as the official tools compute it, from our logs and from other people's, and what a difference is made of."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_log
import timed_log
from synthetic_log import LORA, PRETRAINING
from timed_log import Timed

from llama31_8b import rules
from records import published, rcp
from submission import describe, score, series
from submission.runs import read_run, read_runs

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
ROOT = Path(__file__).resolve().parents[2]

# AMD's MI355X result of v5.1: minutes of the ten runs, to two decimals, and samples to the target.
AMD_MINUTES = (95.97, 102.68, 95.74, 109.44, 102.66, 102.65, 102.74, 95.89, 95.90, 95.99)
AMD_SAMPLES = (172_032, 184_320, 172_032, 196_608, 184_320, 184_320, 184_320, 172_032, 172_032, 172_032)
AMD_RUNS = [Timed(samples, 30.679, 9.88, 0.0, minutes) for samples, minutes in zip(AMD_SAMPLES, AMD_MINUTES, strict=True)]
for dropped in (2, 3):  # the fastest and the slowest, in which 9.88 s, the mean over all evaluations, would not fit
    AMD_RUNS[dropped] = replace(AMD_RUNS[dropped], evaluation_s=9.7)
MIXED = [Timed(172_032)] * 7 + [Timed(184_320)] * 3


def evaluate(capsys, *arguments, code=0) -> dict:
    """The JSON of the command, which must end with `code`."""
    return json.loads(text(capsys, *arguments, "--json", code=code))


def text(capsys, *arguments, code=0) -> str:
    capsys.readouterr()
    assert score.main([*map(str, arguments)]) == code
    return capsys.readouterr().out


def read(folder: Path, points=rcp.POINT_SETS) -> series.Series:
    return series.score_runs(read_runs([folder])[0], points)


def change(path: Path, edit) -> None:
    """Rewrite each record of the log at `path` with what `edit` makes of it."""
    synthetic_log.write_records(path, [edit(record) for record in synthetic_log.records(path)])


def one_step_short(record: dict) -> dict:
    """As AMD's 8B logs count: one optimizer step behind in eval_accuracy, right in the blocks."""
    if record["key"] == "eval_accuracy":
        record["metadata"]["samples_count"] -= 32
    return record


@pytest.fixture(scope="module")
def amd(tmp_path_factory) -> Path:
    folder = timed_log.write_series(tmp_path_factory.mktemp("amd") / "results/MI355X/llama31_8b", PRETRAINING, AMD_RUNS)
    for path in folder.glob("result_*.txt"):
        change(path, one_step_short)
    return folder


# The official tools.


def write_system(path: Path) -> None:
    system = dict.fromkeys(describe.KEYS, "text") | {"division": "closed", "status": "Available on-premise"}
    system |= {"number_of_nodes": "1", "host_processors_per_node": "2", "accelerators_per_node": "8"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(system | {"accelerator_model_name": "AMD Instinct MI355X"}))


def official(folder: Path, module: str, *arguments) -> str:
    pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed")
    command = [sys.executable, "-m", f"mlperf_logging.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def organisation(tmp_path_factory) -> Path:
    """Both benchmarks, ten runs each; one run of the LoRA series did not converge."""
    folder = tmp_path_factory.mktemp("submission") / "Org"
    write_system(folder / "systems/sys.json")
    pretraining = [replace(run, samples_per_s=30 + index / 7) for index, run in enumerate(MIXED)]
    timed_log.write_series(folder / "results/sys/llama31_8b", PRETRAINING, pretraining)
    lora = [Timed(2688, 5.8 + index / 9, 12.3) for index in range(3)] + [Timed(3072, 5.8 - index / 90, 12.3) for index in range(6)]
    timed_log.write_series(folder / "results/sys/llama2_70b_lora", LORA, [*lora, Timed(3840, 5.9, 12.3, converged=False)])
    return folder


@pytest.mark.parametrize("ruleset", RULESETS)
def test_package_checker_and_summarizer_find_our_numbers(organisation, ruleset, tmp_path):
    assert "FOUND NO ERRORS, SUCCESS" in official(tmp_path, "package_checker", organisation, "training", ruleset)
    expected = {}
    for folder in (organisation / "results/sys").iterdir():
        found = read(folder)
        expected[folder.name] = found.score
        assert json.loads((folder / "scaling.json").read_text())["scaling_factor"] == found.factor
    official(tmp_path, "result_summarizer", organisation, "training", ruleset, "--csv", "out.csv")
    rows = json.loads((tmp_path / "out_detailed.json").read_text())
    for benchmark, ours in expected.items():
        theirs = [value for row in rows for key, value in flat(row) if benchmark in key and "time_to_train" in key]
        assert theirs == [round(ours, 10)], rows  # ten decimals are what it writes


def flat(value, key="") -> list:
    if isinstance(value, dict):
        return [pair for name, inner in value.items() for pair in flat(inner, f"{key}/{name}")]
    return [(key, value)]


def test_rcp_checker_prints_our_numbers(organisation, tmp_path):
    folder = organisation / "results/sys/llama31_8b"
    for points in rcp.POINT_SETS:
        printed = official(tmp_path, "rcp_checker", folder, "--rcp_version", "6.1.0", "--rcp_pass", f"{points}_rcps")
        verdict = read(folder, [points]).verdicts[0]
        assert "RCP found, RCP test PASSED" in printed
        assert f"Submission mean epochs: {verdict.mean:.4f}" in printed
        assert f"factor of {verdict.point.mean} / {verdict.mean} = {verdict.factor}" in printed
        for number in (verdict.point.mean, verdict.point.minimum, verdict.point.max_speedup):
            assert f"np.float64({number})" in printed


# What was published.


def test_amd_v51_mi355x(amd):
    """Score 99.709, raw 99.310, factor 1.00401; the minutes are rounded to 0.01, so the score is known to 0.001."""
    found = read(amd)
    assert found.minutes == pytest.approx(99.310, abs=5e-4)
    assert found.score == pytest.approx(99.709, abs=1e-3)
    assert found.verdicts[0].mean == 178_144 and found.factor == 178_858.66666666666 / 178_144
    assert round(found.factor, 5) == 1.00401


def test_split_of_a_published_result_against_itself_is_nothing(amd, capsys):
    found = evaluate(capsys, amd, "--gpu", "MI355X", "--gpus", 8)
    assert found["published"]["submitter"] == "AMD"
    for part in found["split"]:
        assert part["minutes"] == pytest.approx(0, abs=1e-3) and part["factor"] == pytest.approx(1, abs=1e-5)


def pace_of(submitter: str) -> published.Pace:
    return next(e.pace for e in published.published("llama31_8b", "MI355X") if e.submitter == submitter)


def test_dell_against_amd():
    """107.46 against 99.31 minutes: more than half of it is throughput, the rest mostly samples."""
    parts = {part.name: part for part in published.split(pace_of("Dell"), pace_of("AMD"))}
    assert sum(part.minutes for part in parts.values()) == pytest.approx(107.462 - 99.310, abs=1e-9)
    assert math.prod(part.factor for part in parts.values()) == pytest.approx(107.462 / 99.310, rel=1e-12)
    assert parts["throughput"].minutes == pytest.approx(4.47, abs=0.01)
    assert parts["samples to the target"].minutes == pytest.approx(3.49, abs=0.01)
    assert parts["time per evaluation"].minutes == pytest.approx(0.18, abs=0.01)
    back = {part.name: part for part in published.split(pace_of("AMD"), pace_of("Dell"))}
    for name, part in parts.items():
        assert (back[name].minutes, back[name].factor) == (pytest.approx(-part.minutes), pytest.approx(1 / part.factor))


def test_without_evaluation_times_the_split_still_adds_up():
    ours = replace(pace_of("Dell"), evaluations=None, evaluation_s=None)
    parts = published.split(ours, pace_of("AMD"))
    assert [part.name for part in parts] == ["throughput", "samples to the target", "evaluation and other"]
    assert sum(part.minutes for part in parts) == pytest.approx(107.462 - 99.310, abs=1e-9)


@pytest.mark.parametrize("entry", [e for e in published.RESULTS if e.gpus == 8], ids=lambda e: f"{e.benchmark}-{e.gpu}-{e.submitter}")
def test_published_table_agrees_with_itself(entry):
    """Score over minutes is the RCP factor of its samples (8B logs count one step short), and the parts explain the minutes."""
    logged = entry.samples - (entry.batch if entry.benchmark == "llama31_8b" else 0)
    verdict = rcp.judge(entry.benchmark, entry.batch, [logged] * 10)
    assert verdict.passed and entry.factor == pytest.approx(verdict.factor, abs=2e-4)
    pace = entry.pace
    assert 0 < pace.minutes - pace.training_minutes - pace.evaluation_minutes < 0.025 * pace.minutes


# What counts.


def test_one_run_that_did_not_converge_is_the_slowest(tmp_path, capsys):
    runs = [Timed(172_032 if index < 5 else 184_320, 35, minutes=100 + index) for index in range(9)]
    runs.append(Timed(196_608, 80, converged=False, minutes=50))
    folder = timed_log.write_series(tmp_path / "logs", PRETRAINING, runs)
    found = read(folder)
    assert found.verdicts[0].mean == (172_032 + 184_320) / 2
    assert found.minutes == sum(100 + index for index in range(1, 9)) / 8 and found.passed
    assert "did not converge" in text(capsys, folder)
    timed_log.write(folder / "result_0.txt", PRETRAINING, Timed(184_320, converged=False), seed=1)
    assert "INVALID         2 runs did not converge" in text(capsys, folder, code=20)
    assert evaluate(capsys, folder, code=20)["result"]["score"] is None


def test_success_without_an_evaluation_at_the_target_did_not_converge(tmp_path):
    path = timed_log.write(tmp_path / "log", PRETRAINING, Timed(172_032), seed=1)
    change(path, lambda record: record | {"value": 3.31} if record["key"] == "eval_accuracy" else record)
    run = read_run(path)
    assert not run.converged and "compliance checker refuses" in run.notes[0]


def test_rcp_failure_is_exit_code_20_and_no_score(tmp_path, capsys):
    folder = timed_log.write_series(tmp_path / "logs", PRETRAINING, [Timed(172_032)] * 10)
    assert "RCP pruned      FAILED (RCP found)" in text(capsys, folder, code=20)
    found = evaluate(capsys, folder, "--rcp", "full", code=20)["result"]
    assert found["score"] is None and [verdict["points"] for verdict in found["rcp"]] == ["full"]


def test_of_thirteen_runs_the_median_window_counts(tmp_path, capsys):
    minutes = [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 95, 130, 130]
    folder = timed_log.write_series(tmp_path / "logs", PRETRAINING, [Timed(184_320, 35, minutes=m) for m in minutes])
    windows = series.windows(read_runs([folder])[0])
    assert [window.runs[0].name for window in windows] == [f"result_{index}.txt" for index in range(4)]  # 10 comes after 9
    assert [window.score for window in windows] == [104.5, 104.5, 105.5, 109.0]
    chosen = series.median_window(windows)
    assert chosen is windows[2]  # of two in the middle the slower
    printed = text(capsys, folder)
    assert printed.count("not in the median window") == 3 and "<- median" in printed
    assert evaluate(capsys, folder)["result"]["score"] == 105.5


def test_a_window_that_is_no_result_is_not_in_the_middle(tmp_path):
    failed = [Timed(184_320, minutes=200, converged=False)]
    runs = [Timed(184_320, 35, minutes=100 + index) for index in range(10)]
    windows = series.windows(read_runs([timed_log.write_series(tmp_path, PRETRAINING, [*runs, *failed, *failed])])[0])
    assert [bool(window.invalid) for window in windows] == [False, False, True]
    assert series.median_window(windows) is windows[1]


def test_too_few_runs_are_scored_and_called_invalid(tmp_path, capsys):
    timed_log.write_series(tmp_path / "logs", PRETRAINING, [Timed(184_320, 37, minutes=90)])
    printed = text(capsys, tmp_path / "logs", "--gpu", "MI355X", "--gpus", 8, code=20)
    assert "a result is 10 runs, these are 1" in printed and "together" in printed
    assert "mean of 1 runs   90.0000 min" in printed


# Other people's logs.


def test_eight_ranks_a_prefix_another_order_of_keys_and_epochs_change_nothing(amd, tmp_path):
    """Every line eight times, each rank two seconds later than the one before, so that the last one's training block ends when the
    first one's next has begun; mixed with other output, and epoch_num for samples_count."""
    wanted = read(amd)
    for path in amd.glob("result_*.txt"):
        lines = [(0, "+ echo ':::DLPAL image 123 1 node'")]
        for record in synthetic_log.records(path):
            if record["key"] == "eval_accuracy":
                record["metadata"]["epoch_num"] = record["metadata"].pop("samples_count")
            for rank in range(8 if record["key"] not in ("run_start", "run_stop") else 1):
                late = dict(reversed(record.items())) | {"time_ms": record["time_ms"] + 2000 * rank}
                lines.append((late["time_ms"], f"{rank}: :::MLLOG {json.dumps(late)}"))
        lines.sort(key=lambda line: line[0])
        (tmp_path / path.name).write_text("\n".join(line for _, line in lines) + "\n0: RESULT,LLM_FINETUNING,,1733\n")
    found = read(tmp_path)
    assert (found.score, found.verdicts) == (wanted.score, wanted.verdicts)
    for name in ("samples", "samples_per_s", "evaluations", "evaluation_s"):
        assert getattr(series.pace(found), name) == pytest.approx(getattr(series.pace(wanted), name), rel=1e-5)


def test_torn_and_repeated_lines_are_read_as_the_official_tools_do(tmp_path):
    """The last token of a line counts; so do the last run_start before the first run_stop, and the last evaluation before a run_stop."""
    path = timed_log.write(tmp_path / "log", PRETRAINING, Timed(172_032, 35, minutes=90), seed=1)
    records = synthetic_log.records(path)
    start, stop = synthetic_log.find(records, "run_start"), synthetic_log.find(records, "run_stop")
    again = [records[start] | {"time_ms": records[start]["time_ms"] + 60_000}]
    late = [records[stop - 2] | {"metadata": {"samples_count": 999_999}, "value": 3.0}]
    ended_ms = records[stop]["time_ms"]
    restart = [records[start] | {"time_ms": ended_ms}, records[stop] | {"time_ms": ended_ms + 120_000}]
    synthetic_log.write_records(path, [*records[: start + 1], *again, *records[start + 1 :], *restart, *late])
    torn = path.read_text().replace(":::MLLOG", ':::MLLOG {"key": "train_los:::MLLOG', 1)
    path.write_text(torn + ":::MLLOG cut shor\n")
    run = read_run(path)
    assert (run.minutes, run.samples, run.converged) == (89, 172_032, True)
    assert len(run.notes) == 1 and "is not one event" in run.notes[0]


def test_an_epoch_around_everything_stands_for_blocks(tmp_path):
    path = timed_log.write(tmp_path / "log", PRETRAINING, Timed(184_320, 25.0, 10.0, first_block_s=0), seed=1)
    records = [record for record in synthetic_log.records(path) if not record["key"].startswith("block")]
    start, stop = synthetic_log.find(records, "run_start"), synthetic_log.find(records, "run_stop")
    whole = {"metadata": {"samples_count": 184_320, "file": "x", "lineno": 1}}
    records.insert(stop, records[stop] | {"key": "epoch_stop"} | whole)
    records.insert(start + 1, records[start] | {"key": "epoch_start", "metadata": {"samples_count": 0}})
    run = read_run(synthetic_log.write_records(path, records))
    assert run.samples_per_s == pytest.approx(25.0, rel=1e-4) and run.evaluation_s == pytest.approx(150.0)


def test_one_step_behind_is_noted(amd):
    run = read_run(amd / "result_0.txt")
    assert (run.samples, run.trained) == (172_000, 172_032)
    assert run.notes == ["the last evaluation is logged at 172,000 sequences, the blocks end at 172,032"]


def test_the_first_block_of_a_run_is_not_in_the_steady_throughput(tmp_path):
    found = read(timed_log.write_series(tmp_path, PRETRAINING, [Timed(184_320, 30.0, first_block_s=60)] * 10))
    assert series.pace(found).samples_per_s == pytest.approx(30.0, rel=1e-6)
    assert found.runs[0].samples_per_s == pytest.approx(184_320 / (184_320 / 30 + 60), rel=1e-6)


def test_gpus_from_the_system_description_or_the_platform(amd, organisation, tmp_path, capsys):
    run = read_run(organisation / "results/sys/llama31_8b/result_0.txt")
    assert (run.gpu, run.gpus) == ("MI355X", 8)
    change_platform = tmp_path / "log"
    change_platform.write_bytes((amd / "result_0.txt").read_bytes().replace(b'"8 GPUs"', b'"DGX-H200 x8"'))
    assert (read_run(change_platform).gpu, read_run(change_platform).gpus) == ("H200", None)
    assert "unknown GPU or number of GPUs: name them" in text(capsys, amd)


def test_no_published_result_is_said(amd, capsys):
    printed = text(capsys, amd, "--gpu", "h200", "--gpus", 8)
    assert "no published result of llama31_8b on 8 x H200" in printed and "HPE, 64 GPUs: 37.753 min, 11,572 tokens/s/GPU" in printed
    assert evaluate(capsys, amd, "--gpu", "H200", "--gpus", 8)["split"] is None


def test_against_another_submitter(amd, capsys):
    found = evaluate(capsys, amd, "--gpu", "MI355X", "--gpus", 8, "--against", "dell")
    assert found["published"]["submitter"] == "Dell"
    assert sum(part["minutes"] for part in found["split"]) == pytest.approx(99.310 - 107.462, abs=1e-3)
    assert score.main([str(amd), "--gpu", "MI355X", "--gpus", "8", "--against", "Nobody"]) == 2
    assert "there are: AMD, Supermicro, GigaComputing, Dell" in capsys.readouterr().err


# Our own folders.


def write_ledger(folder: Path, ends: list[tuple[str, int, str]], goal: int = 10) -> None:
    lines = [{"event": "series", "series": "20260101-000000-abcdef", "goal": goal, "facts": {}}]
    for number, (run, code, kind) in enumerate(ends, start=1):
        lines.append({"event": "start", "series": lines[0]["series"], "attempt": number, "run": run})
        lines.append(lines[-1] | {"event": "end", "exit_code": code, "kind": kind, "reason": f"because of {kind}"})
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')


def test_the_ledger_says_what_counts(tmp_path, capsys):
    folder = tmp_path / "llama31_8b"
    ends = []
    for index in range(12):
        run_dir = folder / f"{11 - index:02}_seed{index}"  # the order is the ledger's, not the names'
        path = timed_log.write(run_dir / "result.txt", PRETRAINING, AMD_RUNS[index % 10], seed=index)
        ends.append((run_dir.name, 0, "success"))
        if index == 2:  # killed: its log just stops
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
            ends[-1] = (run_dir.name, 14, "rank_lost")
        if index == 4:  # ran to its end in vain
            timed_log.write(path, PRETRAINING, Timed(196_608, converged=False), seed=index)
            ends[-1] = (run_dir.name, 10, "target_missed")
        if index == 6:  # never began
            path.write_text("")
            ends[-1] = (run_dir.name, 17, "storage")
    write_ledger(folder, ends)
    stray = timed_log.write(folder / "stray" / "result.txt", PRETRAINING, Timed(172_032), seed=99)
    runs, notes = read_runs([folder])
    assert [run.name for run in runs] == [name for name, code, _ in ends if code in (0, 10)] and stray.parent.name not in str(notes)
    assert "09_seed2, rank_lost, because of rank_lost; its clock had started" in notes[1]
    assert "05_seed6, storage, because of storage" in notes[2] and "clock" not in notes[2]
    assert "10 runs" in text(capsys, folder) and [run.converged for run in runs].count(False) == 1
    assert read_runs([folder], "20260101")[0][0].name == "11_seed0"
    assert score.main([str(folder), "--series", "nothing"]) == 2


def test_a_run_directory_and_a_folder_without_a_ledger(tmp_path):
    for name in ("20260102_b", "20260101_a"):
        timed_log.write(tmp_path / name / "result.txt", LORA, Timed(3072, 5.8, 12.0), seed=1)
        (tmp_path / name / "config.toml").write_text('gpu = "MI300X"\nnodes = 1\ngpus_per_node = 8\n')
    runs, notes = read_runs([tmp_path])
    assert [run.name for run in runs] == ["20260101_a", "20260102_b"] and "no ledger" in notes[0]
    assert (runs[0].gpu, runs[0].gpus) == ("MI300X", 8)
    assert [run.name for run in read_runs([tmp_path / "20260102_b"])[0]] == ["20260102_b"]


def test_a_miniature_is_no_result(tmp_path, capsys):
    miniature = rules.MINIATURE
    runs = [Timed(4096, 100.0, 1.0, 0.5)] * 10
    folder = timed_log.write_series(tmp_path, PRETRAINING, runs, rules_=miniature, global_batch_size=8)
    printed = text(capsys, folder)
    assert "a miniature: no RCP, no benchmark result" in printed
    found = evaluate(capsys, folder)
    assert found["result"]["score"] is None and found["result"]["rcp"] == [] and found["result"]["minutes"] > 0


@pytest.mark.parametrize("what", ["nothing there", "no log", "two benchmarks", "two batches", "empty folder"])
def test_wrong_usage_is_exit_code_2(what, tmp_path, capsys):
    logs = [tmp_path / "a", tmp_path / "b"]
    timed_log.write(logs[0], PRETRAINING, Timed(24_576), seed=1)
    if what == "no log":
        logs[1].write_text("hello\n:::MLLOG nonsense\n")
    elif what == "two benchmarks":
        timed_log.write(logs[1], LORA, Timed(3072), seed=1)
    elif what == "two batches":
        timed_log.write(logs[1], PRETRAINING, Timed(24_576), seed=1, global_batch_size=16)
    elif what == "empty folder":
        logs[1].mkdir()
    assert score.main([str(path) for path in logs]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_command_runs_without_torch(amd):
    code = "import sys; sys.modules['torch'] = None; from submission.score import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(amd)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "99.7" in done.stdout, done.stderr
