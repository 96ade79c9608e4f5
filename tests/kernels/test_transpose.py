"""The transpose of bytes."""

import pytest
import torch
from kernel_checks import DEVICE

from common.kernels.transpose import IMPLEMENTATIONS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("engine", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape", [(128, 256), (5, 300), (257, 1), (200, 129), (132, 4), (300, 208)], ids=str
)
def test_the_transpose_is_right_also_for_sizes_that_fill_no_tile_or_word(shape, engine):
    x = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    out = torch.zeros(shape[::-1], dtype=torch.uint8, device=DEVICE)
    IMPLEMENTATIONS[engine](x, out)
    assert torch.equal(out, x.t())
