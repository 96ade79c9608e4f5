"""The adapter's kernels against an fp64 truth, and their dropout mask."""

import pytest
import torch
from kernel_checks import DEVICE, error

from common.kernels import lora
from common.kernels.lora import IMPLEMENTATIONS, Dropout, Norm, keep_mask
from common.kernels.quantize import quantize_triton
from common.model.linear_layers import DelayedScaling

REFERENCE, KERNELS = IMPLEMENTATIONS["reference"], IMPLEMENTATIONS["triton"]


def check(what, ours, plain, truth):
    assert error(ours, truth) <= 2 * error(plain, truth) + 1e-6, (
        f"{what}: {error(ours, truth):.2e}, plain torch {error(plain, truth):.2e}"
    )


# Rows and columns that fill no tile; rank 4 is padded to 16, and 24 to 32. The last ones need
# several row parts of several tiles.
CASES = [
    (70, 1100, 300, 16, torch.float32),
    (33, 48, 40, 4, torch.float16),
    (1, 8, 8, 24, torch.float32),
    (1100, 40, 24, 16, torch.float16),
]


@pytest.mark.parametrize(
    ("normed", "dropped"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
    ids=["", "norm", "dropout", "norm and dropout"],
)
@pytest.mark.parametrize("M, K, N, R, dtype", CASES)
def test_the_kernels_are_as_exact_as_plain_torch(M, K, N, R, dtype, normed, dropped):
    random = torch.Generator().manual_seed(M)
    sizes = ((M, K), (M, N), (M, K), (R, K), (N, R), (K,))
    x, g, d_n, a, b, weight = (
        torch.randn(size, generator=random).to(DEVICE, dtype) for size in sizes
    )
    rstd = (torch.rand(M, generator=random) + 0.5).to(DEVICE)
    norm = Norm(rstd, weight) if normed else None
    dropout = Dropout(torch.tensor([2**40 + 77], device=DEVICE), 0.1) if dropped else None
    q = 1 - round(0.1 * 65536) / 65536 if dropped else 1.0
    mask = (
        keep_mask(M, K, dropout).double() if dropout else torch.ones(M, K, device=DEVICE).double()
    )
    n = x.double() * (rstd[:, None].double() * weight.double() if norm else 1)

    t_plain, t_ours = REFERENCE.down(x, norm, a, dropout), KERNELS.down(x, norm, a, dropout)
    assert t_ours.dtype == dtype
    check("T", t_ours, t_plain, (n * mask / q) @ a.double().t())
    p_plain, d_b_plain, _ = REFERENCE.up_backward(g, t_plain, b, 2.0, dropout, None)
    p_ours, d_b_ours, unquantized = KERNELS.up_backward(g, t_plain, b, 2.0, dropout, None)
    assert unquantized.rowwise is g and unquantized.inverse_scale is None
    check("P", p_ours, p_plain, g.double() @ b.double() * (2.0 / q))
    check("dB", d_b_ours, d_b_plain, 2 * g.double().t() @ t_plain.double())
    d_n_plain, d_n_ours = d_n.clone(), d_n.clone()
    d_a_plain = REFERENCE.down_backward_(d_n_plain, x, norm, p_plain, a, dropout)
    d_a_ours = KERNELS.down_backward_(d_n_ours, x, norm, p_plain, a, dropout)
    check("dA", d_a_ours, d_a_plain, p_plain.double().t() @ (n * mask))
    check("d_n", d_n_ours, d_n_plain, d_n.double() + (p_plain.double() @ a.double()) * mask)
    assert d_a_ours.dtype == d_b_ours.dtype == torch.float32
    assert torch.equal(
        d_a_ours, KERNELS.down_backward_(d_n.clone(), x, norm, p_plain, a, dropout)
    ), "sums in a fixed order"


@pytest.mark.parametrize("has_numbers", [False, True])
def test_the_kernels_have_the_mask_of_the_reference_element_for_element(has_numbers):
    """P A adds exactly 1 wherever an element stays."""
    numbers = 1000 - torch.arange(45, dtype=torch.int32, device=DEVICE) if has_numbers else None
    dropout = Dropout(torch.tensor([123456789123], device=DEVICE), 0.3, numbers)
    shown, ones = torch.zeros(45, 1003, device=DEVICE), torch.ones(45 + 1003, device=DEVICE)
    KERNELS.down_backward_(
        shown,
        torch.zeros_like(shown),
        None,
        ones[:45, None].contiguous(),
        ones[None, 45:].contiguous(),
        dropout,
    )
    assert torch.equal(shown, keep_mask(45, 1003, dropout).float())


def test_the_gradient_is_quantized_as_by_a_kernel_of_its_own():
    """The same bytes, scales and counts, in two passes and in one."""
    random = torch.Generator().manual_seed(0)
    x, t, b = (
        torch.randn(size, generator=random).to(DEVICE) for size in ((70, 300), (70, 16), (300, 16))
    )
    scaling = DelayedScaling()
    fused, alone = (scaling.quantizer(gradient=True, transposed=False) for _ in range(2))
    scaling.allocate(DEVICE)
    for step in range(3):
        g = x * (1 + step)  # the second step saturates
        p, d_b, quantized = KERNELS.up_backward(g, t, b, 2.0, None, fused)
        expected = quantize_triton(g, alone)
        assert (
            torch.equal(quantized.rowwise.view(torch.uint8), expected.rowwise.view(torch.uint8))
            and quantized.columnwise is None
        )
        assert (
            torch.equal(fused.state, alone.state)
            and quantized.inverse_scale.data_ptr() == fused.inverse_scale.data_ptr()
        )
        plain = REFERENCE.up_backward(g, t, b, 2.0, None, None)
        assert torch.allclose(p, plain[0], atol=1e-3) and torch.allclose(
            d_b, plain[1], atol=1e-3
        ), "two passes add nothing twice"
        scaling.step_done()
    assert fused.state[3] > 0, "the test must see saturation"


def test_the_mask_drops_the_share_it_should_everywhere():
    rows, columns, p = 512, 1024, 0.1
    seed = torch.tensor([2**62 + 5])
    mask = keep_mask(rows, columns, Dropout(seed, p))
    assert mask.shape == (rows, columns) and mask.dtype == torch.bool
    dropped = (~mask).double()
    for name, share, count in (
        ("all", dropped.mean(), rows * columns),
        (
            "of each of the 8 numbers of a call",
            dropped.view(rows, -1, 8).mean((0, 1)),
            rows * columns / 8,
        ),
        ("in each row", dropped.mean(1), columns),
        ("in each column", dropped.mean(0), rows),
    ):
        # 5 sigma: of 1024 columns one in 3 million would be so far off
        assert ((share - p).abs() < 5 * (p * (1 - p) / count) ** 0.5).all(), name
    # Neighbours in both directions, and other seeds (either half of the key), are independent: both
    # dropped with p^2.
    others = [keep_mask(rows, columns, Dropout(seed + step, p)) for step in (1, 2**32)]
    pairs = [
        (mask[1:], mask[:-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask[:, 2:], mask[:, :-2]),
        *((mask, other) for other in others),
    ]
    for first, second in pairs:
        assert float((~first & ~second).double().mean()) == pytest.approx(p * p, rel=0.1)


def test_the_mask_belongs_to_row_and_column_not_to_the_shape():
    dropout = Dropout(torch.tensor([9]), 0.25)
    assert torch.equal(keep_mask(64, 96, dropout)[:5, :13], keep_mask(5, 13, dropout))
    assert dropout.threshold == 16384 and dropout.kept == 0.75


def test_philox_is_the_published_one():
    """Known answer of Philox4x32-7 (Random123's kat_vectors): counter and key zero.

    5f6fb709 0d893f64 4f121f81 4f730a48.
    """
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    numbers = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    seed = torch.tensor([0])
    for column, number in enumerate(numbers):
        for threshold, stays in ((number, True), (number + 1, False)):
            dropout = Dropout(seed, threshold / lora.STEPS)
            assert dropout.threshold == threshold
            assert bool(keep_mask(1, 8, dropout)[0, column]) is stays
