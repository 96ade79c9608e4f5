"""Inject faults into real runs of the miniature and check exit code, message, log and failure.json.

The program does not know these tests: they damage files, kill or stop processes, set limits and
override values.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common.paths import ROOT
from common.training.continuation import newest
from llama31_8b.rules import MINIATURE

SMALL = ("global_batch_size=4", "micro_batch_size=2", "max_samples=4096")


@pytest.fixture
def data(miniature_data):
    return miniature_data


class Started:
    """A run by run_and_time.sh, in the background, with its files at hand."""

    def __init__(
        self, tmp_path, data, *settings, environment=None, arguments=(), before=(), ranks=1
    ):
        self.log_dir = tmp_path / "results"
        keys = dict(setting.split("=", 1) for setting in (*SMALL, *settings))
        keys = {"gpus_per_node": ranks} | keys
        options = [part for item in keys.items() for part in ("--set", "{}={}".format(*item))]
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DATADIR": str(data),
            "LOGDIR": str(self.log_dir),
        }
        variables |= {"SEED": "1"} | (environment or {})
        self.process = subprocess.Popen(
            [
                *before,
                str(ROOT / "run_and_time.sh"),
                "llama31_8b",
                "--miniature",
                *options,
                *arguments,
            ],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def run_dir(self) -> Path:
        (folder,) = (path for path in (self.log_dir / "llama31_8b").iterdir() if path.is_dir())
        return folder

    def heartbeat(self, rank: int) -> dict:
        try:
            return json.loads((self.run_dir / "ranks" / f"rank_{rank}.heartbeat").read_text())
        except (OSError, ValueError):
            return {"step": -1}

    def wait_for_step(self, step: int, ranks: int = 1) -> None:
        deadline = time.monotonic() + 120
        while any(self.heartbeat(rank)["step"] < step for rank in range(ranks)):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "the run never got going"
            time.sleep(0.05)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=150)
        return self.process.returncode, out, err

    def failure(self) -> dict:
        return json.loads((self.run_dir / "failure.json").read_text())

    def logged_keys(self) -> list[str]:
        """Keys of the log, every line of which must be whole."""
        lines = (self.run_dir / "result.txt").read_text().splitlines()
        return [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]

    def status(self) -> str | None:
        lines = [
            json.loads(line.removeprefix(":::MLLOG "))
            for line in (self.run_dir / "result.txt").read_text().splitlines()
        ]
        stops = [line for line in lines if line["key"] == "run_stop"]
        assert len(stops) <= 1
        return stops[0]["metadata"]["status"] if stops else None


def expect(run: Started, code: int, kind: str, *words: str, status: str | None) -> dict:
    returned, _, err = run.end()
    assert returned == code, err
    failure = run.failure()
    assert failure["kind"] == kind and failure["exit_code"] == code
    assert failure["what"] and failure["why"] and failure["do"], (
        "a failure says what, why and what to do"
    )
    for word in words:
        assert word in json.dumps(failure), f"{word!r} is not in {failure}"
        assert failure["what"] in err, "what happened stands on the terminal"
    assert run.status() == status
    assert ("run_start" in run.logged_keys()) == (status is not None)
    assert (run.run_dir / "report.html").is_file()
    return failure


def damaged(data: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(data, copy)
    # Else the launcher would see the damage and build the files again.
    (copy / "miniature.json").unlink()
    return copy


def test_real_data_missing_is_said_before_anything_starts(tmp_path):
    places = {"DATADIR": str(tmp_path / "nothing"), "LOGDIR": str(tmp_path / "out")}
    config = str(ROOT / "configs/llama31_8b/H200_1x1.toml")
    done = subprocess.run(
        [str(ROOT / "run_and_time.sh"), "llama31_8b", "--device", "cpu", "--config", config],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | places,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (15, "")
    assert "missing" in done.stderr and "prepare" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_truncated_token_file(tmp_path, data):
    copy = damaged(data, tmp_path)
    path = copy / f"{MINIATURE.train_prefix}.bin"
    os.truncate(path, path.stat().st_size - 1000)
    expect(Started(tmp_path, copy), 15, "data", path.name, status="aborted")


@pytest.mark.slow
def test_id_beyond_the_vocabulary(tmp_path, data):
    copy = damaged(data, tmp_path)
    tokens = np.memmap(copy / f"{MINIATURE.validation_prefix}.bin", np.uint16, "r+")
    tokens[100] = MINIATURE.shape.vocab_size
    tokens.flush()
    expect(
        Started(tmp_path, copy),
        15,
        "data",
        MINIATURE.validation_prefix,
        str(MINIATURE.shape.vocab_size),
        status="aborted",
    )


@pytest.mark.parametrize(
    "setting, word",
    [
        ("learning_rate=1", "unknown key"),
        ("global_batch_size=5", "multiple"),
        ("linear=fp4", "linear"),
    ],
)
def test_config_error_names_the_key_and_starts_nothing(tmp_path, data, setting, word):
    run = Started(tmp_path, data, setting)
    code, out, err = run.end()
    assert (
        code == 2
        and word in err
        and setting.partition("=")[0] in err
        and out == ""
        and not run.log_dir.exists()
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", ("no output", "driver")),
        ("echo 'GPU-1, NVIDIA H200, [N/A], 9.0, [N/A], 580.0'", ("[N/A]",)),
    ],
)
def test_unreadable_gpu_is_never_guessed(tmp_path, data, script, words):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = Started(tmp_path, data, environment={"PATH": path})
    code, out, err = run.end()
    assert (
        code == 18 and all(word in err for word in words) and out == "" and not run.log_dir.exists()
    )
    assert [line.split(":")[0].strip() for line in err.splitlines()] == ["error", "why", "do"]


@pytest.mark.slow
def test_nan_loss_stops_the_run_at_the_step(tmp_path, data):
    run = Started(tmp_path, data, "opt_base_learning_rate=2e9", "opt_learning_rate_warmup_steps=0")
    expect(run, 11, "non_finite", "step", status="aborted")
    steps = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    last = [event for event in steps if event["event"] == "step"][-1]
    assert last["loss"] is None or last["grad_norm"] is None, (
        "the bad step is the last one in the events; null stands for NaN"
    )


@pytest.mark.slow
def test_target_not_reached(tmp_path, data):
    """Uses the miniature's own model. test_multi_node.py tests a smaller one."""
    expect(
        Started(tmp_path, data, "global_batch_size=16", "micro_batch_size=16", "max_samples=1024"),
        10,
        "target_missed",
        "1,024",
        status="aborted",
    )


# The interrupt of a toy run is in test_series.py and test_outside.py.
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_signal_while_training(tmp_path, data, number, code):
    run = Started(tmp_path, data)
    run.wait_for_step(3)
    began = time.monotonic()
    run.process.send_signal(number)
    expect(run, code, "interrupted", status="aborted")
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_signal_before_a_time_limit_saves_the_next_step(tmp_path, data):
    """SIGUSR1 as from sbatch --signal, long before the interval of --checkpoint ends."""
    arguments = ("--checkpoint", "9999s", "--grace", "90", "--continue", "auto")
    run = Started(tmp_path, data, arguments=arguments, ranks=2)
    run.wait_for_step(3, ranks=2)
    run.process.send_signal(signal.SIGUSR1)
    failure = expect(run, 138, "interrupted", "--continue", status="aborted")
    assert "signal 10" in failure["what"]
    saved = newest(run.run_dir).facts["step"]
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    assert saved >= 3 and saved == max(each.get("step", 0) for each in events)
    assert any(event["event"] == "checkpoint" for event in events)


def test_rank_that_dies_is_named(tmp_path, data):
    run = Started(tmp_path, data, ranks=2)
    run.wait_for_step(3, ranks=2)
    os.kill(run.heartbeat(1)["pid"], signal.SIGKILL)
    failure = expect(run, 14, "rank_lost", "rank 1", status="aborted")
    assert failure["rank"] == 1


def test_rank_that_hangs_is_named_and_every_stack_is_kept(tmp_path, data):
    run = Started(tmp_path, data, "hang_timeout_s=20", ranks=2)
    run.wait_for_step(3, ranks=2)
    os.kill(run.heartbeat(1)["pid"], signal.SIGSTOP)
    # Rank 0 waits in a collective and is killed with the rest: nobody is left to write run_stop,
    # and nobody forges it.
    code, _, err = run.end()
    assert code == 13, err
    failure = run.failure()
    assert (
        failure["kind"] == "hang"
        and failure["rank"] == 1
        and "rank 1" in err
        and "run_start" in run.logged_keys()
    )
    assert "train_step" in (run.run_dir / "ranks" / "rank_0.stack").read_text()
    (stuck,) = failure["collectives"]
    assert (stuck["entered"], stuck["unknown"]) == ([0], [1]) and "rank 1" in failure["why"]


NO_NAMES = ["unshare", "--map-root-user", "--mount", "--uts", "bash", "-c"]
NO_NAMES.append(
    "hostname nobody-knows && mount --bind /dev/null /etc/hosts && mount --bind /dev/null "
    '/etc/resolv.conf && exec "$0" "$@"'
)


@pytest.mark.slow
def test_no_host_name_is_needed_on_one_node(tmp_path, data):
    """Neither the machine's own nor localhost resolves."""
    names = subprocess.run([*NO_NAMES, "getent", "hosts", "localhost"], capture_output=True)
    if names.returncode != 2:
        pytest.skip("needs the right to unshare")
    run = Started(tmp_path, data, before=NO_NAMES, ranks=2)
    run.wait_for_step(3, ranks=2)
    run.process.send_signal(signal.SIGTERM)
    expect(run, 143, "interrupted", status="aborted")


@pytest.mark.slow
def test_disk_full_while_training(tmp_path, data):
    results = tmp_path / "results"
    results.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", results], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount")
    try:
        run = Started(tmp_path, data)
        run.wait_for_step(3)
        with (
            pytest.raises(OSError, match="No space"),
            (results / "filler").open("wb", buffering=0) as file,
        ):
            while True:
                file.write(bytes(512))
        code, _, err = run.end()
        assert code == 17, err
        failure = run.failure()
        assert (
            failure["kind"] == "storage"
            and failure["rank"] == 0
            and "No space left" in failure["why"]
            and failure["what"] in err
        )
        assert run.logged_keys()[0] == "cache_clear", "every line that was written before is whole"
        (end,) = [
            line
            for line in map(
                json.loads, (run.run_dir.parent / "attempts.jsonl").read_text().splitlines()
            )
            if line["event"] == "end"
        ]
        assert end["kind"] == "storage"
    finally:
        subprocess.run(["umount", "-l", results], check=True)


def test_results_directory_that_cannot_be_written(tmp_path, data):
    """A file that is named is a wrong argument; one above the directory is found in writing."""
    (tmp_path / "file").write_text("a file stands where the directory should be")
    for folder, expected in (("file", 2), ("file/results", 17)):
        run = Started(tmp_path, data, environment={"LOGDIR": str(tmp_path / folder)})
        code, out, err = run.end()
        assert code == expected and str(tmp_path / folder) in err and out == ""
