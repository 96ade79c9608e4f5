"""What `build` decides by itself."""

from dataclasses import replace

import pytest
from tiny import TINY, run_config

from common.sharding.processes import start_processes
from common.training.pretraining import assemble_random

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("length", "tied", "by_rows"),
    [(16, False, True), (30, False, True), (31, False, False), (16, True, False)],
)
def test_the_embedding_gradient_is_sparse_where_that_is_smaller(length, tied, by_rows):
    """4 sequences of `length` tokens, 61 rows: 122 tokens are the most."""
    rules = replace(TINY, shape=replace(TINY.shape, tied_embedding=tied), sequence_length=length)
    model = assemble_random(run_config(), rules, start_processes("cpu", 60.0), seed=1).model
    assert model.embedding.sparse == by_rows
