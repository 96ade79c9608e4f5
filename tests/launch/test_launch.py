"""The launcher: what it chooses, how it watches and stops processes, whom it blames, and its exit codes. No torch needed here.

The runs from end to end use a copy of the launcher beside a toy benchmark whose trainer misbehaves as told, under real torchrun.
"""

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from toy import alive, door, finish, make_project, wait_until

from common import hardware
from common.config import load
from common.errors import ConfigError, Hang, PreflightError, RankLost, RunError, StorageError, TargetMissed, write_rank_record
from common.gpu_kinds import GIB
from common.hardware import Device, Probe
from launch import environment, page_cache, rundir, screen, series, supervise, verdict
from launch.choose import benchmarks, choose
from launch.supervise import HangLimits, HangWatch
from llama31_8b.rules import CLOSED, MINIATURE, Config

ROOT = Path(__file__).parents[2]
H200X4 = Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143771 * 2**20),) * 4, "580.95.05")
MI300X = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304),) * 8)
NOTHING = Probe("none")


# --- choosing ---------------------------------------------------------------------------------------------------------


def wish(config=None, set=(), device=None):
    return argparse.Namespace(config=config, set=list(set), device=device)


def pick(found, environment=None, **options):
    return choose(ROOT, "llama31_8b", wish(**options), environment or {}, found)


def test_benchmarks_are_found():
    assert "llama31_8b" in benchmarks(ROOT)


def test_the_gpu_decides():
    chosen = pick(H200X4)
    assert (chosen.log_name, chosen.device, chosen.notes) == ("H200_1x4.toml", "cuda", ())
    assert "4 x H200" in chosen.reason and "NVIDIA H200" in chosen.found
    assert pick(MI300X).log_name == "MI300X_1x8.toml"
    assert pick(H200X4, {"DGXNGPU": "2"}).config.gpus_per_node == 2


def test_no_gpu_is_the_miniature():
    for chosen in (pick(NOTHING), pick(H200X4, device="cpu"), pick(H200X4, {"DGXSYSTEM": "CPU_1x1"})):
        assert (chosen.log_name, chosen.device, chosen.config.miniature) == ("CPU_1x1.toml", "cpu", True)


@pytest.mark.parametrize(
    ("found", "environment", "words"),
    [
        (H200X4, {"DGXSYSTEM": "MI300X_1x8"}, "the config is for MI300X, this is H200"),
        (H200X4, {"DGXSYSTEM": "H200_1x8"}, "needs 8 GPUs"),
        (H200X4, {"DGXSYSTEM": "H200"}, "no config H200"),
        (H200X4, {"DGXNGPU": "3"}, "no config H200_1x3"),
        (H200X4, {"DGXNGPU": "two"}, "DGXNGPU=two"),
        (H200X4, {"DGXNGPU": "2", "DGXSYSTEM": "H200_1x4"}, "DGXNGPU=2"),
        (NOTHING, {"DGXSYSTEM": "H200_1x4"}, "this is CPU"),
    ],
)
def test_what_does_not_fit_is_a_config_error(found, environment, words):
    with pytest.raises(ConfigError, match=words):
        pick(found, environment)


def test_a_wish_for_cuda_without_gpu():
    with pytest.raises(PreflightError, match="no GPU is visible"):
        pick(NOTHING, device="cuda")


def test_forced_and_changed_configs_say_so():
    forced = pick(H200X4, config=str(ROOT / "configs/llama31_8b/MI300X_1x8.toml"), set=["gpus_per_node=4"])
    assert forced.log_name == "MI300X_1x8+forced+modified.toml"
    assert len(forced.notes) == 2 and all("not for submission" in note for note in forced.notes)
    # The RCP checker would take these words in config_filename for events.
    assert "global_batch_size" not in pick(H200X4, set=["global_batch_size=32"]).log_name
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        pick(H200X4, set=["precision"])
    with pytest.raises(ConfigError, match="unknown key"):
        pick(H200X4, set=["precison=fp32"])


def test_what_is_wished_for():
    wish = series.wish
    assert wish({}, None, False) == series.Wish(1, 0), "a single run is not repeated"
    assert wish({"NEXP": "10"}, None, False) == series.Wish(10, 2)
    assert wish({"NEXP": "10"}, 0, False) == series.Wish(10, 0)
    assert wish({}, 3, False) == series.Wish(1, 3)
    assert wish({"SEED": "7"}, None, False) == series.Wish(1, 0, 7)
    assert wish({}, None, True) == series.Wish(0, 2, None, True), "how many: the ledger knows"


@pytest.mark.parametrize(
    ("environment", "max_failures", "resume"),
    [
        ({"NEXP": "0"}, None, False),
        ({"NEXP": "ten"}, None, False),
        ({"SEED": "-1"}, None, False),
        ({"SEED": str(2**32)}, None, False),
        ({"SEED": "7", "NEXP": "3"}, None, False),
        ({"SEED": "7"}, 1, False),
        ({"SEED": "7"}, None, True),
        ({}, -1, False),
    ],
)
def test_what_cannot_be_wished_for(environment, max_failures, resume):
    with pytest.raises(ConfigError):
        series.wish(environment, max_failures, resume)


def test_a_config_that_only_bears_our_name_is_modified(tmp_path):
    ours = ROOT / "configs/llama31_8b/H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text())
    assert pick(H200X4, config=str(tmp_path / ours.name)).log_name == "H200_1x4.toml"
    (tmp_path / ours.name).write_text(ours.read_text() + "# changed\n")
    changed = pick(H200X4, config=str(tmp_path / ours.name))
    assert changed.log_name == "H200_1x4+modified.toml" and "differs" in changed.notes[0]


def test_header():
    lines = screen.header("llama31_8b", pick(H200X4), CLOSED, (Path("/data"), Path("/results")))
    assert lines[0].startswith("benchmark  llama31_8b")
    text = "\n".join(lines)
    assert all(words in text for words in ("4 x H200", "H200_1x4.toml", "3.3", "12,288", "161,109", "/data", "/results"))
    lines = screen.header("llama31_8b", pick(NOTHING), MINIATURE, None)
    assert lines[0].startswith("No GPU found. THIS IS THE MINIATURE") and "NOT a benchmark result" in lines[0]
    assert "synthetic" in lines[-1]


# --- the run's directory ----------------------------------------------------------------------------------------------


def test_run_directories_are_never_reused(tmp_path):
    made = {rundir.create(tmp_path, "toy", "CPU_1x1", 7) for _ in range(3)}
    assert len(made) == 3 and all((path / "ranks").is_dir() for path in made)


def test_unwritable_results_are_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        rundir.create(tmp_path / "file", "toy", "CPU_1x1", 7)
    assert caught.value.exit_code == 17


def test_facts(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    config = load(ROOT / "configs/llama31_8b/H200_1x4.toml", Config)
    rundir.write_facts(tmp_path, config, rundir.versions(ROOT, H200X4))
    assert load(tmp_path / "config.toml", Config) == config
    facts = json.loads((tmp_path / "versions.json").read_text())
    assert facts["driver"] == "580.95.05" and len(facts["gpus"]) == 4 and "torch" in facts["packages"] and "dirty" in facts
    assert "hf_secret" not in (tmp_path / "versions.json").read_text()


def test_page_cache(tmp_path, monkeypatch):
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"x" * 100_000)
    assert page_cache.resident(path) > 0
    assert page_cache.clear([path]) == "fadvise" and page_cache.resident(path) == 0
    assert path.read_bytes() == b"x" * 100_000


def test_data_that_stays_in_the_page_cache_is_not_called_cleared(tmp_path, monkeypatch):
    """A mapped page stays, whatever the kernel is told; and this test does not empty the page cache of the whole machine."""
    monkeypatch.setattr(page_cache.Path, "write_text", lambda self, text: (_ for _ in ()).throw(PermissionError()))
    with (tmp_path / "tokens.bin").open("w+b") as file:
        file.write(b"x" * 100_000)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[0] == ord("x")
            assert page_cache.clear([tmp_path / "tokens.bin"]) == "no"
    assert page_cache.clear([tmp_path / "absent"]) == "no"


# --- the Python to use ------------------------------------------------------------------------------------------------


def test_requirements_are_read_with_their_includes():
    names = [name for name, _ in environment.requirements(ROOT / "requirements-test.txt")]
    assert {"torch", "numpy", "mlperf-logging", "pytest", "megatron-core"} <= set(names)
    assert all("==" in line for _, line in environment.requirements(ROOT / "requirements-test.txt"))


def test_a_complete_python_is_used_as_it_is(tmp_path):
    (tmp_path / "r.txt").write_text("pytest==1.0  # any version does\n")
    assert environment.python_for(tmp_path / "r.txt", tmp_path / ".venv") == Path(sys.executable)
    assert not (tmp_path / ".venv").exists()


def test_old_torch_does_not_do(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: True)
    for version, good in (("2.8.0", False), ("2.9.0a0+git", True), ("2.13.0+cpu", True)):
        monkeypatch.setattr(environment.importlib.metadata, "version", lambda name, version=version: version)
        assert environment._has("torch") == good


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip and venv; holds the commands that were run, and the exit code that pip shall have."""

    fake = argparse.Namespace(commands=[], code=0)

    def create(folder, with_pip):
        for name in ("bin", "lib/python3.11/site-packages"):
            (folder / name).mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(environment.venv, "create", create)
    monkeypatch.setattr(environment, "_answers", lambda url: False)
    monkeypatch.setattr(
        environment.subprocess, "run", lambda command, **_: fake.commands.append(command) or argparse.Namespace(returncode=fake.code)
    )
    return fake


def test_environment_is_made_once_and_repaired(tmp_path, pip):
    wanted, folder = tmp_path / "r.txt", tmp_path / ".venv"
    wanted.write_text("no-such-package==1.0\n")
    pip.code = 1
    with pytest.raises(SystemExit, match="pip could not install"):
        environment.python_for(wanted, folder)
    (folder / "left-over").write_text("")
    pip.code = 0
    assert environment.python_for(wanted, folder) == folder / "bin" / "python"
    assert not (folder / "left-over").exists(), "half made: made anew"
    assert pip.commands[-1][-1] == "no-such-package==1.0"
    count = len(pip.commands)
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count, "made once"
    wanted.write_text("no-such-package==2.0\n")
    environment.python_for(wanted, folder)
    assert len(pip.commands) == count + 1, "new versions are installed"


def test_a_foreign_environment_is_not_touched(tmp_path, pip):
    (tmp_path / "r.txt").write_text("no-such-package==1.0\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("")
    with pytest.raises(SystemExit, match="not made by this script"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert (tmp_path / ".venv" / "precious").exists() and not pip.commands


def test_no_cuda_torch_on_an_amd_machine(tmp_path, pip, monkeypatch):
    (tmp_path / "r.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(environment, "_has", lambda name: False)
    monkeypatch.setattr(Path, "exists", lambda self: "kfd" in str(self))
    with pytest.raises(SystemExit, match="ROCm"):
        environment.python_for(tmp_path / "r.txt", tmp_path / ".venv")
    assert not pip.commands


# --- the verdict ------------------------------------------------------------------------------------------------------


def mllog(key, time_ms, **metadata):
    return ":::MLLOG " + json.dumps({"key": key, "time_ms": time_ms, "value": None, "metadata": metadata}) + "\n"


def test_result_is_read_from_the_log(tmp_path):
    log = tmp_path / "result.txt"
    assert verdict.read_result(log).status == ""
    log.write_text(mllog("run_start", 1000) + "noise\n:::MLLOG {broken\n")
    assert verdict.read_result(log).seconds is None
    log.write_text(mllog("run_start", 1000) + mllog("run_stop", 61000, status="success", samples_count=48))
    result = verdict.read_result(log)
    assert (result.seconds, result.status, result.samples) == (60.0, "success", 48)


def exits(run_dir, *entries):
    listed = [{"rank": rank, "pid": 100 + rank, "exit_code": code, "time": 10} for rank, code in entries]
    (run_dir / "torchrun.json").write_text(json.dumps(listed))


def test_the_earliest_failure_counts_and_not_its_victims(tmp_path):
    write_rank_record(tmp_path, 0, "failed", RankLost("peer is gone"), secondary=True, time=1.0)
    write_rank_record(tmp_path, 2, "failed", TargetMissed("too slow", "why", "do"), step=5, time=3.0)
    write_rank_record(tmp_path, 1, "failed", RunError("boom"), step=4, time=2.0)
    error, facts = verdict.diagnose(tmp_path, 4)
    assert (error.what, error.exit_code, facts["step"]) == ("rank 1: boom", 1, 4)
    verdict.write_failure(tmp_path, error, facts)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert set(failure) == {"kind", "exit_code", "what", "why", "do", "rank", "step", "time"} and failure["rank"] == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [(-9, 14, "SIGKILL"), (-11, 14, "SIGSEGV"), (0, 14, "exit code 0"), (1, 1, "exit code 1"), (12, 12, "12")],
)
def test_a_rank_without_a_record_is_guilty(tmp_path, code, exit_code, words):
    write_rank_record(tmp_path, 0, "failed", RankLost("peer is gone"), secondary=True)
    exits(tmp_path, (2, -15), (1, code), (0, 14))
    error, facts = verdict.diagnose(tmp_path, 3)
    assert error.exit_code == exit_code and facts["rank"] == 1
    assert "rank 1 (process 101)" in error.what and words in error.what + error.why


def test_a_rank_that_ends_early_is_guilty(tmp_path):
    write_rank_record(tmp_path, 0, "failed", RankLost("peer is gone"), secondary=True, time=2.0)
    write_rank_record(tmp_path, 1, "done", step=3, time=1.0)
    error, facts = verdict.diagnose(tmp_path, 2)
    assert (error.exit_code, facts["rank"]) == (14, 1) and "as if done at step 3" in error.what


def test_nothing_known_is_said_so(tmp_path):
    for rank in (0, 1):
        write_rank_record(tmp_path, rank, "done")
    error, _ = verdict.diagnose(tmp_path, 2)
    assert (error.kind, error.exit_code) == ("internal", 1)


# --- supervision ------------------------------------------------------------------------------------------------------

LIMITS = HangLimits(startup_s=8.0, step_s=0.6)


def start(tmp_path, script, watch=None, ranks=1, **options):
    """Supervise a parent that starts `ranks` copies of `script` (its argument: the rank) in sessions of their own, as torchrun does."""
    (tmp_path / "ranks").mkdir(exist_ok=True)
    prelude = f"""
        import faulthandler, json, os, signal, sys, time
        rank, folder = int(sys.argv[1]), {str(tmp_path)!r}
        faulthandler.register(signal.SIGUSR1, open(f"{{folder}}/ranks/rank_{{rank}}.stack", "w"))
        def beat(step, phase="train"):
            record = dict(rank=rank, pid=os.getpid(), step=step, phase=phase, time=time.time())
            open(f"{{folder}}/ranks/rank_{{rank}}.heartbeat", "w").write(json.dumps(record))
    """
    (tmp_path / "rank.py").write_text(textwrap.dedent(prelude) + textwrap.dedent(script))
    parent = f"""
        import subprocess, sys
        children = [subprocess.Popen([sys.executable, {str(tmp_path / "rank.py")!r}, str(r)], start_new_session=True) for r in range({ranks})]
        sys.exit(max(abs(child.wait()) for child in children))
    """
    (tmp_path / "parent.py").write_text(textwrap.dedent(parent))
    return supervise.supervise([sys.executable, str(tmp_path / "parent.py")], dict(os.environ), watch, poll_s=0.05, **options)


def test_end_by_itself(tmp_path):
    assert start(tmp_path, "sys.exit(3 * rank)", ranks=2) == supervise.Ending(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_and_stubborn_ranks_are_killed(tmp_path, number):
    script = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill({os.getpid()}, {int(number)})
        time.sleep(60)
    """
    began = time.monotonic()
    ending = start(tmp_path, script, grace_s=0.5)
    assert ending.signal_number == number
    assert time.monotonic() - began < 8 and not alive(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stopped_rank_is_named(tmp_path):
    script = """
        for step in range(1, 3 if rank == 1 else 4):
            beat(step)
            time.sleep(0.02)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        def wait_for_the_others():
            time.sleep(60)
        wait_for_the_others()
    """
    ending = start(tmp_path, script, HangWatch(tmp_path / "ranks", 3, LIMITS), ranks=3)
    assert ending.hang and ending.hang.exit_code == 13
    assert ending.guilty["rank"] == 1 and "SIGSTOP" in ending.hang.why
    assert "wait_for_the_others" in (tmp_path / "ranks" / "rank_0.stack").read_text()
    assert not alive(tmp_path)


def test_the_rank_furthest_behind_is_named(tmp_path):
    script = """
        for step in range(1, 3 if rank == 0 else 5):
            beat(step)
        time.sleep(60)
    """
    ending = start(tmp_path, script, HangWatch(tmp_path / "ranks", 2, LIMITS), ranks=2)
    assert isinstance(ending.hang, Hang) and ending.guilty["rank"] == 0 and "step 2" in ending.hang.why
    assert not alive(tmp_path)


def test_hang_limits(tmp_path):
    now = [0.0]
    watch = HangWatch(tmp_path, 2, HangLimits(startup_s=100, step_s=10), clock=lambda: now[0])

    def beat(rank, step):
        (tmp_path / f"rank_{rank}.heartbeat").write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "step": step, "phase": "p", "time": 0})
        )
        os.utime(tmp_path / f"rank_{rank}.heartbeat", ns=(int(now[0] * 1e9), int(now[0] * 1e9) + step))

    now[0] = 99
    assert not watch.look(), "nobody has reported yet: the limit of the start holds"
    now[0] = 101
    assert watch.look() and "never reported" in watch.explain()[0].why
    beat(0, 1)
    now[0] = 150
    assert not watch.look(), "rank 1 is still starting"
    beat(1, 1)
    assert not watch.look()
    now[0] = 159
    assert not watch.look()
    now[0] = 161
    assert watch.look()
    beat(0, 2)
    assert not watch.look()
    (tmp_path / "rank_0.heartbeat").write_text("")  # caught while it is being written
    assert not watch.look() and watch.beats[0]["step"] == 2


# --- from end to end --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("with a blank"))


def only_run(cwd):
    (run_dir,) = [path for path in (cwd / "out" / "toy").iterdir() if path.is_dir()]
    return run_dir


def test_a_good_run(project, tmp_path):
    code, out, err = finish(door(project, tmp_path, TOY="good", MLPERF_SUBMISSION_ORG="Us", SEED="5"))
    assert code == 0, err
    other = [line for line in out.splitlines() if not line.startswith(":::MLLOG")]
    assert [line.partition(" AT ")[0].partition(",,")[0] for line in other] == ["STARTING TIMING RUN", "ENDING TIMING RUN", "RESULT,TOY"]
    assert ",Us,20" in other[2]
    assert err.startswith("No GPU found. THIS IS THE MINIATURE") and "target reached with 32 sequences" in err
    assert err.count("progress line") == 2 and "prepared" in err
    run_dir = only_run(tmp_path)
    assert "seed5" in run_dir.name and not (run_dir / "failure.json").exists()
    assert {"config.toml", "versions.json", "result.txt", "report.html", "check.txt"} <= {path.name for path in run_dir.iterdir()}
    assert "CPU_1x1.toml" in out


def test_a_killed_rank(project, tmp_path):
    code, out, err = finish(door(project, tmp_path, TOY="kill"))
    failure = json.loads((only_run(tmp_path) / "failure.json").read_text())
    assert (code, failure["kind"], failure["rank"]) == (14, "rank_lost", 1)
    assert "error: rank 1 (process" in err and "Traceback" not in err and "FAILED" not in err
    assert "RESULT" not in out or "aborted" in out


def test_findings_are_no_success(project, tmp_path):
    code, _, err = finish(door(project, tmp_path, TOY="good", FINDINGS="20"))
    assert code == 20 and "one finding" in err
    end = json.loads((tmp_path / "out/toy/attempts.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["exit_code"], end["kind"], end["samples"]) == ("end", 20, "check_failed", 32)


@pytest.mark.parametrize("verb", ["check", "report", "score", "describe", "package"])
def test_verbs_of_submission_get_the_rest_of_the_line_and_no_torch(project, tmp_path, verb):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    (project / "submission/score.py").write_text("import sys; print('score', sys.argv[1:])")
    for name in ("describe", "package"):
        (project / f"submission/{name}.py").write_text(f"import sys; print({name!r}, sys.argv[1:]); sys.exit(20)")
    code, out, err = finish(door(project, tmp_path, verb, str(tmp_path), "--some", "option", PYTHONPATH=str(tmp_path)))
    wanted = {"check": (0, "one finding"), "report": (0, ""), "score": (0, f"score ['{tmp_path}', '--some', 'option']")}
    assert (code, out.strip()) == wanted.get(verb, (20, f"{verb} ['{tmp_path}', '--some', 'option']")), err


def test_killing_the_launcher_leaves_nothing_behind(project, tmp_path):
    process = door(project, tmp_path, TOY="wait")
    wait_until(lambda: list(tmp_path.glob("out/toy/*/waiting")))
    process.kill()
    process.communicate()
    run_dir = only_run(tmp_path)
    wait_until(lambda: not alive(run_dir))
    assert verdict.read_result(run_dir / "result.txt").status == "aborted"


def test_sigterm_to_the_launcher(project, tmp_path):
    process = door(project, tmp_path, TOY="wait")
    wait_until(lambda: list(tmp_path.glob("out/toy/*/waiting")))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    run_dir = only_run(tmp_path)
    assert code == 143 and time.monotonic() - began < 10
    assert json.loads((run_dir / "failure.json").read_text())["kind"] == "interrupted" and "stopped by signal" in err
    assert verdict.read_result(run_dir / "result.txt").status == "aborted"
    assert not alive(run_dir)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["dance"], 2, "run, prepare, bench, check"),
        (["--set", "micro_batch_size=3", "--print"], 2, "not a multiple"),
        (["--config", "absent.toml"], 2, "no such config"),
        (["--device", "cuda"], 18, "no GPU is visible"),
        (["--set", "miniature=false"], 15, "data files are missing"),
        (["run", "--steps", "3"], 2, "unrecognized"),
    ],
)
def test_errors_before_anything_starts(project, tmp_path, arguments, code, words):
    seen, out, err = finish(door(project, tmp_path, *arguments))
    assert (seen, out) == (code, "") and words in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_unknown_benchmark_lists_the_known(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for arguments in (["gpt5"], []):
        answer = subprocess.run([sys.executable, "-m", "launch", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert answer.returncode == 2 and "llama31_8b" in answer.stderr and not answer.stdout


def test_print_shows_the_command_and_starts_nothing(project, tmp_path):
    code, out, _ = finish(door(project, tmp_path, "bench", "--print", "--steps", "5", "--set", "micro_batch_size=4"))
    assert code == 0 and not (tmp_path / "out").exists()
    assert out.endswith("-m toy.train --bench --config DIR/CPU_1x1+modified.toml --device cpu --steps 5\n")
    assert "-m launch.torchrun DIR --standalone --nnodes 1 --nproc-per-node 2" in out


def test_hardware_of_this_machine_is_readable():
    assert hardware.probe({"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}).vendor in ("none", "amd")
