"""Which Python runs the package, and what is installed when."""

import argparse
import sys
from pathlib import Path

import pytest

from launch import environment

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
    monkeypatch.setattr(
        environment.subprocess, "run", lambda command, **_: fake.commands.append(command) or argparse.Namespace(returncode=fake.code)
    )
    return fake


def test_environment_is_made_once_and_repaired(tmp_path, pip):
    wanted, folder = tmp_path / "r.txt", tmp_path / ".venv"
    wanted.write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(SystemExit, match="pip could not install"):
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


def test_a_foreign_environment_is_not_touched(tmp_path, pip):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("")
    with pytest.raises(SystemExit, match="not made by this script"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (tmp_path / ".venv" / "precious").exists() and not pip.commands


def test_no_cuda_torch_on_an_amd_machine(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "_has", lambda name: False)
    monkeypatch.setattr(Path, "exists", lambda self: "kfd" in str(self))
    with pytest.raises(SystemExit, match="ROCm"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert not pip.commands
