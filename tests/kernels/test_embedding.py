"""Compare the sparse gradient of an embedding with the reference, and that with torch."""

import pytest
import torch
from kernel_checks import DEVICE, normal

from common.kernels.accumulate import add_rows_reference, add_rows_triton

pytestmark = pytest.mark.quick

VOCABULARY = 20
# This rank holds the rows FIRST to FIRST + ROWS - 1.
FIRST = 5
ROWS = 12
COLUMNS = 600  # not a multiple of a tile's columns


def tokens(count):
    """Return int64 ids [count]. One of them occurs 40 times, more often than a tile has rows."""
    ids = torch.randint(
        VOCABULARY, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int64
    )
    ids[:40] = 7
    return ids.to(DEVICE)


@pytest.mark.parametrize("count", [1, 70])
@pytest.mark.parametrize("ranks", [1, 3])
def test_added_rows_equal_torchs_dense_gradient(count, ranks):
    ids, gradient = tokens(count), normal(count, COLUMNS, seed=1)
    start = normal(ROWS, COLUMNS, seed=2)
    dense = torch.ops.aten.embedding_dense_backward(gradient.double(), ids, VOCABULARY, -1, False)
    expected = (start.double() + dense[FIRST : FIRST + ROWS] / ranks).float()
    for add_rows in (add_rows_reference, add_rows_triton):
        total = start.clone()
        add_rows(total, ids, gradient, FIRST, ranks)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        untouched = [row for row in range(ROWS) if not (ids == row + FIRST).any()]
        assert torch.equal(total[untouched], start[untouched])
