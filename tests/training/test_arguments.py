"""What an argument of a command means: a folder of runs, a run, or weights."""

import json
from pathlib import Path

import pytest

from common import benchmarks
from common.errors import ConfigError, WeightsError
from common.paths import ROOT
from common.training.arguments import (
    Weights,
    run_or_runs,
    run_to_continue,
    runs_in,
    weights_of,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def logs(tmp_path, monkeypatch) -> Path:
    """LOGDIR with two runs: the older one has model/, the newer one adapter/ and checkpoints/."""
    monkeypatch.setenv("LOGDIR", str(tmp_path / "logs"))
    monkeypatch.chdir(ROOT)
    runs = tmp_path / "logs" / "open_llama"
    old = runs / "20261101-000000_a_seed1"
    new = runs / "20261102-000000_b_seed2"
    for run in (old, new):
        run.mkdir(parents=True)
        (run / "config.toml").touch()
        (run / "report.html").touch()
    base = tmp_path / "base"
    for folder in (old / "model", base):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (new / "adapter").mkdir()
    (new / "checkpoints").mkdir()
    name_base(new, str(base))
    return runs


def name_base(run: Path, base: object) -> None:
    text = json.dumps({"base_model_name_or_path": base})
    (run / "adapter/adapter_config.json").write_text(text)


def test_the_name_of_a_benchmark_means_its_folder_of_results(logs, tmp_path, monkeypatch):
    assert ROOT.joinpath("open_llama").is_dir(), "the folder of the source code is not meant"
    assert runs_in(Path("open_llama")) == logs
    for name in benchmarks.names():
        assert runs_in(Path(name)) == logs.parent / name
    assert runs_in(Path("results")) == Path("results")
    (tmp_path / "open_llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert runs_in(Path("open_llama")) == Path("open_llama"), "a folder of the user's is meant"


@pytest.mark.parametrize("name", ["", "report.html", "config.toml", "model", "model/config.json"])
def test_a_run_is_named_by_what_is_in_it(logs, name):
    run = logs / "20261101-000000_a_seed1"
    path = run / name
    assert run_or_runs(path) == run or name == "model/config.json"
    assert weights_of(path) == Weights(run / "model")


def test_only_a_page_or_the_ledger_names_a_folder_of_runs(logs):
    for name, means in (("report.html", logs), ("attempts.jsonl", logs), ("README.md", None)):
        file = logs / name
        file.touch()
        assert run_or_runs(file) == (means or file)
    assert run_to_continue(logs / "README.md") == logs / "README.md"


def test_a_folder_of_runs_is_its_newest_run_where_one_run_is_needed(logs):
    new = logs / "20261102-000000_b_seed2"
    assert run_or_runs(logs) == logs
    assert run_to_continue(Path("open_llama")) == new
    assert weights_of(Path("open_llama")).adapter == new / "adapter"


@pytest.mark.parametrize("name", ["", "adapter", "adapter/adapter_config.json"])
def test_an_adapter_brings_its_base(logs, tmp_path, name):
    run = logs / "20261102-000000_b_seed2"
    assert weights_of(run / name) == Weights(tmp_path / "base", run / "adapter")


@pytest.mark.parametrize("base", ["meta-llama/Llama-3.1-8B", None, 5, ""])
def test_a_base_that_is_elsewhere_is_named_with_the_option_that_helps(logs, base):
    run = logs / "20261102-000000_b_seed2"
    name_base(run, base)
    with pytest.raises(ConfigError) as error:
        weights_of(run)
    assert str(base) in error.value.what and f"--adapter {run / 'adapter'}" in error.value.do


def test_no_weights_are_refused(logs, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(ConfigError, match=name):
            weights_of(tmp_path / name)
    run = logs / "20261102-000000_b_seed2"
    (run / "adapter/adapter_config.json").unlink()
    with pytest.raises(ConfigError) as error:
        weights_of(run)
    assert f"export {run}" in error.value.do
    (run / "adapter/adapter_config.json").write_text("{")
    with pytest.raises(WeightsError):
        weights_of(run)
