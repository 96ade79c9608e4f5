"""Compare the study's kernels with the plain emulation, and test stochastic rounding."""

import block_formats
import fast_emulation
import pytest
import torch
from block_formats import BLOCK_FORMATS, E2M1
from kernel_checks import DEVICE

TIES = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, -5.0, 6.0, -0.25, 0.75, 1.25, 1.75, 0.0, -2.5, 448.0, 464.0]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_kernels_give_the_bits_of_the_plain_emulation(name, square):
    block_format = BLOCK_FORMATS[name]
    torch.manual_seed(1)
    for shape in ((96, 160), (64, 96)) if square else ((5, 64), (96, 160)):  # tiles are 64 x 64
        x = (torch.randn(shape) * torch.exp(4 * torch.randn(shape))).bfloat16().to(DEVICE)
        x[0], x[1, :16] = 0.0, torch.tensor(TIES).to(x)
        for view in (x, x.t().contiguous().t()):
            plain, fast = (
                emulate(
                    view, block_format, block_format.gradient_element, torch.float32, square=square
                )
                for emulate in (fast_emulation.PLAIN, fast_emulation.emulate)
            )
            assert torch.equal(plain, fast)


def test_a_number_that_is_not_finite_makes_its_block_nan():
    x = torch.ones(2, 64, device=DEVICE)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    fast = fast_emulation.emulate(x, BLOCK_FORMATS["mxfp4"], E2M1, torch.float32)
    assert (
        fast.isnan().equal(
            fast_emulation.PLAIN(x, BLOCK_FORMATS["mxfp4"], E2M1, torch.float32).isnan()
        )
        and fast.isnan().sum() == 64
    )


def test_stochastic_rounding_has_the_right_mean():
    x = torch.full((512, 64), 1.2, device=DEVICE)
    x[:, 0] = 4.0
    torch.manual_seed(1)
    first, second = (
        fast_emulation.emulate(x, BLOCK_FORMATS["mxfp4"], E2M1, torch.float32, stochastic=True)[
            :, 1:
        ]
        for _ in range(2)
    )
    assert first.unique().tolist() == [1.0, 1.5] and not first.equal(second)
    assert abs(first.mean().item() - 1.2) < 4 * 0.245 / first.numel() ** 0.5, (
        "0.245: its standard deviation, sqrt(0.2 * 0.3)"
    )


@pytest.mark.parametrize("random_signs", [False, True])
def test_the_hadamard_transform(random_signs):
    torch.manual_seed(1)
    x = torch.randn(48, 80).bfloat16().to(DEVICE)
    for view in (x, x.t()):
        plain, fast = (
            hadamard(view, random_signs)
            for hadamard in (fast_emulation.PLAIN_HADAMARD, fast_emulation.hadamard)
        )
        torch.testing.assert_close(fast, plain, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError, match="whole"):
        fast_emulation.hadamard(x[:, :40], random_signs)


def test_what_is_installed_is_used(monkeypatch):
    for name in ("emulate", "hadamard"):
        # Put back at the end.
        monkeypatch.setattr(block_formats, name, getattr(block_formats, name))
    said = fast_emulation.install(DEVICE, side=128)
    assert all(f"{name} 0 and " in said for name in BLOCK_FORMATS if name != "nvfp4"), said
    assert (
        block_formats.emulate is fast_emulation.emulate
        and block_formats.hadamard is fast_emulation.hadamard
    )
