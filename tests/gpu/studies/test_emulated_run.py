"""Test the real trainer in an emulated block format with healing: log, warm-up, records, target."""

import json
from dataclasses import asdict
from unittest import mock

import pytest
import tiny
from emulated_layers import install
from synthetic_run import records
from tiny import FP8_RULES as RULES
from tiny import write_data

from common.config import load
from common.linear_formats import FORMATS
from common.paths import ROOT
from common.training import warmup
from common.training.mllog import EMULATED_KEY
from llama31_8b.rules import MINIATURE, Config

FORMAT = "mxfp4+stochastic+hadamard"
HEALED = f"{FORMAT} until step 6, then fp8"
UNHEALED = f"{FORMAT} until step 9999, then fp8"  # in bf16, as what heals to FP8


def run(folder, data, rules, linear, **options):
    """Run the trainer with the format `linear` installed."""
    with mock.patch.dict(FORMATS):
        install(linear)
        return tiny.run(folder, data, rules, linear=linear, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"), RULES)


@pytest.fixture(scope="module")
def healed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healed") / "run"
    return run(folder, data, RULES, HEALED), folder


def formats(folder):
    """Return the format at each evaluation, from the records of the run."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["linear_format"] for event in events if event["event"] == "linear"]


def test_a_run_learns_heals_and_logs_its_format(healed):
    facts, folder = healed
    assert facts.error == "target_missed", facts.message  # TINY's target is out of reach
    assert [samples for samples, _ in facts.evaluations] == [32, 64, 96] and facts.losses[
        -1
    ] < 0.9 * facts.losses[0]
    assert formats(folder) == ["mxfp4, emulated", "fp8", "fp8"]
    log = {record["key"]: record["value"] for record in records(folder / "result.txt")}
    assert log["lowest_numerical_precision_in_linear"] == "mxfp4" and log[EMULATED_KEY] == HEALED


def test_healing_changes_the_losses_only_from_its_step_on(healed, data, tmp_path):
    unhealed = run(tmp_path / "run", data, RULES, linear=UNHEALED)
    assert unhealed.losses[:6] == healed[0].losses[:6] and unhealed.losses[6] != healed[0].losses[6]
    assert formats(tmp_path / "run") == ["mxfp4, emulated"] * 3


def test_at_a_loss_it_heals_after_the_evaluation_that_reached_it(healed, data, tmp_path):
    first = healed[0].evaluations[0][1]
    facts = run(
        tmp_path / "run", data, RULES, linear=f"{FORMAT} until loss {first + 1e-6:.9f}, then fp8"
    )
    assert (
        formats(tmp_path / "run") == ["mxfp4, emulated", "fp8", "fp8"]
        and facts.evaluations[0][1] == first
    )
    assert facts.losses[:4] == healed[0].losses[:4] and facts.losses[4] != healed[0].losses[4]


def test_the_warm_up_leaves_no_trace(healed, data, tmp_path, monkeypatch):
    """Neither in the step that healing waits for nor in the generator that rounds."""
    monkeypatch.setattr(warmup, "TRAIN_STEPS", 0)
    monkeypatch.setattr(warmup, "EVAL_STEPS", 0)
    cold = run(tmp_path / "cold", data, RULES, linear=HEALED)
    assert (cold.losses, cold.norms, cold.evaluations) == (
        healed[0].losses,
        healed[0].norms,
        healed[0].evaluations,
    )


@pytest.mark.slow
def test_a_continued_run_stays_healed(processes, healed, data, tmp_path):
    """Healing starts after step 4, and the checkpoint is of step 8, with the rounding generator."""
    linear = f"{FORMAT} until loss {healed[0].evaluations[0][1] + 1e-6:.9f}, then fp8"
    whole = run(tmp_path / "run", data, RULES, checkpoint="2", linear=linear)
    rest = run(tmp_path / "on", data, RULES, continues=tmp_path / "run", linear=linear)
    assert (
        len(rest.losses) == 4
        and rest.losses == whole.losses[8:]
        and rest.evaluations == whole.evaluations[2:]
    )
    assert formats(tmp_path / "on") == ["fp8"]


@pytest.mark.slow
def test_the_miniature_reaches_its_target_in_mxfp4_with_healing(miniature_data, tmp_path):
    """Three evaluation intervals in MXFP4; in fp32 after that, as a CPU without FP8 computes."""
    config = asdict(load(ROOT / "configs" / "llama31_8b" / "CPU_1x1.toml", Config))
    facts = run(
        tmp_path / "run",
        miniature_data,
        MINIATURE,
        **config | {"linear": "mxfp4+hadamard until step 192, then bf16"},
    )
    assert facts.status == "success", facts.message
    found = formats(tmp_path / "run")
    assert found[:3] == ["mxfp4, emulated"] * 2 + ["bf16"] and len(found) > 3
