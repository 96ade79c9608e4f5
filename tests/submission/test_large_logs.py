"""Large logs: the memory that they take, and findings about records that are not held in memory."""

import json
import subprocess
import sys

import pytest
from synthetic_run import LORA, find, project_root, records, write_good, write_records

from common.paths import ROOT
from common.records import mlperf_log
from common.records.mlperf_log import TOKEN
from submission import compliance_checker
from submission.examined_log import examine, rule_findings

pytest.importorskip("mlperf_logging")

BYTES_PER_LINE = 100  # a record in memory takes more than 1,000
PEAK = (
    "import resource, sys; from submission import check; check.main(sys.argv[1:]);"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
)


def statistics(index, **changes):
    record = {
        "namespace": "",
        "time_ms": 0,
        "event_type": "POINT_IN_TIME",
        "key": "tracked_stats",
        "value": {"train_loss": 1.0 + index / 1e6, "lr": 4e-4},
        "metadata": {"file": "train.py", "lineno": 100, "samples_count": index},
    }
    return record | changes


def with_statistics(path, count, **changes):
    """A good log with `count` statistics before its first block_stop, the last one changed."""
    log = records(write_good(path, LORA.rules.CLOSED))
    at = find(log, "block_stop")
    with path.open("w") as file:
        for record in log[:at]:
            file.write(f"{TOKEN} {json.dumps(record)}\n")
        for index in range(count):
            last = changes if index == count - 1 else {}
            record = statistics(index, **{"time_ms": log[at - 1]["time_ms"]} | last)
            file.write(f"{TOKEN} {json.dumps(record)}\n")
        for record in log[at:]:
            file.write(f"{TOKEN} {json.dumps(record)}\n")
    return path


def peak_of(path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert "official checker: passed" in done.stdout, done.stdout + done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_a_line_of_a_large_log_takes_no_memory(tmp_path):
    small = peak_of(with_statistics(tmp_path / "small.txt", 2 * mlperf_log.MAX_KEPT))
    count = 80_000
    path = with_statistics(tmp_path / "large.txt", count)
    assert path.stat().st_size > compliance_checker.LARGE_LOG_BYTES
    assert (peak_of(path) - small) / count < BYTES_PER_LINE


def verdict_of(path):
    return examine(path, project_root=project_root(path.parent)).findings


def test_records_that_are_not_in_memory_are_checked(tmp_path, monkeypatch):
    path = with_statistics(tmp_path / "log.txt", 50, value=float("nan"), time_ms=7)
    whole = verdict_of(path)
    assert {"finite"} <= {finding.rule for finding in whole}
    monkeypatch.setattr(mlperf_log, "MAX_KEPT", 10)
    assert len(mlperf_log.read(path).all("tracked_stats")) == 10
    assert verdict_of(path) == whole


def test_rules_for_every_record_share_one_pass(tmp_path, monkeypatch):
    path = with_statistics(tmp_path / "log.txt", 50, value=float("nan"), time_ms=7)
    monkeypatch.setattr(mlperf_log, "MAX_KEPT", 10)
    log = mlperf_log.read(path)
    passes = []
    read_events = mlperf_log.events
    monkeypatch.setattr(mlperf_log, "events", lambda path: passes.append(path) or read_events(path))
    assert {"finite", "time"} <= {finding.rule for finding in rule_findings(log, ours=True)}
    assert passes == [path]


SPOILED = {
    "good": lambda log: None,
    "no target": lambda log: [
        record.update(value=9.0) for record in log if record["key"] == "eval_accuracy"
    ],
    "two batches": lambda log: log.append(log[find(log, "global_batch_size")] | {"value": 9}),
    "no benchmark": lambda log: log.pop(find(log, "submission_benchmark")),
    "a key of a wrong type": lambda log: log[find(log, "seed")].update(value=[]),
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("line", ["", f"{TOKEN} {{cut\n", f"0: {TOKEN} 7\n"])
def test_a_large_log_has_the_verdict_of_the_unchanged_checker(tmp_path, monkeypatch, name, line):
    log = records(write_good(tmp_path / "good.txt", LORA.rules.CLOSED))
    SPOILED[name](log)
    path = write_records(tmp_path / "log.txt", log)
    path.write_text(path.read_text() + line)
    unchanged = compliance_checker.closed_verdict(path, "6.1.0")
    monkeypatch.setattr(compliance_checker, "LARGE_LOG_BYTES", 0)
    assert compliance_checker.closed_verdict(path, "6.1.0") == unchanged
