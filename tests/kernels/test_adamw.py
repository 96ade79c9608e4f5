"""AdamW in one pass: the kernel against fp64 and torch's fused one, which is the reference."""

import inspect
import math

import pytest
import torch
from kernel_checks import DEVICE

from common.kernels import adamw

pytestmark = pytest.mark.quick

STEPS = 5
LEARNING_RATE = 1e-2
EPS = 1e-5  # gradients are 0.01: eps is a thousandth of sqrt(v), so a wrong eps shows
# betas, weight decay, divisor.
CASES = [
    ((0.9, 0.95), 0.1, 1.0),
    ((0.9, 0.999), 0.1, 3.7),
    ((0.9, 0.95), 0.0, 3.7),
]


def start(shape, device):
    """Return a weight and the gradients of all steps.

    The updates outgrow the weight, so that it cannot hide their error.
    """
    generator = torch.Generator(device).manual_seed(3)

    def normal(scale):
        return scale * torch.randn(shape, generator=generator, device=device)

    return normal(0.02), [normal(0.01) for _ in range(STEPS)]


def by_formula(weight, gradients, betas, weight_decay, divisor):
    """Return weight, m and v after all steps, by the formula of common/kernels/adamw.py in fp64."""
    w, (b1, b2) = weight.double(), betas
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double() / divisor
        w *= 1 - LEARNING_RATE * weight_decay
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        w -= LEARNING_RATE / (1 - b1**t) * m / (v.sqrt() / (1 - b2**t) ** 0.5 + EPS)
    return w, m, v


def by_torch(weight, gradients, betas, weight_decay, divisor):
    """Return weight, m and v after all steps of torch's fused AdamW."""
    weight = weight.clone()
    optimizer = torch.optim.AdamW(
        [weight], lr=LEARNING_RATE, betas=betas, eps=EPS, weight_decay=weight_decay, fused=True
    )
    optimizer.grad_scale = torch.tensor(divisor, device=weight.device)
    optimizer.found_inf = torch.tensor(0.0, device=weight.device)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[weight]
    return weight, state["exp_avg"], state["exp_avg_sq"]


def by_engine(engine, weight, gradients, betas, weight_decay, divisor, dtype):
    """Return weight, m and v after all steps of this package's `engine`.

    `dtype`: of the rounded copy of the weight, which is checked after each step (None: no copy).
    """
    weight = weight.clone()
    given = [gradient.clone() for gradient in gradients]
    m = torch.zeros_like(weight)
    v = torch.zeros_like(weight)
    step = torch.zeros((), device=weight.device)
    skip = torch.zeros((), device=weight.device)
    divisor = torch.tensor(divisor, device=weight.device)
    rounded = torch.empty_like(weight, dtype=dtype) if dtype else None
    for gradient in given:
        common = adamw.AdamWStep(LEARNING_RATE, betas, EPS, step.add_(1), divisor, skip)
        adamw.IMPLEMENTATIONS[engine](weight, gradient, m, v, rounded, weight_decay, common)
        if rounded is not None:
            assert torch.equal(rounded, weight.to(dtype))
    assert all(map(torch.equal, given, gradients)), "a gradient was changed"
    return weight, m, v


def error(value, truth):
    """Return the L2 norm of the difference, relative to that of `truth`."""
    return ((value.double() - truth).norm() / truth.norm()).item()


def check(engine, shape, device, dtype, case):
    """Compare weight, m and v after STEPS steps with fp64 and with torch's fused AdamW."""
    problem = (*start(shape, device), *case)
    truth = by_formula(*problem)
    for name, ours, theirs, true in zip(
        ("weight", "m", "v"),
        by_engine(engine, *problem, dtype),
        by_torch(*problem),
        truth,
        strict=True,
    ):
        what = (engine, shape, case, name, error(ours, true), error(theirs, true))
        assert error(ours, true) < 2**-22, what  # a few roundings a step, of 2^-24 at most each
        # torch has 1 - b2 from b2 in fp32 on a GPU, wrong by 1.3e-5 for 0.999.
        assert error(ours, theirs.double()) < 2e-5, what


def check_skip(engine, device, dtype):
    """Check that a step with `skip` set changes no byte, with NaN and inf in the gradient."""
    weight, gradients = start((5000,), device)
    gradients[0][::2] = torch.nan
    gradients[0][1] = torch.inf
    held = [weight, gradients[0], gradients[1], gradients[2].square(), gradients[3].to(dtype)]
    before = [tensor.clone() for tensor in held]
    one, divisor = torch.ones((), device=device), torch.full((), torch.nan, device=device)
    adamw.IMPLEMENTATIONS[engine](
        *held, 0.1, adamw.AdamWStep(0.1, (0.9, 0.95), EPS, one, divisor, one)
    )
    assert all(
        torch.equal(new.view(torch.uint8), old.view(torch.uint8))
        for new, old in zip(held, before, strict=True)
    ), engine


def check_rate_zero(engine, device):
    """Run the warm-up steps at rate 0 and compare the weights' bits (common/training/warmup.py)."""
    weight, (gradient, *_) = start((5000,), device)
    weight[:2] = 0.0
    before, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    one, zero = torch.ones((), device=device), torch.zeros((), device=device)
    adamw.IMPLEMENTATIONS[engine](
        weight, gradient, m, v, None, 0.1, adamw.AdamWStep(0.0, (0.9, 0.95), EPS, one, one, zero)
    )
    assert (
        torch.equal(weight.view(torch.int32), before.view(torch.int32)) and m.any() and v.any()
    ), engine


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 1000, 100_000])
def test_bias_corrections_are_exact_to_fp32(t, betas):
    first, second = (-math.expm1(t * math.log(beta)) for beta in betas)
    found = adamw.AdamWStep(
        0.1, betas, EPS, torch.tensor(float(t)), torch.ones(()), torch.zeros(())
    ).corrections
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(
        [1 / first, second**-0.5], rel=2**-24
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_agrees_with_fp64_and_torch(dtype, case):
    check("reference", (37, 130), "cpu", dtype, case)


def test_the_reference_changes_no_byte_when_told_to_skip():
    check_skip("reference", "cpu", torch.bfloat16)


SHAPES = [
    ((1,), None),
    ((5000,), torch.float16),
    ((8192,), torch.float32),
    ((37, 130), torch.float16),
]
if DEVICE.type == "cuda":  # Triton's interpreter truncates to bf16 instead of rounding
    SHAPES += [((14336, 4096), torch.bfloat16), ((4097,), torch.bfloat16)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
def test_the_kernel_agrees_with_fp64_and_torch(shape, dtype, case):
    check("triton", shape, DEVICE, dtype, case)


def test_the_kernel_changes_no_byte_when_told_to_skip():
    check_skip("triton", DEVICE, torch.float16)


def test_the_kernel_at_learning_rate_zero_changes_no_bit_of_a_weight():
    check_rate_zero("triton", DEVICE)


def test_an_empty_shard_is_accepted():
    """Nothing raises. There is no element to compare."""
    by_engine("triton", *start((0, 7), DEVICE), *CASES[0], torch.float16)


def test_a_gradient_in_another_memory_order_is_refused():
    with pytest.raises(AssertionError):
        by_engine(
            "triton",
            start((5, 7), DEVICE)[0],
            [torch.zeros(7, 5, device=DEVICE).t()] * STEPS,
            *CASES[0],
            None,
        )


def test_a_learning_rate_is_not_compiled_in():
    parameters = inspect.signature(adamw._adamw_kernel.fn).parameters
    assert not any(
        "constexpr" in str(parameters[name].annotation) for name in ("learning_rate", "decay")
    )
    assert "constexpr" in str(parameters["BETA1"].annotation)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16], ids=str
)
def test_moments_in_16_bits_are_computed_in_fp32_and_rounded(dtype):
    weight, (gradient, *_) = start((5000,), DEVICE)
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    found = []
    for engine in adamw.IMPLEMENTATIONS.values():
        w = weight.clone()
        m = torch.full_like(weight, 0.01, dtype=dtype)
        v = torch.full_like(weight, 0.02, dtype=dtype)
        engine(
            w,
            gradient,
            m,
            v,
            None,
            0.1,
            adamw.AdamWStep(LEARNING_RATE, (0.9, 0.95), EPS, one, one, zero),
        )
        found.append((w, m, v))
    for theirs, ours in zip(*found, strict=True):
        assert theirs.dtype == ours.dtype
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-7
        )
