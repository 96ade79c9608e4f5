"""Test packaging: the official tools accept the result, and invalid series are refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import synthetic_run
import synthetic_series as synthetic
from log_dialects import dated
from made_once import made_once
from synthetic_run import LORA, PRETRAINING

from common import engines
from common.errors import CheckFailed, ConfigError, StorageError
from common.records.ledger import SeriesRecord
from common.records.mlperf_log import TOKEN
from common.training.mllog import EMULATED_KEY, RunLog
from submission import (
    compliance_checker,
    describe,
    forbidden_files,
    implementation,
    official_tools,
    package,
    package_checks,
    score,
)
from submission.findings import Finding
from submission.package_checks import PackageRequest
from submission.prerequisites import NAME
from submission.run import Run
from submission.series import TenRuns, read_series, ten_runs

ROOT = synthetic.ROOT
NAMES = [benchmark.rules.BENCHMARK for benchmark in (PRETRAINING, LORA)]


def git(folder, *arguments) -> str:
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=T",
        "-c",
        "user.email=t@example.org",
        *arguments,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(folder) -> str:
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "a state of the project")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A git repository of the current project, with files that must not be submitted."""
    return made_once(tmp_path_factory, "project", make_project)


def make_project(folder):
    junk = shutil.ignore_patterns("__pycache__", "*.pyc")
    for path in ROOT.iterdir():
        if path.is_dir() and (path / "__init__.py").is_file():
            shutil.copytree(path, folder / path.name, ignore=junk)
        elif path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("__pycache__/\n")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_x.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "remote", "add", "origin", "https://me:secret@example.org/Us/code.git")
    commit_all(folder)
    (folder / "common" / "__pycache__").mkdir()
    (folder / "common" / "__pycache__" / "x.pyc").write_text("")
    (folder / "common" / "notes.txt").write_text("not in the commit")


# In versions.json when the clock starts. The paths, the address and the token must stay private.
RAN = {
    "engines": {"attention": "transformer_engine 2.17.0", "products": "torch", "swiglu": "kernel"},
    "variables": {
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "NCCL_ALGO": "Ring;allreduce:tree 'x' $HOME",
        "MATMUL_ENGINE": "torch",
        "NCCL_TUNER_PLUGIN": "/home/jane/private.so",
        "NCCL_COMM_ID": "10.77.0.1:29500",
        "TRITON_CACHE_DIR": "/home/jane/private",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NVTE_TOKEN": "private",
    },
    "system_tuning": {"governor": "good", "swappiness": "could be better"},
}


def plans(benchmark, project, **changes):
    evaluations = synthetic.evaluations_near_reference(benchmark)
    commit = git(project, "rev-parse", "HEAD")
    return synthetic.plans(evaluations, changes={"commit": commit, **RAN}, **changes)


def described(folder, **changes) -> Path:
    path = folder / f"{synthetic.SYSTEM}.json"
    path.write_text(json.dumps(synthetic.DESCRIPTION | changes))
    return path


@pytest.fixture(scope="module")
def submission(project, tmp_path_factory):
    """Request and exit code of a package of both benchmarks, ten good runs each, for 6.1.0."""

    def make(folder):
        good = folder / "good"
        for benchmark in (PRETRAINING, LORA):
            synthetic.write(good / "logs", benchmark, plans(benchmark, project))
        described(good)
        code = package.package(both_benchmarks(good, project))
        (folder / "exit_code.txt").write_text(str(code))

    folder = made_once(tmp_path_factory, "submission", make)
    request = both_benchmarks(folder / "good", project)
    return request, int((folder / "exit_code.txt").read_text())


def both_benchmarks(folder, project) -> PackageRequest:
    sources = {
        PRETRAINING.rules.BENCHMARK: folder / "logs" / PRETRAINING.rules.BENCHMARK,
        LORA.rules.BENCHMARK: folder / "logs",
    }
    description = folder / f"{synthetic.SYSTEM}.json"
    return PackageRequest(sources, description, folder / "out", synthetic.ORG, root=project)


@pytest.fixture
def org_dir(submission):
    return submission[0].out / synthetic.ORG


def test_official_tools_accept_both_benchmarks_for_all_rulesets(submission, capsys):
    request, code = submission
    assert code == 0
    for ruleset in ("5.1.0", "6.0.0"):
        assert package.judge(replace(request, ruleset=ruleset)) == 0
    for ruleset in official_tools.CLOSED_RULESETS:
        text = (request.out / f"package_checker_{ruleset}.txt").read_text()
        assert (
            text.count("RCP Test Passed") == 2
            and "PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !" in text
        )
        verdict = json.loads((request.out / f"verdict_{ruleset}.json").read_text())
        assert verdict["passed"] and set(verdict["scores_minutes"]) == set(NAMES)


def test_our_score_of_the_window_is_the_official_one(submission):
    request, _ = submission
    scores = json.loads((request.out / "verdict_6.1.0.json").read_text())["scores_minutes"]
    for name, source in request.sources.items():
        folder = source if source.name == name else source / name
        assert ten_runs(read_series([folder])).score == pytest.approx(scores[name], rel=1e-12)


def test_the_tree_is_what_the_rules_want(submission, org_dir):
    assert {path.name for path in org_dir.iterdir()} == {"systems", "results", "benchmarks"}
    # No partial trees.
    assert {path.name for path in submission[0].out.parent.iterdir()} == {
        "logs",
        "out",
        f"{synthetic.SYSTEM}.json",
    }
    for name in NAMES:
        results = org_dir / "results" / synthetic.SYSTEM / name
        assert {path.name for path in results.iterdir()} - {"scaling.json"} == {
            f"result_{index}.txt" for index in range(10)
        }
        code = org_dir / "benchmarks" / name / "implementations" / "torch_native"
        assert {path.name for path in code.parent.iterdir()} == {"torch_native", synthetic.SYSTEM}
        for file in (
            "run_and_time.sh",
            "requirements.txt",
            f"configs/{name}/{synthetic.CONFIG}",
            f"{name}/train.py",
        ):
            assert (code / file).is_file(), file
        for file in (
            "README.md",
            "setup.sh",
            "init_datasets.sh",
            "run_and_time.sh",
            f"{synthetic.SYSTEM}_torch_native.json",
        ):
            assert (code.parent / synthetic.SYSTEM / file).is_file(), file
        others = {path.name for path in code.rglob("*")}
        assert not others & {"tests", "__pycache__", "x.pyc", "notes.txt", ".gitignore"}
        assert not (code / next(n for n in NAMES if n != name) / "train.py").exists()
        assert os.access(code / "run_and_time.sh", os.X_OK)
    assert forbidden_files.forbidden_files(org_dir) == []


def test_logs_are_copied_in_the_order_of_the_attempts(submission, org_dir):
    for index, run in enumerate(read_series([submission[0].sources[NAMES[0]]]).runs):
        copy = org_dir / "results" / synthetic.SYSTEM / NAMES[0] / f"result_{index}.txt"
        assert copy.read_bytes() == run.path.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_names_engines_variables_and_host_settings_and_nothing_private(org_dir, name):
    documents = org_dir / "benchmarks" / name / "implementations" / synthetic.SYSTEM
    written = json.loads((documents / f"{synthetic.SYSTEM}_torch_native.json").read_text())
    assert written["engines"] == RAN["engines"]
    assert written["environment_variables"] == {
        name: RAN["variables"][name] for name in ("HSA_NO_SCRATCH_RECLAIM", "NCCL_ALGO")
    }
    assert written["system_tuning"] == RAN["system_tuning"]
    text = (documents / "README.md").read_text()
    for row in (
        "| `attention` | `transformer_engine 2.17.0` |",
        "| `HSA_NO_SCRATCH_RECLAIM` | `1` |",
        "| `swappiness` | `could be better` |",
    ):
        assert row in text
    assert "NCCL_TUNER_PLUGIN" in text, "that it was set is known, its path is not"
    for path in documents.iterdir():
        text = path.read_text()
        assert not re.search("jane|private|10.77|CACHE_DIR|VISIBLE_DEVICES|NVTE_TOKEN", text)


def test_the_packaged_script_exports_the_variables_and_pins_the_engines(org_dir, tmp_path):
    implementations = org_dir / "benchmarks" / NAMES[0] / "implementations"
    for name in ("system", "torch_native"):
        (tmp_path / name).mkdir()
    script = shutil.copy(
        implementations / synthetic.SYSTEM / "run_and_time.sh", tmp_path / "system"
    )
    (tmp_path / "torch_native/run_and_time.sh").write_text("#!/bin/sh\nexec env -0\n")
    (tmp_path / "torch_native/run_and_time.sh").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "MATMUL_ENGINE": "cublaslt"}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    exported = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    expected = {
        "ATTENTION_ENGINE": "transformer_engine",
        "MATMUL_ENGINE": "torch",
        "SWIGLU_ENGINE": "kernel",
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "NCCL_ALGO": RAN["variables"]["NCCL_ALGO"],
    }
    assert expected.items() <= exported.items() and "NCCL_TUNER_PLUGIN" not in exported


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_of_the_tree_is_of_the_series(submission, org_dir, name):
    documents = org_dir / "benchmarks" / name / "implementations" / synthetic.SYSTEM
    text = (documents / "README.md").read_text()
    assert (
        text.startswith(f"# {name} on {synthetic.SYSTEM}")
        and "1 x 8 MI355X" in text
        and f"configs/{name}/{synthetic.CONFIG}" in text
        and " of example.org/Us/code." in text
    )
    measurements = json.loads((documents / f"{synthetic.SYSTEM}_torch_native.json").read_text())
    assert measurements["repository"] == "example.org/Us/code"
    rows = {
        row.split("`")[1]: row
        for row in text.splitlines()
        if row.startswith("| `") and row.count("|") == 4
    }
    run = read_series(
        [submission[0].sources[name] if name == NAMES[0] else submission[0].sources[name] / name]
    ).runs[0]
    for key, origin in (
        ("opt_base_learning_rate", "config"),
        ("opt_gradient_clip_norm", "rules"),
        ("global_batch_size", "config"),
    ):
        assert f"| {run.log.value(key)} | {origin} |" in rows[key]
    assert name == NAMES[0] or "rules" in rows["lora_rank"]
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert (documents / link).exists(), link


def test_the_tree_holds_what_ran_and_not_our_log_and_pictures(org_dir):
    for name in NAMES:
        code = org_dir / "benchmarks" / name / "implementations" / "torch_native"
        names = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
        assert not [
            each
            for each in names
            if each.endswith((".png", ".svg", ".html")) and each.startswith("docs")
        ]
        assert not names & {
            "docs/log.md",
            "docs/results.md",
            "docs/results-archive.md",
            "AGENTS.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
        }
        assert {
            f"docs/{page}" for page in implementation.DOCS
        } <= names and "docs/gpus/MI355X.md" in names
        assert {each.split("/")[1] for each in names if each.startswith("configs/")} == {name}
        assert not [each for each in names if each.startswith("tests/")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_packaged_code_runs_by_itself(org_dir, name):
    code = org_dir / "benchmarks" / name / "implementations" / "torch_native"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(code),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, "-m", "launch", name, "--device", "cpu", "--print"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=code, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"{name}.train" in done.stdout
    code_check = [
        sys.executable,
        "-c",
        "import submission.check, submission.package, submission.report, submission.score",
    ]
    assert subprocess.run(code_check, env=environment, cwd=code, timeout=60).returncode == 0
    script = code.parent / synthetic.SYSTEM / "run_and_time.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    # A python3 that has all packages.
    first = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [code.parent / synthetic.SYSTEM / "setup.sh"],
        capture_output=True,
        text=True,
        env=first,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (
        0,
        str(Path(sys.executable).with_name("python3")),
    ), done.stderr
    preflight = [sys.executable, "-m", "launch", name, "preflight", "--quick", "--device", "cpu"]
    done = subprocess.run(
        preflight, capture_output=True, text=True, env=environment, cwd=code, timeout=120
    )
    assert "Traceback" not in done.stderr and " skipped" in done.stdout, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_packaged_tree_has_its_license_and_no_broken_link(org_dir, name):
    code = org_dir / "benchmarks" / name / "implementations" / "torch_native"
    pages = list(code.parent.rglob("*.md"))
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in link
    ]
    assert (code / "LICENSE").is_file() and len(links) > 10
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []


# Refusals. All of them come before anything is built, so the official checkers need not be asked.


@pytest.fixture
def case(tmp_path, project, monkeypatch):
    """A series of ten and a request for it. The official checker of single logs always passes."""
    monkeypatch.setattr(
        compliance_checker,
        "closed_verdict",
        lambda path, ruleset, log=None: compliance_checker.LogVerdict(ruleset, True),
    )
    return Case(tmp_path, project)


def lora_request(folder, project) -> PackageRequest:
    """Return a request to package the LoRA series in `folder`/logs."""
    return PackageRequest(
        {NAMES[1]: folder / "logs"},
        described(folder),
        folder / "out",
        synthetic.ORG,
        root=project,
    )


class Case:
    def __init__(self, folder, project):
        self.folder, self.plans = folder, plans(LORA, project)
        self.request = lora_request(folder, project)

    def write(self, **options):
        return synthetic.write(self.folder / "logs", LORA, self.plans, **options)

    def runs(self) -> list[Path]:
        return sorted(
            path.parent for path in (self.folder / "logs" / NAMES[1]).glob("*/result.txt")
        )

    def refused(self, *said: str, error=CheckFailed, **changes) -> None:
        """Packaging raises `error`, whose text has all of `said`, and leaves nothing behind."""
        before = set(self.folder.iterdir())
        with pytest.raises(error) as caught:
            package.package(replace(self.request, **changes))
        for words in said:
            assert words in caught.value.lines(), caught.value.lines()
        assert set(self.folder.iterdir()) == before


def test_a_miniature_is_refused(case):
    case.write(rules=LORA.rules.MINIATURE)
    case.refused("is a miniature")


def test_a_run_in_the_open_division_is_refused_with_the_way_to_submit_it(case):
    case.write()
    for run in case.runs():
        log = synthetic_run.records(run / "result.txt")
        log[synthetic_run.find(log, "submission_division")]["value"] = "open"
        synthetic_run.write_records(run / "result.txt", log)
    case.refused("in the open division", "By hand")
    with pytest.raises(ConfigError) as caught:
        score._score_series(score.parser().parse_args([str(case.folder / "logs" / NAMES[1])]))
    assert "By hand" in caught.value.lines()


def test_a_run_that_emulated_another_number_format_is_refused(case):
    case.write()
    log = case.runs()[3] / "result.txt"
    lines = log.read_text().splitlines(keepends=True)
    seed = next(line for line in lines if '"key": "seed"' in line)
    record = json.loads(seed.removeprefix(TOKEN)) | {
        "key": EMULATED_KEY,
        "value": "mxfp4+hadamard step 340",
    }
    log.write_text("".join(lines).replace(seed, f"{seed}{TOKEN} {json.dumps(record)}\n"))
    case.refused("emulated mxfp4+hadamard step 340", "fp8")


@pytest.mark.parametrize("commit", ["--output=victim", "HEAD~1", "main", 7, None, "0123abc"])
def test_a_commit_is_forty_hexadecimal_digits(case, commit, tmp_path, monkeypatch):
    for plan in case.plans:
        plan.changes = plan.changes | {"commit": commit}
    case.write()
    victim = case.request.root / "victim"
    victim.write_text("kept")
    try:
        case.refused("names no commit")
        assert victim.read_text() == "kept"
    finally:
        victim.unlink()


def test_an_option_in_place_of_a_commit_does_not_reach_git(project, tmp_path):
    with pytest.raises(CheckFailed):
        implementation.export(tmp_path / "out", project, NAMES[0], f"--output={tmp_path}/victim")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("suffix", ["+modified", "+forced", "+derived"])
def test_a_run_that_was_not_as_its_config_says_is_refused(case, suffix):
    case.plans[4].config_name = f"MI355X_1x8{suffix}.toml"
    case.write()
    case.refused(f"ran with MI355X_1x8{suffix}.toml", "--set")


def test_a_resumed_run_is_refused(case):
    case.write()
    path = case.runs()[4] / "result.txt"
    lines = path.read_text().splitlines(keepends=True)
    seed = next(line for line in lines if '"key": "seed"' in line)
    at = lines.index(seed) + 1
    path.write_text(
        "".join(
            [
                *lines[:at],
                re.sub(r'"key": "seed", "value": \d+', '"key": "resumed", "value": 12288', seed),
                *lines[at:],
            ]
        )
    )
    case.refused("checkpoint", "--continue")


def test_the_same_seed_twice_is_refused(case):
    case.plans[7].seed = case.plans[2].seed
    case.write()
    case.refused("attempts 3 and 8", "seed")


def test_seeds_that_were_counted_up_are_refused(case):
    for number, plan in enumerate(case.plans):
        plan.seed = 5 + number
    case.write()
    case.refused("seeds 5 and 6", "SEED")


def test_single_runs_are_no_series(case):
    for plan in list(case.plans):
        case.plans = [plan]
        synthetic.write(case.folder / "logs", LORA, [plan], series=f"single-{plan.seed}", goal=1)
    case.refused("10 runs")


def test_a_log_of_another_run_is_refused(case):
    case.write()
    first, second = case.runs()[:2]
    shutil.copy(first / "result.txt", second / "result.txt")
    case.refused("the log is not the one")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": "f" * 40}, "different commit"),
        ({"commit": None}, "no commit"),
        ({"dirty": True}, "uncommitted"),
        ({"dirty": None}, "uncommitted"),
        ({"packages": {"torch": "2.12.0"}}, "different packages"),
        ({"driver": "6.15"}, "different driver"),
        ({"engines": {"attention": "flash_attention_4 4.0.0"}}, "different engines"),
        ({"variables": {"NCCL_ALGO": "Tree"}}, "different variables"),
        ({"system_tuning": {"governor": "could be better"}}, "different system_tuning"),
    ],
)
def test_runs_of_different_code_or_systems_are_refused(case, changes, said):
    case.plans[3].changes = case.plans[3].changes | changes
    case.write()
    case.refused(said)


def test_a_run_whose_self_test_chose_another_engine_is_refused_and_named(case):
    """versions.json may be of before the self-test, in runs of earlier versions."""
    case.write()
    events = case.runs()[4] / "events.jsonl"
    event = {"event": "self_test", "attention": "flash", "products": "torch", "swiglu": "kernel"}
    events.write_text(f"{json.dumps(event)}\n{events.read_text()}")
    case.refused("attempts 1 and 5", "different engines", "transformer_engine", case.runs()[4].name)


def test_variables_of_one_host_may_differ_among_the_runs(case):
    other = {"TRITON_CACHE_DIR": "/other", "CUDA_VISIBLE_DEVICES": "2,3"}
    case.plans[1].changes = case.plans[1].changes | {"variables": RAN["variables"] | other}
    case.write()
    first, second = read_series([case.folder / "logs" / NAMES[1]]).runs[:2]
    assert first.variables != second.variables
    package_checks._check_same(first, second)


@pytest.mark.parametrize(
    ("events", "pin"),
    [([], "aiter"), ([{"attention": "cudnn"}], "sdpa"), ([{"attention": "sdpa"}], "sdpa")],
)
def test_the_backend_of_torch_s_attention_is_pinned_as_its_engine(events, pin, tmp_path):
    synthetic_run.write_run(tmp_path)
    (tmp_path / "versions.json").write_text('{"engines": {"attention": "aiter 0.1.14"}}')
    lines = [json.dumps({"event": "self_test", **event}) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    run = Run.read(tmp_path / "result.txt")
    assert engines.pins(implementation.engine_names(run)) == {"ATTENTION_ENGINE": pin}


def test_runs_of_different_configs_are_refused(case):
    case.write()
    config = case.runs()[5] / "config.toml"
    config.write_text(
        config.read_text().replace("opt_base_learning_rate = ", "opt_base_learning_rate = 1")
    )
    case.refused("ran with different configs")


@pytest.mark.parametrize(
    "break_it", [lambda path: path.write_text("= nonsense"), lambda path: path.unlink()]
)
def test_a_spoilt_or_missing_config_is_refused(case, break_it):
    case.write()
    for run in case.runs():
        break_it(run / "config.toml")
    case.refused("config.toml")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"org": "Other"}, "submission_org is 'Other'"),
        ({"org": "unnamed"}, "submission_org is 'unnamed'"),
        ({"platform": "8xB300_of_a_friend"}, "submission_platform is '8xB300_of_a_friend'"),
        ({"status": "cloud"}, "submission_status is 'cloud'"),
    ],
)
def test_an_identity_that_is_not_ours_is_refused(case, plan, said):
    for key, value in plan.items():
        setattr(case.plans[6], key, value)
    case.write()
    case.refused(said, "MLPERF_SUBMISSION_")


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("cloud", "Available cloud"),
        ("research", "Research, Development, or Internal (RDI)"),
        ("onprem", "Preview"),
        ("cloud", "Preview"),
    ],
)
def test_the_status_of_the_logs_may_be_that_of_the_description(case, word, status):
    for plan in case.plans:
        plan.status = word
    case.write()
    described(case.folder, status=status)
    description = describe.read(case.request.system)
    package_checks.check_description(case.request, description)
    assert len(package_checks.runs_to_submit(case.request, NAMES[1], description).runs) == 10


def test_runs_before_and_after_the_newest_deadline_differ_in_round(case, capsys):
    case.write()
    for run in case.runs()[6:]:
        log = synthetic_run.records(run / "result.txt")
        synthetic_run.write_records(run / "result.txt", dated(log, "2026-11-23"))
    package_checks.runs_to_submit(case.request, NAMES[1], synthetic.DESCRIPTION)
    out = capsys.readouterr().out
    assert "differ in round" in out and "later than 6.1.0" in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"submitter": "Other"}, "submitter is 'Other'"),
        ({"accelerators_per_node": "4"}, "accelerators_per_node is 4, not 8"),
        ({"number_of_nodes": "2"}, "number_of_nodes is 2, not 1"),
        ({"accelerator_model_name": "AMD Instinct MI300X"}, "accelerator_model_name"),
        ({"framework": "PyTorch 2.9"}, "framework is PyTorch 2.9, not 2.13.0"),
        ({"status": "available"}, "status: 'available'"),
        ({"status": "Available cloud"}, "submission_status is 'onprem'"),
        ({"status": describe.STATUS["rdi"]}, "submission_status is 'onprem'"),
        ({"division": "Closed"}, "not 'closed'"),
        ({"division": "open"}, "By hand"),
        ({"status": ""}, "status: ''"),
        ({"accelerators_per_node": 8}, "is not a string"),
        ({"number_of_nodes": 2}, "number_of_nodes is 2, not 1"),  # the official tools accept it
    ],
)
def test_a_description_that_does_not_fit_is_refused(case, changes, said):
    case.write()
    described(case.folder, **changes)
    case.refused(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"org": "My Org"},
        {"org": "unnamed"},
        {"implementation": ".hidden"},
        {"implementation": "a/b"},
        {"system": Path("X.JSON")},
        {"implementation": synthetic.SYSTEM},
    ],
)
def test_names_that_cannot_be_are_refused(case, changes):
    case.write()
    case.refused("--", error=ConfigError, **changes)


def test_a_repository_without_a_remote_is_named(case, capsys, monkeypatch):
    case.write()
    monkeypatch.setattr(package, "remote_name", lambda root: None)
    monkeypatch.setattr(package, "_build", mock.Mock(side_effect=OSError("stopped here")))
    case.refused("stopped here", error=StorageError)
    assert "no remote `origin`" in capsys.readouterr().out


def test_what_exists_is_not_overwritten(case):
    case.write()
    (case.folder / "out").mkdir()
    case.refused("exists", "to add a system", "By hand", error=ConfigError)


def test_a_log_that_is_not_clean_is_refused_with_its_line(case):
    case.write()
    path = case.runs()[8] / "result.txt"
    log = synthetic_run.records(path)
    index = synthetic_run.find(log, "lora_alpha")
    log[index]["value"] = 64
    synthetic_run.write_records(path, log)
    case.refused("is not clean", f"line {index + 1}: lora_alpha is 64")


def test_a_log_that_the_official_checker_refuses_is_refused(case, monkeypatch):
    case.write()
    complaint = Finding(7, "value", "CHECK for something", "CC")
    monkeypatch.setattr(
        compliance_checker,
        "closed_verdict",
        lambda path, ruleset, log=None: compliance_checker.LogVerdict(ruleset, False, (complaint,)),
    )
    case.refused("10 runs did not converge", "CHECK for something")


def test_a_log_that_is_a_link_is_refused(case):
    case.write()
    path = case.runs()[0] / "result.txt"
    path.rename(case.folder / "elsewhere.txt")
    path.symlink_to(case.folder / "elsewhere.txt")
    case.refused("is a link")


def test_a_log_of_the_other_benchmark_is_refused(case):
    synthetic.write(case.folder / "logs", PRETRAINING, plans(PRETRAINING, case.request.root))
    (case.folder / "logs" / NAMES[0]).rename(case.folder / "logs" / NAMES[1])
    case.refused("llama31_8b")


def test_a_commit_that_is_not_here_is_refused(case):
    for plan in case.plans:
        plan.changes = plan.changes | {"commit": "f" * 40}
    case.write()
    case.refused("has no commit")


def test_a_commit_of_the_repository_in_git_dir_is_refused(case, tmp_path, monkeypatch):
    """Earlier versions recorded it, and read the code from it."""
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "nothing")
    commit = git(other, "rev-parse", "HEAD")
    for plan in case.plans:
        plan.changes = plan.changes | {"commit": commit}
    case.write()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    case.refused("has no commit")
    with pytest.raises(CheckFailed, match="has no commit"):
        implementation.export(tmp_path / "code", other, NAMES[0], commit)


def test_a_password_in_a_log_is_refused_and_not_repeated(case):
    case.write()
    with (case.runs()[2] / "result.txt").open("a") as log:
        log.write("export HF_TOKEN=hf_" + "a1B2" * 8 + "\n")
    case.refused("result_2.txt: line ", "Hugging Face token")
    with pytest.raises(CheckFailed) as caught:
        package.package(case.request)
    assert "a1B2" not in caught.value.lines()


def test_what_a_commit_should_not_hold_is_refused(case, tmp_path_factory):
    project = tmp_path_factory.mktemp("bad_project")
    git(case.request.root, "clone", "-q", ".", str(project / "clone"))
    clone = project / "clone"
    for name in (".hidden", "two words.txt", "old.pyc"):
        (clone / "common" / name).write_text("x")
    (clone / "launch" / "key.py").write_text("KEY = '" + "AKIA" + "ABCDEFGHIJKLMNOP'\n")
    commit = commit_all(clone)
    for plan in case.plans:
        plan.changes = plan.changes | {"commit": commit}
    case.write()
    case.refused(
        ".hidden",
        "two words.txt",
        "old.pyc",
        "key.py: line 1 ",
        root=clone,
    )
    (clone / "common" / "link.py").symlink_to("llama.py")
    commit = commit_all(clone)
    for run in case.runs():
        versions = run / "versions.json"
        versions.write_text(json.dumps(json.loads(versions.read_text()) | {"commit": commit}))
    case.refused("common/link.py is a link", root=clone)


def test_the_command_line(case, capsys):
    case.write()
    arguments = [
        "--system",
        str(case.request.system),
        "--out",
        str(case.folder / "out"),
        "--org",
        "Acme",
    ]
    assert package.main(["--benchmark", "/tmp/x", *arguments]) == 2
    assert "not BENCHMARK=DIR" in capsys.readouterr().err
    assert package.main(["--benchmark", "resnet=x", *arguments]) == 2
    assert package.main(["--benchmark", f"{NAMES[1]}={case.folder / 'nothing'}", *arguments]) == 2
    assert (
        package.main(
            ["--benchmark", f"{NAMES[1]}={case.folder / 'logs'}", *arguments, "--series", "2027"]
        )
        == 2
    )
    # This repository has no such commit.
    assert package.main(["--benchmark", f"{NAMES[1]}={case.folder / 'logs'}", *arguments]) == 20
    assert "has no commit" in capsys.readouterr().err
    assert not (case.folder / "out").exists()


# Contraband.


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "abcdefghij" * 3,
        "aws AKIA" + "ABCDEFGHIJKLMNOP",
        "-----BEGIN RSA " + "PRIVATE KEY-----",
        "-----BEGIN " + "PRIVATE KEY-----",
        "pass" + "word=hunter22",
        "DB_PASS" + 'WORD: "hunter22"',
        "api_" + "key = 'abcdef123'",
        "https://user:" + "hunter22@example.org",
        "ghp_" + "a" * 36,
    ],
)
def test_secrets_are_seen(text):
    assert list(forbidden_files.secrets_in(f"first line\n{text}\n".encode())) and "line 2" in next(
        forbidden_files.secrets_in(f"x\n{text}".encode())
    )


@pytest.mark.parametrize(
    "text",
    [
        "password: str",
        "token = tokenizer.encode(text)",
        "hf_config",
        "passwords are never logged",
        "http://host:80/x@y",
    ],
)
def test_what_is_no_secret_is_let_through(text):
    assert list(forbidden_files.secrets_in(text.encode())) == []


def test_links_and_big_files_are_seen(tmp_path):
    (tmp_path / "big.bin").touch()
    os.truncate(tmp_path / "big.bin", forbidden_files.SIZE_LIMIT + 1)
    (tmp_path / "link").symlink_to("big.bin")
    (tmp_path / "__pycache__").mkdir()
    found = "\n".join(forbidden_files.forbidden_files(tmp_path))
    assert "big.bin" in found and "link:" in found and "__pycache__" in found


# Windows.


def chosen(case) -> TenRuns:
    return ten_runs(read_series([case.folder / "logs" / NAMES[1]]))


def more(case, count):
    """`count` attempts more, of which the last ones are ever slower."""
    case.plans += synthetic.plans(
        [12 + number for number in range(count)], changes=case.plans[0].changes
    )


def test_of_more_than_ten_the_median_window_is_taken(case):
    more(case, 4)
    case.write()
    found = read_series([case.folder / "logs" / NAMES[1]], synthetic.SERIES[:8]).windows
    assert [each.runs[0].number for each in found] == [1, 2, 3, 4, 5]
    assert sorted(each.rank for each in found)[2] == chosen(case).rank


def test_of_two_windows_the_slower_one_is_the_median(case):
    more(case, 1)
    case.write()
    assert (
        chosen(case).runs[0].number == 2
        and chosen(case).rank > read_series([case.folder / "logs" / NAMES[1]]).windows[0].rank
    )


def test_two_that_missed_the_target_are_one_too_many(case):
    case.plans[4].fails = case.plans[6].fails = "missed"
    case.write()
    case.refused("2 runs did not converge")


@pytest.mark.slow
def test_one_of_ten_may_miss_the_target(project, tmp_path, capsys):
    """Through the official tools: the run is packaged, and counts as the slowest."""
    attempts = plans(LORA, project)
    attempts[4].fails = "missed"
    synthetic.write(tmp_path / "logs", LORA, attempts)
    request = lora_request(tmp_path, project)
    assert package.package(request) == 0
    log = (
        tmp_path / "out" / "Acme" / "results" / synthetic.SYSTEM / NAMES[1] / "result_4.txt"
    ).read_text()
    assert '"status": "aborted"' in log
    assert chosen_score(tmp_path) == pytest.approx(
        json.loads((tmp_path / "out" / "verdict_6.1.0.json").read_text())["scores_minutes"][
            NAMES[1]
        ]
    )
    # The same tree, if nobody had said that one run missed its target: the tools forgive it in
    # silence, we do not.
    assert package.judge(request, missed=0) == 20


def missed(log: RunLog, due: int) -> None:
    log.block_start(0)
    log.block_stop(due)
    synthetic_run.evaluate(log, due, 0.95)
    log.run_stop(due, "aborted")


def aborted_before_the_first_block(log: RunLog, due: int) -> None:
    log.abort(0)


def aborted_before_the_first_evaluation(log: RunLog, due: int) -> None:
    log.block_start(0)
    log.abort(8)


def killed_before_the_first_block(log: RunLog, due: int) -> None:
    pass


def killed_before_the_first_evaluation(log: RunLog, due: int) -> None:
    log.block_start(0)


def killed_in_the_first_evaluation(log: RunLog, due: int) -> None:
    log.block_start(0)
    log.block_stop(due)
    log.eval_start(due)


def killed_after_an_evaluation(log: RunLog, due: int) -> None:
    log.block_start(0)
    log.block_stop(due)
    synthetic_run.evaluate(log, due, 0.95)
    log.block_start(due)


@pytest.fixture(
    params=[
        missed,
        aborted_before_the_first_block,
        aborted_before_the_first_evaluation,
        killed_before_the_first_block,
        killed_before_the_first_evaluation,
        killed_in_the_first_evaluation,
        killed_after_an_evaluation,
    ]
)
def failed_log(request, tmp_path):
    """The log of a LoRA run that failed after its clock started."""
    rules = LORA.rules.CLOSED
    path = tmp_path / "result.txt"
    log = synthetic_run.start(path, rules)
    request.param(log, rules.first_evaluation(LORA.run_config().global_batch_size))
    return path


def check_log(path: Path) -> None:
    """Check the log as `package` does, in a project with its config."""
    project = synthetic_run.project_root(path.parent)
    request = PackageRequest({}, path, path, synthetic.ORG, root=project)
    series = SeriesRecord(starts={1: {"seed": 1}})
    package_checks.check_log(request, Run.read(path, 1, series))


def test_complaints_that_every_failed_run_causes_are_accepted(failed_log):
    assert not compliance_checker.closed_verdict(failed_log, "6.1.0").passed
    check_log(failed_log)


def test_another_official_complaint_about_a_failed_run_is_reported(failed_log):
    log = synthetic_run.records(failed_log)
    index = synthetic_run.find(log, "tensor_parallelism")
    log[index]["value"] = 0
    synthetic_run.write_records(failed_log, log)
    with pytest.raises(CheckFailed) as refused:
        check_log(failed_log)
    assert re.findall(r"line \d+: \w+", refused.value.why) == [
        f"line {index + 1}: tensor_parallelism"
    ]


def test_a_damaged_line_in_the_log_of_a_failed_run_is_reported(failed_log):
    lines = failed_log.read_text().splitlines()
    failed_log.write_text("\n".join([*lines, f"{TOKEN} {{\n"]))
    with pytest.raises(CheckFailed) as refused:
        check_log(failed_log)
    assert refused.value.why.startswith(f"line {len(lines) + 1}: ")


def chosen_score(folder):
    return ten_runs(read_series([folder / "logs" / NAMES[1]])).score


@pytest.mark.slow
def test_a_series_that_converges_too_fast_is_no_success(project, tmp_path, capsys):
    """The package checker ends with 0 all the same."""
    attempts = plans(LORA, project)
    for plan in attempts:
        plan.evaluations = 2
    synthetic.write(tmp_path / "logs", LORA, attempts)
    request = lora_request(tmp_path, project)
    assert package.package(request) == 20
    out = capsys.readouterr().out
    assert "RCP test" in out and "RCP Test Failed" in out and "NOT a submission" in out
    assert "evidence" in out and "printf rcp-bypass >" in out and "package_checker_params" in out
    assert (tmp_path / "out" / "package_checker_6.1.0.txt").is_file()


def test_a_batch_without_a_reference_point_needs_runs_of_the_reference(capsys, tmp_path):
    package._explain_rcp_failure("llama31_8b", "RCP Test Failed: Missing RCP, please", tmp_path)
    out = capsys.readouterr().out
    assert "20 runs of the reference" in out and "evidence" not in out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):\nKeyError: 'x'",
        "WARNING -  Skipping benchmark: llama31_8B\n"
        "INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !",
        "INFO - PACKAGE CHECKER FOUND ERRORS, LOOK INTO ERROR LOG LINES AND FIX THEM.",
        # No RCP test was made, so the division was not closed.
        "INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !",
    ],
)
def test_only_full_success_in_words_is_success(monkeypatch, tmp_path, text):
    monkeypatch.setattr(official_tools, "run_tool", lambda tool, *arguments: text)
    answer = official_tools.package(tmp_path, "6.1.0", 1)
    assert not answer.passed and answer.complaints
    assert (
        not official_tools.summary(tmp_path, "6.1.0", 2).passed
        and not official_tools.repository(tmp_path, "6.1.0").passed
    )


def test_descriptions_of_the_tests_are_complete():
    assert describe.problems(synthetic.DESCRIPTION) == [] and re.fullmatch(NAME, synthetic.SYSTEM)
