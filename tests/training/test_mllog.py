"""RunLog: the form of a line, the order of events, what happens when the disk or the loss fails."""

import json
import math
import os
import subprocess
import sys

import pytest
from synthetic_run import LORA, evaluate, find, records, run_config, start, write_good

from common import benchmarks
from common.config import FROZEN_BASE_STORAGE, load
from common.errors import ConfigError, NonFinite, StorageError
from common.paths import ROOT
from common.records.mlperf_log import TOKEN
from common.training.log_keys import hyperparameters
from common.training.mllog import RunLog
from llama31_8b import rules

pytestmark = pytest.mark.quick


def test_lines_have_the_form_of_the_checker_and_reach_stdout_too(tmp_path, capfd):
    path = write_good(tmp_path / "result.txt")
    text = path.read_text()
    assert capfd.readouterr().out == text
    for line in text.splitlines():
        assert line.startswith(TOKEN)
        record = json.loads(line[len(TOKEN) :])
        assert list(record) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert record["namespace"] == "" and type(record["time_ms"]) is int
        assert (ROOT / record["metadata"]["file"]).is_file() and record["metadata"]["lineno"] > 0
    times = [record["time_ms"] for record in records(path)]
    assert times == sorted(times)


def test_an_invented_log_has_the_times_of_its_clock_and_stays_off_stdout(tmp_path, capfd):
    path = tmp_path / "result.txt"
    times = iter((5, 7))
    log = RunLog(path, clock=lambda: next(times))
    log.cache_clear(True)
    log.init_start()
    log.close()
    assert [record["time_ms"] for record in records(path)] == [5, 7]
    assert capfd.readouterr().out == ""


def test_values_keep_their_types(tmp_path):
    values = {
        record["key"]: record["value"] for record in records(write_good(tmp_path / "result.txt"))
    }
    assert values["global_batch_size"] == 32 and type(values["global_batch_size"]) is int
    assert values["opt_base_learning_rate"] == 8e-4 and values["cache_clear"] is True
    assert (
        values["eval_accuracy"] == 3.3
        and values["run_stop"] is None
        and values["tracked_stats"] == {"throughput": 25.5}
    )


def test_warmup_steps_stand_before_decay_steps(tmp_path):
    log = records(write_good(tmp_path / "result.txt"))
    assert find(log, "opt_learning_rate_warmup_steps") < find(log, "opt_learning_rate_decay_steps")
    assert log[find(log, "opt_learning_rate_decay_steps")]["value"] == 1_199_872


def test_precisions_are_disclosed():
    def disclosed(**changes):
        keys = dict(hyperparameters(run_config(**changes), rules.CLOSED, 1, "x.toml"))
        return [
            keys[f"lowest_numerical_precision_in_{where}"] for where in ("linear", "attn", "comm")
        ]

    assert disclosed(linear="fp8") == ["fp8", "bfloat16", "bfloat16"]
    assert (
        disclosed(linear="bf16") == ["bfloat16"] * 3
        and disclosed(linear="bf16", gpu="CPU") == ["fp32"] * 3
    )


@pytest.mark.parametrize(
    ("storage", "linear"),
    [
        *((storage, "fp8") for storage in FROZEN_BASE_STORAGE),
        ("sharded", "bf16"),
        ("replicated", "bf16"),
    ],
)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (1, 1), (8, 1)])
def test_only_a_base_in_fp8_that_ranks_gather_is_communicated_in_fp8(storage, linear, nodes, gpus):
    """The base is sharded over the ranks of a node."""
    sizes = {"nodes": nodes, "gpus_per_node": gpus, "frozen_base": storage, "linear": linear}
    keys = dict(hyperparameters(LORA.run_config(**sizes), LORA.rules.CLOSED, 1, "x.toml"))
    in_fp8 = storage == "sharded" and "fp8" in linear and gpus > 1
    word = "fp8" if in_fp8 else "bfloat16"
    assert keys["lowest_numerical_precision_in_comm"] == word


@pytest.mark.parametrize("name", benchmarks.names())
def test_every_config_discloses_the_precision_of_its_communication(name):
    for path in sorted((ROOT / "configs" / name).glob("*.toml")):
        config = load(path, benchmarks.config_class(name))
        keys = dict(hyperparameters(config, benchmarks.rules_of(name, config), 1, path.name))
        gathers_fp8 = config.frozen_base == "sharded" and config.linear == "fp8"
        word = {"fp32": "fp32", "bf16": "bfloat16"}[config.precision]
        if gathers_fp8 and config.world_size > 1:
            word = "fp8"
        assert keys["lowest_numerical_precision_in_comm"] == word, path


def test_a_rank_without_a_file_writes_nothing_but_keeps_order(capfd):
    log = start(None)
    with pytest.raises(AssertionError):
        log.init_start()
    log.abort(0)
    assert capfd.readouterr().out == ""


def test_an_existing_file_is_neither_overwritten_nor_continued(tmp_path):
    path = tmp_path / "result.txt"
    path.write_text("another run\n")
    with pytest.raises(StorageError, match="exists already"):
        RunLog(path)
    assert path.read_text() == "another run\n"


def test_a_missing_directory_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        RunLog(tmp_path / "nowhere" / "result.txt")


def test_newlines_and_control_characters_stay_on_one_line(tmp_path):
    path = tmp_path / "result.txt"
    log = RunLog(path)
    log.cache_clear(True)
    log.init_start()
    log.submission(
        benchmark="llama31_8b",
        org="a\nb\r\x1b[31m\u2028ü",
        platform="p",
        division="closed",
        status="onprem",
    )
    lines = path.read_bytes().decode("ascii").splitlines()
    assert (
        len(lines) == 7 and json.loads(lines[3][len(TOKEN) :])["value"] == "a\nb\r\x1b[31m\u2028ü"
    )


@pytest.mark.parametrize("text", ["eval_error box", "my global_batch_size", "a :::MLLOG b"])
def test_words_the_official_checkers_misread_are_refused(tmp_path, text):
    log = RunLog(tmp_path / "result.txt")
    log.cache_clear(True)
    log.init_start()
    with pytest.raises(ConfigError, match="contains"):
        log.submission(
            benchmark="llama31_8b", org="o", platform=text, division="closed", status="onprem"
        )


def test_an_empty_organisation_is_refused(tmp_path):
    log = RunLog(tmp_path / "result.txt")
    log.cache_clear(True)
    log.init_start()
    with pytest.raises(ConfigError, match="submission_org is empty"):
        log.submission(
            benchmark="llama31_8b", org=" ", platform="p", division="closed", status="onprem"
        )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, loss):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.block_stop(12288)
    log.eval_start(12288)
    with pytest.raises(NonFinite):
        log.eval_accuracy(12288, loss)
    log.abort(12288)
    assert [record["key"] for record in records(path)][-3:] == [
        "eval_start",
        "eval_stop",
        "run_stop",
    ]


def test_order_is_asserted(tmp_path):
    log = start(tmp_path / "result.txt")
    log.block_start(0)
    for wrong in (
        log.run_start,
        lambda: log.seed(1),
        lambda: log.eval_start(0),
        lambda: log.block_start(0),
        lambda: log.run_stop(0, "success"),
        lambda: log.run_stop(0, "done"),
        lambda: log.block_stop(-1),
    ):
        with pytest.raises(AssertionError):
            wrong()
    log.block_stop(12288)
    with pytest.raises(AssertionError):
        log.eval_start(12256)  # one step behind
    evaluate(log, 12288, 3.2)
    assert log.run_stop(12288, "success") >= 0
    with pytest.raises(AssertionError):
        log.block_start(12288)


def test_init_stop_wants_everything_logged(tmp_path):
    log = RunLog(tmp_path / "result.txt")
    log.cache_clear(True)
    log.init_start()
    with pytest.raises(AssertionError, match="hyperparameters"):
        log.init_stop()


def test_abort_before_the_clock_writes_nothing(tmp_path):
    path = tmp_path / "result.txt"
    log = RunLog(path)
    log.cache_clear(True)
    log.init_start()
    before = path.read_text()
    log.abort(0)
    log.abort(0)
    assert path.read_text() == before


def test_abort_closes_an_open_block_once_and_with_the_samples_trained(tmp_path):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.abort(320)
    log.abort(640)
    block_stop, run_stop = records(path)[-2:]
    assert (block_stop["key"], block_stop["metadata"]["samples_count"]) == ("block_stop", 320)
    assert (
        run_stop["key"],
        run_stop["metadata"]["samples_count"],
        run_stop["metadata"]["status"],
    ) == ("run_stop", 320, "aborted")


def test_abort_after_success_changes_nothing(tmp_path):
    path = tmp_path / "result.txt"
    log = start(path)
    log.block_start(0)
    log.block_stop(12288)
    evaluate(log, 12288, 3.0)
    log.run_stop(12288, "success")
    before = path.read_text()
    log.abort(12288)
    assert path.read_text() == before


FULL_DISK = """
import resource, sys
from pathlib import Path
from synthetic_run import start
from common.errors import StorageError
path = Path(sys.argv[1])
log = start(path)
whole = path.read_bytes()
# The next line fits only in part.
resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, len(whole) + 50))
try:
    log.block_start(0)
except StorageError as error:
    log.abort(0)
    assert error.exit_code == 17 and "errno" in error.why, error.why
    assert path.read_bytes() == whole, "earlier lines are not intact"
    print("STORAGE ERROR", file=sys.stderr)
"""


def test_a_full_disk_is_a_storage_error_and_earlier_lines_stay_whole(tmp_path):
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}"}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "result.txt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and "STORAGE ERROR" in done.stderr, done.stderr


COPY = """
import os, sys
from pathlib import Path
from common.training.mllog import RunLog
log = RunLog(Path(sys.argv[1]))
log.cache_clear(True)
log.init_start()
"""


@pytest.mark.parametrize("behind", ["a full disk", "a reader that ended", "nothing"])
def test_stdout_is_a_copy_and_the_file_goes_on_without_it(tmp_path, behind):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", COPY, str(tmp_path / "result.txt")]
    with open("/dev/full", "w") as full:
        stdout = {"a full disk": full, "a reader that ended": writer, "nothing": None}[behind]
        close = None if stdout else lambda: os.close(1)
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=close
        )
    os.close(writer)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("stdout") == (behind != "nothing"), "one note at most"
    assert [record["key"] for record in records(tmp_path / "result.txt")] == [
        "cache_clear",
        "init_start",
    ], "nothing twice"
