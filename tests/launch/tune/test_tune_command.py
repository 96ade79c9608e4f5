"""Command `tune`: its files, its errors, and a whole search on a CPU with a stand-in for bench."""

import json

import pytest

from common import config as configs
from common.benchmarks import config_class
from common.paths import ROOT
from launch.job import job_from
from launch.selection.check import MEASURED_ANYWAY
from launch.tune import command
from launch.tune import search as tune_search
from launch.tune.candidates import changed
from launch.tune.search import Journal, Measurement
from launch.tune.target import Target

BAD = """
gpu = "CPU"
nodes = 1
gpus_per_node = 1
miniature = true
global_batch_size = 16
opt_base_learning_rate = 4e-3
max_samples = 2048
micro_batch_size = 1
eval_micro_batch_size = 48
"""
OWN = {
    "llama31_8b": "opt_learning_rate_warmup_steps = 20\nrecompute_layers = 4\n",
    "llama2_70b_lora": "opt_learning_rate_training_steps = 256\n",
}


def stand_in(target, folder, journal):
    """A measurement in which large micro-batches are fast, and 16 do not fit."""

    def measure(changes, length, steps, stop):
        config = changed(target.job.config, changes)
        if config.micro_batch_size == 16:
            error = {"kind": "out_of_memory", "exit_code": 12, "what": "full", "why": "", "do": ""}
            return Measurement(changes, length, "out_of_memory", 1.0, error=error)
        step_ms = 100.0 / config.micro_batch_size + config.recompute_layers
        step_ms += 0 if "OMP_WAIT_POLICY" in config.env else 50
        return Measurement(changes, length, "done", 1.0, (step_ms,) * steps)

    return measure


@pytest.fixture(params=sorted(OWN))
def benchmark_name(request, tmp_path, monkeypatch):
    (tmp_path / "bad.toml").write_text(BAD + OWN[request.param])
    monkeypatch.setenv("LOGDIR", str(tmp_path / "results"))
    monkeypatch.setattr(command, "_measure", stand_in)
    return request.param


def tune(benchmark: str, tmp_path, *options: str) -> int:
    words = ["--config", str(tmp_path / "bad.toml"), "--device", "cpu", *options]
    return command.main([benchmark, *words])


def test_the_config_is_what_the_journal_says(benchmark_name, tmp_path, capsys):
    assert tune(benchmark_name, tmp_path) == 0
    (folder,) = (tmp_path / "results" / "tune").iterdir()
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    done = [line for line in lines[1:] if line["outcome"] == "done"]
    fastest = min(done, key=lambda line: (line["times_ms"][0], line["length"]))
    base = configs.load(tmp_path / "bad.toml", config_class(benchmark_name))
    found = configs.load(folder / "bad.toml", config_class(benchmark_name))
    assert found == changed(base, fastest["changes"])
    assert found.micro_batch_size == 8 and found.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert found.recompute_layers == 0
    lines_of_toml = (folder / "bad.toml").read_text().splitlines()
    (line,) = [each for each in lines_of_toml if each.startswith("micro_batch_size")]
    assert f"8: {fastest['times_ms'][0]:,.1f} ms" in line and "16: out of memory" in line
    (line,) = [each for each in lines_of_toml if each.startswith("OMP_WAIT_POLICY")]
    assert f"unset: {50 / fastest['times_ms'][0]:+.1%}" in line
    (line,) = [each for each in lines_of_toml if each.startswith("global_batch_size")]
    assert "#" not in line
    assert "micro_batch_size=8" in capsys.readouterr().out
    page = (folder / "page.html").read_text()
    assert "out of memory" in page and "planned memory" in page


def test_keys_that_decide_convergence_stay(benchmark_name, tmp_path):
    tune(benchmark_name, tmp_path)
    (folder,) = (tmp_path / "results" / "tune").iterdir()
    base = configs.load(tmp_path / "bad.toml", config_class(benchmark_name))
    tuned = {"micro_batch_size", "recompute_layers", "frozen_base", "env"}
    for line in (folder / "journal.jsonl").read_text().splitlines()[1:]:
        config = changed(base, json.loads(line)["changes"])
        for name in vars(base).keys() - tuned:
            assert getattr(config, name) == getattr(base, name), name


def test_resume_continues_the_same_search_only(benchmark_name, tmp_path, capsys):
    assert tune(benchmark_name, tmp_path, "--resume") == 2
    tune(benchmark_name, tmp_path, "--minutes", "0.05")
    (folder,) = (tmp_path / "results" / "tune").iterdir()
    before = (folder / "journal.jsonl").read_text()
    assert len(before.splitlines()) == 4  # identity, and three measurements of a second
    assert tune(benchmark_name, tmp_path, "--resume") == 0
    after = (folder / "journal.jsonl").read_text()
    assert after.startswith(before) and len(after) > len(before)
    assert [*(tmp_path / "results" / "tune").iterdir()] == [folder]
    assert tune(benchmark_name, tmp_path, "--resume", "--set", "max_samples=4096") == 2
    assert "--resume" in capsys.readouterr().err


def test_resume_continues_the_search_that_started_last(tmp_path, monkeypatch):
    """The names of earlier versions are local times."""
    for name, started in (("20261123-190000", 100.0), ("20261123-110000", 200.0)):
        monkeypatch.setattr(tune_search.time, "time", lambda started=started: started)
        folder = tmp_path / f"mine_{name}"
        folder.mkdir()
        Journal(folder).begin({"benchmark": "llama31_8b"})
    found, journal = command._resumed(tmp_path, "mine", {"benchmark": "llama31_8b"})
    assert found.name == "mine_20261123-110000" and journal.identity == {"benchmark": "llama31_8b"}


def test_resume_finds_a_search_whose_config_has_brackets_in_its_name(tmp_path):
    folder = tmp_path / "llama31_8b_mine[1]_20261126-120000"
    folder.mkdir()
    Journal(folder).begin({"benchmark": "llama31_8b"})
    found, _ = command._resumed(tmp_path, "llama31_8b_mine[1]", {"benchmark": "llama31_8b"})
    assert found == folder


def test_the_first_failure_is_the_exit_code_if_nothing_can_be_measured(
    benchmark_name, tmp_path, monkeypatch
):
    def failing(target, folder, journal):
        def measure(changes, length, steps, stop):
            error = {"kind": "out_of_memory", "exit_code": 12, "what": "full", "why": "", "do": ""}
            return Measurement(changes, length, "out_of_memory", 1.0, error=error)

        return measure

    monkeypatch.setattr(command, "_measure", failing)
    assert tune(benchmark_name, tmp_path) == 12


def test_print_starts_nothing(benchmark_name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_measure", None)
    assert tune(benchmark_name, tmp_path, "--print") == 0
    memory, _, others = capsys.readouterr().out.partition("other settings")
    assert memory.startswith("memory settings") and "micro_batch_size=8" in memory
    assert "recommended" in others and "OMP_WAIT_POLICY: " in others
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x"])
def test_minutes_that_make_no_sense_are_refused(minutes):
    assert command.main(["llama31_8b", "--minutes", minutes]) == 2


def test_results_that_cannot_be_written_name_the_variable(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOGDIR", str(tmp_path / "file/logs"))
    assert command.main(["llama31_8b", "--miniature", "--device", "cpu"]) == 17
    assert "LOGDIR" in capsys.readouterr().err


def test_several_nodes_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    words = ["--config", str(ROOT / "configs/llama31_8b/CPU_1x1.toml"), "--device", "cpu"]
    words += ["--set", "nodes=2", "--set", "micro_batch_size=8"]
    for more in ([], ["--print"]):
        assert command.main(["llama31_8b", *words, *more]) == 2
        assert "2 nodes" in capsys.readouterr().err


def test_a_measurement_is_a_bench_in_processes_of_its_own(tmp_path):
    """Steps, a failure of the ranks, and the end that the search asks for."""
    (tmp_path / "bad.toml").write_text(BAD + OWN["llama31_8b"])
    words = ["--config", str(tmp_path / "bad.toml"), "--device", "cpu"]
    options = command.parser("llama31_8b").parse_args(words)
    job = job_from("llama31_8b", options, *MEASURED_ANYWAY)
    journal = Journal(tmp_path)
    measure = command._measure(Target.of(job), tmp_path, journal)
    changes = {"micro_batch_size": 8, "recompute_layers": 0, "OMP_WAIT_POLICY": "PASSIVE"}
    done = measure(changes, "short", 2, lambda seconds: False)
    assert (done.outcome, len(done.times_ms)) == ("done", 2) and done.seconds > done.step_ms / 1e3
    file = configs.load(tmp_path / "measurement_001/bad.toml", config_class("llama31_8b"))
    assert file == changed(job.config, changes)
    failed = measure({"ATTENTION_ENGINE": "none"}, "short", 2, lambda seconds: False)
    assert failed.outcome == "config" and failed.error["exit_code"] == 2
    assert measure({}, "short", 2, lambda seconds: True).outcome == "stopped"
