"""The learning rate of every step."""

import itertools
import math

import pytest

from common.training.schedules import warmup_constant, warmup_cosine, warmup_linear
from llama31_8b.rules import CLOSED

pytestmark = pytest.mark.quick


def test_the_learning_rate_at_marked_steps():
    base, warmup, last = 8e-4, 128, 1_200_000
    end = CLOSED.end_learning_rate(base)
    lr_at = warmup_cosine(base, end, warmup, last)
    assert lr_at(0) == pytest.approx(base / 129, rel=1e-15)
    assert lr_at(warmup - 1) == pytest.approx(base * 128 / 129, rel=1e-15)
    assert lr_at(warmup) == pytest.approx(base, rel=1e-15)
    assert lr_at(warmup + 1) == pytest.approx(
        end + (base - end) * (1 + math.cos(math.pi / 1_199_872)) / 2, rel=1e-15
    )
    middle = warmup + 1_199_872 // 2
    assert lr_at(middle) == pytest.approx((base + end) / 2, rel=1e-9)
    assert lr_at(warmup + 1_199_872 // 4) == pytest.approx(
        end + (base - end) * (2 + math.sqrt(2)) / 4, rel=1e-9
    )
    assert lr_at(last - 1) == pytest.approx(end, rel=1e-9)
    assert lr_at(last) == lr_at(last + 1) == lr_at(10 * last) == end == pytest.approx(8e-5)


def test_the_learning_rate_never_jumps_and_never_rises_after_warm_up():
    lr_at = warmup_cosine(1.0, 0.1, 10, 100)
    rates = [lr_at(step) for step in range(120)]
    assert all(b > a for a, b in itertools.pairwise(rates[:11]))
    assert all(b <= a for a, b in itertools.pairwise(rates[10:]))
    assert max(abs(b - a) for a, b in itertools.pairwise(rates)) <= 1 / 11 + 1e-12


def test_without_warm_up_the_first_step_has_the_base_rate():
    lr_at = warmup_cosine(3e-4, 3e-5, 0, 1000)
    assert lr_at(0) == pytest.approx(3e-4, rel=1e-15)
    assert lr_at(1) == pytest.approx(3e-5 + 2.7e-4 * (1 + math.cos(math.pi / 1000)) / 2, rel=1e-15)
    assert lr_at(1000) == 3e-5


@pytest.mark.parametrize("warmup", [0, 10])
def test_a_linear_schedule_falls_by_the_same_amount_in_every_step(warmup):
    lr_at = warmup_linear(1.0, 0.1, warmup, 100)
    assert [lr_at(step) for step in range(warmup)] == [(s + 1) / 11 for s in range(warmup)]
    assert lr_at(warmup) == 1.0
    falls = [lr_at(step) - lr_at(step + 1) for step in range(warmup, 100)]
    assert falls == pytest.approx([0.9 / (100 - warmup)] * (100 - warmup), rel=1e-9)
    assert lr_at(100) == lr_at(1000) == pytest.approx(0.1)


def test_a_constant_schedule_keeps_the_base_rate_after_warm_up():
    lr_at = warmup_constant(3e-4, 2)
    assert [lr_at(0), lr_at(1)] == pytest.approx([1e-4, 2e-4])
    assert lr_at(2) == lr_at(3) == lr_at(10**6) == 3e-4
    assert warmup_constant(3e-4, 0)(0) == 3e-4
