"""Test series through run_and_time.sh: failures, a killed launcher, and two series at once.

Most tests use the toy of tests/helpers/toy.py under a stand-in for torchrun. One pair of runs is of
the real miniature.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from toy import TORCHRUN, alive, finish, launch, make_project, wait_until

from common.errors import ConfigError
from common.paths import ROOT
from common.records import ledger
from launch import run_command, series
from launch.diagnosis import read_result

# Reaches the miniature's target in two thirds of the sequences that its config needs.
QUICK = (
    "global_batch_size=4",
    "micro_batch_size=4",
    "opt_base_learning_rate=3e-3",
    "opt_learning_rate_warmup_steps=40",
)
# bytes: enough for the ledger and the reserve of an attempt, not for the log of the toy
SMALL_DISK = 70_000


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("with a blank"), torchrun=TORCHRUN)


class Running:
    """A series of the toy in `cwd`, in the background; attempts in `held` wait to be released."""

    def __init__(self, project, cwd, *arguments, held=(), shell="", **variables):
        self.cwd = cwd
        for attempt in held:
            (cwd / f"hold_{attempt}").write_text("")
        self.process = launch(
            project, cwd, *arguments, shell=shell, **({"TOY": "held"} | variables)
        )

    def lines(self, event):
        path = self.cwd / "out/toy/attempts.jsonl"
        found = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )
        return [line for line in found if line["event"] == event]

    def run_dir(self, attempt: int) -> Path:
        """Wait for both ranks of a waiting attempt and return its directory."""

        def started():
            assert self.process.poll() is None, self.process.communicate()
            folders = [
                self.cwd / "out/toy" / line["run"]
                for line in self.lines("start")
                if line["attempt"] == attempt
            ]
            return folders and all(
                (folders[-1] / f"pid_{rank}").is_file()
                and (folders[-1] / f"pid_{rank}").read_text()
                for rank in (0, 1)
            )

        wait_until(started, 60)
        return (
            self.cwd
            / "out/toy"
            / next(line["run"] for line in self.lines("start") if line["attempt"] == attempt)
        )

    def release(self, attempt: int) -> None:
        (self.cwd / f"hold_{attempt}").unlink()

    def limit_files(self, size: int) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def spoil_second_and_fifth(running: Running) -> None:
    """A rank of the second attempt is killed; the fifth, and nothing else, meets a full disk."""
    os.kill(int((running.run_dir(2) / "pid_1").read_text()), signal.SIGKILL)
    running.run_dir(4)
    running.limit_files(SMALL_DISK)  # inherited by what is started from now on: the fifth
    running.release(4)
    running.run_dir(5)
    running.limit_files(resource.RLIM_INFINITY)
    running.release(5)


def test_as_many_good_runs_as_asked_for_though_two_fail(project, tmp_path):
    running = Running(project, tmp_path, held=(2, 4, 5), NEXP="4")
    spoil_second_and_fifth(running)
    code, out, err = finish(running.process)
    assert code == 0, err
    starts, ends = running.lines("start"), running.lines("end")
    assert (
        [line["attempt"] for line in starts]
        == [line["attempt"] for line in ends]
        == list(range(1, 7))
    )
    assert {
        line["attempt"]: (line["exit_code"], line["kind"]) for line in ends if line["exit_code"]
    } == {
        2: (14, "rank_lost"),
        5: (17, "storage"),
    }
    assert len({line["seed"] for line in ends}) == 6 and max(line["seed"] for line in ends) > 2**24
    assert len({line["run"] for line in ends}) == 6 and len(
        {line["series"] for line in ends}
    ) == 1 == len(running.lines("closed"))
    for line in ends:
        assert (
            set(line) >= {"started", "reason", "minutes", "samples", "config", "modified", "commit"}
            and line["cache"] == "fadvise"
        )
        folder = tmp_path / "out/toy" / line["run"]
        assert (folder / "failure.json").is_file() == bool(
            line["exit_code"]
        ) and f"seed{line['seed']}" in folder.name
        assert (read_result(folder / "result.txt").status == "success") == (line["exit_code"] == 0)
        assert (line["minutes"] is None) == (line["attempt"] == 5), (
            "nobody was left to write run_stop: an empty field, no guess"
        )
    assert not list(tmp_path.rglob("result_*.txt")) and not list(tmp_path.rglob("*.lock")), (
        "no glob of a tool finds the failures"
    )
    assert (
        "6 attempts, 4 of 4 good, 2 failed" in err
        and "attempt  5  exit code 17 (storage)" in err
        and "attempts.jsonl" in err
    )
    assert out.count("STARTING TIMING RUN") == 6


def test_enough_is_enough(project, tmp_path):
    """Two failures with --max-failures 1 end the series with the first exit code.

    The series can be resumed.
    """
    running = Running(project, tmp_path, "--max-failures", "1", held=(1, 2, 3), NEXP="3")
    for attempt in (1, 3):
        os.kill(int((running.run_dir(attempt) / "pid_1").read_text()), signal.SIGKILL)
        if attempt == 1:
            running.run_dir(2)
            running.release(2)
    code, _, err = finish(running.process)
    assert code == 14 and "3 attempts, 1 of 3 good, 2 failed" in err and "--resume" in err
    assert [line["exit_code"] for line in running.lines("end")] == [
        14,
        0,
        14,
    ] and not running.lines("closed")
    code, _, err = finish(launch(project, tmp_path, "--resume", TOY="good"))
    assert code == 0 and "5 attempts, 3 of 3 good" in err, err


def test_a_launcher_that_is_killed_is_resumed(project, tmp_path):
    running = Running(project, tmp_path, held=(2,), NEXP="3")
    lost = running.run_dir(2)
    code, _, err = finish(launch(project, tmp_path, "--resume", TOY="good"))
    assert code == 2 and "still running" in err
    running.process.kill()
    running.process.communicate()
    ledger_before = (tmp_path / "out/toy/attempts.jsonl").read_bytes()
    for arguments, words in (
        (["--set", "max_samples=99"], "config was CPU_1x1.toml, now CPU_1x1+modified.toml"),
        ([], "NEXP was 3, now 2"),
    ):
        code, _, err = finish(
            launch(
                project, tmp_path, "--resume", *arguments, TOY="good", NEXP="" if arguments else "2"
            )
        )
        assert (
            code == 2
            and words in err
            and (tmp_path / "out/toy/attempts.jsonl").read_bytes() == ledger_before
        )
    log_of_the_lost = (lost / "result.txt").read_bytes()
    code, _, err = finish(launch(project, tmp_path, "--resume", TOY="good"))
    assert code == 0 and "4 attempts, 3 of 3 good, 1 failed" in err, err
    ends = running.lines("end")
    assert [(line["attempt"], line["kind"]) for line in ends] == [
        (1, "success"),
        (2, "lost"),
        (3, "success"),
        (4, "success"),
    ]
    assert len({line["seed"] for line in ends}) == 4 and len({line["series"] for line in ends}) == 1
    assert (tmp_path / "out/toy/attempts.jsonl").read_bytes().startswith(ledger_before), (
        "only ever appended to"
    )
    assert (lost / "result.txt").read_bytes().startswith(log_of_the_lost) and json.loads(
        (lost / "failure.json").read_text()
    )["kind"] == "lost"
    assert not alive(lost)
    code, _, err = finish(launch(project, tmp_path, "--resume", TOY="good"))
    assert code == 2 and "nothing to resume" in err
    code, _, err = finish(launch(project, tmp_path, "--resume", TOY="good", NEXP="4"))
    assert code == 0 and "5 attempts, 4 of 4 good, 1 failed" in err, "a larger NEXP adds runs"


def test_a_signal_ends_the_series(project, tmp_path):
    running = Running(project, tmp_path, held=(1,), NEXP="3")
    running.run_dir(1)
    running.process.send_signal(signal.SIGINT)
    code, _, err = finish(running.process)
    assert code == 130 and "1 attempt, 0 of 3 good" in err
    assert [(line["exit_code"], line["kind"]) for line in running.lines("end")] == [
        (130, "interrupted")
    ]


def test_two_series_in_one_place_do_not_mix(project, tmp_path):
    both = []
    for count in (
        1,
        2,
    ):  # the second when the first has made the data: what is being written is in the page cache
        both.append(Running(project, tmp_path, held=(1,), NEXP="2"))
        wait_until(lambda count=count: len(list(tmp_path.glob("out/toy/*/pid_1"))) == count, 60)
    both[0].release(1)
    for running in both:
        code, _, err = finish(running.process)
        assert code == 0 and "2 attempts, 2 of 2 good" in err, err
    ends = both[0].lines("end")
    for name in {line["series"] for line in ends}:
        assert [line["attempt"] for line in ends if line["series"] == name] == [1, 2]
    assert len({line["run"] for line in ends}) == 4 == len({line["seed"] for line in ends})


# --- names ----------------------------------------------------------------------------------------

# A clock that stands still for the names of directories.
SAME_SECOND = """
import time
strftime = time.strftime
def stopped(form, *when):
    return "20261122-120000" if form == "%Y%m%d-%H%M%S" else strftime(form, *when)
time.strftime = stopped
"""


def test_three_runs_of_one_second_and_seed_have_a_directory_each(tmp_path):
    project = make_project(tmp_path / "project", torchrun=TORCHRUN)
    (project / "common/__init__.py").write_text(SAME_SECOND)
    for _ in range(3):
        code, _, err = finish(launch(project, tmp_path, TOY="good", SEED="7"))
        assert code == 0, err
    names = [json.loads(line)["run"] for line in ledger_lines(tmp_path) if '"start"' in line]
    assert len(set(names)) == 3 and all((tmp_path / "out/toy" / name).is_dir() for name in names)


def test_names_are_in_utc_and_as_given(project, tmp_path):
    code, _, err = finish(launch(project, tmp_path, "--name", "lr_3", TOY="good", TZ="JST-9"))
    assert code == 0, err
    (start,) = [json.loads(line) for line in ledger_lines(tmp_path) if '"start"' in line]
    named = datetime.strptime(start["run"][:15], "%Y%m%d-%H%M%S")
    recorded = datetime.strptime(start["started"], ledger.TIME)
    assert abs((recorded - named).total_seconds()) < 60
    assert "_lr_3_seed" in start["run"]


def ledger_lines(cwd) -> list[str]:
    return (cwd / "out/toy/attempts.jsonl").read_text().splitlines()


# --- without a run --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 61, "two words"])
def test_a_name_that_no_directory_should_have_is_refused(name):
    with pytest.raises(ConfigError, match="--name"):
        run_command.parser("llama31_8b").parse_args([f"--name={name}"])


def test_what_can_be_requested():
    request = series.request_from
    assert request({}, None, False) == series.SeriesRequest(1, 0), "a single run is not repeated"
    assert request({"NEXP": "10"}, None, False) == series.SeriesRequest(10, 2)
    assert request({"NEXP": "10"}, 0, False) == series.SeriesRequest(10, 0)
    assert request({}, 3, False) == series.SeriesRequest(1, 3)
    assert request({"SEED": "7"}, None, False) == series.SeriesRequest(1, 0, 7)
    assert request({}, None, True) == series.SeriesRequest(0, 2, None, True), (
        "how many: the ledger knows"
    )


@pytest.mark.parametrize(
    ("environment", "max_failures", "resume"),
    [
        ({"NEXP": "0"}, None, False),
        ({"NEXP": "ten"}, None, False),
        ({"NEXP": "²"}, None, False),
        ({"SEED": "-1"}, None, False),
        ({"SEED": str(2**32)}, None, False),
        ({"SEED": "7", "NEXP": "3"}, None, False),
        ({"SEED": "7"}, 1, False),
        ({"SEED": "7"}, None, True),
    ],
)
def test_what_cannot_be_requested(environment, max_failures, resume):
    with pytest.raises(ConfigError):
        series.request_from(environment, max_failures, resume)


def test_seeds_are_drawn_anew_until_one_is_new(tmp_path, monkeypatch):
    record = ledger.SeriesRecord("s", 10, {}, {1: {"seed": 7}})
    drawn = iter([7, 7, 8])
    monkeypatch.setattr(
        series.secrets, "randbits", lambda bits: next(drawn) if bits == 32 else None
    )
    assert series.SeriesRunner(tmp_path, record, None).seed() == 8


def test_resume_says_everything_that_changed(tmp_path):
    record = ledger.SeriesRecord("s", 10, {"commit": "a", "gpus": "8 x MI355X", "config": "x"})
    with pytest.raises(ConfigError) as caught:
        series.resume_series(
            series.SeriesRunner(tmp_path, record, None),
            {"commit": "b", "gpus": "4 x H200", "config": "x"},
            series.SeriesRequest(0, 2),
        )
    assert (
        "commit" in caught.value.what
        and "gpus was" in caught.value.what
        and "config" not in caught.value.what
    )


def test_a_series_without_its_first_line_is_not_resumed(tmp_path):
    runner = series.SeriesRunner(tmp_path, ledger.SeriesRecord("s", 10), None)
    with pytest.raises(ConfigError, match=r"first line .* is damaged") as caught:
        series.resume_series(runner, {"commit": "b"}, series.SeriesRequest(0, 2))
    assert str(tmp_path / ledger.NAME) in caught.value.what


# --- the real thing -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_of_the_miniature_is_followed_by_a_good_one(tmp_path, miniature_data):
    """The first attempt loses its rank in training, and the second reaches the target.

    The series asks for one good run and allows one failure.
    """
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DATADIR": str(miniature_data),
        "LOGDIR": str(tmp_path / "results"),
        "NEXP": "1",
    }
    command = [
        str(ROOT / "run_and_time.sh"),
        "llama31_8b",
        "--device",
        "cpu",
        "--max-failures",
        "1",
    ]
    for setting in QUICK:
        command += ["--set", setting]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def heartbeat():
        beats = list(tmp_path.glob("results/llama31_8b/*/ranks/rank_0.heartbeat"))
        try:
            return json.loads(beats[0].read_text()) if beats else {"step": 0}
        except ValueError:
            return {"step": 0}

    deadline = time.monotonic() + 90
    while heartbeat()["step"] < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    os.kill(heartbeat()["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    lines = [
        json.loads(line)
        for line in (tmp_path / "results/llama31_8b/attempts.jsonl").read_text().splitlines()
    ]
    killed, good = [line for line in lines if line["event"] == "end"]
    assert (killed["exit_code"], killed["kind"], good["exit_code"], good["modified"]) == (
        14,
        "rank_lost",
        0,
        True,
    )
    assert killed["seed"] != good["seed"] and good["minutes"] > 0 and good["samples"] % 1024 == 0
    assert "2 attempts, 1 of 1 good, 1 failed" in err
