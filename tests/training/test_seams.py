"""Train with an update rule and a number format that only this file defines.

They run through the real trainers on one and two ranks and with checkpoints. No file of the package
names them: the rules select the update rule, and the config key `linear` selects the format.
"""

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import tiny
import torch
from ranks import call_on_ranks
from safetensors import safe_open
from tiny import TINY, known_gradient, records, run, run_config, whole, write_data

from common.config import load
from common.estimate.memory import activation_bytes, state_bytes
from common.estimate.workload import benchmark_workload
from common.kernels.fp8 import QuantizedTensor
from common.linear_formats import FORMATS, LinearFormat
from common.model.linear_layers import LinearLayers
from common.paths import ROOT
from common.sharding.optimizer import UPDATE_RULES
from common.training.continuation import CHECKPOINTS_FOLDER
from common.training.pretraining import assemble_random
from llama31_8b.rules import Config, Rules

MOMENTUM = 0.5


class SgdMomentum:
    """v = momentum * v + g; w -= lr * v, with the gradient clipped to a global norm."""

    def __init__(self, clip_norm, weights, rounded):
        self.clip_norm, self.weights = clip_norm, list(weights)
        self.rounded = rounded or [None] * len(self.weights)
        self.velocity = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def update(self, gradients, norm, learning_rate):
        if not torch.isfinite(norm):
            return
        factor = (self.clip_norm / norm).clamp(max=1.0)
        for weight, gradient, velocity, rounded in zip(
            self.weights, gradients, self.velocity, self.rounded, strict=True
        ):
            if gradient is None:
                continue
            velocity.mul_(MOMENTUM).add_(gradient * factor)
            weight.sub_(learning_rate * velocity)
            if rounded is not None:
                rounded.copy_(weight)

    def state(self):
        return {"velocity": self.velocity}

    def reset(self):
        for velocity in self.velocity:
            velocity.zero_()


@dataclass(frozen=True, kw_only=True)
class SgdRules(Rules):
    opt_name: str = "sgd"

    def optimizer_log_keys(self):
        return [("opt_sgd_momentum", MOMENTUM)]


class Rounded12(LinearLayers):
    """Factors of products with 12 bits: sign, exponent and 3 bits of fp32's mantissa.

    Where it rounds up moves with the steps.
    """

    def allocate(self, device):
        self.steps = torch.zeros(1, device=device)

    def rounded(self, tensor):
        up = 0x80000 + 0x8000 * (self.steps % 5).int()
        bits = tensor.rowwise.detach().contiguous().view(torch.int32)
        return QuantizedTensor(((bits + up) & -0x100000).view(torch.float32))

    def fprop(self, x, weight):
        return super().fprop(self.rounded(x), self.rounded(weight))

    def dgrad(self, g, weight):
        return super().dgrad(self.rounded(g), self.rounded(weight))

    def wgrad(self, g, x):
        return super().wgrad(self.rounded(g), self.rounded(x))

    def state(self):
        return {"rounded12_steps": self.steps}

    def reset(self):
        self.steps.zero_()

    def resume(self, ranks, steps, gradient_ratio=1.0):
        self.steps.copy_(ranks[0]["rounded12_steps"])

    def step_done(self):
        self.steps += 1

    def evaluated(self, loss):
        return {"rounded12_steps": int(self.steps)}


ROUNDED = LinearFormat(
    "rounded12", "test_seams:Rounded12", "fp16", bytes_per_element=2, weight_copies=1
)
RULES = SgdRules(**vars(TINY) | {"opt_name": "sgd"})
BOTH = {"rules": RULES, "linear": "rounded12", "opt_base_learning_rate": 0.5}


@contextmanager
def plugged_in():
    sgd = mock.patch.dict(
        UPDATE_RULES,
        sgd=lambda rules, kernels, dtype: partial(SgdMomentum, rules.gradient_clip_norm),
    )
    with sgd, mock.patch.dict(FORMATS, rounded12=ROUNDED):
        yield


@pytest.fixture
def plugged():
    with plugged_in():
        yield


def one_step(processes):
    """Weights before and after one step with known gradients, and the norm of these."""
    assembly = assemble_random(
        run_config(gpus_per_node=processes.world_size), RULES, processes, seed=7
    )
    before = whole(assembly.model)
    products = [
        (parameter * known_gradient(name, parameter.shape)).sum()
        for name, parameter in assembly.model.named_parameters()
    ]
    sum(products).backward()
    norm = float(assembly.step(1e-2))
    return {"before": before, "norm": norm, "after": whole(assembly.model)}


def run_and_continue(folder, ranks):
    """Train with checkpoints, then continue from the one of step 8.

    Returns losses, gradient norms and evaluations of both runs.
    """
    begun = run(
        folder / "run",
        folder / "data",
        gpus_per_node=ranks,
        micro_batch_size=2,
        checkpoint="2",
        **BOTH,
    )
    rest = run(
        folder / "on",
        folder / "data",
        gpus_per_node=ranks,
        micro_batch_size=2,
        continues=folder / "run",
        **BOTH,
    )
    assert {begun.error, rest.error} == {"target_missed"}, begun.message + rest.message
    return [[each.losses, each.norms, each.evaluations] for each in (begun, rest)]


def on_two_ranks(processes, folder):
    with plugged_in():
        return {"run_and_continue": run_and_continue(folder, 2), "step": one_step(processes)}


def assert_continues(begun, rest):
    losses, norms, evaluations = begun
    assert rest == [losses[8:], norms[8:], evaluations[2:]] and len(rest[0]) == 4
    assert losses[-1] < 0.95 * losses[0]


def assert_is_sgd(step):
    factor = min(1.0, RULES.gradient_clip_norm / step["norm"])
    for name, before in step["before"].items():
        expected = before - 1e-2 * factor * known_gradient(name, before.shape)
        torch.testing.assert_close(step["after"][name], expected, rtol=1e-6, atol=1e-7)


def test_one_rank_trains_and_continues_with_the_new_rule_and_format(processes, plugged, tmp_path):
    write_data(tmp_path / "data")
    begun, rest = run_and_continue(tmp_path, 1)
    assert_continues(begun, rest)
    assert_is_sgd(one_step(processes))
    log = {record["key"]: record["value"] for record in records(tmp_path / "run" / "result.txt")}
    assert (
        log["opt_name"] == "sgd"
        and log["opt_sgd_momentum"] == MOMENTUM
        and not any("adamw" in key for key in log)
    )
    assert log["lowest_numerical_precision_in_linear"] == "fp16"
    events = [
        json.loads(line) for line in (tmp_path / "on" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["rounded12_steps"] for event in events if event["event"] == "linear"] == [12]
    (folder,) = (tmp_path / "run" / CHECKPOINTS_FOLDER).glob("step_*")
    with safe_open(folder / "rank_0.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"head.output.weight.velocity", "rank_0.rounded12_steps"} <= names and not any(
        "moment" in name for name in names
    )


@pytest.mark.slow
def test_two_ranks_train_and_continue_with_the_new_rule_and_format(plugged, tmp_path):
    write_data(tmp_path / "data")
    ranks = call_on_ranks(2, "test_seams:on_two_ranks", tmp_path)
    assert_continues(*ranks[0]["run_and_continue"])
    for rank in ranks:
        assert_is_sgd(rank["step"])
    write_data(tmp_path / "alone" / "data")
    (losses, *_), _ = run_and_continue(tmp_path / "alone", 1)
    assert ranks[0]["run_and_continue"][0][0] == pytest.approx(losses, rel=1e-2), (
        "the same sums in another order, rounded to 3 bits"
    )


def test_the_new_rule_and_the_new_format_each_change_the_losses(processes, plugged, tmp_path):
    write_data(tmp_path / "data")
    runs = [
        run(tmp_path / "adamw", tmp_path / "data"),
        run(tmp_path / "format", tmp_path / "data", linear="rounded12"),
        run(tmp_path / "rule", tmp_path / "data", rules=RULES),
    ]
    assert len({tuple(each.losses) for each in runs}) == 3
    assert (
        runs[1].losses[0] == pytest.approx(runs[0].losses[0], rel=1e-2)
        and runs[2].losses[0] == runs[0].losses[0]
    )


def test_a_frozen_base_is_read_in_the_format(processes, plugged):
    rounded = tiny.lora_steps(processes, linear="rounded12")
    plain = tiny.lora_steps(processes)
    assert rounded["losses"] != plain["losses"] and rounded["losses"] == pytest.approx(
        plain["losses"], rel=0.05
    )
    assert rounded["base unchanged"]


def test_the_plan_counts_the_bytes_of_the_format(plugged):
    config = replace(load(ROOT / "configs/llama31_8b/H200_1x8.toml", Config), linear="rounded12")
    work = benchmark_workload("llama31_8b", config)
    assert (
        state_bytes(config, work)["quantized weights"]
        == 2 * work.shape.num_layers * work.shape.matrix_parameters
    )
    assert activation_bytes(config, work)["SwiGLU output"] == 2 * work.shape.ffn_hidden_size
