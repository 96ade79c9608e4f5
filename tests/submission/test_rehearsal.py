"""`package --rehearse`: the official tools accept the tree, and nobody can submit it."""

import errno
import json
import os
import shutil
import subprocess

import pytest
import synthetic_series as synthetic
from synthetic_run import LORA, PRETRAINING, find, records

from common.errors import CheckFailed, ConfigError, StorageError
from common.paths import ROOT
from launch.plan.command import main as plan
from llama2_70b_lora import rules as lora_rules
from submission import check, official_tools, package, rehearsal, score
from submission.log_rules import REHEARSAL_KEY
from submission.package_checks import PackageRequest

NAMES = [benchmark.rules.BENCHMARK for benchmark in (PRETRAINING, LORA)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A git repository that has the configs and nothing else."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "configs", folder / "configs")
    commit(folder)
    return folder


def commit(folder) -> None:
    """Make a git repository of the files in `folder`."""
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "configs"]):
        subprocess.run(["git", "-C", folder, *words], check=True)


def rehearse(project, out, *arguments) -> int:
    options = package.parser().parse_args(["--rehearse", "--out", str(out), *map(str, arguments)])
    return package.rehearse(options, project)


@pytest.fixture(scope="module")
def invented(project, tmp_path_factory):
    """A rehearsal of both benchmarks without any series: its folder and exit code."""
    out = tmp_path_factory.mktemp("rehearsal") / "out"
    return out, rehearse(project, out, "--org", "Acme")


def test_the_official_tools_accept_invented_series(invented):
    out, code = invented
    assert code == 0
    verdict = json.loads(next(out.glob("verdict_*.json")).read_text())
    assert verdict["passed"] and verdict["rehearsal"] and set(verdict["scores_minutes"]) == {*NAMES}
    for name in NAMES:
        assert len(list(out.glob(f"*/results/*/{name}/result_?.txt"))) == 10


def test_every_part_of_the_tree_is_marked(invented):
    org_dir = invented[0] / rehearsal.marked("Acme")
    assert (org_dir / rehearsal.NOTICE).is_file()
    (system,) = (org_dir / "systems").iterdir()
    description = json.loads(system.read_text())
    for name in (system.name, description["system_name"], description["submitter"]):
        assert name.startswith(rehearsal.MARK)
    logs = list(org_dir.glob("results/*/*/result_?.txt"))
    assert len(logs) == 20
    for path in logs:
        assert records(path)[find(records(path), REHEARSAL_KEY)]["value"] is True


def test_without_a_verdict_nothing_is_left_behind(project, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(official_tools, "package", fail)
    with pytest.raises(StorageError):
        rehearse(project, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_names_engines_variables_and_host_settings(invented, name):
    (readme,) = invented[0].glob(f"*/benchmarks/{name}/implementations/REHEARSAL-*/README.md")
    script = readme.with_name("run_and_time.sh")
    assert "| `attention` | `sdpa` |" in readme.read_text()
    assert "| `NCCL_NVLS_ENABLE` | `0` |" in readme.read_text()
    assert "| `rehearsal` | `good` |" in readme.read_text()
    assert "export NCCL_NVLS_ENABLE=0\n" in script.read_text()
    assert "export ATTENTION_ENGINE=sdpa\n" in script.read_text()


def test_check_refuses_a_log_of_a_rehearsal(invented, capsys):
    (log,) = invented[0].glob(f"*/results/*/{NAMES[0]}/result_0.txt")
    assert check.main([str(log)]) == 20
    assert REHEARSAL_KEY in capsys.readouterr().out


def test_score_says_that_the_logs_of_a_rehearsal_are_invented(invented, capsys):
    (log,) = invented[0].glob(f"*/results/*/{NAMES[0]}/result_0.txt")
    score.main([str(log.parent)])
    assert "10 logs INVENTED" in capsys.readouterr().out


def test_check_and_score_take_the_whole_tree(invented, capsys):
    """The tree also holds reports of the official tools, such as result_summarizer_6.1.0.txt."""
    assert list(invented[0].glob("result_*.txt"))
    assert check.main([str(invented[0])]) == 20
    assert f"{10 * len(NAMES)} logs" in capsys.readouterr().out
    score.main([str(invented[0])])
    out, err = capsys.readouterr()
    assert out.count("10 logs INVENTED") == len(NAMES) and not err


@pytest.mark.parametrize("org", [rehearsal.marked("Acme"), rehearsal.marked("Acme").lower()])
def test_package_refuses_the_name_of_a_rehearsal(invented, org, tmp_path):
    (system,) = invented[0].glob("*/systems/*.json")
    with pytest.raises(ConfigError, match="--org"):
        package.package(PackageRequest({NAMES[0]: tmp_path}, system, tmp_path / "out", org))


def test_package_refuses_the_logs_of_a_rehearsal_under_another_name(project, tmp_path):
    system = rehearsal.write_description(tmp_path, None, "Acme")
    description = json.loads(system.read_text())
    rehearsal.write_series(
        tmp_path / NAMES[0],
        NAMES[0],
        rehearsal.attempts_like(None),
        config=rehearsal.config_file(project, NAMES[0], description),
        org="Acme",
        system=system,
        commit=synthetic.COMMIT,
    )
    request = PackageRequest({NAMES[0]: tmp_path}, system, tmp_path / "out", "Acme", root=project)
    with pytest.raises(CheckFailed, match="rehearsal"):
        package.package(request)
    assert not (tmp_path / "out").exists()


def test_a_name_that_no_log_may_have_is_refused(project, tmp_path):
    """RunLog writes the invented logs, too. The RCP checker would misread this name."""
    with pytest.raises(ConfigError) as caught:
        rehearse(project, tmp_path / "out", "--benchmark", NAMES[0], "--org", "eval_error")
    assert "eval_error" in caught.value.what and "RCP" in caught.value.why
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_series_of_miniatures_gives_seeds_and_outcomes(project, tmp_path, capsys):
    attempts = [*synthetic.plans([2, 3]), *synthetic.plans([4], fails="missed")]
    logs = tmp_path / "logs"
    synthetic.write(logs, LORA, attempts, rules=lora_rules.MINIATURE)
    system = tmp_path / f"{synthetic.SYSTEM}.json"
    system.write_text(json.dumps(synthetic.DESCRIPTION | {"status": "Available cloud"}))
    out = tmp_path / "out"
    assert rehearse(project, out, "--benchmark", f"{NAMES[1]}={logs}", "--system", system) == 0
    results = [records(path) for path in sorted(out.glob("*/results/*/*/result_?.txt"))]
    seeds = [log[find(log, "seed")]["value"] for log in results]
    assert seeds[:3] == [plan.seed for plan in attempts] and len(set(seeds)) == 10
    statuses = [log[find(log, "run_stop")]["metadata"]["status"] for log in results]
    assert statuses == ["success"] * 2 + ["aborted"] + ["success"] * 7
    assert {log[find(log, "submission_status")]["value"] for log in results} == {"cloud"}


@pytest.mark.parametrize(
    ("model", "nodes", "word"), [("Voodoo 2", "1", "Voodoo"), ("NVIDIA H200", "77", "77x8")]
)
def test_a_system_without_a_config_is_refused(model, nodes, word, project, tmp_path):
    description = synthetic.DESCRIPTION | {
        "accelerator_model_name": model,
        "number_of_nodes": nodes,
    }
    system = tmp_path / "system.json"
    system.write_text(json.dumps(description))
    with pytest.raises(ConfigError) as caught:
        rehearse(project, tmp_path / "out", "--benchmark", NAMES[0], "--system", system)
    assert word in caught.value.what
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_derived_config_of_several_nodes_can_be_packaged_once_it_is_written(
    tmp_path, monkeypatch
):
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "configs", folder / "configs")
    monkeypatch.setenv("DGXSYSTEM", "MI355X_2x8")
    for name in NAMES:
        assert plan(name, ["--write", str(folder / "configs" / name / "MI355X_2x8.toml")]) == 0
    commit(folder)
    description = synthetic.DESCRIPTION | {
        "accelerator_model_name": "AMD Instinct MI355X",
        "number_of_nodes": "2",
        "accelerators_per_node": "8",
    }
    system = tmp_path / "MI355X_2x8_pytorch.json"
    system.write_text(json.dumps(description))
    out = tmp_path / "out"
    assert rehearse(folder, out, "--org", "Acme", "--system", system) == 0
    verdict = json.loads(next(out.glob("verdict_*.json")).read_text())
    assert verdict["passed"] and set(verdict["scores_minutes"]) == {*NAMES}
    for name in NAMES:
        log = records(next(out.glob(f"*/results/*/{name}/result_0.txt")))
        assert log[find(log, "config_filename")]["value"] == "MI355X_2x8.toml"
        assert list(out.glob(f"**/configs/{name}/MI355X_2x8.toml"))


def test_the_command_needs_only_a_directory():
    options = package.parser().parse_args(["--rehearse", "--out", "x"])
    assert options.rehearse
    with pytest.raises(ConfigError) as caught:
        package.parser().parse_args(["--out", "x"])
    for name in ("--benchmark", "--system", "--org"):
        assert name in caught.value.what
