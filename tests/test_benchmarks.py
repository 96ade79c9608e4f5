"""What measures must at least start: each benchmark's options, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def test_they_are_found():
    assert {"kernels", "convergence", "lora_convergence"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_it_says_what_it_takes(module):
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-2000:]


def test_the_synthetic_text_is_the_same_everywhere():
    """Golden losses hang on it."""
    from benchmarks.convergence import synthetic_batches

    first = next(synthetic_batches(1, 2048))
    assert first.shape == (8, 2, 1024) and first[0, 0, :8].tolist() == FIRST and (first[:, 0, 1:] == first[:, 1, :-1]).all()


FIRST = [1628, 587, 1968, 242, 1001, 395, 1358, 1405]
