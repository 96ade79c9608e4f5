"""Limits that are looked at before a run."""

import socket

import pytest

from common.errors import ConfigError, PreflightError
from launch import limits


def test_without_a_loopback_interface_a_run_ends_before_it_starts(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    limits.require_loopback()
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(PreflightError, match=r"127\.0\.0\.1") as caught:
        limits.require_loopback()
    assert caught.value.exit_code == 18 and "Network is unreachable" in caught.value.why


def test_a_network_interface_that_is_not_there_is_named():
    limits.require_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    limits.require_interfaces({})
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=eth99") as caught:
        limits.require_interfaces({"GLOO_SOCKET_IFNAME": "lo,eth99"})
    assert caught.value.exit_code == 2 and "lo" in caught.value.why
