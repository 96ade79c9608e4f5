"""Write both locks from the requirements files: `python3 -m tests.tools.lock [--upgrade]`.

A lock has the packages of requirements-test.txt and their dependencies for every Python from 3.11
on. requirements-cuda12.lock has the torch of requirements-cuda12.txt. launch/environment.py
installs from the locks what a command needs.

torch has the hashes of two Linux wheels: the package index's, for CUDA, and pytorch.org's, for
CPUs. If pytorch.org does not answer, the lock's hashes of this version are kept. The head names
the pip for a Python without ensurepip. It also has the digest of the content for which a dry run of
uv found wheels for every Python and machine.

Needs uv (`pip install uv`) and a network.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from common.paths import ROOT
from launch import environment

INDEX = "https://pypi.org/simple"
CPU_TORCH = "https://download.pytorch.org/whl/cpu/torch/"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
CHECKED = "# Each package of a run has a wheel for Python 3.11 to 3.14:"


def pip_line(page: str) -> str:
    """Return `# pip: URL#sha256=...` of the newest release on an index page (PEP 503)."""
    wheels = re.findall(
        r'href="([^"#]+/pip-(\d+(?:\.\d+)+)-py3-none-any\.whl#sha256=[0-9a-f]{64})"', page
    )
    return "# pip: " + max(wheels, key=lambda wheel: [int(part) for part in wheel[1].split(".")])[0]


def cpu_lines(page: str, version: str) -> list[str]:
    """Return `# torch VERSION+cpu, 3.12 x86_64: sha256:...` of each Linux wheel on a page."""
    pattern = (
        rf"torch-{re.escape(version)}(?:%2B|\+)cpu-cp3(\d+)-cp3\1-"
        r"manylinux\w*_(x86_64|aarch64)\.whl#sha256=([0-9a-f]{64})"
    )
    found = {
        (int(minor), machine, sha)
        for minor, machine, sha in re.findall(pattern, page)
        if int(minor) >= 11
    }
    return [
        f"# torch {version}+cpu, 3.{minor} {machine}: sha256:{sha}"
        for minor, machine, sha in sorted(found)
    ]


def with_cpu_hashes(lock: str, lines: list[str]) -> str:
    """Return the lock with the hashes of `lines` added to torch's, if they are missing."""
    hashes = "".join(
        f"    --hash={line.split()[-1]} \\\n" for line in lines if line.split()[-1] not in lock
    )
    return re.sub(
        r"^(torch==\S+ \\\n)", lambda match: match[1] + hashes, lock, count=1, flags=re.MULTILINE
    )


def content_digest(path: Path) -> str:
    """Return the digest of the entries of the lock `path` for the packages of a run."""
    return hashlib.sha256(run_entries(path).encode()).hexdigest()


def run_entries(path: Path) -> str:
    """Return the entries of the lock `path` for the packages of a run."""
    build = "cuda12" if path.name == environment.CUDA12_LOCK else "cuda"
    required, _ = environment.required_packages(ROOT / environment.ALL, build)
    return "".join(environment.locked_entries(required, path, own_torch=False).values())


def check_wheels(path: Path) -> list[str]:
    """Resolve the packages of a run by uv for each Python and machine. Return uv's errors."""
    machines = MACHINES[:1] if path.name == environment.CUDA12_LOCK else MACHINES
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        entries = Path(folder) / "entries.txt"
        entries.write_text(run_entries(path))
        for python in PYTHONS:
            for machine in machines:
                command = [
                    "uv",
                    "pip",
                    "install",
                    "--dry-run",
                    "--quiet",
                    "--default-index",
                    INDEX,
                    "--target",
                    f"{folder}/target",
                ]
                command += [
                    "--python-version",
                    python,
                    "--python-platform",
                    f"{machine}-manylinux_2_28",
                    "--only-binary",
                    ":all:",
                ]
                done = subprocess.run(
                    [*command, "--no-deps", "--require-hashes", "-r", str(entries)],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    failures.append(
                        f"{path.name}, Python {python}, {machine}: {done.stderr.strip()}"
                    )
    return failures


def write_checked(path: Path, head: list[str], text: str) -> None:
    """Write the lock `path` and its digest. Raises SystemExit if a wheel is missing."""
    path.write_text("\n".join(head) + "\n" + text)
    if failures := check_wheels(path):
        raise SystemExit("\n".join(failures))
    path.write_text("\n".join([*head, f"{CHECKED} sha256:{content_digest(path)}"]) + "\n" + text)


def compile_lock(
    path: Path, options: list[str], requirements: str = "requirements-test.txt"
) -> str:
    """Let uv resolve the packages into `path`, keeping its versions if possible.

    Return the text.
    """
    command = [
        "uv",
        "pip",
        "compile",
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-header",
        "--quiet",
    ]
    command += [
        "--default-index",
        INDEX,
        *options,
        requirements,
        "--output-file",
        str(path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path.read_text()


def hopper_lock() -> str:
    """Return the entries for requirements-hopper.txt that a run does not install otherwise.

    Other packages of a run are there already, in a container perhaps in another version.
    """
    path = ROOT / environment.HOPPER_LOCK
    constraints = ["--constraints", environment.LOCK]
    text = compile_lock(path, constraints, environment.HOPPER)
    required, lock = environment.required_packages(ROOT / environment.ALL, "cuda")
    installed = environment.locked_entries(required, lock, own_torch=False)
    entries = re.findall(r"^\w.*\n(?: .*\n)*", text, re.MULTILINE)
    return "".join(entry for entry in entries if entry.partition("==")[0] not in installed)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as page:
        return page.read().decode()


def main(arguments: list[str]) -> None:
    path = ROOT / environment.LOCK
    old = path.read_text() if path.is_file() else ""
    lock = compile_lock(path, arguments)
    version = re.search(r"^torch==(\S+)", lock, re.MULTILINE)[1]
    try:
        lines = cpu_lines(read(CPU_TORCH), version)
    except OSError as error:
        lines = re.findall(rf"^# torch {re.escape(version)}\+cpu, .*$", old, re.MULTILINE)
        print(f"{CPU_TORCH} does not answer ({error}): {len(lines)} hashes kept", file=sys.stderr)
    head = [
        "# Made by tests/tools/lock.py: each package that a run or a test needs, with the hashes "
        "of its files on the package index.",
        *lines,
    ]
    pip = pip_line(read(f"{INDEX}/pip/"))
    write_checked(path, [*head, pip], with_cpu_hashes(lock, lines))
    cuda12 = ROOT / environment.CUDA12_LOCK
    write_checked(
        cuda12,
        [head[0], pip],
        compile_lock(cuda12, [*arguments, "--overrides", environment.CUDA12]),
    )
    hopper = hopper_lock()
    path = ROOT / environment.HOPPER_LOCK
    path.write_text(
        f"# Made by tests/tools/lock.py: {environment.HOPPER}, beside the other lock.\n"
    )
    with path.open("a") as file:
        file.write(hopper)


if __name__ == "__main__":
    main(sys.argv[1:])
