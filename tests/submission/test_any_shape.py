"""Test that check, score, report, package and resume survive ledgers and logs of any shape."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import synthetic_run
import synthetic_series as synthetic
from synthetic_run import LORA

from common.config import from_table
from common.errors import RunError
from common.records import ledger
from common.training.mllog import TOKEN
from launch import series
from launch.selection.check import Choice
from submission import check, package, report, score

pytest.importorskip("mlperf_logging")
hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as draw  # noqa: E402

NAME = LORA.rules.BENCHMARK
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": list(hypothesis.HealthCheck),
}
KNOWN = {0, 2, 16, 17, 18, 20}

plain = (
    draw.none()
    | draw.booleans()
    | draw.integers()
    | draw.floats()
    | draw.text(max_size=8)
    | draw.just("\ud800")
    | draw.just("success")
)
values = draw.recursive(
    plain,
    lambda inner: (
        draw.lists(inner, max_size=3) | draw.dictionaries(draw.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Records of a good run, and the lines of the ledger of a series of one."""
    folder = synthetic.write(tmp_path_factory.mktemp("good"), LORA, synthetic.plans([3]), goal=2)
    log = synthetic_run.records(next(folder.glob("*/result.txt")))
    lines = [json.loads(line) for line in (folder / ledger.NAME).read_text().splitlines()]
    return (
        log,
        lines,
        {
            path.name: path.read_bytes()
            for path in next(folder.glob("*/result.txt")).parent.iterdir()
        },
    )


@draw.composite
def harmed(draws, records: list[dict]) -> list[object]:
    """Return the records with one to four random changes of values, fields or lines."""
    changed: list[object] = [dict(record) for record in records]
    for _ in range(draws(draw.integers(1, 4))):
        if not changed:
            break
        at = draws(draw.integers(0, len(changed) - 1))
        record = changed[at]
        way = draws(
            draw.sampled_from(("field", "inner", "drop", "double", "move", "anything", "cut"))
        )
        if way == "drop":
            del changed[at]
        elif way == "double":
            changed.insert(at, record)
        elif way == "move":
            changed.insert(draws(draw.integers(0, len(changed) - 1)), changed.pop(at))
        elif way == "cut":
            del changed[at + 1 :]
        elif way == "anything" or not isinstance(record, dict) or not record:
            changed[at] = draws(values)
        else:
            key = draws(draw.sampled_from(sorted(record)))
            inner = record[key]
            if way == "inner" and isinstance(inner, dict) and inner:
                name = draws(draw.sampled_from(sorted(inner)))
                changed[at] = {**record, key: {**inner, name: draws(values)}}
            else:
                changed[at] = {**record, key: draws(values)}
    return changed


def write_lines(path: Path, lines: list[object], before: str, noise: bytes) -> None:
    path.write_bytes("".join(f"{before}{json.dumps(line)}\n" for line in lines).encode() + noise)


def commands(folder: Path, run: Path) -> list[int]:
    """Exit codes of every command that reads a series. A traceback would come through."""
    system = folder / f"{synthetic.SYSTEM}.json"
    system.write_text(json.dumps(synthetic.DESCRIPTION))
    asked = [
        "--benchmark",
        f"{NAME}={folder}",
        "--system",
        str(system),
        "--out",
        str(folder / "out"),
        "--org",
        synthetic.ORG,
    ]
    codes = [
        check.main([str(run / "result.txt")]),
        check.main([str(run / "result.txt"), "--json", "--werror"]),
    ]
    codes += [
        score.main([str(folder)]),
        score.main([str(folder), "--json"]),
        score.main([str(run / "result.txt")]),
    ]
    codes += [report.main([str(run)]), report.main([str(folder)]), package.main(asked)]
    return [*codes, resume(folder)]


def resume(folder: Path) -> int:
    """Apply what --resume does to the ledger, up to the next attempt."""
    config = from_table({**synthetic_table(), "miniature": True}, LORA.rules.Config, "test")
    selection = Choice(config, folder / "X_1x8.toml", "X_1x8.toml", "a test", "cpu", "none")
    request = series.SeriesRequest(goal=0, max_failures=0, resume=True)
    try:
        with series._open(folder, selection, {}, request):
            return 0
    except RunError as error:
        return error.exit_code


def synthetic_table() -> dict:
    sizes = {
        "nodes": 1,
        "gpus_per_node": 8,
        "micro_batch_size": 1,
        "eval_micro_batch_size": 1,
        "max_samples": 1_000_000,
    }
    return {"gpu": "MI355X", **sizes, **LORA.config}


def try_one(draws, good) -> None:
    log, lines, files = good
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / next(line["run"] for line in lines if "run" in line)
        run.mkdir()
        for file, content in files.items():
            (run / file).write_bytes(content)
        which = draws.draw(draw.sampled_from(("log", "ledger", "both", "file")))
        noise = draws.draw(draw.binary(max_size=8))
        harmed_log = draws.draw(harmed(log)) if which in ("log", "both") else log
        harmed_ledger = draws.draw(harmed(lines)) if which in ("ledger", "both") else lines
        write_lines(run / "result.txt", harmed_log, TOKEN, noise if which == "log" else b"")
        write_lines(folder / ledger.NAME, harmed_ledger, "", noise if which == "ledger" else b"")
        if which == "file":
            file = draws.draw(
                draw.sampled_from(("versions.json", "config.toml", "events.jsonl", "failure.json"))
            )
            (run / file).write_text(json.dumps(draws.draw(values)))
        assert set(commands(folder, run)) <= KNOWN


@settings(max_examples=40, **SETTINGS)
@given(draws=draw.data())
@pytest.mark.slow
def test_no_shape_ends_in_a_traceback(good, draws):
    try_one(draws, good)


@pytest.mark.slow
@settings(max_examples=2000, **SETTINGS)
@given(draws=draw.data())
def test_no_shape_of_two_thousand_ends_in_a_traceback(good, draws):
    try_one(draws, good)
