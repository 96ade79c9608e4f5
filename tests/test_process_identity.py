"""Test that a process is called gone only when it is."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from common import process_identity
from common.paths import ROOT
from common.process_identity import is_gone, parse, this_process

pytestmark = pytest.mark.quick

PRINT = "from common.process_identity import *; print(this_process(), flush=True); input()"


def start(*prefix):
    """Start a process that prints its identity and lives until it is killed."""
    command = [*prefix, sys.executable, "-c", PRINT]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return process, parse(process.stdout.readline().strip())


def test_a_process_is_gone_when_it_has_ended_also_as_a_zombie():
    assert is_gone(this_process()) is False
    process, identity = start()
    assert identity.pid == process.pid and is_gone(identity) is False
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert is_gone(identity) is True
    process.wait()
    assert is_gone(identity) is True


def test_the_host_name_does_not_matter_but_the_other_values_do():
    own = this_process()
    assert is_gone(dataclasses.replace(own, host="another-name")) is False
    assert is_gone(dataclasses.replace(own, start=own.start - 1)) is True  # the ID is used again
    for changed in ({"boot": "0-0"}, {"boot": ""}, {"pid_namespace": "1"}, {"start": 0}):
        assert is_gone(dataclasses.replace(own, **changed)) is None, changed


def test_a_process_of_another_user_lives_although_its_entries_are_hidden(monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    own = this_process()
    monkeypatch.setattr(os, "kill", refuse)
    assert is_gone(own) is False
    monkeypatch.setattr(process_identity, "_state_and_start", lambda pid: ("", 0))
    assert is_gone(own) is None


@pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="needs unshare, root")
def test_a_container_with_another_name_is_this_machine_but_cannot_be_examined():
    process, identity = start("unshare", "--uts", "--pid", "--fork", "--mount-proc")
    try:
        assert process_identity.same_machine(identity)
        assert identity.pid != process.pid and is_gone(identity) is None
    finally:
        process.communicate("\n")
    assert is_gone(identity) is None


def test_the_text_can_be_in_a_file_name_and_is_read_back():
    own = dataclasses.replace(this_process(), host="a/b c\n_1.example")
    assert "/" not in str(own) and "\n" not in str(own)
    assert parse(str(own)) == dataclasses.replace(own, host="a-b-c-_1.example")
    for text in ("", "x", "1_2_x_4_host", str(own) + "\n"):
        assert parse(text) is None
