"""Which Python runs the package, and what is installed when."""

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import zipfile
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from toy import gone, wait_until

from common import packages
from common.errors import PreflightError
from common.paths import ROOT
from launch import environment
from launch.processes.supervise import Ending
from tests.tools import lock

pytestmark = pytest.mark.quick


def test_requirements_are_read_with_their_includes():
    names = [name for name, _ in environment.requirements(ROOT / "requirements-test.txt")]
    assert {"torch", "numpy", "mlperf-logging", "pytest", "megatron-core"} <= set(names)
    assert all("==" in line for _, line in environment.requirements(ROOT / "requirements-test.txt"))


def test_a_complete_python_is_used_as_it_is(tmp_path):
    (tmp_path / "r.txt").write_text("pytest==1.0  # any version does\n")
    assert environment.python_for(tmp_path / "r.txt", tmp_path / ".venv") == Path(sys.executable)
    assert not (tmp_path / ".venv").exists()


def test_without_installs_the_running_python_is_used_as_it_is(tmp_path):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    path = environment.python_for(tmp_path / "r.txt", tmp_path / ".venv", installs=False)
    assert path == Path(sys.executable) and [*tmp_path.iterdir()] == [tmp_path / "r.txt"]


def test_a_module_inside_another_package_is_found(monkeypatch):
    assert environment.has_package("protobuf")
    monkeypatch.setitem(environment.MODULES, "protobuf", "no_such_package.protobuf")
    assert not environment.has_package("protobuf")


@pytest.mark.parametrize(
    ("name", "version", "good"),
    [
        ("torch", "2.9.1+gitff65f5b", False),
        ("torch", "2.10.0a0+git", True),
        ("torch", "2.13.0+cpu", True),
        ("sentencepiece", "0.2.0", False),
        ("sentencepiece", "0.2.1", True),
        ("pyarrow", "23.0.0", False),
        ("pyarrow", "23.0.1", True),
        ("pyarrow", "26.0.1", True),
        ("pyarrow", "3.0.0", False),
        ("numpy", "1.0", True),
    ],
)
def test_an_old_version_does_not_do(monkeypatch, name, version, good):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: version)
    assert environment.has_package(name) == good


def test_pip_has_the_floors_of_the_launcher():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(line.split(">=") for line in project["dependencies"] if ">=" in line)
    assert floors == packages.OLDEST
    [flash_attention] = [
        line.partition("==")[2]
        for name, line in environment.requirements(ROOT / environment.HOPPER)
        if name == "flash-attn-4"
    ]
    assert project["optional-dependencies"]["hopper"] == [
        f"flash-attn-4[cu13]>={flash_attention}"
    ], "from the tested release on"


PYTHON = f"python3.{sys.version_info.minor}"
SHA = "0" * 64
LOCK = "".join(
    f"{line} \\\n    --hash=sha256:{SHA}\n    # via {by}\n"
    for line, by in {
        "cuda-thing==1.0": "torch",
        "no-other-package==1.0": "-r requirements.txt",
        "no-such-need==3.0": "no-such-package",
        "no-such-package==1.0": "-r requirements-logs.txt",
        "no-tool==1.0": "-r requirements-test.txt",
        "numpy==2.4.6": "no-such-need",
        "nvidia-thing==1.0": "cuda-thing",
        "torch==2.13.0": "-r requirements.txt",
    }.items()
)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Stand-in for pip: commands, requirements, exit code, and builds of the machine.

    `installs`: whether it creates a module for each package.
    """

    fake = argparse.Namespace(
        commands=[], lists=[], code=0, builds=("cpu", "cuda", "cuda12"), installs=True
    )
    (tmp_path / environment.LOCK).write_text(LOCK)
    find = environment.importlib.util.find_spec  # Debian's Python alone has no ensurepip
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: name == "ensurepip" or find(name)
    )

    def run(command, _, folder, **__):
        (site,) = folder.glob("lib/python*/site-packages")
        if "ensurepip" in command:
            (site / "pip-26.3.dist-info").mkdir()
            return Ending(0)
        fake.commands.append(command)
        fake.lists.append(
            [line.split()[0] for line in Path(command[-1]).read_text().splitlines() if "==" in line]
        )
        for line in fake.lists[-1] * fake.installs:
            name = line.partition("==")[0].replace("-", "_")
            (site / f"{name}.py").write_text("")
        return Ending(fake.code)

    monkeypatch.setattr(environment, "answers_at", lambda url: False)
    monkeypatch.setattr(environment, "supervise", run)
    which = shutil.which  # uv, where it is installed, would be taken
    monkeypatch.setattr(
        environment.shutil,
        "which",
        lambda name, **options: None if name == "uv" else which(name, **options),
    )
    monkeypatch.setattr(environment, "suitable_builds", lambda env: fake.builds)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return fake


def test_environment_is_made_once_and_repaired(tmp_path, pip):
    wanted, folder = tmp_path / "r.txt", tmp_path / ".venv"
    wanted.write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(PreflightError, match="could not install"):
        environment.python_for(wanted, folder)
    (folder / "left-over").write_text("")
    pip.code = 0
    assert environment.python_for(wanted, folder) == folder / "bin" / "python"
    assert not (folder / "left-over").exists(), "half made: made anew"
    assert pip.lists[-1][-1] == "no-such-package==1.0" and "--require-hashes" in pip.commands[-1]
    count = len(pip.commands)
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count, "made once"
    wanted.write_text("no-such-package==2.0\n")
    with pytest.raises(PreflightError, match=r"lacks no-such-package==2\.0") as caught:
        environment.python_for(wanted, folder)
    assert caught.value.do.endswith("python3 -m tests.tools.lock") and len(pip.commands) == count, (
        "no package without its hash"
    )
    (tmp_path / environment.LOCK).write_text(
        LOCK.replace("no-such-package==1.0", "no-such-package==2.0")
    )
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count + 1, "new versions are installed"
    lock = (tmp_path / environment.LOCK).read_text()
    (tmp_path / environment.LOCK).write_text(lock.replace("no-tool==1.0", "no-tool==1.1"))
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count + 1, "of no concern to this file"
    (tmp_path / environment.LOCK).write_text(lock.replace("no-such-need==3.0", "no-such-need==3.1"))
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count + 2 and "no-such-need==3.1" in pip.lists[-1], (
        "what a package needs has changed in the lock alone"
    )


@pytest.mark.parametrize("victim", ["module", "pyvenv.cfg", "Python", "packages"])
def test_a_broken_environment_is_made_anew(tmp_path, pip, capsys, victim):
    wanted, folder = tmp_path / "r.txt", tmp_path / ".venv"
    wanted.write_text("no-such-package==1.0\n")
    python = environment.python_for(wanted, folder)
    (folder / "left-over").write_text("")
    site = folder / "lib" / PYTHON / "site-packages"
    if victim == "module":
        (site / "no_such_package.py").unlink()
    elif victim == "pyvenv.cfg":
        (folder / "pyvenv.cfg").unlink()
    elif victim == "Python":
        python.unlink()
        python.symlink_to(tmp_path / "an older Python")
    else:
        shutil.rmtree(folder / "lib")
    assert environment.python_for(wanted, folder) == python
    subprocess.run([python, "-c", "import no_such_package"], check=True)
    assert not (folder / "left-over").exists() and "is broken" in capsys.readouterr().err
    count = len(pip.commands)
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count


def test_ctrl_c_while_an_environment_is_examined_is_not_lost(tmp_path, pip):
    """Python drops what a signal handler raises in the hooks of a fork. So there must be none."""
    forks = []
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    os.register_at_fork(after_in_parent=lambda: forks.append("here"))
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert forks == []


def test_a_broken_environment_is_not_extended(tmp_path, pip):
    """Without pyvenv.cfg, pip would install into the Python of the system."""
    small, large, folder = tmp_path / "small.txt", tmp_path / "large.txt", tmp_path / ".venv"
    small.write_text("no-such-package==1.0\n")
    large.write_text("no-other-package==1.0\n")
    environment.python_for(small, folder)
    (folder / "pyvenv.cfg").unlink()
    environment.python_for(large, folder)
    assert (folder / "pyvenv.cfg").exists() and not (folder / "small.txt.sha256").exists()


def test_pip_that_installs_elsewhere_is_found_out(tmp_path, pip):
    """As with PIP_TARGET, PIP_PREFIX and PIP_DRY_RUN, where pip exits with 0."""
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    pip.installs = False
    for _ in range(2):
        with pytest.raises(PreflightError, match="lacks packages") as caught:
            environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
        assert "'no_such_package'" in caught.value.why and "PIP_TARGET" in caught.value.do
    pip.installs = True
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")


@pytest.mark.parametrize("name", ["r.txt", ".venv/r.txt.sha256", environment.LOCK])
def test_files_that_are_not_utf8(tmp_path, pip, name):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    python = environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    content = b"" if name.endswith("sha256") else (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"# \xff\n" + content)
    assert environment.python_for(tmp_path / "r.txt", tmp_path / ".venv") == python


def test_a_failure_of_ensurepip_is_no_traceback(tmp_path, pip, monkeypatch, capsys):
    def fail(command, *_, stdout, **__):
        stdout.write('Traceback (most recent call last):\n  File "x", line 1\nOSError: No space\n')
        return Ending(1)

    monkeypatch.setattr(environment, "supervise", fail)
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    with pytest.raises(PreflightError, match="pip could not be installed") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    error = capsys.readouterr().err
    assert error.endswith("\nOSError: No space\n") and "Traceback" not in error
    assert environment.PIP_LOG in caught.value.do


@pytest.fixture
def hopper(pip, tmp_path, monkeypatch):
    """A .venv on a machine with Hopper GPUs and a package index; returns the call."""
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / environment.HOPPER).write_text("flash-attn-4==4.0.0b36\n")
    (tmp_path / environment.HOPPER_LOCK).write_text("flash-attn-4==4.0.0b36 \\\n    --hash=x\n")
    monkeypatch.setattr(environment, "has_hopper", lambda env: True)
    monkeypatch.setattr(environment, "answers_at", lambda url: True)
    folder = tmp_path / ".venv"
    python = environment.python_for(tmp_path / "r.txt", folder)
    return lambda python=python: environment.add_hopper_packages(python, tmp_path, folder)


def test_flash_attention_is_installed_once_on_hopper_by_its_hashes(hopper, pip, tmp_path):
    before = len(pip.commands)
    for _ in range(2):
        hopper()
    assert len(pip.commands) == before + 1 and "--require-hashes" in pip.commands[-1]
    assert pip.lists[-1] == ["flash-attn-4==4.0.0b36"]
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert len(pip.commands) == before + 1, "the .venv is not made anew for it"
    (tmp_path / environment.HOPPER_LOCK).write_text("flash-attn-4==4.0.0b37 \\\n    --hash=y\n")
    hopper()
    assert len(pip.commands) == before + 2, "a new version"


def test_a_failed_installation_of_flash_attention_stops_nothing(hopper, pip, tmp_path):
    before = len(pip.commands)
    pip.code = 1
    hopper()
    pip.code = 0
    hopper()
    assert len(pip.commands) == before + 2, "tried again"


def test_an_index_with_a_password_answers_and_a_wrong_address_does_not():
    """PIP_INDEX_URL of a company's index often holds a user name and a token."""

    class Index(BaseHTTPRequestHandler):
        def do_HEAD(self):
            is_known = self.headers["Authorization"] == f"Basic {b64encode(b'me:p@ss').decode()}"
            self.send_response(200 if is_known else 401)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}/simple"
        assert environment.answers_at(f"http://me:p%40ss@{address}")
        assert not environment.answers_at(f"http://me:other@{address}")
        server.shutdown()
    assert not environment.answers_at("http://me:other@127.0.0.1/simple")
    assert not environment.answers_at("index.example.com/simple")


@pytest.mark.parametrize("obstacle", ["no Hopper", "no index", "another Python"])
def test_flash_attention_is_left_out(hopper, pip, monkeypatch, obstacle):
    before = len(pip.commands)
    if obstacle == "no Hopper":
        monkeypatch.setattr(environment, "has_hopper", lambda env: False)
    if obstacle == "no index":
        monkeypatch.setattr(environment, "answers_at", lambda url: False)
    hopper(*([Path(sys.executable)] if obstacle == "another Python" else []))
    assert len(pip.commands) == before


def test_a_small_file_of_packages_is_met_by_the_large_one(tmp_path, pip):
    """`check` after a run installs nothing; a run after `check` does."""
    small, large, folder = (
        tmp_path / "requirements-logs.txt",
        tmp_path / "requirements.txt",
        tmp_path / ".venv",
    )
    small.write_text("no-such-package==1.0\n")
    large.write_text("-r requirements-logs.txt\nno-other-package==1.0\n")
    environment.python_for(small, folder)
    assert pip.lists[-1][-1] == "no-such-package==1.0"
    environment.python_for(large, folder)
    assert len(pip.commands) == 2 and {"no-such-package==1.0", "no-other-package==1.0"} <= set(
        pip.lists[-1]
    )
    (tmp_path / "requirements-test.txt").write_text("-r requirements.txt\nno-tool==1.0\n")
    environment.python_for(tmp_path / "requirements-test.txt", folder)
    assert "no-tool==1.0" in pip.lists[-1] and pip.commands.pop()
    (folder / "requirements-logs.txt.sha256").unlink()
    environment.python_for(small, folder)
    assert len(pip.commands) == 2


def test_uv_installs_where_it_is_there(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    monkeypatch.setattr(
        environment.shutil, "which", lambda name: "/usr/bin/uv" if name == "uv" else None
    )
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert pip.commands[-1][:5] == [
        "/usr/bin/uv",
        "pip",
        "install",
        "--python",
        str(tmp_path / ".venv/bin/python"),
    ]


@pytest.mark.parametrize("torch", [True, False])
def test_what_the_packages_need_is_taken_from_the_lock(tmp_path, pip, monkeypatch, torch):
    """A new environment gets all packages. One beside a container's torch gets the missing ones."""
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    monkeypatch.setattr(environment, "has_package", lambda name: name == "torch" and torch)
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (
        pip.lists
        == [["no-such-need==3.0", "no-such-package==1.0"] + ["numpy==2.4.6"] * (not torch)]
        and "--no-deps" in pip.commands[0]
    )


CUDA = ["cuda-thing==1.0", "nvidia-thing==1.0", "torch==2.13.0"]


def test_torch_is_the_one_for_cpus_where_there_is_no_gpu_and_an_index_has_it(
    tmp_path, pip, monkeypatch
):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    version = f"{sys.version_info.major}{sys.version_info.minor}"

    def options(answers: bool, folders: str = "") -> list[str]:
        monkeypatch.setattr(environment, "answers_at", lambda url: answers)
        monkeypatch.setenv("PIP_FIND_LINKS", folders)
        environment.python_for(
            tmp_path / "r.txt", tmp_path / f"{answers}{folders and len(list(wheels.iterdir()))}"
        )
        return pip.commands[-1][pip.commands[-1].index("--no-deps") + 1 : -2]

    assert options(True) == ["--extra-index-url", environment.CPU_TORCH] and pip.lists[-1] == [
        "torch==2.13.0+cpu"
    ]
    assert options(False) == [] and pip.lists[-1] == CUDA
    (wheels / f"torch-2.12.0+cpu-cp{version}-cp{version}-linux_x86_64.whl").write_text(
        "another version"
    )
    assert options(False, str(wheels)) == []
    (wheels / f"torch-2.13.0+cpu-cp{version}-cp{version}-linux_x86_64.whl").write_text("")
    assert options(False, f"{tmp_path} {wheels}") == ["--find-links", str(wheels)] and pip.lists[
        -1
    ] == ["torch==2.13.0+cpu"]


def test_an_nvidia_gpu_gets_torch_for_cuda(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    monkeypatch.setattr(environment, "answers_at", lambda url: True)
    pip.builds = ("cuda", "cuda12")
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert pip.lists == [CUDA] and "--extra-index-url" not in pip.commands[0]


def test_a_driver_too_old_for_cuda_13_gets_torch_for_cuda_12_from_its_own_lock(
    tmp_path, pip, monkeypatch
):
    (tmp_path / "r.txt").write_text("torch==2.13.0\nno-such-package==1.0\n")
    (tmp_path / environment.CUDA12).write_text("torch==2.10.0\n")
    (tmp_path / environment.CUDA12_LOCK).write_text(
        LOCK.replace("torch==2.13.0", "torch==2.10.0").replace("cuda-thing", "cuda-12-thing")
    )
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    pip.builds = ("cuda12",)
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert {"torch==2.10.0", "cuda-12-thing==1.0"} <= set(pip.lists[-1])
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert len(pip.commands) == 1


def test_torch_for_cpus_is_exchanged_on_a_machine_with_gpus(tmp_path, pip, monkeypatch):
    """Set up on a login node and use on a node with GPUs installs only the difference."""
    torch, logs, folder = tmp_path / "r.txt", tmp_path / "logs.txt", tmp_path / ".venv"
    torch.write_text("torch==2.13.0\n")
    logs.write_text("no-such-package==1.0\n")
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    monkeypatch.setattr(environment, "answers_at", lambda url: True)
    environment.python_for(torch, folder)
    environment.python_for(logs, folder)
    (folder / "left-over").write_text("")
    pip.builds = ("cuda",)
    environment.python_for(logs, folder)
    assert len(pip.commands) == 2, "no torch, no matter which"
    environment.python_for(torch, folder)
    assert pip.lists[-1] == CUDA and not (folder / "left-over").exists(), (
        "made anew: pip would keep torch 2.13.0+cpu"
    )
    pip.builds = ("cpu", "cuda", "cuda12")
    environment.python_for(torch, folder)
    assert len(pip.commands) == 3, "torch for CUDA serves a CPU"


def test_set_up_for_another_machine(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    # A complete Python, whose torch is for CPUs.
    monkeypatch.setattr(environment, "has_package", lambda name: True)
    monkeypatch.setattr(environment, "installed_build", lambda: "cpu")
    assert environment.python_for(tmp_path / "r.txt", tmp_path / ".venv", "cpu") == Path(
        sys.executable
    )
    assert (
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv", "cuda")
        == tmp_path / ".venv/bin/python"
    )
    assert pip.lists == [CUDA]
    with pytest.raises(PreflightError, match="AMD"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv", "rocm")


def test_an_environment_of_another_processor_is_left_alone_but_by_setup(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    monkeypatch.setattr(environment.platform, "machine", lambda: "other_64")
    with pytest.raises(PreflightError, match="other_64") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "setup" in caught.value.do and len(pip.commands) == 1
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv", "cuda")
    assert len(pip.commands) == 2


def without_ensurepip(tmp_path, monkeypatch, digest: str) -> Path:
    """A Python without ensurepip, as Debian's, a lock with this pip, and where it is unpacked."""
    find, wheel = environment.importlib.util.find_spec, tmp_path / "pip-26.3-py3-none-any.whl"
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: None if name == "ensurepip" else find(name),
    )
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("pip/__main__.py", "")
    digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / environment.LOCK).write_text(f"# pip: {wheel.as_uri()}#sha256={digest}\n{LOCK}")
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    return tmp_path / ".venv" / "lib" / PYTHON / "site-packages"


def test_a_python_without_ensurepip_gets_the_locked_pip(tmp_path, pip, monkeypatch):
    site = without_ensurepip(tmp_path, monkeypatch, "")
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (site / "pip" / "__main__.py").is_file() and pip.commands[-1][1:3] == [
        "-Pm",
        "pip",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_another_pip_than_the_locked_one_is_not_unpacked(tmp_path, pip, monkeypatch, there):
    site = without_ensurepip(tmp_path, monkeypatch, SHA)
    if not there:
        (tmp_path / "pip-26.3-py3-none-any.whl").unlink()
    with pytest.raises(PreflightError, match="cannot create") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "python3-venv" in caught.value.do and not pip.commands and not (site / "pip").exists()
    assert ("hash" if there else "downloaded") in caught.value.why


def entries(text: str) -> dict[str, str]:
    return {name: line for name, line in re.findall(r"^(\S+?)(==\S+)", text, re.MULTILINE)}


def test_the_lock_has_every_requirement_at_its_version_with_hashes():
    text = (ROOT / environment.LOCK).read_text()
    for name in ("requirements-logs.txt", "requirements.txt", "requirements-test.txt"):
        wanted = environment.requirements(ROOT / name)
        found = environment.locked_entries(wanted, ROOT / environment.LOCK, own_torch=False)
        assert found.keys() >= {name for name, _ in wanted}
        assert all(
            re.search(r"^    --hash=sha256:[0-9a-f]{64}", entry, re.MULTILINE)
            for entry in found.values()
        )
    assert found.keys() == entries(text).keys(), "and nothing that no requirement needs"
    assert re.search(r"^# pip: https://\S+\.whl#sha256=[0-9a-f]{64}$", text, re.MULTILINE)


@pytest.mark.parametrize("name", [environment.LOCK, environment.CUDA12_LOCK])
def test_the_wheels_of_the_lock_were_checked_for_each_python_and_machine(name):
    """tests/tools/lock.py writes the digest after a dry run. An edit by hand invalidates it."""
    path = ROOT / name
    assert f"{lock.CHECKED} sha256:{lock.content_digest(path)}\n" in path.read_text()


@pytest.mark.skipif(not shutil.which("uv"), reason="needs uv, and the package index")
def test_a_dry_run_finds_a_wheel_of_each_package(tmp_path):
    assert lock.check_wheels(ROOT / environment.LOCK) == []
    assert lock.check_wheels(ROOT / environment.CUDA12_LOCK) == []


def test_torch_of_the_lock_has_the_wheels_for_cpus():
    text = (ROOT / environment.LOCK).read_text()
    version, entry = re.search(
        r"^torch==(\S+) (.*?)^ +# via", text, re.MULTILINE | re.DOTALL
    ).groups()
    hashes = dict(
        re.findall(rf"^# torch {version}\+cpu, (\S+ \S+): (sha256:\w+)$", text, re.MULTILINE)
    )
    assert {f"3.{minor} x86_64" for minor in (11, 12, 13, 14)} <= hashes.keys() and all(
        each in entry for each in hashes.values()
    )
    assert lock.with_cpu_hashes(text, [f"# x: {each}" for each in hashes.values()]) == text, (
        "each once"
    )


def test_the_lock_reads_the_pages_of_the_indices():
    page = "".join(
        f'<a href="/whl/cpu/torch-{version}%2Bcpu-{tag}.whl#sha256={sha * 64}">\n'
        for version, tag, sha in [
            ("2.13.0", "cp310-cp310-manylinux_2_28_x86_64", "1"),
            ("2.13.0", "cp312-cp312-manylinux_2_28_x86_64", "2"),
            ("2.13.0", "cp312-cp312-win_amd64", "3"),
            ("2.12.0", "cp312-cp312-manylinux_2_28_x86_64", "4"),
            ("2.13.0", "cp311-cp311-manylinux_2_28_aarch64", "5"),
        ]
    )
    lines = lock.cpu_lines(page, "2.13.0")
    assert lines == [
        f"# torch 2.13.0+cpu, 3.11 aarch64: sha256:{'5' * 64}",
        f"# torch 2.13.0+cpu, 3.12 x86_64: sha256:{'2' * 64}",
    ]
    added = lock.with_cpu_hashes(f"torch==2.13.0 \\\n    --hash=sha256:{'6' * 64}\n", lines)
    assert re.findall(r"sha256:(\d)", added) == ["5", "2", "6"]
    wheels = [
        f'<a href="https://x/pip-{version}-py3-none-any.whl#sha256={SHA}">'
        for version in ("9.0.3", "26.3", "25.10", "27.0b1")
    ]
    assert (
        lock.pip_line("\n".join(wheels))
        == f"# pip: https://x/pip-26.3-py3-none-any.whl#sha256={SHA}"
    )


def test_the_words_of_pip_go_to_a_file_and_after_a_failure_to_the_terminal(
    tmp_path, pip, monkeypatch, capsys
):
    run = environment.supervise

    def install(command, *arguments, stdout, **__):
        stdout.write("Collecting no-such-package\n" + "no matching distribution\n" * pip.code)
        return run(command, *arguments)

    monkeypatch.setattr(environment, "supervise", install)
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(PreflightError, match="could not install") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (
        "no matching distribution" in capsys.readouterr().err
        and str(tmp_path / ".venv" / environment.PIP_LOG) in caught.value.do
    )
    pip.code = 0
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["creating", "installing", "installed"]
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
    monkeypatch.setattr(environment, "has_package", lambda name: False)
    pip.builds = ("rocm",)
    with pytest.raises(PreflightError, match="AMD GPU") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert "ROCm" in caught.value.do
    assert not pip.commands


def test_of_two_first_starts_one_waits(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    create = environment.venv.create
    monkeypatch.setattr(
        environment.venv,
        "create",
        lambda *arguments, **options: (time.sleep(0.5), create(*arguments, **options)),
    )
    found = []
    starts = [
        threading.Thread(
            target=lambda: found.append(
                environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
            )
        )
        for _ in range(2)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join(30)
    assert found == [tmp_path / ".venv" / "bin" / "python"] * 2 and len(pip.commands) == 1


def test_a_checkout_that_cannot_be_written(tmp_path, pip):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / ".venv.lock").mkdir()  # refuses to be opened for writing, to root as well
    with pytest.raises(PreflightError, match="cannot create") as caught:
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (
        "no-such-package" in caught.value.why and "writable" in caught.value.do and not pip.commands
    )


INSTALLING = """
import os, sys
from pathlib import Path
from launch import environment

def create(folder):
    (folder / "lib/python3/site-packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(
        "#!/bin/sh\\n[ $2 = {step} ] || exit 0\\n"
        "sleep 300 & echo $$ $! > {pid}.new; mv {pid}.new {pid}; wait"
    )
    (folder / "bin/python").chmod(0o755)

find = environment.importlib.util.find_spec
environment.importlib.util.find_spec = lambda name: name == "ensurepip" or find(name)
environment.ROOT = Path({root!r})
environment.venv.create = create
environment.answers_at = lambda url: False
environment.suitable_builds = lambda env: ("cpu",)
which = environment.shutil.which
environment.shutil.which = lambda name, **options: None if name == "uv" else which(name, **options)
sys.exit(environment.exit_code_of(lambda: environment.main("r.txt")))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
@pytest.mark.parametrize("step", ["ensurepip", "pip"])
def test_a_signal_while_pip_installs_ends_pip_and_what_it_started(tmp_path, number, code, step):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    program = INSTALLING.format(pid=tmp_path / "pid", root=str(tmp_path), step=step)
    (tmp_path / environment.LOCK).write_text(LOCK)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "pid").exists)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (
        (process.returncode, out) == (code, "")
        and ("stopped by signal" in err) == (number == signal.SIGTERM)
        and "Traceback" not in err
    )
    installer, started = (tmp_path / "pid").read_text().split()
    wait_until(lambda: gone(installer))
    if code > 0:
        wait_until(lambda: gone(started))
    else:
        # What pip starts is left to pip where nobody is left to end it.
        os.kill(int(started), signal.SIGKILL)
    assert not list(tmp_path.glob(".venv/*.sha256")), "the next start makes it anew"


def test_the_progress_of_pip_is_read_from_its_log():
    log = "Collecting numpy==2.4.6\n  Downloading numpy.whl (17.0 MB)\nProgress 17 of 17\n"
    assert environment._download("", 45) == ("installing", 0, 0)
    assert environment._download(log, 45) == ("numpy (1 of 45)", 17, 17)
    log += "Collecting torch==2.13.0\n"
    assert environment._download(log, 45) == ("torch (2 of 45)", 0, 0)
    log += "Progress 100 of 900\nProgress 300 of 900\n"
    assert environment._download(log, 45) == ("torch (2 of 45)", 300, 900)
    log += "Installing collected packages: numpy, torch\n"
    assert environment._download(log, 45) == ("installing", 0, 0)


def test_rich_is_installed_first_where_it_is_missing(tmp_path, pip, monkeypatch):
    """So that minutes of downloads have a progress bar."""
    (tmp_path / environment.CLI).write_text("no-tool==1.0\n")
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    monkeypatch.setattr(environment, "has_rich", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert [found[-1] for found in pip.lists] == ["no-tool==1.0", "no-such-package==1.0"]
    assert sys.path[-1] == str(tmp_path / ".venv/lib" / PYTHON / "site-packages")


def test_packages_that_pythonpath_replaces(tmp_path):
    for name in ("torch", "numpy", "of_the_user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "numpy-2.1.3.dist-info").mkdir()
    (tmp_path / "numpy-2.1.3.dist-info/METADATA").write_text("Name: numpy\nVersion: 2.1.3\n")
    (tmp_path / "pyarrow").mkdir()  # no module
    own = sysconfig.get_path("purelib")
    path = os.pathsep.join([str(ROOT), own, "", str(tmp_path)])
    replaced = environment.replaced_packages({"PYTHONPATH": path})
    assert replaced == ["torch of unknown version", "numpy 2.1.3"]
    assert environment.replaced_packages({"PYTHONPATH": own}) == []
