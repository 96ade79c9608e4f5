"""The synthetic warm-up leaves nothing behind, and where it does the run is refused."""

import copy
from functools import partial

import pytest
import torch
from tiny import TINY, run_config

from common.errors import PreflightError
from common.training.loop import evaluate, train_step
from common.training.optimizer import local
from common.training.session import batching_of, synthetic_batches
from common.training.warmup import fingerprint, state_digest, warm_up
from llama31_8b.train import build


class Setting:
    """A tiny model whose warm-up step can be spoiled by `extra`, called with the model's optimizer after each train step."""

    def __init__(self, processes, extra=lambda optimizer: None):
        config = run_config()
        self.processes = processes
        self.model, self.optimizer = build(config, TINY, processes, seed=1)
        self.weights = [local(parameter.detach()) for parameter in self.model.trained_tensors()]
        self.source = synthetic_batches(TINY.shape.vocab_size, TINY.sequence_length, processes, config.micro_batch_size)
        self.batching, self.extra, self.learning_rates = batching_of(config), extra, []

    def step(self, learning_rate: float) -> None:
        self.learning_rates.append(learning_rate)
        train_step(self.model, self.optimizer, self.source, self.batching, learning_rate, 1, lambda phase: None)
        self.extra(self.optimizer)

    def digest(self, data_position: int = 0) -> str:
        return state_digest(self.weights, self.optimizer, data_position, self.processes.device)

    def warm_up(self, step=None, train_steps: int = 2) -> str:
        evaluation = partial(evaluate, self.model, [next(self.source)], self.processes, lambda phase: None)
        device = self.processes.device
        return warm_up(step or self.step, evaluation, self.restore, self.digest, train_steps=train_steps, eval_steps=1, device=device)

    def restore(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.reset_state()


def test_the_state_after_warm_up_is_the_one_before(processes):
    setting = Setting(processes)
    before, weights = setting.digest(), copy.deepcopy(setting.weights)
    assert setting.warm_up() == before == setting.digest()
    assert setting.learning_rates == [0.0, 0.0]
    assert all(torch.equal(old, new) for old, new in zip(weights, setting.weights, strict=True))


def test_random_numbers_drawn_in_a_step_are_put_back(processes):
    setting = Setting(processes, extra=lambda optimizer: torch.randn(5))
    state = torch.get_rng_state()
    setting.warm_up()
    assert torch.equal(torch.get_rng_state(), state)


def test_training_after_warm_up_is_training_without_it(processes):
    plain, warm = Setting(processes), Setting(processes)
    warm.warm_up()
    for setting in (plain, warm):
        setting.source = synthetic_batches(TINY.shape.vocab_size, TINY.sequence_length, processes, 4)
        for _ in range(3):
            setting.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, warm.weights, strict=True))
    assert not torch.equal(plain.weights[0], Setting(processes).weights[0]), "the steps did nothing: this test would see no leak"


def test_one_step_at_a_learning_rate_is_refused(processes):
    setting = Setting(processes)
    with pytest.raises(PreflightError, match="changed the training state"):
        setting.warm_up(step=lambda learning_rate: setting.step(1e-6))


def test_moments_that_stay_are_refused(processes, monkeypatch):
    setting = Setting(processes)
    monkeypatch.setattr(setting.optimizer, "reset_state", lambda: None)
    with pytest.raises(PreflightError):
        setting.warm_up()


def test_a_generator_that_moved_on_is_refused(processes, monkeypatch):
    setting = Setting(processes, extra=lambda optimizer: torch.randn(5))
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    with pytest.raises(PreflightError):
        setting.warm_up()


def test_the_smallest_change_of_one_weight_is_refused(processes):
    def nudge(optimizer):
        last = optimizer.shards[-1].view(-1)
        last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))

    with pytest.raises(PreflightError):
        Setting(processes, extra=nudge).warm_up(train_steps=1)


def test_the_digest_sees_the_data_position(processes):
    setting = Setting(processes)
    assert setting.digest(0) != setting.digest(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_fingerprint_sees_a_swapped_pair_of_neighbours_and_of_strangers(dtype):
    values = torch.arange(1, 1002).to(dtype)  # an odd length: bf16 and bytes need padding
    for first, second in ((10, 11), (0, 100)):
        swapped = values.clone()
        swapped[first], swapped[second] = values[second], values[first]
        assert not torch.equal(values, swapped) and fingerprint(values) != fingerprint(swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_the_sign_of_zero(dtype):
    values = torch.zeros(7, dtype=dtype)
    negative = values.clone()
    negative[6] = -0.0
    assert torch.equal(values, negative) and fingerprint(values) != fingerprint(negative)


def test_a_fingerprint_sees_every_single_bit():
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    bits = values.view(torch.int32)
    seen = {fingerprint(values)}
    for place in range(values.numel()):
        for bit in range(32):
            flipped = bits.clone()
            flipped.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(fingerprint(flipped.view(torch.float32)))
    assert len(seen) == 1 + 32 * values.numel()  # all different: a hash of 64 bits has no business with collisions here


def test_changes_of_two_weights_do_not_cancel():
    values = torch.arange(100, dtype=torch.int32)
    seen = {fingerprint(values)}
    for up in range(1, 12):
        for down in range(1, 12):
            changed = values.clone()
            changed[0] += up
            changed[1] -= down
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 11 * 11


def test_a_fingerprint_depends_on_values_alone(monkeypatch):
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(values)
    assert whole == fingerprint(values.t().contiguous().t()) == fingerprint(values.clone())
    monkeypatch.setattr("common.training.warmup._CHUNK", 7)
    assert fingerprint(values) == whole  # the same in pieces
    assert fingerprint(torch.empty(0)) == 0 and fingerprint(torch.tensor(3.0)) != fingerprint(torch.tensor(0.0))
