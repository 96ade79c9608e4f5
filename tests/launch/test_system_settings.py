"""--system-tuning applies settings before the first run and restores them at the end.

They are restored however the launcher ends. The tests use a copy of a host's files.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from common.errors import PreflightError
from common.machine.hardware import Probe
from common.paths import ROOT
from launch import job_command, run_command, run_directory, system_settings
from launch.job import Node
from system_tuning.settings import KERNEL, value_of

pytestmark = pytest.mark.quick

HOLD = (
    "import sys; from pathlib import Path; from system_tuning.__main__ import main; "
    "sys.exit(main({words}, Path({root!r})))"
)
FILES = {f"{KERNEL}/numa_balancing": "1", f"{KERNEL}/nmi_watchdog": "0"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    for variable in ("container", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(
        system_settings,
        "HOLD",
        [sys.executable, "-c", HOLD.format(words=["hold"], root=str(tmp_path))],
    )
    monkeypatch.setattr(system_settings.os, "geteuid", lambda: 0)
    return tmp_path


def values(host):
    return [value_of(host / name) for name in FILES]


def test_settings_hold_inside_and_are_put_back_after_an_error(host):
    assert system_settings.state(host) == {
        "numa_balancing": system_settings.BETTER,
        "nmi_watchdog": "good",
    } and "numa_balancing" in system_settings.advice(host)
    with pytest.raises(ZeroDivisionError), system_settings.applied(ROOT):
        assert values(host) == ["0", "0"]
        assert system_settings.state(host) == {
            "numa_balancing": "good",
            "nmi_watchdog": "good",
        } and not system_settings.advice(host)
        raise ZeroDivisionError
    assert values(host) == ["1", "0"]


def test_a_setting_that_cannot_be_made_ends_the_command_and_leaves_nothing(host, monkeypatch):
    (host / "run").rmdir()
    with pytest.raises(PreflightError, match="--system-tuning"), system_settings.applied(ROOT):
        pytest.fail("the run started")
    assert values(host) == ["1", "0"]
    monkeypatch.setattr(system_settings, "HOLD", ["no-such-program"])
    with pytest.raises(PreflightError, match="--system-tuning"), system_settings.applied(ROOT):
        pytest.fail("the run started")


def test_files_that_cannot_be_set_or_restored_are_named(host, monkeypatch, capfd):
    with system_settings.applied(ROOT):
        (host / KERNEL / "numa_balancing").write_text("2\n")
        capfd.readouterr()
    assert f"{KERNEL}/numa_balancing" in capfd.readouterr().err
    fails = "import sys; print('/proc/x: read-only'); sys.exit(18)"
    monkeypatch.setattr(system_settings, "HOLD", [sys.executable, "-c", fails])
    with pytest.raises(PreflightError), system_settings.applied(ROOT):
        pytest.fail("the run started")
    assert "/proc/x: read-only" in capfd.readouterr().err


def test_in_a_container_system_tuning_is_refused_and_the_advice_does_not_name_it(host, capfd):
    assert "--system-tuning" in system_settings.remedy(host)
    (host / ".dockerenv").touch()
    with pytest.raises(PreflightError, match="--system-tuning"), system_settings.applied(ROOT):
        pytest.fail("the run started")
    assert values(host) == ["1", "0"] and "refused in a container" in capfd.readouterr().err
    assert "--system-tuning" not in system_settings.remedy(host)


def test_a_run_and_a_series_are_tuned_when_asked_and_else_told_what_could_be_better(
    monkeypatch, capsys
):
    order = []

    @contextlib.contextmanager
    def tuned(project):
        order.append("made")
        yield
        order.append("put back")

    given = Namespace(
        benchmark="llama31_8b",
        config=Namespace(miniature=False, platform="H200_1x8"),
        environment={},
        node=Node(),
        continues=None,
        checkpoint=None,
        selection=Namespace(device="cpu"),
        rules=None,
        data_dir=None,
        log_dir=None,
        cpus=(),
        engines=Namespace(),
    )
    monkeypatch.setattr(run_command, "job_from", lambda *_, **__: given)
    monkeypatch.setattr(run_command, "refusal_reasons", lambda *_: [])
    monkeypatch.setattr(run_command, "run_all", lambda *_: order.append("runs") or 0)
    monkeypatch.setattr(job_command, "header", lambda *_: [])
    monkeypatch.setattr(job_command, "outlive_readers", lambda: None)
    monkeypatch.setattr(system_settings, "applied", tuned)
    monkeypatch.setattr(system_settings, "advice", lambda: "governor could be better")
    assert run_command.main(["llama31_8b", "--system-tuning"]) == 0 and order == [
        "made",
        "runs",
        "put back",
    ]
    assert "could be better" not in capsys.readouterr().err
    assert run_command.main(["llama31_8b"]) == 0 and order[3:] == ["runs"]
    assert "system-tuning check" in capsys.readouterr().err


def test_the_record_of_a_run_says_what_was_set(monkeypatch):
    monkeypatch.setattr(run_directory.settings, "state", lambda: {"governor": "good"})
    assert run_directory.versions(ROOT, Probe("none"))["system_tuning"] == {"governor": "good"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_they_are_put_back_when_the_launcher_is_killed(host, number):
    """SIGINT reaches all processes of a terminal.

    The process that holds the settings waits for the end of the launcher.
    """
    words = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\nfrom launch import system_settings\n"
        f"system_settings.HOLD = {system_settings.HOLD!r}\n"
    )
    words += "system_settings.os.geteuid = lambda: 0\n"
    words += f"with system_settings.applied({str(ROOT)!r}):\n"
    words += "    print('running', flush=True)\n    time.sleep(60)\n"
    launcher = subprocess.Popen(
        [sys.executable, "-c", words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert launcher.stdout.readline() == b"running\n" and values(host) == ["0", "0"]
    if number == signal.SIGKILL:
        launcher.kill()
    else:
        os.killpg(launcher.pid, number)
    launcher.wait(30)
    deadline = time.monotonic() + 30
    while values(host) != ["1", "0"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert values(host) == ["1", "0"]
