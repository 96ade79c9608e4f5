"""The report of a run: complete and self-contained when the run is, and never a crash when it is not."""

import json
import re
from html.parser import HTMLParser

import pytest
from synthetic_log import records, start, write_good, write_records

from llama31_8b import rules
from submission import report


class Page(HTMLParser):
    """Collects tags and text, and fails on a tag that is not closed in order."""

    VOID = ("meta", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def events(steps: int = 50, interval: int = 12288) -> list[dict]:
    lines: list[dict] = [{"event": "phase", "name": "init", "seconds": 30.0, "time_s": 0.0}]
    for step in range(1, steps + 1):
        measured = {"tokens_per_s_per_gpu": 9000.0, "tflops_per_gpu": 480.0, "mfu": None, "memory_gib": 100.5}
        values = {"loss": 10 / step**0.3, "grad_norm": 1.0, "learning_rate": 8e-4, "time_s": step, "step_time_ms": 900 + step % 7}
        lines.append({"event": "step", "step": step, "samples": step * 1000, **values, **measured})
    lines += [{"event": "eval", "step": n, "samples": n * interval, "loss": 3.4, "seconds": 8.25, "time_s": 60.0} for n in (1, 2, 3, 4)]
    lines += [{"event": "phase", "name": name, "seconds": 100.0, "time_s": 200.0} for name in ("train", "eval")]
    return [*lines, {"event": "verdict", "status": "success", "samples": 4 * interval, "loss": 3.3, "minutes": 5.0}]


@pytest.fixture
def run_dir(tmp_path):
    write_good(tmp_path / "result.txt")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
    (tmp_path / "config.toml").write_text('gpu = "MI355X"\nglobal_batch_size = 32\n')
    (tmp_path / "versions.json").write_text(json.dumps({"commit": "0123abc", "torch": "2.13.0", "gpus": ["MI355X"] * 8}))
    return tmp_path


def page(run_dir) -> str:
    assert report.main([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert Page(text).links == []
    return text


def test_the_report_of_a_good_run_is_complete(run_dir):
    text = page(run_dir)
    for part in ("Target reached", "training sequences", "loss, nats per token", "step time, ms", "target 3.3", "49,152", "8.2500"):
        assert part in text
    for part in ("0123abc", "2.13.0", "1234567", "global_batch_size = 32", "An Organisation", "480.0 TFLOP/s per GPU"):
        assert part in text
    assert "MFU" not in text and "miniature" not in text and "Could not be read" not in text
    assert text.count('<circle class="point"') == 4 and "prefers-color-scheme: dark" in text


def test_the_report_is_self_contained(run_dir):
    text = page(run_dir)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text) and "script" not in Page(text).tags


def test_a_miniature_is_called_no_benchmark_result(tmp_path):
    write_good(tmp_path / "result.txt", rules.MINIATURE)
    assert "this is not a benchmark result" in page(tmp_path)


def test_an_aborted_run_gives_its_reason(run_dir):
    (run_dir / "result.txt").unlink()
    log = start(run_dir / "result.txt")
    log.block_start(0)
    log.abort(640)
    failure = {"kind": "hang", "exit_code": 13, "what": "no progress for 600 s", "why": "rank 3 is missing", "do": "look at rank 3"}
    (run_dir / "failure.json").write_text(json.dumps(failure))
    text = page(run_dir)
    assert "Aborted: hang" in text and "rank 3 is missing" in text and "Target reached" not in text


def test_phases_of_a_run_that_broke_off_come_from_its_log(run_dir):
    log = records(run_dir / "result.txt")
    for index, record in enumerate(log):
        record["time_ms"] = log[0]["time_ms"] + 1000 * index
    write_records(run_dir / "result.txt", log)
    (run_dir / "events.jsonl").write_text(json.dumps(events()[0]) + "\n")
    text = page(run_dir)
    assert 'init</td><td class="n">30.0 s' in text and 'train</td><td class="n">4.0 s' in text and 'eval</td><td class="n">8.0 s' in text


def test_a_run_that_gave_up_says_so(run_dir):
    log = records(run_dir / "result.txt")
    log[-1]["metadata"]["status"] = "aborted"
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "Target not reached" in page(run_dir)


def test_a_success_that_is_none_is_not_believed(run_dir):
    log = records(run_dir / "result.txt")
    log[-3]["value"] = 3.9
    write_records(run_dir / "result.txt", log)
    assert "claims success" in page(run_dir)


def test_all_text_is_escaped(run_dir):
    evil = "<script>alert('x')</script>&"
    (run_dir / "config.toml").write_text(evil)
    (run_dir / "versions.json").write_text(json.dumps({evil: evil, "deep": {evil: [evil]}}))
    (run_dir / "failure.json").write_text(json.dumps({"kind": evil, "what": evil, "why": evil, "do": evil}))
    log = records(run_dir / "result.txt")
    for record in log:
        if record["key"] in ("submission_org", "seed", "eval_accuracy"):
            record["value"] = evil
    write_records(run_dir / "result.txt", log)
    text = page(run_dir)
    assert "<script" not in text and "&lt;script&gt;" in text


def test_an_empty_directory_still_gets_a_report(tmp_path):
    text = page(tmp_path)
    assert "run_stop is missing" in text and "result.txt is missing" in text and "events.jsonl is missing" in text


@pytest.mark.parametrize("name", ["result.txt", "events.jsonl", "versions.json", "config.toml"])
@pytest.mark.parametrize("keep", [0, 1, 700, -20])
def test_files_that_are_cut_off_do_not_stop_it(run_dir, name, keep):
    path = run_dir / name
    path.write_bytes(path.read_bytes()[:keep])
    page(run_dir)


def test_junk_does_not_stop_it(run_dir):
    junk = [[], 1, None, "x", {"event": 5}, {"event": "step"}, {"event": "step", "samples": [1], "loss": {}, "step_time_ms": "x"}]
    junk += [
        {"event": "eval", "samples": [1]},
        {"event": "eval", "samples": 5, "loss": "NaN"},
        {"event": "phase", "name": [1], "seconds": 1},
    ]
    junk += [{"event": "phase", "name": "init", "seconds": "x"}, {"event": "step", "samples": -5, "loss": float("nan"), "step_time_ms": 0}]
    junk += [{"event": "step", "samples": -5, "loss": 10**400, "step_time_ms": 0}, {"event": "step", "samples": -5, "loss": 1}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in junk))
    (run_dir / "versions.json").write_text("[1]")
    (run_dir / "failure.json").write_text("{")
    log = records(run_dir / "result.txt")
    log[-3]["metadata"]["samples_count"] = [1]
    log[-1]["metadata"] = {}
    write_records(run_dir / "result.txt", log)
    page(run_dir)


def test_evaluations_of_a_run_without_its_log_come_from_the_events(run_dir):
    (run_dir / "result.txt").unlink()
    assert page(run_dir).count('<circle class="point"') == 4


def test_a_long_run_gives_a_small_page(run_dir):
    with open(run_dir / "events.jsonl", "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in events(steps=12_000))
    assert len(page(run_dir)) < 60_000


def test_a_missing_directory_is_a_usage_error(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "no such run" in capsys.readouterr().err
