"""What measures must at least start: each benchmark's options, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


def test_they_are_found():
    assert {"kernels", "convergence", "load_time", "lora_convergence"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_it_says_what_it_takes(module):
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr[-2000:]


def test_written_shards_are_a_checkpoint_of_their_layers(tmp_path, capsys):
    from benchmarks.load_time import print_report, write_shards
    from common.distributed import start_processes
    from common.shapes import ModelShape
    from llama2_70b_lora.weights import LoadReport, open_checkpoint

    shape = ModelShape(3, 32, 48, 4, 2, 61, 10000.0)
    write_shards(tmp_path / "w", shape, start_processes("cpu", 60.0))
    checkpoint = open_checkpoint(tmp_path / "w", shape)
    assert checkpoint.layout == "fused" and len(checkpoint.files) == 4
    report = LoadReport("fused", 0.0, 4.0, 3 * 10**9, 2**30)
    print_report(report, {"build": 1.0, "load": 4.0, "adapters and hashes": 2.0, "warm-up": 3.0}, 5.0, 20, 80, tmp_path / "w")
    assert "15.0 s to run_start" in (out := capsys.readouterr().out) and "projected to 80 layers: 42 s of the 1800 s" in out


def test_the_synthetic_text_is_the_same_everywhere():
    """Golden losses hang on it."""
    from benchmarks.convergence import synthetic_batches

    first = next(synthetic_batches(1, 2048))
    assert first.shape == (8, 2, 1024) and first[0, 0, :8].tolist() == FIRST and (first[:, 0, 1:] == first[:, 1, :-1]).all()


FIRST = [1628, 587, 1968, 242, 1001, 395, 1358, 1405]
