"""Write requirements.lock anew from the requirements files: `python3 -m tests.tools.lock [--upgrade]`. Needs uv (`pip install uv`) and a network.

One lock for all: what requirements-test.txt lists with what it includes, and all that these packages need, for every Python from 3.11 on.
launch/environment.py takes from it what a verb needs. torch has the hashes of both of its Linux wheels: of the package index, for CUDA, and
of pytorch.org's index, for CPUs. Where the latter does not answer, the hashes that the lock already has for this version are kept.
The head also names the pip that a Python without ensurepip gets.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request

from common.paths import ROOT

INDEX = "https://pypi.org/simple"
CPU_TORCH = "https://download.pytorch.org/whl/cpu/torch/"


def pip_line(page: str) -> str:
    """`# pip: URL#sha256=...` of the last wheel without a pre-release mark on an index page (PEP 503), which is in order of versions."""
    wheels = re.findall(r'href="([^"#]+/pip-(\d+(?:\.\d+)+)-py3-none-any\.whl#sha256=[0-9a-f]{64})"', page)
    return "# pip: " + max(wheels, key=lambda wheel: [int(part) for part in wheel[1].split(".")])[0]


def cpu_lines(page: str, version: str) -> list[str]:
    """`# torch 2.13.0+cpu, 3.12 x86_64: sha256:...` of each Linux wheel from Python 3.11 on that an index page lists."""
    pattern = rf"torch-{re.escape(version)}(?:%2B|\+)cpu-cp3(\d+)-cp3\1-manylinux\w*_(x86_64|aarch64)\.whl#sha256=([0-9a-f]{{64}})"
    found = {(int(minor), machine, sha) for minor, machine, sha in re.findall(pattern, page) if int(minor) >= 11}
    return [f"# torch {version}+cpu, 3.{minor} {machine}: sha256:{sha}" for minor, machine, sha in sorted(found)]


def with_cpu_hashes(lock: str, lines: list[str]) -> str:
    """The lock with the hashes of these lines added to torch's, where uv has not kept them from the lock before."""
    hashes = "".join(f"    --hash={line.split()[-1]} \\\n" for line in lines if line.split()[-1] not in lock)
    return re.sub(r"^(torch==\S+ \\\n)", lambda match: match[1] + hashes, lock, count=1, flags=re.MULTILINE)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as page:
        return page.read().decode()


def main(arguments: list[str]) -> None:
    path = ROOT / "requirements.lock"
    old = path.read_text() if path.is_file() else ""
    command = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--quiet"]
    command += ["--default-index", INDEX, *arguments, "requirements-test.txt", "--output-file", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lock = path.read_text()
    version = re.search(r"^torch==(\S+)", lock, re.MULTILINE)[1]
    try:
        lines = cpu_lines(read(CPU_TORCH), version)
    except OSError as error:
        lines = re.findall(rf"^# torch {re.escape(version)}\+cpu, .*$", old, re.MULTILINE)
        print(f"{CPU_TORCH} does not answer ({error}): {len(lines)} hashes kept", file=sys.stderr)
    head = [
        "# Made by tests/tools/lock.py: each package that a run or a test needs, with the hashes of its files on the package index.",
        *lines,
    ]
    path.write_text("\n".join([*head, pip_line(read(f"{INDEX}/pip/"))]) + "\n" + with_cpu_hashes(lock, lines))


if __name__ == "__main__":
    main(sys.argv[1:])
