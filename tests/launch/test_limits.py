"""Limits that are looked at before a run."""

import socket

import pytest

from common.errors import PreflightError
from launch import limits


def test_without_a_loopback_interface_a_run_ends_before_it_starts(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    limits.require_loopback()
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(PreflightError, match=r"127\.0\.0\.1") as caught:
        limits.require_loopback()
    assert caught.value.exit_code == 18 and "Network is unreachable" in caught.value.why
