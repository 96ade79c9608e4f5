"""Test that hostile files cause one error, without a traceback and without a hang."""

import json
import os

import pytest
import synthetic_run
import synthetic_series as synthetic
from synthetic_run import LORA

from common.errors import StorageError, write_text
from submission import check, describe, package, report, run_list, score
from submission.run import Run


def test_a_report_is_whole_or_not_there(tmp_path, monkeypatch):
    def full(path, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "rename", full)
    with pytest.raises(StorageError):
        write_text(tmp_path / "report.html", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("main", [check.main, score.main, report.main])
def test_a_link_to_itself_is_one_error(tmp_path, main, capsys):
    (tmp_path / "result_0.txt").symlink_to("result_0.txt")
    assert main([str(tmp_path / "result_0.txt")]) == 2
    assert capsys.readouterr().err.count("error:") == 1


@pytest.mark.parametrize("main", [check.main, score.main])
def test_a_pipe_is_one_error(tmp_path, main, capsys):
    os.mkfifo(tmp_path / "result_0.txt")
    assert main([str(tmp_path / "result_0.txt")]) == 2
    assert "regular file" in capsys.readouterr().err


@pytest.mark.parametrize("main", [check.main, score.main, report.main, run_list.main])
@pytest.mark.parametrize("name", ["result.txt", "attempts.jsonl"])
def test_a_disk_that_fails_is_a_storage_error_of_each_command(tmp_path, main, name, capsys):
    folder = synthetic.write(tmp_path, LORA, synthetic.plans([5]), goal=1)
    run = next(folder.glob("*/result.txt")).parent
    path = (folder if name.endswith("jsonl") else run) / name
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")  # whose first byte is an error to read: EIO
    code = main([str(folder)])
    if main is check.main and path.parent == folder:
        assert code == 0, "it does not read the ledger"
    else:
        assert code == StorageError.exit_code and str(path) in capsys.readouterr().err


SHAPES = [
    "[]",
    "7",
    '{"packages": []}',
    '{"packages": {"torch": []}, "gpus": 7, "commit": {}}',
    "[" * 100_000,
    '"',
]


@pytest.mark.parametrize("text", SHAPES)
def test_versions_of_a_wrong_shape_are_a_note(tmp_path, text, capsys):
    folder = synthetic.write(tmp_path, LORA, synthetic.plans([5]), goal=1)
    run = next(folder.glob("*/result.txt")).parent
    (run / "versions.json").write_text(text)
    (run / "failure.json").write_text(text)
    assert report.main([str(run)]) == 0 and score.main([str(folder)]) in (0, 20)


LINES = {
    "gpu_samples.jsonl": [
        '{"event": "start"}',
        '{"event": "start", "source": 1, "gpus": 7, "time": 1}',
        '{"event": "start", "source": "x", "gpus": [{}], "time": "a"}',
        '{"event": "start", "source": "x", "gpus": [{}], "time": 1}\n'
        '{"event": "sample", "time_s": 1790853000}',
        '{"event": "start", "source": "x", "gpus": [{}], "time": 0}\n'
        '{"event": "sample", "time_s": 1790853000, "gpus": [7]}',
    ],
    "events.jsonl": [
        '{"event": "ranks", "block_ms": 7, "slow": [9]}',
        '{"event": "ranks", "block_ms": [1], "slow": [9], "samples": 1}',
        '{"event": "ranks", "block_ms": [1], "slow": 9, "samples": 1}',
        '{"event": "ranks", "block_ms": [1, 2], "slow": [], "samples": 1}\n'
        '{"event": "ranks", "block_ms": [1], "slow": [], "samples": 2}',
    ],
    "config.toml": [
        'gpu = "H200"\nnodes = "x"\ngpus_per_node = 8',
        "gpu = 7\nnodes = 1\ngpus_per_node = 8",
        'gpu = "H200"\nnodes = 1\ngpus_per_node = 1.5',
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in LINES.items() for text in texts]
)
def test_files_of_a_run_with_values_of_wrong_types_are_no_traceback(tmp_path, name, text, capsys):
    folder = synthetic.write(tmp_path, LORA, synthetic.plans([5]), goal=1)
    run = next(folder.glob("*/result.txt")).parent
    (run / name).write_text(text + "\n")
    assert report.main([str(run)]) == 0 and score.main([str(folder)]) in (0, 20)


@pytest.mark.parametrize("value", [["llama2_70b_lora"], {"a": 1}, 7, None, ""])
def test_a_benchmark_of_a_wrong_type_is_no_traceback(tmp_path, value, capsys):
    log = synthetic_run.records(
        synthetic_run.write_good(tmp_path / "result.txt", LORA.rules.CLOSED)
    )
    log[synthetic_run.find(log, "submission_benchmark")]["value"] = value
    synthetic_run.write_records(tmp_path / "result.txt", log)
    assert check.main([str(tmp_path / "result.txt")]) == 20
    assert score.main([str(tmp_path / "result.txt"), "--json"]) == 2
    assert not Run.read(tmp_path / "result.txt").converged


@pytest.mark.parametrize("key", ["init_stop", "run_start", "eval_accuracy", "run_stop"])
def test_the_score_of_a_cut_log_is_json(tmp_path, key, capsys):
    log = synthetic_run.records(
        synthetic_run.write_good(tmp_path / "result.txt", LORA.rules.CLOSED)
    )
    path = synthetic_run.write_records(
        tmp_path / "result_0.txt", log[: synthetic_run.find(log, key)]
    )
    assert score.main([str(path), "--json"]) == 20
    assert json.loads(capsys.readouterr().out)["result"]["score"] is None


def test_a_system_description_that_is_a_pipe_or_nested_is_one_error(tmp_path, capsys):
    path = tmp_path / "system.json"
    path.write_text("[" * 100_000)
    assert describe.main(["--out", str(path)]) == 2


@pytest.mark.parametrize("name", ["SUBMISSION_ORG_PLACEHOLDER", "submission_org_placeholder"])
def test_the_placeholder_of_an_organization_is_refused(tmp_path, name, capsys):
    arguments = ["--benchmark", f"llama2_70b_lora={tmp_path}", "--system", "s.json"]
    assert package.main([*arguments, "--out", str(tmp_path / "out"), "--org", name]) == 2
    assert "placeholder" in capsys.readouterr().err


def test_score_and_check_know_the_same_rulesets():
    def rulesets(parser):
        return next(a.choices for a in parser._actions if a.dest == "ruleset")

    assert rulesets(score.parser()) == rulesets(check.parser())
    assert "4.0.0" in rulesets(score.parser())
