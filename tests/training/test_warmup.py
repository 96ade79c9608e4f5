"""The synthetic warm-up leaves nothing behind, and where it does the run is refused."""

import math

import pytest
import torch
from synthetic_run import records
from tiny import TINY, run_config, write_data
from tiny import run as run_tiny

from common.errors import NonFinite, PreflightError
from common.model.checkpoint_loader import load_weights
from common.model.checkpoint_writer import write_checkpoint
from common.training import warmup
from common.training.assembly import Batching
from common.training.loop import train_step
from common.training.pretraining import assemble_random
from common.training.warmup import synthetic_batches, warm_up

pytestmark = pytest.mark.quick

BATCHING = Batching(8, 2)


@pytest.fixture
def assembly(processes):
    return assemble_random(run_config(), TINY, processes, seed=1)


def run(assembly, processes) -> str:
    return warm_up(assembly, BATCHING, (4, 4), processes, lambda phase: None)


def spoil(monkeypatch, after_each_step, learning_rate=None):
    """Every warm-up step is followed by `after_each_step()`, and may have another learning rate."""
    rates = []

    def step(assembly, batches, batching, rate, processes, beat):
        rates.append(rate)
        found = train_step(
            assembly,
            batches,
            batching,
            rate if learning_rate is None else learning_rate,
            processes,
            beat,
        )
        after_each_step()
        return found

    monkeypatch.setattr(warmup, "train_step", step)
    return rates


def test_weights_moments_and_generators_are_restored(assembly, processes, monkeypatch):
    before = [tensor.clone() for tensor in assembly.state_tensors()]
    generator = torch.get_rng_state()
    rates = spoil(monkeypatch, lambda: torch.randn(5))  # draws, and is set back
    digest = run(assembly, processes)
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(before, assembly.state_tensors(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), generator)
    assert rates == [0.0] * warmup.TRAIN_STEPS and warmup.TRAIN_STEPS >= 2 and len(digest) == 64
    assert all(parameter.grad is None for parameter in assembly.model.parameters())


def test_a_loaded_weight_may_hold_negative_zeros(assembly, processes, tmp_path):
    """A step at learning rate 0 would change their sign bits."""
    source = assemble_random(run_config(), TINY, processes, seed=1).model
    with torch.no_grad():
        source.head.output.weight[:, ::2] = -0.0
    write_checkpoint(source, tmp_path)
    load_weights(assembly.model, tmp_path, assembly.optimizer.set_weight)
    assembly.optimizer.gather()
    run(assembly, processes)
    assert (assembly.model.head.output.weight[:, ::2] == 0).all()


def test_two_models_of_one_seed_have_one_digest_and_another_seed_another(processes):
    torch.manual_seed(0)
    digests = [
        run(assemble_random(run_config(), TINY, processes, seed), processes) for seed in (1, 1, 2)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_training_after_warm_up_is_training_without_it(processes):
    plain, warm, untrained = (
        assemble_random(run_config(), TINY, processes, seed=1) for _ in range(3)
    )
    run(warm, processes)
    for assembly in (plain, warm):
        source = synthetic_batches(TINY.shape.vocab_size, TINY.sequence_length, processes, 4)
        for _ in range(3):
            train_step(assembly, source, BATCHING, 1e-2, processes)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_tensors(), warm.state_tensors(), strict=True)
    )
    assert not torch.equal(plain.optimizer.weights[0], untrained.optimizer.weights[0]), (
        "the steps did nothing: no leak could show"
    )


def test_a_warm_up_step_with_a_learning_rate_is_refused(assembly, processes, monkeypatch):
    spoil(monkeypatch, lambda: None, learning_rate=1e-6)
    with pytest.raises(PreflightError, match="training state"):
        run(assembly, processes)


def test_moments_that_stay_are_refused(assembly, processes, monkeypatch):
    monkeypatch.setattr(assembly.optimizer, "reset_state", lambda: None)
    with pytest.raises(PreflightError):
        run(assembly, processes)


def test_a_generator_that_moved_on_is_refused(assembly, processes, monkeypatch):
    spoil(monkeypatch, lambda: torch.randn(5))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    with pytest.raises(PreflightError):
        run(assembly, processes)


def test_the_smallest_change_of_one_weight_is_refused(assembly, processes, monkeypatch):
    def nudge():
        last = assembly.optimizer.weights[-1].view(-1)
        last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))

    spoil(monkeypatch, nudge)
    with pytest.raises(PreflightError):
        run(assembly, processes)


@pytest.mark.parametrize("spoilt", ["weight", "evaluation"])
def test_values_that_are_not_finite_end_the_run_before_its_clock(
    assembly, processes, monkeypatch, spoilt
):
    if spoilt == "weight":  # as a kernel that computes NaN
        assembly.model.blocks[1].down.weight.data[0, 0] = math.nan
    else:
        monkeypatch.setattr(warmup, "evaluate", lambda *arguments: math.inf)
    with pytest.raises(NonFinite, match="not finite"):
        run(assembly, processes)


def test_a_run_whose_warm_up_is_not_finite_ends_before_run_start(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "evaluate", lambda *arguments: math.nan)
    ended = run_tiny(tmp_path / "run", write_data(tmp_path / "data"))
    assert (ended.error, ended.status) == ("non_finite", "") and "warm-up" in ended.message
    keys = [record["key"] for record in records(tmp_path / "run/result.txt")]
    assert keys[1] == "init_start" and not {"init_stop", "run_start", "run_stop"} & set(keys)


def test_a_synthetic_step_has_few_micro_batches(assembly, processes, monkeypatch):
    """A micro-batch of the 8B takes 0.6 s on an H200, and one GPU accumulates 16 of them."""
    counts = []
    step = warmup.train_step

    def counted(assembly, batches, batching, *rest):
        counts.append(batching.gradient_accumulation_steps)
        return step(assembly, batches, batching, *rest)

    monkeypatch.setattr(warmup, "train_step", counted)
    for accumulated in (1, 8):
        warm_up(assembly, Batching(32, accumulated), (4, 4), processes, lambda phase: None)
    assert counts == [1, 1, 2, 2]
