"""Megatron-core's data sets, an independent check of our sample order and file format."""

import os
import warnings
from types import SimpleNamespace

import pytest

WITNESS_VERSION = "0.16.1"


@pytest.fixture(scope="session")
def megatron():
    """megatron-core's own classes, or a failure that says what to install."""
    if os.environ.get("MEGATRON_WITNESS") == "0":
        pytest.skip("MEGATRON_WITNESS=0: the order was NOT compared with Megatron's")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            from megatron.core.datasets import helpers
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split
    except ImportError as error:
        pytest.fail(
            f"the witness is missing ({error}): pip install megatron-core=={WITNESS_VERSION}, or "
            "set MEGATRON_WITNESS=0 to go without"
        )
    assert megatron.core.__version__ == WITNESS_VERSION, (
        "the order was checked against this version: look at what changed"
    )
    return SimpleNamespace(
        helpers=helpers,
        GPTDataset=GPTDataset,
        Config=GPTDatasetConfig,
        IndexedDataset=IndexedDataset,
        Split=Split,
    )
