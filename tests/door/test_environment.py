"""Which Python runs the package, and what is installed when."""

import argparse
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from toy import wait_until

from common.errors import PreflightError
from door import environment
from launch.supervise import Ending

ROOT = Path(__file__).parents[2]


def test_requirements_are_read_with_their_includes():
    names = [name for name, _ in environment.requirements(ROOT / "requirements-test.txt")]
    assert {"torch", "numpy", "mlperf-logging", "pytest", "megatron-core"} <= set(names)
    assert all("==" in line for _, line in environment.requirements(ROOT / "requirements-test.txt"))


def test_a_complete_python_is_used_as_it_is(tmp_path):
    (tmp_path / "r.txt").write_text("pytest==1.0  # any version does\n")
    assert environment.python_for(tmp_path / "r.txt", tmp_path / ".venv") == Path(sys.executable)
    assert not (tmp_path / ".venv").exists()


def test_old_torch_does_not_do(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: True)
    for version, good in (("2.8.0", False), ("2.9.0a0+git", True), ("2.13.0+cpu", True)):
        monkeypatch.setattr(environment.importlib.metadata, "version", lambda name, version=version: version)
        assert environment._has("torch") == good


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip and venv; holds the commands that were run, and the exit code that pip shall have."""

    fake = argparse.Namespace(commands=[], code=0)

    def create(folder, with_pip):
        for name in ("bin", "lib/python3.11/site-packages"):
            (folder / name).mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment, "_answers", lambda url: False)
    monkeypatch.setattr(environment, "supervise", lambda command, *_, **__: fake.commands.append(command) or Ending(fake.code))
    return fake


def test_environment_is_made_once_and_repaired(tmp_path, pip):
    wanted, folder = tmp_path / "r.txt", tmp_path / ".venv"
    wanted.write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(PreflightError, match="pip could not install"):
        environment.python_for(wanted, folder)
    (folder / "left-over").write_text("")
    pip.code = 0
    assert environment.python_for(wanted, folder) == folder / "bin" / "python"
    assert not (folder / "left-over").exists(), "half made: made anew"
    assert pip.commands[-1][-1] == "no-such-package==1.0"
    count = len(pip.commands)
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count, "made once"
    wanted.write_text("no-such-package==2.0\n")
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count + 1, "new versions are installed"


def test_a_small_file_of_packages_is_met_by_the_large_one(tmp_path, pip):
    """`check` after a run installs nothing; a run after `check` does."""
    small, large, folder = tmp_path / "requirements-logs.txt", tmp_path / "requirements.txt", tmp_path / ".venv"
    small.write_text("no-such-package==1.0\n")
    large.write_text("-r requirements-logs.txt\nno-other-package==1.0\n")
    environment.python_for(small, folder)
    assert pip.commands[-1][-1] == "no-such-package==1.0"
    environment.python_for(large, folder)
    assert len(pip.commands) == 2 and pip.commands[-1][-2:] == ["no-such-package==1.0", "no-other-package==1.0"]
    (tmp_path / "requirements-test.txt").write_text("-r requirements.txt\nno-tool==1.0\n")
    environment.python_for(tmp_path / "requirements-test.txt", folder)
    assert pip.commands.pop()[-1] == "no-tool==1.0"
    (folder / "requirements-logs.txt.sha256").unlink()
    environment.python_for(small, folder)
    assert len(pip.commands) == 2


def test_uv_installs_where_it_is_there(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/uv" if name == "uv" else None)
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert pip.commands[-1][:5] == ["/usr/bin/uv", "pip", "install", "--python", str(tmp_path / ".venv/bin/python")]


def test_a_python_without_ensurepip(tmp_path, pip, monkeypatch):
    def fail(*_, **__):
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(environment.venv, "create", fail)
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    with pytest.raises(PreflightError, match="cannot be made") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "python3-venv" in caught.value.do and not pip.commands


def test_the_words_of_pip_go_to_a_file_and_after_a_failure_to_the_terminal(tmp_path, pip, monkeypatch, capsys):
    def install(command, *_, stdout, **__):
        stdout.write("Collecting no-such-package\n" + "no matching distribution\n" * pip.code)
        return Ending(pip.code)

    monkeypatch.setattr(environment, "supervise", install)
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(PreflightError, match="pip could not install") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "no matching distribution" in capsys.readouterr().err and str(tmp_path / ".venv" / environment.PIP_LOG) in caught.value.do
    pip.code = 0
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["installing", "installed"]
    assert (tmp_path / ".venv" / environment.PIP_LOG).read_text() == "Collecting no-such-package\n"


def test_a_foreign_environment_is_not_touched(tmp_path, pip):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("")
    with pytest.raises(PreflightError, match="lacks packages"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (tmp_path / ".venv" / "precious").exists() and not pip.commands


def test_no_cuda_torch_on_an_amd_machine(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "_has", lambda name: False)
    monkeypatch.setattr(Path, "exists", lambda self: "kfd" in str(self))
    with pytest.raises(PreflightError, match="AMD GPU") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "ROCm" in caught.value.do
    assert not pip.commands


def test_of_two_first_starts_one_waits(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    create = environment.venv.create
    monkeypatch.setattr(environment.venv, "create", lambda *arguments, **options: (time.sleep(0.5), create(*arguments, **options)))
    found = []
    starts = [
        threading.Thread(target=lambda: found.append(environment.python_for(tmp_path / "r.txt", tmp_path / ".venv"))) for _ in range(2)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join(30)
    assert found == [tmp_path / ".venv" / "bin" / "python"] * 2 and len(pip.commands) == 1


def test_a_checkout_that_cannot_be_written(tmp_path, pip):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / ".venv.lock").mkdir()  # refuses to be opened for writing, to root as well
    with pytest.raises(PreflightError, match="cannot be made") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "no-such-package" in caught.value.why and "writable" in caught.value.do and not pip.commands


INSTALLING = """
import os, sys
from pathlib import Path
from door import environment

def create(folder, with_pip):
    (folder / "lib/python3/site-packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text("#!/bin/sh\\nsleep 60 & echo $! > {pid}.new; mv {pid}.new {pid}; wait")
    (folder / "bin/python").chmod(0o755)

environment.ROOT, environment.venv.create, environment._answers = Path({root!r}), create, lambda url: False
sys.exit(environment.run_to_exit_code(lambda: environment.main("r.txt")))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_pip_installs_ends_pip_and_what_it_started(tmp_path, number, code):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    program = INSTALLING.format(pid=tmp_path / "pid", root=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "pid").exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "") and "stopped by signal" in err and "Traceback" not in err
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    wait_until(lambda: not state.exists() or " Z " in state.read_text())
    assert not list(tmp_path.glob(".venv/*.sha256")), "the next start makes it anew"
