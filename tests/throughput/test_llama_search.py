"""`throughput llama --search`: the step that is searched, and the row of the settings found."""

import argparse
import json

import pytest
from probes import make_visible

from common.errors import ConfigError
from common.gpu_kinds import KINDS
from common.machine.hardware import Probe
from launch.tune import command as tune_command
from launch.tune.candidates import changed, memory_candidates
from launch.tune.search import Measurement
from throughput import __main__ as command
from throughput import llama_case
from throughput.result import read

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def case_to_tune(batch: int | str | None, gpus: int = 1) -> llama_case.LlamaCase:
    options = argparse.Namespace(
        model="qwen3-8b",
        lora=False,
        layers=None,
        precision="bf16",
        seq=4096,
        batch=batch,
        gpus=[gpus],
        device="cuda",
    )
    return llama_case.case_to_tune(options, KINDS["H200"], gpus)


@pytest.fixture
def measurements(tmp_path, monkeypatch):
    """Results of real measurements. Only the base config is measured, and 4 sequences are fast."""
    real = tune_command._measure
    found = []

    def measure_of(target, folder, journal):
        def measure(changes, length, steps, stop):
            if not changes and length == "short":
                found.append(real(target, folder, journal)(changes, length, 2, lambda seconds: 0))
            size = changed(target.job.config, changes).micro_batch_size
            return Measurement(changes, length, "done", 1.0, (100.0 + abs(size - 4),) * 2)

        return measure

    monkeypatch.setattr(tune_command, "_measure", measure_of)
    make_visible(monkeypatch, Probe("none"))
    monkeypatch.setenv("LOGDIR", str(tmp_path / "results"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return found


def start(tmp_path, out: str, *words: str) -> dict:
    options = ["--model", str(tmp_path / "config.json"), "--seq", "16", "--batch", "8"]
    options += ["--warmup", "1", "--steps", "2", "--device", "cpu", "--out", str(tmp_path / out)]
    assert command.start(command.parser().parse_args(["llama", *options, *words])) == 0
    (row,) = read(tmp_path / out)["rows"]
    return row


@pytest.mark.slow
def test_the_settings_that_the_search_finds_are_measured(tmp_path, measurements):
    row = start(tmp_path, "first", "--search", "1")
    assert (row["batch"], row["micro_batches"]) == (4, 2)
    assert "micro_batch_size=4" in row["note"]
    assert [(each.outcome, len(each.times_ms)) for each in measurements] == [("done", 2)]
    (folder,) = (tmp_path / "results" / "tune").iterdir()
    assert {"page.html", "journal.jsonl"} <= {path.name for path in folder.iterdir()}

    again = start(tmp_path, "second", "--search", "1", "--resume")
    assert again["batch"] == 4
    assert [*(tmp_path / "results" / "tune").iterdir()] == [folder]
    assert len(measurements) == 1
    with pytest.raises(ConfigError, match="--resume"):  # another step
        start(tmp_path, "third", "--search", "1", "--resume", "--lora")


def test_resume_needs_a_search(tmp_path, measurements):
    with pytest.raises(ConfigError, match="--search"):
        start(tmp_path, "out", "--resume")


def test_a_batch_that_does_not_fit_at_once_is_divided():
    case = case_to_tune(batch=64, gpus=2)
    assert case.config.global_batch_size == 128 and case.config.micro_batch_size == 1
    found = memory_candidates(case.config, case.work, KINDS["H200"])
    assert found and all("global_batch_size" not in each for each in found)
    sizes = {changed(case.config, each).micro_batch_size for each in found}
    assert len(sizes | {1}) > 1 and 64 not in sizes


def test_without_a_batch_the_step_is_the_one_that_is_measured_without_a_search():
    case = case_to_tune(batch=None, gpus=8)
    assert case.config.gradient_accumulation_steps == 1 and case.config.micro_batch_size > 1
    assert case_to_tune(batch="max", gpus=8).config == case.config
