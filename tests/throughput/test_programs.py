"""What measures must at least start: each benchmark's options, without a GPU."""

import os
import subprocess
import sys

import pytest

from common.paths import ROOT

PROGRAMS = [
    "tests/gpu/studies/kernel_bandwidth.py",
    pytest.param("tests/gpu/studies/convergence.py", marks=pytest.mark.slow),
    pytest.param("tests/gpu/studies/lora_convergence.py", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_says_what_it_takes(program):
    done = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/helpers'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-2000:]
