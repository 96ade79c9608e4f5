"""Test the reader of MLPerf logs: records, dialects, and errors for files that are not logs."""

import gzip
import json
import tracemalloc

import pytest

from common.errors import ConfigError
from common.records import mlperf_log
from common.records.mlperf_log import BadLine, Event

pytestmark = pytest.mark.quick

RECORD = {
    "namespace": "n",
    "time_ms": 17,
    "event_type": "POINT_IN_TIME",
    "key": "seed",
    "value": 3,
    "metadata": {"samples_count": 64},
}
LINE = f":::MLLOG {json.dumps(RECORD)}"


def records(path, text) -> list:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(mlperf_log.events(path))


@pytest.mark.parametrize("prefix", ["", "0: ", " 12: [rank0] ", "[1,0]<stdout>:", ":::MLLOG {} "])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_record_has_its_fields_whatever_stands_before_it_and_however_lines_end(
    tmp_path, prefix, end
):
    expected = [
        Event(line, 17, "seed", 3, {"samples_count": 64}, "n", "POINT_IN_TIME", prefix)
        for line in (2, 4)
    ]
    assert (
        records(tmp_path / "log", end.join(["epoch 1", prefix + LINE, "", prefix + LINE, ""]))
        == expected
    )
    assert expected[0].samples == 64


def test_a_byte_order_mark_is_no_prefix(tmp_path):
    assert [
        record.prefix for record in records(tmp_path / "log", b"\xef\xbb\xbf" + LINE.encode())
    ] == [""]


def test_returns_of_a_progress_bar_do_not_count_as_lines(tmp_path):
    assert [
        record.line for record in records(tmp_path / "log", f"start\n10 %\r20 %\r{LINE}\n{LINE}\n")
    ] == [2, 3]


def test_bytes_that_are_no_utf_8_and_a_file_without_a_last_line_end_are_read(tmp_path):
    assert [record.key for record in records(tmp_path / "log", b"\xff\xfe?\n" + LINE.encode())] == [
        "seed"
    ]


def without(key: str) -> str:
    return f":::MLLOG {json.dumps({name: value for name, value in RECORD.items() if name != key})}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (LINE + " Epoch 1", "Extra data"),
        (LINE[:-5], "not one JSON object"),
        (":::MLLOG 17", "not one JSON object but int"),
        (":::MLLOG", "no blank after the token"),
        (LINE.replace("MLLOG {", "MLLOG{"), "no blank after the token"),
        (":::MLLOG " + "[" * 100_000, "maximum recursion depth"),
        *((without(key), f"without {key}") for key in ("time_ms", "key", "value", "metadata")),
        (LINE.replace("17", '"17"'), "wrong type"),
        (LINE.replace("17", "NaN"), "wrong type"),
        (LINE.replace('"seed"', "[1]"), "wrong type"),
        (LINE.replace('"seed"', '"se\\u0065d"'), "escapes"),
    ],
)
def test_a_line_that_holds_no_record_is_named_with_its_reason_and_the_others_are_read(
    tmp_path, line, reason
):
    bad, good = records(tmp_path / "log", f"{line}\n{LINE}\n")
    assert isinstance(bad, BadLine) and bad.line == 1 and reason in bad.reason
    assert good.line == 2


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(LINE.encode()), "compressed (gzip)"),
        (b"", "is empty"),
        (b"PK\x03\x04", "zip"),
    ],
)
def test_a_file_that_is_no_text_is_refused_for_what_it_is(tmp_path, content, what):
    with pytest.raises(ConfigError) as error:
        records(tmp_path / "log", content)
    assert what in error.value.what


@pytest.mark.parametrize("metadata", ['""', "[64]", "null", "7"])
def test_metadata_that_is_no_object_is_empty(tmp_path, metadata):
    (record,) = records(tmp_path / "log", LINE.replace('{"samples_count": 64}', metadata))
    assert record.metadata == {} and record.samples is None


def test_nul_bytes_are_read_over(tmp_path):
    assert [record.key for record in records(tmp_path / "log", b"\0\0\n" + LINE.encode())] == [
        "seed"
    ]


def test_a_directory_or_nothing_at_all_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="cannot read"):
            next(mlperf_log.events(path))


def test_read_keeps_the_keys_that_are_named_the_first_of_any_other_and_all_bad_lines(tmp_path):
    other = LINE.replace("seed", "other")
    records(tmp_path / "log", f"{LINE}\n{other}\n:::MLLOG\n{LINE}\n{other}\n")
    found = mlperf_log.read(tmp_path / "log", {"seed"})
    assert [event.line for event in found.events] == [1, 2, 4] and [
        event.line for event in found.all("seed")
    ] == [1, 4]
    assert (
        found.value("seed") == 3 == found.value("other") == found.last("other")
        and found.value("none") is None
        and found.first("none") is None
    )
    assert [bad.line for bad in found.bad] == [3]
    assert len(mlperf_log.read(tmp_path / "log").events) == 4


def test_memory_does_not_grow_with_the_log(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"{LINE}\n" * 20_000 + LINE.replace("seed", "run_stop"))
    tracemalloc.start()
    assert len(mlperf_log.read(path, {"run_stop"}).events) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000 < path.stat().st_size
