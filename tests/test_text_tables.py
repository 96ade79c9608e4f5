"""Tables as text: columns are aligned, and a cell cannot break a Markdown row."""

import pytest

from common import text_tables

pytestmark = pytest.mark.quick

ROWS = [("name", "GiB"), ("weights", "1.5"), ("all", "10.25")]


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1010.2, ".3g", "1010"),
        (1010.2, ",.3g", "1,010"),
        (12_345.6, ",.4g", "12,350"),
        (0.0000123456, ".3g", "0.0000123"),
        (1e6, "g", "1000000"),
        (51.47, ",.3g", "51.5"),
        (None, ",.3g", "-"),
        (float("inf"), ".3g", "inf"),
    ],
)
def test_a_number_has_no_exponent(value, form, text):
    assert text_tables.number(value, form) == text


def test_columns_are_padded_to_their_longest_cell():
    assert text_tables.align(ROWS, "<>") == [
        ["name   ", "  GiB"],
        ["weights", "  1.5"],
        ["all    ", "10.25"],
    ]


def test_markdown_has_a_rule_and_escaped_cells():
    head, rule, row = text_tables.markdown(["what", "n"], [["a|b", "1"]], "<>").splitlines()
    assert (head, rule, row) == ("| what | n |", "| ---- | --: |", "| a\\|b | 1 |")
    assert text_tables.markdown(["what", "n"], []).splitlines()[1] == "| ---- | --- |"


def test_aligned_markdown_stays_aligned():
    head, *rows = text_tables.align(ROWS, "<>")
    assert {len(line) for line in text_tables.markdown(head, rows, "<>").splitlines()} == {19}
