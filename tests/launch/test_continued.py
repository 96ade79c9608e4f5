"""--checkpoint and --continue before any rank starts: what the ranks get, and what is refused."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import pytest
from jobs import job_of

from common.errors import ConfigError, WeightsError, write_rank_record
from common.paths import ROOT
from common.records import ledger
from common.training.continuation import (
    BASE_FILES,
    CHECKPOINTS_FOLDER,
    DATA_FILES,
    DEVICE,
    ENGINES,
    FACTS,
    SAVE,
    base_record,
    data_record,
    newest,
)
from launch import job_command, run_command, series
from launch.job import AUTO, ensure_data, job_from, trainer_command
from launch.series import SeriesRequest, request_from

pytestmark = pytest.mark.quick


def continued(found, request):
    return series.continued(request, found.continues, found.benchmark, found.config)


def job(benchmark="llama31_8b", **options):
    given = {
        "device": "cpu",
        "config": None,
        "set": [],
        "checkpoint": None,
        "continues": None,
    } | options
    return job_from(benchmark, argparse.Namespace(**given))


@pytest.fixture
def before(tmp_path):
    """A run of seed 77 with a checkpoint."""
    folder = tmp_path / "a run" / CHECKPOINTS_FOLDER / "step_00000012"
    folder.mkdir(parents=True)
    facts = {
        "benchmark": "llama31_8b",
        "seed": 77,
        "config": asdict(job().config),
        "step": 12,
        "samples": 192,
        "ranks": 1,
        "digest": "x",
        DATA_FILES: {},
        BASE_FILES: {},
        ENGINES: {},
        DEVICE: "cpu",
    }
    (folder / FACTS).write_text(json.dumps(facts))
    (folder / "rank_0.safetensors").touch()
    return tmp_path / "a run"


def test_the_seed_is_that_of_the_run_before_and_the_ranks_get_both_options(before, capsys):
    found = job(checkpoint="600s", continues=before)
    request = continued(found, request_from({}, None, False))
    assert (
        request
        == SeriesRequest(1, 0, 77)
        == continued(found, request_from({"SEED": "77"}, None, False))
    )
    command = trainer_command(found, Path("DIR"), 77)
    assert (
        command[-4:] == ["--checkpoint", "600s", "--continue", str(before)]
        and command[command.index("--seed") + 1] == "77"
    )
    assert "192 samples" in capsys.readouterr().err
    assert not {"--checkpoint", "--continue"} & set(trainer_command(job(), Path("DIR"), 1))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--max-failures", "1"], {}),
        (["--resume"], {}),
        ([], {"NEXP": "2"}),
    ],
)
def test_a_series_is_refused_even_if_there_is_no_run_to_continue(
    before, tmp_path, monkeypatch, capsys, arguments, environment
):
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "empty"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["--miniature", "--device", "cpu", "--print", "--checkpoint", "1", *arguments]
    for run in (str(before), "auto"):
        assert run_command.main(["llama31_8b", *words, "--continue", run]) == 2
        assert "for a single run" in capsys.readouterr().err


def test_another_seed_is_refused(before):
    with pytest.raises(ConfigError, match="seed was 77, now 78"):
        continued(job(continues=before), request_from({"SEED": "78"}, None, False))


def test_another_config_or_benchmark_and_a_run_without_checkpoint_are_refused(before, tmp_path):
    request = request_from({}, None, False)
    with pytest.raises(ConfigError, match="opt_base_learning_rate"):
        continued(job(continues=before, set=["opt_base_learning_rate=0.5"]), request)
    with pytest.raises(ConfigError, match="benchmark"):
        continued(job("llama2_70b_lora", continues=before), request)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        job(continues=tmp_path / "empty")
    (before / CHECKPOINTS_FOLDER / "step_00000012" / FACTS).write_text("{")
    with pytest.raises(WeightsError, match="is damaged"):
        job(continues=before)


@pytest.mark.parametrize("auto", [False, True])
def test_the_facts_are_read_once(before, log_dir, tmp_path, auto):
    """All checks before a run see the same checkpoint, even if it is replaced in the meantime."""
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    found = job(checkpoint="600s", continues=AUTO if auto else run)
    shutil.rmtree(run / CHECKPOINTS_FOLDER)
    assert continued(found, request_from({}, None, False)).seed == 77
    assert trainer_command(found, Path("DIR"), 77)[-1] == str(run)
    data = job_of("open_llama", OPEN, tmp_path, data=DATA[OPEN])
    ensure_data(replace(data, continues=found.continues))


def test_the_grace_time_is_for_runs_that_save():
    assert job(checkpoint="60s", grace=90.0).grace_s == 90
    with pytest.raises(ConfigError, match="--grace without --checkpoint"):
        job(grace=90.0)


def test_options_that_cannot_be_are_refused_before_that():
    for text in ("often", ""):
        with pytest.raises(ConfigError, match="--checkpoint"):
            job(checkpoint=text)
    with pytest.raises(ConfigError, match="one node"):
        job(checkpoint="1", set=["nodes=2", "micro_batch_size=8"])


def test_the_command_line(before):
    command = [
        sys.executable,
        "-m",
        "launch",
        "llama31_8b",
        "--device",
        "cpu",
        "--print",
        "--checkpoint",
        "1",
        "--continue",
    ]
    done = subprocess.run([*command, str(before)], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 0
        and f"--checkpoint 1 --continue {shlex.quote(str(before))}\n" in done.stdout
        and "continues" in done.stderr
    )
    done = subprocess.run([*command, "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and not done.stdout
        and len(done.stderr.splitlines()) == 3
        and f"{ROOT}/nowhere" in done.stderr
    )


# A run on its own text: everything comes from the run that is continued.

OWN = """
model = "llama-10m"
sequence_length = 256
global_batch_size = 4
max_samples = 1920
eval_samples = 64
eval_interval_samples = 480
opt_base_learning_rate = 2e-3
schedule = "cosine"
opt_learning_rate_warmup_steps = 32
weight_decay = 0.1
gradient_clip_norm = 1.0
"""


def own_job(**options):
    return job("open_llama", **options)


@pytest.fixture
def own_config(tmp_path):
    path = tmp_path / "mine.toml"
    model = ROOT / "open_llama/models/llama-10m.json"
    path.write_text(OWN.replace("llama-10m", str(model)))
    return path


@pytest.fixture
def own_run(own_config, before, tmp_path, monkeypatch):
    """A run of open_llama with --set and another --checkpoint, whose config file is gone."""
    monkeypatch.setenv("DATADIR", "")
    monkeypatch.setenv("LOGDIR", "")
    name = "20261129-100000_mine_seed77"
    run = tmp_path / "elsewhere" / "open_llama" / name
    run.parent.mkdir(parents=True)
    before.rename(run)
    path = run / CHECKPOINTS_FOLDER / "step_00000012" / FACTS
    config = own_job(config=str(own_config), set=["opt_base_learning_rate=5e-4"]).config
    facts = json.loads(path.read_text()) | {"benchmark": "open_llama", "config": asdict(config)}
    path.write_text(json.dumps(facts | {"samples": 48, "checkpoint": "3"}))
    own_config.unlink()
    line = {"time_ms": 1, "key": "config_filename", "value": "mine+derived.toml", "metadata": {}}
    (run / "result.txt").write_text(f":::MLLOG {json.dumps(line)}\n")
    data = tmp_path / "my text"
    data.mkdir()
    ledger_path = run.parent / ledger.NAME
    start = {"series": name, "attempt": 1, "run": name, "seed": 77, "started": EARLY}
    series_line = {"event": "series", "series": name, "goal": 1, "facts": {"data": str(data)}}
    ledger.append(ledger_path, series_line)
    ledger.append(ledger_path, {"event": "start"} | start)
    return run


def test_a_run_on_its_own_text_saves_by_default(own_config):
    config = str(own_config)
    assert own_job(config=config).checkpoint == "600s"
    assert own_job(config=config, checkpoint="none").checkpoint == ""
    assert own_job(config=config, checkpoint="2").checkpoint == "2"
    assert job().checkpoint == "", "a benchmark's runs are timed"


@pytest.mark.parametrize("named_by", ["", "report.html", "checkpoints", ".."])
def test_continue_alone_takes_everything_from_the_run(own_run, tmp_path, named_by):
    (own_run / "report.html").touch()
    found = own_job(continues=own_run / named_by)
    assert found.continues.run.resolve() == own_run
    assert found.config.opt_base_learning_rate == 5e-4
    assert found.selection.log_name == "mine+derived.toml" and found.selection.stem == "mine"
    assert found.checkpoint == "3"
    assert found.data_dir == tmp_path / "my text"
    assert found.log_dir == tmp_path / "elsewhere"
    assert continued(found, request_from({}, None, False)).seed == 77


def test_options_and_variables_take_precedence_over_the_run(own_run, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path / "other"))
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    found = own_job(continues=own_run, checkpoint="none", set=["micro_batch_size=2"])
    assert found.checkpoint == "" and found.config.micro_batch_size == 2
    assert found.data_dir == tmp_path / "other" and found.log_dir == tmp_path / "logs"
    continued(found, request_from({}, None, False))
    changed = own_job(continues=own_run, set=["weight_decay=0.5"])
    with pytest.raises(ConfigError, match="weight_decay"):
        continued(changed, request_from({}, None, False))


# The data

OPEN = ROOT / "open_llama/examples/pretrain_1b.toml"  # sequences of 2,048 tokens
LLAMA31_8B = ROOT / "configs/llama31_8b/H200_1x1.toml"
DATA = {
    OPEN: {"train": [4097], "validation": [128 * 2048 + 1]},
    LLAMA31_8B: {
        "c4-train.en_6_text_document": [8193],
        "c4-validation-91205-samples.en_text_document": [1024 * 8192 + 1],
    },
}


def continuing(path: Path, folder: Path, before: Path):
    """Return a job with data in `folder` that continues the run `before`."""
    benchmark = "open_llama" if path == OPEN else "llama31_8b"
    return replace(job_of(benchmark, path, folder, data=DATA[path]), continues=newest(before))


@pytest.mark.parametrize("path", [OPEN, LLAMA31_8B], ids=["open_llama", "llama31_8b"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_other_data_are_refused(before, tmp_path, path, split):
    job = continuing(path, tmp_path, before)
    facts_file = before / CHECKPOINTS_FOLDER / "step_00000012" / FACTS
    record = {DATA_FILES: data_record(job.data_dir, job.rules.data_files)}
    assert len(record[DATA_FILES]) == 4
    facts_file.write_text(json.dumps(json.loads(facts_file.read_text()) | record))
    job = replace(job, continues=newest(before))
    ensure_data(job)
    ensure_data(replace(job, data_dir=job.data_dir.rename(tmp_path / "moved")))
    job = replace(job, data_dir=tmp_path / "moved")
    (changed,) = (name for name in job.rules.data_files if split in name and name.endswith(".bin"))
    with (job.data_dir / changed).open("r+b") as file:  # of the same size
        file.write(b"\x01\x00")
    with pytest.raises(ConfigError) as caught:
        ensure_data(job)
    assert "step_00000012" in caught.value.what and str(job.data_dir) in caught.value.what
    assert changed in caught.value.why and "DATADIR" in caught.value.do
    with (job.data_dir / changed).open("r+b") as file:
        file.write(b"\x00\x00")
    ensure_data(job)
    with (job.data_dir / changed).open("ab") as file:  # with the same beginning
        file.write(bytes(2))
    with pytest.raises(ConfigError, match="cannot be continued"):
        ensure_data(job)


@pytest.mark.parametrize("key", [DATA_FILES, BASE_FILES, ENGINES, DEVICE])
def test_a_damaged_fact_is_refused(before, key):
    facts_file = before / CHECKPOINTS_FOLDER / "step_00000012" / FACTS
    facts_file.write_text(json.dumps(json.loads(facts_file.read_text()) | {key: []}))
    with pytest.raises(WeightsError) as caught:
        newest(before)
    assert key in caught.value.why


# The frozen base

LORA_8B = ROOT / "open_llama/examples/lora_8b.toml"
LORA_70B = ROOT / "configs/llama2_70b_lora/H200_1x8.toml"
CONTINUE_8B = ROOT / "open_llama/examples/continue_8b.toml"


def job_with_weights(path: Path, folder: Path, before: Path):
    """Return a job that starts from weights in `folder`/base and continues the run `before`."""
    base = folder / "base"
    base.mkdir()
    for number in (1, 2):
        (base / f"model-{number}.safetensors").write_bytes(bytes(4 << 20))
    record = {BASE_FILES: base_record(base)}
    facts_file = before / CHECKPOINTS_FOLDER / "step_00000012" / FACTS
    facts_file.write_text(json.dumps(json.loads(facts_file.read_text()) | record))
    if path == LORA_70B:
        made = job_of("llama2_70b_lora", path, folder, {"MODEL": str(base)})
    else:
        changes = {"weights": str(base), "sequence_length": 16, "eval_samples": 1}
        data = {"train": [99], "validation": [99]}
        made = job_of("open_llama", path, folder, data=data, **changes)
    return replace(made, continues=newest(before))


@pytest.mark.parametrize("path", [LORA_8B, LORA_70B], ids=["open_llama", "llama2_70b_lora"])
def test_another_frozen_base_is_refused(before, tmp_path, path, capsys):
    job = job_with_weights(path, tmp_path, before)
    ensure_data(job)
    assert not capsys.readouterr().err
    changed = tmp_path / "base/model-2.safetensors"
    with changed.open("r+b") as file:  # of the same size and beginning, as after a merge
        file.seek(3 << 20)
        file.write(b"\x01" * (1 << 15))
    with pytest.raises(ConfigError) as caught:
        ensure_data(job)
    assert "step_00000012" in caught.value.what and str(tmp_path / "base") in caught.value.what
    assert changed.name in caught.value.why and "model-1" not in caught.value.why
    changed.unlink()
    with pytest.raises(ConfigError, match="base"):
        ensure_data(job)


def test_weights_that_train_are_not_compared(before, tmp_path, capsys):
    job = job_with_weights(CONTINUE_8B, tmp_path, before)
    (tmp_path / "base/model-1.safetensors").write_bytes(b"")
    ensure_data(job)
    assert not capsys.readouterr().err


# --continue auto


def move(before: Path, log_dir: Path, name: str) -> Path:
    """Move the run into LOGDIR/llama31_8b, as the launcher would have named it."""
    run = log_dir / "llama31_8b" / name
    run.parent.mkdir(parents=True, exist_ok=True)
    return before.rename(run)


@pytest.fixture
def log_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


def test_auto_continues_the_last_unfinished_run(before, log_dir):
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    (run.parent / "20261123-110000_CPU_1x1_seed78").mkdir()  # ended before its first checkpoint
    found = job(checkpoint="600s", continues=AUTO)
    assert found.continues.run == run
    assert continued(found, request_from({}, None, False)).seed == 77


def add_run(before, log_dir, name, continues="", step=0, started=""):
    """Add a run with a checkpoint of `step` steps (0: none), its log and its line in the ledger."""
    run = shutil.copytree(before, log_dir / "llama31_8b" / name)
    saved = run / CHECKPOINTS_FOLDER / "step_00000012"
    facts = json.loads((saved / FACTS).read_text())
    if step:
        (saved / FACTS).write_text(json.dumps(facts | {"step": step, "samples": 16 * step}))
        saved.rename(saved.with_name(f"step_{step:08}"))
    else:
        shutil.rmtree(run / CHECKPOINTS_FOLDER)
    time_ms = datetime.fromisoformat(started).timestamp() * 1000
    line = {"time_ms": time_ms, "key": "cache_clear", "value": None, "metadata": {}}
    lines = [line]
    if continues:
        lines.append(line | {"key": "resumed", "value": 192, "metadata": {"run": continues}})
    text = "".join(f":::MLLOG {json.dumps(each)}\n" for each in lines)
    (run / "result.txt").write_text(text)
    path = run.parent / ledger.NAME
    start = {"series": name, "attempt": 1, "run": name, "seed": 77, "started": started}
    ledger.append(path, {"event": "series", "series": name, "goal": 1, "facts": {}})
    ledger.append(path, {"event": "start"} | start)


TOKYO = "20261123-190000_CPU_1x1_seed77"  # 10:00 UTC, named by the local time of Tokyo
UTC = "20261123-110000_CPU_1x1_seed77"
LATER = "20261123-120000_CPU_1x1_seed77"
EARLY = "2026-11-23T10:00:00Z"
LATE = "2026-11-23T11:00:00Z"
LAST = "2026-11-23T12:00:00Z"


@pytest.mark.parametrize("with_ledger", [True, False])
@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(TOKYO, "", 20, EARLY), (UTC, TOKYO, 60, LATE)], UTC),
        # The clock was set back by a day between the two.
        ([(UTC, "", 20, EARLY), (TOKYO, UTC, 60, "2026-11-22T11:00:00Z")], TOKYO),
        # The newest run continued the first one, and ended before its first checkpoint.
        (
            [
                (TOKYO, "", 60, EARLY),
                (UTC, "", 20, LATE),
                (LATER, TOKYO, 0, LAST),
            ],
            TOKYO,
        ),
        # The newest run did not get as far as the one that it continued.
        ([(TOKYO, "", 60, EARLY), (UTC, TOKYO, 20, LATE)], TOKYO),
        # Two runs that have nothing to do with each other.
        ([(TOKYO, "", 60, EARLY), (UTC, "", 20, LATE)], UTC),
    ],
)
def test_auto_follows_the_records_and_not_the_names(
    before, log_dir, monkeypatch, capsys, runs, expected, with_ledger
):
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    for name, continues, step, started in runs:
        add_run(before, log_dir, name, continues, step, started)
    if not with_ledger:
        (log_dir / "llama31_8b" / ledger.NAME).unlink()
    words = ["--device", "cpu", "--print", "--checkpoint", "1", "--continue", "auto"]
    assert run_command.main(["llama31_8b", "--miniature", *words]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert Path(command[command.index("--continue") + 1]).name == expected


def test_auto_starts_a_new_run_where_there_is_none_to_continue(before, log_dir):
    assert job(checkpoint="600s", continues=AUTO).continues is None
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    other = job(checkpoint="600s", continues=AUTO, set=["opt_base_learning_rate=0.5"])
    assert other.continues is None, "the checkpoint is of another config"
    line = {
        "namespace": "",
        "time_ms": 1,
        "event_type": "INTERVAL_END",
        "key": "run_stop",
        "value": None,
        "metadata": {"status": "success"},
    }
    (run / "result.txt").write_text(f":::MLLOG {json.dumps(line)}\n")
    assert job(checkpoint="600s", continues=AUTO).continues is None, "it reached its target"
    facts = run / CHECKPOINTS_FOLDER / "step_00000012" / FACTS
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {SAVE: True}))
    (run / "ranks").mkdir()
    for outcome, continues in (("done", None), ("failed", run)):  # while it saved the model
        write_rank_record(run, 0, outcome)
        saved = job(checkpoint="600s", save=True, continues=AUTO).continues
        assert (saved and saved.run) == continues


def test_auto_needs_checkpoints_and_refuses_a_damaged_one(before, log_dir):
    with pytest.raises(ConfigError, match="--checkpoint"):
        job(continues=AUTO)
    run = move(before, log_dir, "20261123-100000_CPU_1x1_seed77")
    (run / CHECKPOINTS_FOLDER / "step_00000012" / FACTS).write_text("{")
    with pytest.raises(WeightsError):
        job(checkpoint="600s", continues=AUTO)
