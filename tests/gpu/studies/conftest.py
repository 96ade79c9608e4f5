"""Fixture of the studies' tests."""

from unittest import mock

import pytest

from common.linear_formats import FORMATS


@pytest.fixture(autouse=True)
def formats_of_the_package():
    """Forget the formats that a test installs."""
    with mock.patch.dict(FORMATS):
        yield
