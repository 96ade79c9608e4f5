"""One command line for all verbs: what a typo, a missing argument or a wrong order is answered with, and what reaches a verb's module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from door import completion, verbs
from plan.derive_config import load_or_derive

ROOT = Path(__file__).parents[2]
RUN = "./run_and_time.sh"

# What was typed: what is wrong, and what to do.
TABLE = {
    # verbs and benchmarks
    "": ("which benchmark or verb?", "--help lists the verbs"),
    "lama31_8b": ("unknown benchmark or verb lama31_8b", "did you mean llama31_8b?"),
    "llama2_70b_lore": ("unknown benchmark or verb", "did you mean llama2_70b_lora?"),
    "LLAMA31_8B": ("unknown benchmark or verb LLAMA31_8B", "did you mean llama31_8b?"),
    "gpt5": ("unknown benchmark or verb gpt5", "there are: llama2_70b_lora, llama31_8b, run"),
    "repport results": ("unknown benchmark or verb repport", "did you mean report?"),
    "llama31_8b benhc": ("unknown verb benhc", "did you mean bench?"),
    "llama31_8b dance": ("unknown verb dance", "there are: run"),
    "llama31_8b results/x": ("unknown verb results/x", "there are: run"),
    "run": ("run needs a benchmark", f"{RUN} llama31_8b run ..."),
    "bench --steps 3": ("bench needs a benchmark", f"{RUN} llama31_8b bench ..."),
    "prepare lama31_8b fetch": ("unknown benchmark lama31_8b", "did you mean llama31_8b?"),
    "preflight lama31_8b": ("lama31_8b: one word too many", f"{RUN} preflight --help"),
    "llama31_8b merge": ("llama31_8b has no verb merge", "--help"),
    # order
    "--config x.toml llama31_8b": ("--config comes before the benchmark or verb", f"{RUN} llama31_8b --config"),
    "llama31_8b score results": ("score takes no benchmark", f"{RUN} score results"),
    "check llama31_8b --werror": ("unknown option --weror", "did you mean --werror?"),
    # options and their values
    "llama31_8b --confg x.toml": ("unknown option --confg", "did you mean --config?"),
    "llama31_8b --dry-run": ("unknown option --dry-run", "there are: --help"),
    "llama31_8b --nexp=10": ("unknown option --nexp", "there are"),
    "llama31_8b --device gpu": ("--device gpu", "choose one of them"),  # not cpu
    "llama31_8b --device cudda": ("--device cudda", "did you mean cuda?"),
    "llama31_8b --config": ("argument --config: expected one argument", "--help"),
    "llama31_8b --max-failures two": ("argument --max-failures: invalid int value: 'two'", "--help"),
    "llama31_8b bench --step 5": ("unknown option --step", "did you mean --steps?"),
    "llama31_8b bench 5": ("5: one word too many", "--help"),
    "score": ("the following arguments are required: DIR_OR_LOG", f"{RUN} score --help"),
    "score results --agianst x": ("unknown option --agianst", "did you mean --against?"),
    "check x --ruleset 6.1": ("--ruleset 6.1", "did you mean 6.1.0?"),
    "report": ("the following arguments are required: directory", f"{RUN} report --help"),
    "describe": ("the following arguments are required: --out", f"{RUN} describe --help"),
    "package --out x": ("the following arguments are required: --benchmark, --system, --org", f"{RUN} package --help"),
    "plan --modle llama3.1-8b": ("unknown option --modle", "did you mean --model?"),
    "llama31_8b plan --config a --all": ("argument --all: not allowed with argument --config", "--help"),
    "llama31_8b gemms recrod x": ("unknown step recrod", "did you mean record?"),
    "llama31_8b prepare": ("the following arguments are required: command", "--help"),
    "llama31_8b prepare fetsh --data-dir x": ("unknown command fetsh", "did you mean fetch?"),
    "llama31_8b prepare verify --data-dir x --ful": ("unknown option --ful", "did you mean --full?"),
    "tuning aply": ("unknown verb aply", "did you mean apply?"),
    "tuning": ("the following arguments are required: verb", f"{RUN} tuning --help"),
    "throughput": ("the following arguments are required: measurement", f"{RUN} throughput --help"),
    "throughput gem": ("unknown measurement gem", "did you mean gemm?"),
    "completion fish": ("unknown shell fish", "choose one of them"),
}
TABLE["check x --weror"] = TABLE.pop("check llama31_8b --werror")


@pytest.mark.parametrize("line", TABLE)
def test_what_is_wrong_and_what_to_do(line):
    with pytest.raises(ConfigError) as caught:
        verbs.read(line.split())
    what, do = TABLE[line]
    assert what in caught.value.what and do in caught.value.do and caught.value.why
    assert len(caught.value.lines().splitlines()) == 3


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("configs/llama31_8b/H200_1X8.toml", "did you mean H200_1x8?"),  # as DGXSYSTEM names it
        ("configs/llama31_8b/MI355_1x8.toml", "did you mean MI355X_1x8?"),
        ("configs/llama2_70b_lora/H200_1x8.tml", "H200_1x8.toml?"),  # as --config does, of another benchmark
        ("configs/H200_1x8.toml", "name one of the files under configs/"),
    ],
)
def test_the_name_of_a_config(path, meant):
    with pytest.raises(ConfigError, match=r"no (such )?config") as caught:
        load_or_derive(ROOT, "llama31_8b", ROOT / path)
    assert meant in caught.value.do


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("llama31_8b", "launch run llama31_8b"),
        ("llama31_8b run --print", "launch run llama31_8b --print"),
        ("run llama31_8b --print", "launch run llama31_8b --print"),
        ("bench llama31_8b --steps 3", "launch bench llama31_8b --steps 3"),
        ("llama31_8b prepare fetch --data-dir d", "llama31_8b.prepare fetch --data-dir d"),
        ("prepare llama31_8b fetch --data-dir d", "llama31_8b.prepare fetch --data-dir d"),
        ("preflight --quick", "preflight --quick"),
        ("llama31_8b preflight", "preflight llama31_8b"),
        ("preflight llama31_8b --json", "preflight llama31_8b --json"),
        ("plan --model llama3.1-8b", "plan.command --model llama3.1-8b"),
        ("plan llama31_8b --all", "plan.command llama31_8b --all"),
        ("llama31_8b plan --all", "plan.command llama31_8b --all"),
        ("check a b --werror", "submission.check a b --werror"),
        ("tuning check", "system_tuning check"),
        ("throughput gemm --shape 8x8x8", "throughput gemm --shape 8x8x8"),
        ("llama31_8b gemms check --device cpu", "gemm_tuning.cli llama31_8b check --device cpu"),
    ],
)
def test_what_reaches_the_module(line, words):
    assert verbs.read(line.split())[1] == ["-m", *words.split()]


def test_reading_logs_and_planning_need_fewer_packages_than_a_run():
    assert [verbs.read(line.split())[0] for line in ("plan --model x", "tuning check", "completion bash")] == ["", "", ""]
    assert verbs.read(["check", "x"])[0] == "requirements-logs.txt" and verbs.read(["llama31_8b"])[0] == "requirements.txt"


def test_switches_are_taken_anywhere_and_handed_on(monkeypatch):
    for name in verbs.SWITCHES.values():
        monkeypatch.setenv(name, "")
    assert verbs.read(["--no-color", "llama31_8b", "--quiet", "--print"])[1] == ["-m", "launch", "run", "llama31_8b", "--print"]
    assert all(os.environ[name] == "1" for name in verbs.SWITCHES.values())


@pytest.mark.parametrize("line", ["--help", "-h", "help", "--version", "llama31_8b --version"])
def test_help_and_version_end_well(line, capsys):
    with pytest.raises(SystemExit) as caught:
        verbs.read(line.split())
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("mlperf-llama-training ") if "version" in line else all(name in text for name in verbs.VERBS)


@pytest.mark.parametrize("name", [name for name in verbs.VERBS if name != "merge"])
def test_every_verb_has_help_with_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as caught:
        verbs.read([*(["llama31_8b"] if verbs.VERBS[name].benchmark == verbs.ALWAYS else []), name, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and f" {name}" in text and RUN in text


def test_the_examples_of_help_are_understood(monkeypatch):
    """Those that argparse prints under `examples:`."""
    seen = 0
    for name in verbs.VERBS:
        for benchmark in (
            ["llama31_8b"] if verbs.VERBS[name].benchmark == verbs.ALWAYS else ["", "llama31_8b"][: verbs.VERBS[name].benchmark + 1]
        ):
            parser = verbs.parser_of(name, benchmark) if name != "merge" else None
            for example in (parser.epilog or "").splitlines() if parser else []:
                if example.strip().startswith(RUN):
                    verbs.read(example.partition(" > ")[0].replace('"', "").split()[1:] if '"' not in example else ["score", "a"])
                    seen += 1
    assert seen > 10


def test_a_command_line_is_read_without_any_package():
    """By a Python without site-packages: before pip has run."""
    program = "import sys; from door import verbs; [verbs.parser_of(n, 'llama31_8b') or n for n in verbs.VERBS]; "
    program += "print([n for n in verbs.VERBS if n != 'merge' and not verbs.parser_of(n, 'llama31_8b')])"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run_and_time.sh lla", "llama2_70b_lora llama31_8b"),
        ("run_and_time.sh pre", "prepare preflight"),
        ("run_and_time.sh llama31_8b be", "bench"),
        ("run_and_time.sh llama31_8b --conf", "--config"),
        ("run_and_time.sh llama31_8b bench --st", "--steps"),
        ("run_and_time.sh score --ag", "--against"),
        ("run_and_time.sh throughput ge", "gemm"),
        ("run_and_time.sh prepare llama31", "llama31_8b"),
    ],
)
def test_completion_in_bash(words, wanted):
    split = words.split()
    program = f"{completion.script('bash')}\nCOMP_WORDS=({words}) COMP_CWORD={len(split) - 1}; _run_and_time; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (wanted, "")
