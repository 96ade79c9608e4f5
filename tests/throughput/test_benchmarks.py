"""What measures must at least start: each benchmark's options, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["throughput/kernels.py", "throughput/load_time.py", "tests/gpu/convergence.py", "tests/gpu/lora_convergence.py"]


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


def test_written_shards_are_a_checkpoint_of_their_layers(tmp_path, capsys):
    from common.model.checkpoint_loader import LoadReport
    from common.model.checkpoint_reader import open_checkpoint
    from common.model.shapes import ModelShape
    from common.sharding.processes import start_processes
    from throughput.load_time import print_report, write_shards

    shape = ModelShape(3, 32, 48, 4, 2, 61, 10000.0)
    write_shards(tmp_path / "w", shape, start_processes("cpu", 60.0))
    checkpoint = open_checkpoint(tmp_path / "w", shape)
    assert checkpoint.layout == "fused" and len(checkpoint.files) == 4
    report = LoadReport("fused", 0.0, 4.0, 3 * 10**9, 2**30)
    print_report(report, [6.0, 4.0, 5.0], 20, 80, tmp_path / "w")
    assert "15.0 s to run_start" in (out := capsys.readouterr().out) and "extrapolated to 80 layers: 42 s of the 1800 s" in out
