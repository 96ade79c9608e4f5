"""Test the result of a measurement on several ranks: values, errors, and their source."""

import pytest
import torch

from common.errors import LAUNCHED, Hang, OutOfMemory, RunError
from common.measure import bench
from throughput.ranks import run_ranks

MODULE = """
import json, time, torch
from throughput.ranks import MEASURED, main

def measure(folder):
    (folder / MEASURED).write_text(json.dumps({"first": 1}))
    {WORK}

main(measure)
"""


@pytest.mark.parametrize(
    ("work", "error", "shown"),
    [
        pytest.param("pass", type(None), False, marks=pytest.mark.slow),
        (
            "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')",
            OutOfMemory,
            False,
        ),
        ("raise ValueError('shapes differ')", RunError, True),
        pytest.param("time.sleep(60)", Hang, False, marks=pytest.mark.slow),
    ],
)
def test_the_error_that_ended_the_ranks_and_what_they_had_measured(
    tmp_path, monkeypatch, capfd, work, error, shown
):
    (tmp_path / "of_rank.py").write_text(MODULE.replace("{WORK}", work))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limit_s = 30.0 if error is Hang else 120.0  # two imports of torch take 15 s on busy cores
    found, ended = run_ranks(tmp_path, 1, ["of_rank", str(tmp_path)], {}, limit_s=limit_s)
    assert getattr(ended, "kind", None) == getattr(error, "kind", None)
    assert found == {"first": 1} and ("Traceback" in capfd.readouterr().err) == shown


def test_bench_leaves_its_failure_to_who_asked_for_a_file(tmp_path, monkeypatch, capsys):
    def fail(config, args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(bench, "bench", fail)
    monkeypatch.setattr("common.training.guard.os._exit", end)
    monkeypatch.setenv(LAUNCHED, "by who asks")
    arguments = [
        "--benchmark",
        "llama31_8b",
        "--config",
        "configs/llama31_8b/CPU_1x1.toml",
        "--device",
        "cpu",
    ]
    with pytest.raises(Ended):
        bench.main([*arguments, "--result", str(tmp_path / "measured.json")])
    assert (
        "out_of_memory" in (tmp_path / "ranks" / "rank_0.json").read_text()
        and not capsys.readouterr().err
    )
