"""Adding a reduced gradient to an fp32 one."""

import pytest
import torch
from kernel_checks import DEVICE

from common.kernels.accumulate import accumulate_reference, accumulate_triton

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "size, dtype",
    [(5000, torch.float16), (8192, torch.bfloat16), (7, torch.float32), (1, torch.float32)],
)
def test_the_kernel_adds_what_the_reference_adds(size, dtype):
    ours = theirs = None
    for others in (0, 0, 0, 1, 3):
        part = torch.randn(size, device=DEVICE).to(dtype)
        more = torch.randn(others, size, device=DEVICE).to(dtype) if others else None
        ours = accumulate_triton(ours, part, more)
        theirs = accumulate_reference(theirs, part.clone(), more)
        assert ours.dtype == torch.float32
        if others < 3:
            assert torch.equal(ours, theirs)
        else:  # the kernel sums these in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_first_part_in_fp32_is_copied():
    part = torch.ones(5, device=DEVICE)
    accumulate_triton(accumulate_triton(None, part), part)
    assert (part == 1).all(), "a later sum went into the first part's memory"
