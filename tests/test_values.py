"""Test the parsers of values that options, environment variables and config keys share."""

import argparse

import pytest

from common import values
from common.errors import ConfigError
from common.gpu_kinds import KINDS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (values.count, "8", 8),
        (values.count, "8k", 8_000),
        (values.count, "1e6", 1_000_000),
        (values.count, "1.5M", 1_500_000),
        (values.length, "8k", 8_192),
        (values.length, "128K", 131_072),
        (values.amount, "1T", 1e12),
        (values.amount, "405e9", 405e9),
        (values.amount, "8B", 8e9),
        (values.number, "-0.5", -0.5),
        (values.seconds, "90", 90.0),
        (values.seconds, "90s", 90.0),
        (values.seconds, "1.5m", 90.0),
        (values.seconds, "2 h", 7_200.0),
        (values.minutes, "20", 20.0),
        (values.minutes, "90s", 1.5),
        (values.minutes, "2h", 120.0),
        (values.gpu_kind, "mi325x", "MI325X"),
        (values.gpu_kind, "AMD Instinct MI325X", "MI325X"),
        (values.gpu_kind, "NVIDIA H200", "H200"),
        (values.gpu_kind, "NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),  # no SXM module
        (values.gpu_kind, "GH200", "GH200"),  # no H200
        (values.config_name, "mi325x_1X8", "MI325X_1x8"),
        (values.config_name, "configs/llama31_8b/MI325X_1x8.toml", "MI325X_1x8"),
        (values.config_name, "MI325X 1x8", "MI325X_1x8"),
        (values.config_name, "NVIDIA_GeForce_1x2", "NVIDIA_GeForce_1x2"),  # a derived kind
    ],
)
def test_what_people_write_is_understood(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (values.count, "0"),
        (values.count, "1.5"),
        (values.count, "²"),
        (values.count, "1_0"),
        (values.count, "٣"),
        (values.count, "9" * 5_000),
        (values.whole_number(0, 2**32 - 1), str(2**32)),
        (values.amount, "0"),
        (values.amount, "inf"),
        (values.amount, "8x"),
        (values.number, "nan"),
        (values.number, "1e999"),
        (values.seconds, "ten"),
        (values.seconds, "5k m"),
        (values.seconds, "-1s"),
        (values.seconds, "1e400s"),
        (values.seconds, "0"),
        (values.number_between(1, 60, values.seconds), "2m"),
        (values.path, " "),
        (values.folder, __file__),
    ],
)
def test_what_cannot_be_parsed_is_quoted(parse, text):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse(text)
    assert f"'{text}'" in str(caught.value)


def test_a_name_is_accepted_in_any_case_and_a_version_without_its_last_number():
    assert values.spelled_as("FP8", ("bf16", "fp8")) == "fp8"
    assert values.spelled_as("On-Prem", ("onprem", "cloud")) == "onprem"
    assert values.spelled_as("6.1", ("6.0.0", "6.1.0")) == "6.1.0"
    assert values.spelled_as("v6.0", ("6.0.0", "6.1.0")) == "6.0.0"
    assert values.spelled_as("5", ("5.0.0", "5.1.0")) == "5"
    assert values.spelled_as("A100", KINDS) == "A100"


def test_a_leading_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    assert str(values.path("~/x")) == str(values.folder("~/x")) == "/home/jane/x"
    with pytest.raises(argparse.ArgumentTypeError, match="'~nobody-here/x'"):
        values.path("~nobody-here/x")


def test_a_variable_is_named_with_its_value():
    assert values.of_variable({"NEXP": "1e1"}, "NEXP", values.count) == 10
    assert values.of_variable({"NEXP": ""}, "NEXP", values.count) is None
    with pytest.raises(ConfigError) as caught:
        values.of_variable({"NEXP": "1 0"}, "NEXP", values.count)
    assert "NEXP='1 0'" in caught.value.what and "unset NEXP" in caught.value.do
