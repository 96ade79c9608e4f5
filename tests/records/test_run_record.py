"""Test the order of runs by their records."""

import json

import pytest

from common.records.ledger import SeriesRecord
from common.records.run_record import RunRecord
from submission.series import read_series

pytestmark = pytest.mark.quick
CONFIG = """
gpu = "CPU"
model = "llama3.2-1b"
sequence_length = 64
global_batch_size = 8
max_samples = 320
eval_samples = 16
eval_interval_samples = 160
schedule = "cosine"
opt_base_learning_rate = 3e-3
opt_learning_rate_warmup_steps = 5
weight_decay = 0.1
gradient_clip_norm = 1.0
"""


def write_log(folder, name, time_ms, **more):
    (folder / name).mkdir()
    record = {"time_ms": time_ms, "key": "cache_clear", "value": None, "metadata": {}} | more
    (folder / name / "result.txt").write_text(f":::MLLOG {json.dumps(record)}\n")


def test_logs_give_the_order_where_there_is_no_ledger(tmp_path):
    write_log(tmp_path, "20261123-190000_tokyo", 1_000_000)
    write_log(tmp_path, "20261123-110000_utc", 2_000_000)
    write_log(tmp_path, "20261123-100000_utc", 3_000_000)
    (tmp_path / "20261124-100000_nothing").mkdir()
    for name, value in (("a", 1e300), ("b", 10**30)):
        write_log(tmp_path, name, value)
    names = [run.name for run in RunRecord.in_folder(tmp_path)]
    assert names[3:] == ["20261123-190000_tokyo", "20261123-110000_utc", "20261123-100000_utc"]
    scored = [run.name for run in read_series([tmp_path]).runs]
    assert scored == [name for name in names if "nothing" not in name]


def test_the_run_that_was_continued(tmp_path):
    write_log(tmp_path, "a", 1, key="resumed", metadata={"run": "before"})
    write_log(tmp_path, "b", 1)
    paths = [tmp_path / name / "result.txt" for name in "abc"]
    assert [RunRecord.read(path).continues for path in paths] == ["before", "", ""]


@pytest.mark.parametrize("status", ["success", "aborted", ""])
def test_training_after_the_last_evaluation_is_an_anomaly_of_a_result_only(tmp_path, status):
    """A run that is interrupted ends anywhere, also between two evaluations."""
    lines = [
        ("run_start", None, {}),
        ("block_start", None, {"samples_count": 0}),
        ("block_stop", None, {"samples_count": 64}),
        ("eval_accuracy", 5.0, {"samples_count": 64}),
        ("block_start", None, {"samples_count": 64}),
        ("block_stop", None, {"samples_count": 96}),
        ("run_stop", None, {"status": status}),
    ]
    text = ""
    for number, (key, value, metadata) in enumerate(lines[: 7 if status else 6]):
        line = {"time_ms": 1000 * number, "key": key, "value": value, "metadata": metadata}
        text += f":::MLLOG {json.dumps(line)}\n"
    (tmp_path / "result.txt").write_text(text)
    run = RunRecord.read(tmp_path / "result.txt")
    assert run.trained == 96 and run.samples == 64
    assert any("96" in note for note in run.notes) == (status == "success")


@pytest.mark.parametrize(("target", "words"), [("", "finished"), ("target_loss = 2.0", "reached")])
def test_a_run_whose_log_cannot_be_read_has_the_target_of_its_config(target, words, tmp_path):
    folder = tmp_path / "open_llama" / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f"{CONFIG}{target}\n")
    (folder / "result.txt").mkdir()
    end = {"attempt": 1, "run": "run", "exit_code": 0, "kind": "success", "reason": ""}
    series = SeriesRecord("s", starts={1: end}, ends={1: end})
    run = RunRecord.read(folder / "result.txt", 1, series)
    assert run.unreadable and words in run.state_words
