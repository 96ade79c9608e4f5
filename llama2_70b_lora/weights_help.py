"""A hint for errors about missing or damaged base weights: the command that helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import WeightsError


@contextmanager
def weights_help() -> Iterator[None]:
    """Add the command to a WeightsError that is raised inside the block."""
    try:
        yield
    except WeightsError as error:
        error.do += "; see ./run_and_time.sh llama2_70b_lora prepare --help"
        raise
