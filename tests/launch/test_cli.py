"""Test the command line: typos, missing or misplaced arguments, and what a command receives."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from pseudo_terminal import PseudoTerminal

from common.errors import ConfigError
from common.paths import ROOT
from launch import cli, completion
from launch.selection.choose import choose
from launch.selection.machine import NO_GPUS
from launch.selection.request import Request

pytestmark = pytest.mark.quick

RUN = "./run_and_time.sh"

# What was typed: the word that the error names as wrong, and the one that it suggests.
TYPOS = {
    # subcommands and benchmarks
    "": ("benchmark", "--help"),
    "lama31_8b": ("lama31_8b", "llama31_8b"),
    "llama2_70b_lore": ("llama2_70b_lore", "llama2_70b_lora"),
    "LLAMA31_8B": ("LLAMA31_8B", "llama31_8b"),
    "gpt5": ("gpt5", "--help"),
    "repport results": ("repport", "report"),
    "llama31_8b benhc": ("benhc", "bench"),
    "llama31_8b dance": ("dance", "run"),
    "llama31_8b results/x": ("results/x", "run"),
    "run": ("benchmark", "llama31_8b run"),
    "bench --steps 3": ("benchmark", "llama31_8b bench"),
    "prepare lama31_8b fetch": ("lama31_8b", "llama31_8b"),
    "preflight lama31_8b": ("lama31_8b", "llama31_8b preflight?"),
    "llama31_8b merge": ("merge", "llama2_70b_lora merge"),
    "version": ("version", "--version"),
    # order
    "--config x.toml llama31_8b": ("--config", "llama31_8b --config"),
    "llama31_8b score results": ("score", "score results"),
    "check x --weror": ("--weror", "--werror"),
    "llama31_8b NEXP=10": ("NEXP=10", "NEXP=10 ./run_and_time.sh"),
    "NEXP=10 llama31_8b bench": ("NEXP=10", "NEXP=10 ./run_and_time.sh"),
    "llama31_8b run NEXP=10": ("NEXP=10", "NEXP=10 ./run_and_time.sh"),
    "--versoin": ("--versoin", "--version"),
    "-v": ("-v", "--version"),
    # options and their values
    "llama31_8b --quite": ("--quite", "--quiet"),
    "llama31_8b --confg x.toml": ("--confg", "--config"),
    "llama31_8b --dry-run": ("--dry-run", "--print"),
    "llama31_8b --nexp=10": ("--nexp", "NEXP=10"),
    "llama31_8b --device gpu": ("--device", "cuda"),
    "llama31_8b --device cudda": ("--device", "cuda"),
    "llama31_8b --config": ("--config", "its value"),
    "llama31_8b --max-failures two": ("--max-failures", "--help"),
    "llama31_8b --max-failures -1": ("--max-failures", "--help"),
    "llama31_8b bench --step 5": ("--step", "--steps"),
    "llama31_8b bench 5": ("5", "--help"),
    "score": ("DIR_OR_LOG", "score --help"),
    "score results --agianst x": ("--agianst", "--against"),
    "check x --ruleset 6.2": ("--ruleset", "--help"),
    "report": ("DIR", "report --help"),
    "describe": ("--out", "describe --help"),
    "package --out x": ("--benchmark", "package --help"),
    "plan --modle llama3.1-8b": ("--modle", "--model"),
    "llama31_8b zzz": ("zzz", "choose one of: run, prepare"),
    "llama31_8b plan --config a --all": ("--all", "leave out"),
    "llama31_8b gemms recrod x": ("recrod", "record"),
    "llama31_8b prepare": ("command", "--help"),
    "llama31_8b prepare fetsh --data-dir x": ("fetsh", "fetch"),
    "llama31_8b prepare verify --data-dir x --ful": ("--ful", "--full"),
    "open_llama prepare text --input x --data-dir y": ("--tokenizer or", "prepare text --help"),
    "tuning aply": ("aply", "apply"),
    "system-tuning": ("command", "system-tuning --help"),
    "llama31_8b tuning": ("tuning", "system-tuning"),
    "llama31_8b --tune": ("--tune", "--system-tuning"),
    "throughput": ("measurement", "throughput --help"),
    "throughput gem": ("gem", "gemm"),
    "completion fish": ("fish", "choose"),
}


@pytest.mark.parametrize("line", TYPOS)
def test_an_error_names_the_wrong_word_and_a_better_one(line):
    with pytest.raises(ConfigError) as caught:
        cli.read(line.split())
    wrong, better = TYPOS[line]
    assert wrong in caught.value.what and better in caught.value.do and caught.value.why


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("configs/llama31_8b/H200_1X8.toml", "H200_1x8?"),  # as DGXSYSTEM names it
        ("configs/llama31_8b/MI355_1x8.toml", "MI355X_1x8?"),
        (
            "configs/llama2_70b_lora/H200_1x8.tml",
            "H200_1x8.toml?",
        ),  # as --config does, of another benchmark
        ("configs/H200_1x8.toml", "configs/"),
    ],
)
def test_the_name_of_a_config(path, meant):
    with pytest.raises(ConfigError, match=r"no (such )?config") as caught:
        choose(Request("llama31_8b", file=str(ROOT / path)), NO_GPUS)
    assert meant in caught.value.do


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("llama31_8b", "launch.run_command llama31_8b"),
        ("llama31_8b run --print", "launch.run_command llama31_8b --print"),
        ("run llama31_8b --print", "launch.run_command llama31_8b --print"),
        ("bench llama31_8b --steps 3", "launch.bench llama31_8b --steps 3"),
        ("llama31_8b prepare fetch --data-dir d", "llama31_8b.prepare fetch --data-dir d"),
        ("prepare llama31_8b fetch --data-dir d", "llama31_8b.prepare fetch --data-dir d"),
        ("preflight --quick", "launch.preflight.__main__ --quick"),
        ("llama31_8b preflight", "launch.preflight.__main__ llama31_8b"),
        ("preflight llama31_8b --json", "launch.preflight.__main__ llama31_8b --json"),
        ("plan --model llama3.1-8b", "launch.plan.command --model llama3.1-8b"),
        ("plan llama31_8b --all", "launch.plan.command llama31_8b --all"),
        ("llama31_8b plan --all", "launch.plan.command llama31_8b --all"),
        ("check a b --werror", "submission.check a b --werror"),
        ("llama31_8b score", "submission.score llama31_8b"),
        ("system-tuning check", "system_tuning.__main__ check"),
        ("tuning check", "system_tuning.__main__ check"),
        ("llama31_8b profile --memory", "launch.profile llama31_8b --memory"),
        ("tune llama31_8b", "launch.tune.command llama31_8b"),
        ("series status x --series 7", "submission.run_list --series= x --series 7"),
        ("throughput gemm --shape 8x8x8", "throughput.__main__ gemm --shape 8x8x8"),
        (
            "llama31_8b gemms check --device cpu",
            "throughput.gemm_tuning.cli llama31_8b check --device cpu",
        ),
    ],
)
def test_what_reaches_the_module(line, words):
    assert cli.read(line.split())[1] == words.split()


@pytest.mark.parametrize("name", ["run", "bench", "profile", "tune"])
def test_help_without_a_benchmark_is_that_of_one_with_configs(name, capsys):
    with pytest.raises(SystemExit):
        cli.read([name, "--help"])
    assert "llama31_8b" in (printed := capsys.readouterr().out) and "--miniature" in printed


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("train", "./run_and_time.sh llama31_8b?"),
        ("llama31_8b train", "./run_and_time.sh llama31_8b?"),
        ("llama31_8b benchmark", "./run_and_time.sh llama31_8b bench?"),
        ("llama31_8b bnech", "./run_and_time.sh llama31_8b bench?"),
        ("llama31_8b scor", "./run_and_time.sh score llama31_8b?"),
        ("llama31_8b validate", "./run_and_time.sh check llama31_8b?"),
        ("llama31_8b plna", "./run_and_time.sh llama31_8b plan?"),
        ("llama31_8b setpu", "./run_and_time.sh setup?"),
        ("ls", "./run_and_time.sh runs?"),
        ("llama31_8b series", "./run_and_time.sh runs llama31_8b?"),
        ("llama31_8b --nexp 10", "NEXP=10 ./run_and_time.sh llama31_8b"),
        ("llama31_8b --seed=1", "SEED=1 ./run_and_time.sh llama31_8b"),
        ("llama31_8b --datadir /data/c4", "DATADIR=/data/c4 ./run_and_time.sh llama31_8b"),
        ("llama31_8b check x.txt", "./run_and_time.sh check x.txt"),
    ],
)
def test_the_likely_meaning_comes_first(line, suggestion):
    with pytest.raises(ConfigError) as caught:
        cli.read(line.split())
    assert suggestion in caught.value.do
    assert "usage" not in caught.value.why


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("llama31_8b --fast", "did you mean"),  # --set has the same dashes, and no more
        ("llama31_8b fly", "generate"),  # a command of open_llama
        ("llama31_8b generat", "generate"),
        ("throughput gpt --gpus 2", "DGXNGPU"),  # which throughput does not read
        ("throughput gpt --gpus 2", "--gpus"),  # an option of other measurements
        ("llama31_8b bench --steps x", "cannot be parsed"),
    ],
)
def test_an_error_suggests_nothing_that_fails_too(line, wrong):
    with pytest.raises(ConfigError) as caught:
        cli.read(line.split())
    assert wrong not in caught.value.do and wrong not in caught.value.why


@pytest.mark.parametrize("line", ["llama31_8b prepare", "score", "llama31_8b bench --steps x"])
def test_why_is_a_reason_and_not_the_usage(line):
    with pytest.raises(ConfigError) as caught:
        cli.read(line.split())
    assert "usage" not in caught.value.why and "[-h]" not in caught.value.why


def test_the_help_of_open_llama_names_its_commands_and_only_options_that_apply():
    text = cli.parser_of("run", "open_llama").format_help()
    for name in [
        "prepare",
        "eval",
        "generate",
        "export",
        "merge",
        "plan",
        "bench",
        "profile",
        "tune",
    ]:
        assert f" {name}," in text or f" {name}." in text
    assert "config file (required; relative paths" in " ".join(text.split())
    assert "--miniature" not in text and "--save" not in text
    assert "--miniature" in cli.parser_of("run", "llama31_8b").format_help()
    assert "--config FILE" in cli.parser_of("plan", "open_llama").format_help()


def test_reading_logs_and_planning_need_fewer_packages_than_a_run():
    assert [
        cli.read(line.split())[0] for line in ("plan --model x", "tuning check", "completion bash")
    ] == ["", "", "requirements-cli.txt"]
    assert cli.read(["check", "x"])[0] == cli.read(["runs"])[0] == "requirements-logs.txt"
    assert cli.read(["llama31_8b"])[0] == "requirements.txt"


@pytest.mark.parametrize(
    ("line", "installs"),
    [
        ("llama31_8b", True),
        ("llama31_8b --print", False),
        ("llama2_70b_lora bench --print", False),
        ("llama31_8b profile --print", False),
        ("llama31_8b tune --print", False),
        ("runs", True),
        ("runs --series", False),
        ("series status --json", False),
        ("score results", True),
    ],
)
def test_what_starts_nothing_installs_nothing(line, installs):
    assert cli.read(line.split())[2] is installs


def test_switches_are_taken_anywhere_and_handed_on(monkeypatch):
    for name in cli.SWITCHES.values():
        monkeypatch.setenv(name, "")
    assert cli.read(["--no-color", "llama31_8b", "--quiet", "--print"])[1] == [
        "launch.run_command",
        "llama31_8b",
        "--print",
    ]
    assert all(os.environ[name] == "1" for name in cli.SWITCHES.values())


@pytest.mark.parametrize("line", ["--help", "-h", "help", "--version", "llama31_8b --version"])
def test_help_and_version_end_well(line, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.read(line.split())
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        text.startswith("mlperf-llama-training ")
        if "version" in line
        else all(name in text for name in cli.COMMANDS)
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("benchmark", ["", "llama2_70b_lora"])
def test_every_command_has_help_with_its_own_name(name, benchmark, capsys):
    """Also before one has chosen a benchmark."""
    takes_it = cli.COMMANDS[name].benchmark != cli.NEVER and cli.has_command(benchmark, name)
    words = [benchmark, name] if benchmark and takes_it else [name]
    for line in ([*words, "--help"], ["help", *words]):
        with pytest.raises(SystemExit) as caught:
            cli.read(line)
        text = capsys.readouterr().out
        assert caught.value.code == 0 and f" {name}" in text and RUN in text


@pytest.mark.parametrize(
    ("name", "codes", "files"),
    [
        ("check", (20, 2, 18), ()),
        ("score", (20, 2, 18), ()),
        ("package", (20, 2, 17, 18), ("verdict_<ruleset>.json", "result_9.txt")),
        ("describe", (20, 2, 17, 18), ("FILE",)),
        ("runs", (2,), ()),
        ("report", (2, 17, 18), ("report.html", "compared_with_B.html")),
    ],
)
def test_the_help_has_exit_codes_and_written_files(name, codes, files):
    text = " ".join(cli.parser_of(name, "").format_help().split())
    assert all(file in text for file in files)
    after = text.partition("Exit code 0")[2]
    assert all(re.search(rf"\b{code}\b", after) for code in codes)


@pytest.mark.parametrize("benchmark", ["llama31_8b", "llama2_70b_lora", "open_llama"])
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_says_what_it_is(name, benchmark):
    queue = [cli.parser_of(name, benchmark)] if cli.has_command(benchmark, name) else []
    while queue:
        parser = queue.pop()
        queue += [each for action in parser._actions for each in parser.subcommands(action)]
        silent = [
            action.dest for action in parser._actions if not action.help and not action.choices
        ]
        assert silent == [], parser.prog


def test_a_command_line_is_read_without_any_package():
    """Parsing works in a Python without site-packages, before pip has run."""
    program = "import sys; from launch import cli; "
    program += "names = [(name, each) for name in cli.COMMANDS for each in cli.benchmarks.names()"
    program += " if cli.has_command(each, name)]; "
    program += "[cli.parser_of(*name) for name in names]"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line", ["--help", "llama2_70b_lora merge --help", "plan --help", "throughput suite --help"]
)
def test_help_needs_no_package_and_no_network(line):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-S", "-m", "launch", "--install", *line.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PIP_INDEX_URL": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: ./run_and_time.sh")
    assert "installing" not in done.stderr and time.monotonic() - began < 10


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_fits_the_terminal(name, columns, monkeypatch, capsys):
    """Lines that are longer hold one word, or an example to be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.read([*name.split(), "--help"])
    text, _, _ = capsys.readouterr().out.partition("examples:")
    wide = [line for line in text.splitlines() if len(line) > columns]
    assert [line for line in wide if not line.startswith("  ") and " " in line.strip()] == []


COMPLETED = {
    "llama3": "llama31_8b",
    "pref": "preflight",
    "llama31_8b be": "bench",
    "llama31_8b --conf": "--config",
    "llama31_8b --set max_samp": "max_samples=",
    "llama31_8b bench --st": "--steps",
    "llama31_8b prepare conv": "convert",
    "prepare llama31": "llama31_8b",
    "plan --gpu MI30": "MI300X MI308X",
    "plan --model qwen3-8": "qwen3-8b",
    "score --again": "--against",
    "score --against MI35": "MI350X MI355X",
    "throughput gem": "gemm",
    "throughput llama --model mini": "miniature",
    "throughput llama --prec": "--precision",
    "throughput gemm --precision fp": "fp8",
}
SHELLS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}


@pytest.fixture(scope="module", params=SHELLS)
def shell(request, tmp_path_factory):
    """An interactive shell in a terminal, which has evaluated its completion script."""
    if not shutil.which(request.param):
        pytest.skip(f"no {request.param}")
    folder = tmp_path_factory.mktemp("shell")
    (folder / "script").write_text(completion.script(request.param))
    terminal = PseudoTerminal()
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "PS1": "$ "}
    process = terminal.start([request.param, *SHELLS[request.param]], cwd=folder, env=variables)
    terminal.type("source ./script; echo rea''dy\n")
    assert "ready" in terminal.read(until="ready\n", seconds=20)
    yield terminal
    process.kill()
    process.wait()


@pytest.mark.parametrize("words", COMPLETED)
def test_a_shell_completes(shell, words):
    shell.type(f"\x15run_and_time.sh {words}\t\t")  # Ctrl-U clears the line
    *_, last = COMPLETED[words].split()
    text = shell.read(until=last, seconds=10).replace("\a", " ")  # the bell
    assert set(COMPLETED[words].split()) <= set(text.split())


def test_a_value_follows_a_completed_key(shell):
    shell.type("\x15run_and_time.sh llama31_8b --set max_samp\t5")
    assert "max_samples=5" in shell.read(until="=5", seconds=10)
