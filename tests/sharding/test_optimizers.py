"""The optimizers against AdamW written out in fp64, and what they refuse."""

import math
from functools import partial

import pytest
import torch
from tiny import TINY, known_gradient, optimizer_step
from torch import nn

from common.model.fused_block import fused_llama
from common.model.linear_layers import LinearLayers
from common.sharding.adamw import AdamW, AdamWSettings
from common.sharding.replicated import ReplicatedOptimizer
from common.training.assembly import Assembly
from llama31_8b.rules import CLOSED

pytestmark = pytest.mark.quick

BETAS = (CLOSED.adam_beta_1, CLOSED.adam_beta_2)
EPS = CLOSED.adam_epsilon
DECAY = CLOSED.weight_decay
CLIP = CLOSED.gradient_clip_norm
LEARNING_RATES = [0.0, 1e-3, 3e-3, 2e-3, 1e-2, 1e-3, 5e-4, 1e-3, 2e-3, 4e-3]


def parameters() -> list[nn.Parameter]:
    """Two matrices, a norm, and a parameter of four dimensions; weights of ordinary size."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((7, 5), (3, 11), (13,), (2, 2, 2, 3))
    ]


SETTINGS = AdamWSettings(BETAS, EPS, DECAY, CLIP)
MAKE_RULE = partial(AdamW, SETTINGS, "reference", torch.float32)


@pytest.fixture
def optimizer_of(processes):
    return lambda weights: ReplicatedOptimizer(weights, processes, MAKE_RULE)


def gradients(step: int, norm: float) -> list[torch.Tensor]:
    """Random fp32 gradients of all parameters with about the global L2 norm `norm`."""
    generator = torch.Generator().manual_seed(100 + step)
    raw = [torch.randn(parameter.shape, generator=generator) for parameter in parameters()]
    return [g * (norm / math.sqrt(sum(float(g.square().sum()) for g in raw))) for g in raw]


def set_gradients(weights: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.grad = value.clone()


class Adamw64:
    """The formula of common/kernels/adamw.py, in fp64, one statement per line of it."""

    def __init__(self, weights: list[torch.Tensor]):
        self.weights = [w.detach().double() for w in weights]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        self.t = 0

    def step(self, grads: list[torch.Tensor], lr: float) -> float:
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        self.t += 1
        for index, weight in enumerate(self.weights):
            g = grads[index].double() * min(1.0, CLIP / norm)
            self.m[index] = BETAS[0] * self.m[index] + (1 - BETAS[0]) * g
            self.v[index] = BETAS[1] * self.v[index] + (1 - BETAS[1]) * g * g
            m = self.m[index] / (1 - BETAS[0] ** self.t)
            v = self.v[index] / (1 - BETAS[1] ** self.t)
            decay = DECAY if weight.ndim >= 2 else 0.0
            weight -= lr * decay * weight + lr * m / (v.sqrt() + EPS)
        return norm


@pytest.mark.parametrize("norm", [0.3, 1.0, 25.0], ids=["below the clip", "at the clip", "clipped"])
def test_ten_steps_agree_with_adamw_in_fp64(optimizer_of, norm):
    weights = parameters()
    optimizer, truth = optimizer_of(weights), Adamw64(weights)
    for step, lr in enumerate(LEARNING_RATES):
        grads = gradients(step, norm)
        set_gradients(weights, grads)
        # An fp32 sum of 105 squares.
        assert float(optimizer.step(lr)) == pytest.approx(truth.step(grads, lr), rel=1e-6)
    for weight, expected in zip(weights, truth.weights, strict=True):
        error = (weight.detach().double() - expected).norm() / expected.norm()
        # Ten fp32 roundings of 6e-8 each on the weight, and the update's own, times lr.
        assert error <= 1e-6


def test_clipping_makes_the_step_that_of_the_shortened_gradient(optimizer_of):
    """Adam hardly depends on a factor, so compare m after one step, (1 - beta 1) x the gradient."""
    weights = parameters()
    optimizer = optimizer_of(weights)
    grads = gradients(0, 20.0)
    set_gradients(weights, grads)
    assert float(optimizer.step(0.1)) == pytest.approx(20.0, rel=1e-6)
    for first, gradient in zip(optimizer.rule.state()["first_moment"], grads, strict=True):
        torch.testing.assert_close(first, gradient / 20.0 * (1 - BETAS[0]), rtol=1e-5, atol=0)


def test_norms_do_not_decay_and_matrices_do(optimizer_of):
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = optimizer_of(weights)
    set_gradients(weights, [torch.zeros_like(weight) for weight in weights])
    optimizer.step(0.5)
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(
            weight.detach(), old if weight.ndim == 1 else old * (1 - 0.5 * DECAY), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_shows_in_the_norm(optimizer_of, bad):
    weights = parameters()
    optimizer = optimizer_of(weights)
    set_gradients(weights, gradients(0, 2.0))
    optimizer.step(1e-2)
    before = [
        tensor.clone()
        for tensor in (*(weight.detach() for weight in weights), *optimizer.state_tensors())
    ]
    grads = gradients(1, 2.0)
    grads[2][4] = bad
    set_gradients(weights, grads)
    assert not math.isfinite(float(optimizer.step(1e-2)))
    after = [*(weight.detach() for weight in weights), *optimizer.state_tensors()]
    assert all(
        torch.equal(old.view(torch.int32), new.view(torch.int32))
        for old, new in zip(before, after, strict=True)
    )


def test_a_step_at_learning_rate_zero_changes_no_bit_of_a_weight(optimizer_of):
    weights = parameters()
    with torch.no_grad():
        weights[0][0, 0], weights[1][1, 1] = 0.0, 1e-42  # zero, and a denormal
    before = [weight.detach().clone() for weight in weights]
    optimizer = optimizer_of(weights)
    for step in range(2):
        set_gradients(weights, gradients(step, 30.0))
        optimizer.step(0.0)
    assert all(
        torch.equal(old.view(torch.int32), new.detach().view(torch.int32))
        for old, new in zip(before, weights, strict=True)
    )


def test_reset_state_makes_the_next_step_the_first_one_again(optimizer_of):
    fresh, used = parameters(), parameters()
    optimizer = optimizer_of(used)
    set_gradients(used, gradients(5, 3.0))
    optimizer.step(0.0)
    assert any(tensor.any() for tensor in optimizer.state_tensors())
    optimizer.reset_state()
    assert not any(tensor.any() for tensor in optimizer.state_tensors())
    for weights, one in ((used, optimizer), (fresh, optimizer_of(fresh))):
        set_gradients(weights, gradients(0, 3.0))
        one.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(used, fresh, strict=True))


def test_the_new_weights_are_also_written_rounded():
    weights = [weight.detach() for weight in parameters()]
    rounded = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    MAKE_RULE(weights, rounded).update(gradients(0, 2.0), torch.tensor(2.0), 1e-2)
    assert all(
        torch.equal(weight.bfloat16(), one) for weight, one in zip(weights, rounded, strict=True)
    )


@pytest.mark.parametrize("norm", [0.3, 25.0], ids=["below the clip", "clipped"])
def test_moments_in_bf16_stay_near_the_truth(norm):
    """Each step rounds a moment by at most 2^-9 and forgets at the rate 1 - beta.

    After many steps, m is off by at most 2^-9 / (1 - 0.9) = 2 % and v by 2^-9 / (1 - 0.95) = 4 %,
    so an update is off by at most 4 %.
    """
    weights = [weight.detach() for weight in parameters()]
    optimizer, truth = AdamW(SETTINGS, "reference", torch.bfloat16, weights, None), Adamw64(weights)
    start = [weight.clone() for weight in weights]
    assert {moment.dtype for moment in (*optimizer.first, *optimizer.second)} == {torch.bfloat16}
    for step, lr in enumerate(LEARNING_RATES):
        grads = gradients(step, norm)
        truth.step(grads, lr)
        optimizer.update(grads, torch.tensor(norm), lr)
    for weight, expected, before in zip(weights, truth.weights, start, strict=True):
        moved = (expected - before).norm()
        assert 0 < (weight.double() - expected).norm() < 0.04 * moved


def test_a_weight_without_a_gradient_is_left_alone(optimizer_of):
    weights = parameters()
    before, optimizer = weights[1].detach().clone(), optimizer_of(weights)
    set_gradients(weights, gradients(0, 5.0))
    weights[1].grad = None
    expected = math.sqrt(
        sum(float(weight.grad.square().sum()) for weight in weights if weight.grad is not None)
    )
    assert float(optimizer.step(1e-2)) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(weights[1], before) and all(weight.grad is None for weight in weights)


def test_a_second_optimizer_on_the_same_weights_is_refused(optimizer_of):
    weights = parameters()
    optimizer_of(weights)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer_of(weights[:1])


def test_a_model_with_a_weight_that_its_optimizer_does_not_update_is_refused(optimizer_of):
    model = fused_llama(TINY.shape, 16)
    with pytest.raises(ValueError, match=r"head\.output\.weight trains, but"):
        Assembly(
            model,
            optimizer_of(
                [p for name, p in model.named_parameters() if name != "head.output.weight"]
            ),
            LinearLayers(),
        )


def test_norm_and_step_of_two_ranks_are_those_of_the_whole(two_ranks, processes):
    one = optimizer_step(processes)
    total = sum(
        float(known_gradient(name, tensor.shape).double().square().sum())
        for name, tensor in one["stepped"].items()
    )
    assert one["norm"] == pytest.approx(math.sqrt(total), rel=1e-6)
    for rank in two_ranks:
        # Both sum 19,000 squares in fp32, in another order.
        assert rank["norm"] == pytest.approx(math.sqrt(total), rel=1e-6)
        for name, tensor in one["stepped"].items():
            # Weights of 0.02 moved by 0.01.
            torch.testing.assert_close(rank["stepped"][name], tensor, rtol=0, atol=1e-7, msg=name)
    assert two_ranks[0]["norm"] == two_ranks[1]["norm"]
