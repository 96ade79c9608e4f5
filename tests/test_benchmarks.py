"""The type of a benchmark: what shared code reads from Rules and Config."""

from dataclasses import replace

import pytest

from common import benchmarks
from common.benchmarks import closed, config_class, divisions, rules_of
from common.config import RunConfig, load
from common.paths import ROOT
from common.records.rcp import mean_samples
from common.training.log_keys import hyperparameters

pytestmark = pytest.mark.quick

each_benchmark = pytest.mark.parametrize("name", closed())


def config_of(name: str, file: str) -> RunConfig:
    return load(ROOT / "configs" / name / file, config_class(name))


@each_benchmark
def test_rules_py_defines_what_the_registry_reads(name):
    assert issubclass(config_class(name), RunConfig)
    assert all(
        isinstance(rules, benchmarks.Rules) and rules.data_files
        for rules in divisions(name).values()
    )
    assert rules_of(name, config_of(name, "CPU_1x1.toml")) == divisions(name)["miniature"]
    assert rules_of(name, config_of(name, "H200_1x8.toml")) == divisions(name)["closed"]


@each_benchmark
def test_a_run_logs_the_values_that_its_division_fixes(name):
    for file in ("CPU_1x1.toml", "H200_1x8.toml"):
        config = config_of(name, file)
        rules = rules_of(name, config)
        logged = dict(
            hyperparameters(config, rules, rules.fixed_log_values().get("train_samples", 1), file)
        )
        fixed = rules.fixed_log_values()
        assert fixed.pop("submission_division") == ("miniature" if config.miniature else "closed")
        assert {key: logged[key] for key in fixed} == fixed


@each_benchmark
def test_only_the_closed_division_has_a_reference(name):
    closed, miniature = divisions(name)["closed"], divisions(name)["miniature"]
    batch = min(closed.reference_runs)
    assert (
        mean_samples(closed, batch)
        and closed.reference_learning_rates.keys() == closed.reference_runs.keys()
    )
    assert mean_samples(miniature, batch) is None and not miniature.reference_learning_rates


def test_rules_may_differ_in_every_run():
    """A benchmark whose rules come from its config needs nothing but another `rules_of`."""
    rules = divisions(benchmarks.measured_in("full"))["closed"]
    longer = replace(
        rules, sequence_length=2 * rules.sequence_length, eval_interval_samples=100, target_loss=2.0
    )
    assert longer.training_flops.total > rules.training_flops.total
    assert longer.eval_interval(64) == longer.first_evaluation(64) == 128
    assert longer.fixed_log_values()["target_accuracy"] == 2.0


def test_adapters_cost_fewer_operations_than_all_weights():
    rules = divisions(benchmarks.measured_in("lora"))["closed"]
    assert rules.lora_rank == 16
    assert (
        rules.training_flops.total
        < replace(rules, lora_rank=0).training_flops.total
        < 2 * rules.training_flops.total
    )


def test_options_of_other_benchmarks_have_their_neutral_value():
    full, lora = (
        config_of(benchmarks.measured_in(mode), "H200_1x8.toml") for mode in ("full", "lora")
    )
    assert full.has_key("recompute_layers") and not full.has_key("offload_layers")
    assert lora.has_key("offload_layers") and not lora.has_key("recompute_layers")
    assert (full.offload_layers, full.frozen_base) == (0, "")
    assert (lora.recompute_layers, lora.moment_precision, lora.reduce_scatter) == (
        0,
        "fp32",
        "nccl",
    )
