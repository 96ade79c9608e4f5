"""Faults in the system calls of all phases, and the tool that injects them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_once import made_once

from common.errors import PreflightError
from tests.tools import inject_faults
from tests.tools.inject_faults import (
    COMMANDS,
    PHASES,
    Call,
    Command,
    Ended,
    Fault,
    Verdict,
    Workshop,
    build_shim,
    choose,
    go_on,
    judge,
    lost_files,
    read_calls,
    unsynced,
)

FAULTS = 20

# --- the shim -------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return -error.errno
folder = sys.argv[1]
file = attempt(os.open, folder + "/a", os.O_RDWR | os.O_CREAT)
found = [int(file > 0) if file > 0 else file]
if file > 0:
    found += [attempt(os.write, file, b"12345678") for _ in range(3)]
    found += [attempt(os.fsync, file) or 0, attempt(os.lseek, file, 0, 0)]
    found += [len(os.read(file, 6))]
    found += [attempt(os.rename, folder + "/a", folder + "/b") or 0]
    found += [attempt(os.mkdir, folder + "/c") or 0]
print(found)
"""
GOOD = [1, 8, 8, 8, 0, 0, 6, 0, 0]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    return build_shim(tmp_path_factory.mktemp("shim"))


def run_program(shim, folder, rule=""):
    """Return the exit code of PROGRAM, what it printed, and the log of the shim."""
    log = folder.parent / f"{folder.name}.log"
    environment = os.environ | {
        "LD_PRELOAD": str(shim),
        "FAULT_ROOT": str(folder),
        "FAULT_LOG": str(log),
    }
    if rule:
        environment["FAULT_RULE"] = rule
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout or "null"), read_calls(log)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("python*|create|a|1|28", {0: -28}),
        ("python*|write|a|2|28", {2: -28}),
        ("python*|write|a|2+|5", {2: -5, 3: -5}),
        ("python*|write|a|1|short", {1: 4}),
        ("python*|fsync|*|1|5", {4: -5}),
        ("python*|read|a|1|short", {6: 3}),
        ("python*|rename|b|1|5", {7: -5}),
        ("python*|mkdir|c|1|30", {8: -30}),
        ("python*|write|b|1|28", {}),  # another file
        ("other|write|a|1|28", {}),  # another process
    ],
)
def test_a_chosen_call_fails(shim, tmp_path, rule, changes):
    code, found, hits = run_program(shim, tmp_path, rule)
    expected = list(GOOD)
    for position, result in changes.items():
        expected[position] = result
    assert code == 0 and found == (expected[:1] if 0 in changes else expected)
    assert len(hits) == len(changes)


@pytest.mark.parametrize(("action", "exists"), [("kill", False), ("killed", True)])
def test_the_process_dies_before_or_after_the_call(shim, tmp_path, action, exists):
    code, _, hits = run_program(shim, tmp_path, f"python*|rename|b|1|{action}")
    assert code == -signal.SIGKILL and (tmp_path / "b").exists() == exists
    assert [hit.path for hit in hits] == ["b"]


def test_calls_are_recorded(shim, tmp_path):
    code, found, calls = run_program(shim, tmp_path)
    assert code == 0 and found == GOOD
    names = [(call.name, call.path) for call in calls]
    writes = [("write", "a")] * 3
    ends = [("fsync", "a"), ("read", "a"), ("rename", "b"), ("mkdir", "c")]
    assert names == [("create", "a"), *writes, *ends]


def test_without_gcc_the_tool_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    code = inject_faults.main(["--folder", str(tmp_path / "new")])
    assert code == PreflightError.exit_code and "gcc" in capsys.readouterr().err


# --- the judge ------------------------------------------------------------------------------------

ERROR = "error: no space\n  why: the disk\n  do:  free it\n"


def verdict_of(monkeypatch, case, ended, files, by_products=()):
    """Return the verdict of a command that should write a file `a` with `right`."""

    def outputs(folder: Path, stdout: str):
        return {path.name: path.read_text() for path in folder.iterdir()}

    command = Command("a command", (), outputs, by_products=lambda folder: list(by_products))
    monkeypatch.setitem(COMMANDS, "check", command)
    for name, text in files.items():
        (case / name).write_text(text)
    fault = Fault("*", "write", "a", 1, "28", False)
    verdict = Verdict(0, "check", fault)
    judge(verdict, ended, SimpleNamespace(outputs=lambda name: {"a": "right"}), case)
    return verdict


@pytest.mark.parametrize(
    ("ended", "files", "outcome"),
    [
        (Ended(0, "", "", False), {"a": "right"}, "complete"),
        (Ended(17, "", ERROR, False), {}, "error"),
        (Ended(-9, "", "", False), {}, "killed"),
        (Ended(-9, "", "", False), {"a": "right"}, "killed"),
    ],
)
def test_a_true_outcome_is_accepted(monkeypatch, tmp_path, ended, files, outcome):
    verdict = verdict_of(monkeypatch, tmp_path, ended, files)
    assert (verdict.outcome, verdict.untruths) == (outcome, [])


@pytest.mark.parametrize(
    ("ended", "files", "missing", "word"),
    [
        (Ended(0, "", "", False), {}, [], "not as without"),
        (Ended(0, "", "", False), {"a": "half"}, [], "not as without"),
        (Ended(0, "", "", False), {"a": "right"}, ["page"], "page"),
        (Ended(17, "", ERROR, False), {"a": "right"}, [], "everything is complete"),
        (Ended(1, "", "Traceback (most recent call last)", False), {}, [], "no error for users"),
        (Ended(17, "", "", False), {}, [], "without an error"),
        (Ended(None, "", ERROR, False), {}, [], "no end"),
        (Ended(17, "", ERROR, True), {}, [], "processes"),
    ],
)
def test_an_untruth_is_found(monkeypatch, tmp_path, ended, files, missing, word):
    verdict = verdict_of(monkeypatch, tmp_path, ended, files, missing)
    assert any(word in untruth for untruth in verdict.untruths)


def test_what_existed_before_may_not_change_except_the_ledger_and_pages(tmp_path):
    before = {"a": b"1", "b": b"1", "attempts.jsonl": b"{}\n", "report.html": b"<html></html>"}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "attempts.jsonl").write_bytes(b"{}\n{}\n")
    (tmp_path / "report.html").write_bytes(b"<html>new</html>")
    assert lost_files(before, tmp_path) == []
    (tmp_path / "attempts.jsonl").write_bytes(b"{")
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"2")
    lost = lost_files(before, tmp_path)
    assert [line.split()[0] for line in lost] == ["a", "b", "attempts.jsonl"]


def test_going_on_must_give_what_a_run_without_a_fault_gives(monkeypatch, tmp_path):
    verdict = verdict_of(monkeypatch, tmp_path, Ended(17, "", ERROR, False), {})
    (tmp_path.parent / f"{tmp_path.name}.out").write_text("")
    for code, word in ((0, "not as without"), (2, "exit code 2")):
        workshop = SimpleNamespace(
            outputs=lambda name: {"a": "right"},
            start=lambda *arguments, code=code, **options: Ended(code, "", "", False),
        )
        go_on(verdict, workshop, tmp_path)
        assert word in verdict.untruths[-1]


def test_files_that_get_their_names_before_they_are_synced_are_found():
    def calls(*words: str) -> list[Call]:
        return [Call(1, "python", *word.split()) for word in words]

    good = ["create a.1.partial", "write a.1.partial", "fsync a.1.partial", "rename a"]
    assert unsynced(calls(*good)) == []
    assert unsynced(calls(*good[:2], "rename a")) == ["a"]
    folder = ["write m.1.partial/x.2.partial", "rename m.1.partial/x", "rename m"]
    assert unsynced(calls(*folder)) == ["m.1.partial/x", "m"]
    assert unsynced(calls(folder[0], "fsync m.1.partial/x.2.partial", *folder[1:])) == []
    assert unsynced(calls("write m.1.partial/y", "rename m")) == ["m"]


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, shim):
    folder = made_once(tmp_path_factory, "faults", lambda folder: Workshop(folder).build())
    return Workshop(folder)


@pytest.mark.slow
def test_the_faults_are_in_all_phases(workshop):
    assert {choose(seed, workshop)[0] for seed in range(FAULTS)} == PHASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_files_are_on_the_disk_before_they_have_their_names(workshop, command):
    """Token files, their indexes and parts, models, checkpoints, adapters, pages and records."""
    calls = workshop.calls(command)
    assert calls and unsynced(calls) == []
