"""The process group of one rank."""

import warnings

import pytest
import torch
import torch.distributed as dist

from common.sharding.processes import start_processes

pytestmark = pytest.mark.quick


def test_the_old_names_of_collectives_do_not_warn():
    """torch 2.13 warns of them, on the terminal of everybody's first run."""
    start_processes("cpu", 60.0)
    part, whole = torch.ones(3), torch.zeros(3)
    with warnings.catch_warnings(record=True) as seen:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
    assert not seen and torch.equal(whole, part)
