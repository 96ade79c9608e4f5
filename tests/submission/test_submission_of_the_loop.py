"""Check ten closed logs of each benchmark, written by the real loop, with tools of three rounds.

Only the step and the evaluation are scripted. Their results decide when the loop stops, and the
script sets the times.
"""

import gc
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from synthetic_series import DESCRIPTION, ORG, SYSTEM

from common.config import load
from common.model.linear_layers import LinearLayers
from common.paths import ROOT
from common.training import loop
from common.training.assembly import Batching
from common.training.log_keys import hyperparameters
from common.training.loop import Goal
from common.training.metrics import Events, Meter, ProgressLog
from common.training.mllog import RunLog
from common.training.reports import Reports
from llama2_70b_lora import rules as lora_rules
from llama31_8b import rules
from submission import official_tools
from submission.examined_log import examine
from submission.official_tools import CLOSED_RULESETS
from submission.series import read_series, ten_runs

# Sequences to the target of ten runs, by benchmark: near the reference, so that the RCP test
# passes, with and without a factor.
CONVERGED = {
    "llama31_8b": [147_456] + [159_744] * 8 + [172_032],
    "llama2_70b_lora": [2688] * 2 + [3072] * 6 + [3456] * 2,
}
MODULES = {"llama31_8b": rules, "llama2_70b_lora": lora_rules}


@pytest.fixture(scope="module")
def scripted():
    """The loop's two calls that compute, as scripts; the rest of it is real."""
    patch = pytest.MonkeyPatch()
    step = (torch.tensor(3.0), torch.tensor(0.5))
    patch.setattr(loop, "LOG_EVERY_STEPS", 2000)
    patch.setattr(loop, "train_step", lambda *args: step)
    patch.setattr(loop, "evaluate", lambda model, batches, *rest, **options: next(batches))
    yield
    patch.undo()
    gc.unfreeze()
    gc.enable()


def log_of_the_loop(path, benchmark: str, number: int, samples: int, processes) -> None:
    fixed = MODULES[benchmark]
    closed, config = (
        fixed.CLOSED,
        load(ROOT / "configs" / benchmark / "MI355X_1x8.toml", fixed.Config),
    )
    batch = config.global_batch_size
    first, interval = closed.first_evaluation(batch), closed.eval_interval(batch)
    above = (samples - first) // interval
    log = RunLog(path)
    log.cache_clear(True)
    log.init_start()
    log.submission(
        benchmark=benchmark, org=ORG, platform=SYSTEM, division="closed", status="onprem"
    )
    log.seed(3_000_000_019 + 7919 * number)
    log.hyperparameters(
        hyperparameters(
            config, closed, getattr(closed, "train_samples", 1_574_207_408), "MI355X_1x8.toml"
        )
    )
    log.init_stop()
    log.run_start()
    sizes = {
        "tokens_per_step": batch,
        "samples_per_step": batch,
        "flops_per_token": 1,
        "peak_tflops": None,
    }
    reports = Reports(log, Events(None), ProgressLog(False), mock.Mock())
    reports.meter = Meter(processes, reports.events, **sizes)
    outcome = loop.train(
        assembly=SimpleNamespace(model=None, linear=LinearLayers()),
        lr_at=lambda step: 0.0,
        batches=iter(()),
        eval_batches=iter([closed.target_loss + 0.1] * above + [closed.target_loss]),
        batching=Batching(batch, config.gradient_accumulation_steps),
        goal=Goal(interval, first, closed.target_loss, config.max_samples),
        processes=processes,
        reports=reports,
    )
    log.run_stop(outcome.samples, "success")


@pytest.fixture(scope="module")
def org_dir(tmp_path_factory, processes, scripted):
    org = tmp_path_factory.mktemp("loop") / ORG
    (org / "systems").mkdir(parents=True)
    (org / "systems" / f"{SYSTEM}.json").write_text(json.dumps(DESCRIPTION))
    for benchmark, converged in CONVERGED.items():
        folder = org / "results" / SYSTEM / benchmark
        folder.mkdir(parents=True)
        for number, samples in enumerate(converged):
            log_of_the_loop(folder / f"result_{number}.txt", benchmark, number, samples, processes)
    return org


def test_our_checks_find_nothing(org_dir):
    for path in sorted(org_dir.glob("results/*/*/result_*.txt")):
        assert examine(path).errors() == [], path


# The older rulesets are slow tests; test_package.py has the official tools accept a submission for
# all three.
@pytest.mark.parametrize(
    "ruleset",
    [
        *(pytest.param(older, marks=pytest.mark.slow) for older in CLOSED_RULESETS[:-1]),
        CLOSED_RULESETS[-1],
    ],
)
def test_the_official_tools_say_success_and_our_numbers_are_theirs(org_dir, ruleset):
    assert official_tools.package(org_dir, ruleset, 2).passed
    summary = official_tools.summary(org_dir, ruleset, 2)
    assert summary.passed and official_tools.repository(org_dir, ruleset).passed
    for benchmark, converged in CONVERGED.items():
        folder = org_dir / "results" / SYSTEM / benchmark
        series = read_series([folder])
        ten = ten_runs(series)
        assert [run.samples for run in series.runs] == converged and ten.passed, series.notes
        assert ten.score == pytest.approx(summary.scores[SYSTEM, benchmark], abs=1e-9), (
            "equal to the last digit of the summary"
        )
        scaling = folder / "scaling.json"
        factor = json.loads(scaling.read_text())["scaling_factor"] if scaling.is_file() else 1.0
        assert ten.factor == factor, benchmark
