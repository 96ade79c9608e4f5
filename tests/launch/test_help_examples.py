"""Every example of every --help: all are parsed, and those that take seconds on a CPU are run."""

import importlib
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import synthetic_series
from synthetic_run import PRETRAINING

from common import benchmarks
from common.command_line import PROGRAM, Parser
from common.paths import ROOT
from launch import cli

NAME = PRETRAINING.rules.BENCHMARK
# Modules whose examples are run, in a directory with the files that the examples name.
RUN_IN_PROCESS = (
    "submission.check",
    "submission.report",
    "submission.run_list",
    "submission.score",
)
RUN_ALONE = (
    "launch.completion",
    "launch.plan.command",
    "launch.run_command",
)


def parsers(parser: Parser):
    yield parser
    for action in parser._actions:
        for each in parser.subcommands(action):
            yield from parsers(each)


def every_parser():
    for name, command in cli.COMMANDS.items():
        known = [] if command.benchmark == cli.ALWAYS else [""]
        if command.benchmark != cli.NEVER:
            known += benchmarks.names()
        for benchmark in known:
            if not cli.has_command(benchmark, name):
                continue
            parser = cli.parser_of(name, benchmark)
            if parser is not None:
                yield from parsers(parser)


def lines_of(text: str) -> list[str]:
    """Return the examples in the text of a help, without `PROGRAM`."""
    _, _, examples = text.partition("examples:\n")
    block, _, _ = examples.partition("\n\n")
    found = []
    for line in block.splitlines():
        _, _, example = line.partition(PROGRAM)
        # without a redirection, the end of a <(...), and a description after two spaces
        found.append(re.split(r"  | > |\)$", example.strip())[0])
    return found


def every_example() -> list[str]:
    texts = [parser.format_help() for parser in every_parser()]
    found = [line for text in [*texts, cli.overview()] for line in lines_of(text)]
    return list(dict.fromkeys(found))


EXAMPLES = every_example()


def arguments_of(example: str) -> list[str]:
    """Return the module that an example starts, and its arguments."""
    return cli.read(shlex.split(example))[1]


@pytest.mark.quick
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_parsed(example):
    assert find_spec(arguments_of(example)[0])


@pytest.mark.quick
@pytest.mark.parametrize("example", [each for each in EXAMPLES if "--config" in each])
def test_the_config_that_an_example_names_exists(example):
    words = shlex.split(example)
    config = words[words.index("--config") + 1]
    assert "/" not in config or (ROOT / config).is_file()


@pytest.mark.quick
def test_examples_of_all_kinds_are_found():
    assert {'score "AMD MI300X 5.1" --against "AMD MI300X 5.0"', "completion bash"} <= {*EXAMPLES}
    assert {"preflight --quick", "runs results/llama31_8b --series", NAME} <= {*EXAMPLES}


@pytest.mark.quick
def test_a_help_does_not_repeat_a_default():
    repeated = []
    for parser in every_parser():
        for action in parser._actions:
            if f"(default: {action.default})" in str(action.help):
                repeated.append(f"{parser.prog} {action.dest}")
    assert repeated == []


def runs_in_process(example: str) -> bool:
    """Return whether the example reads logs only. An export needs further packages."""
    return arguments_of(example)[0] in RUN_IN_PROCESS and "--export" not in example


def runs_alone(example: str) -> bool:
    """Return whether the example starts no training."""
    module = arguments_of(example)[0]
    return module in RUN_ALONE and (module != "launch.run_command" or "--print" in example)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A directory with the files that the examples name: results/, RUN, OTHER_RUN and DIR."""
    folder = tmp_path_factory.mktemp("workplace")
    evaluations = synthetic_series.evaluations_near_reference(PRETRAINING)
    series = synthetic_series.write(
        folder / "results", PRETRAINING, synthetic_series.plans(evaluations)
    )
    runs = sorted(path.parent for path in series.glob("*/result.txt"))
    for name, target in (("RUN", runs[0]), ("OTHER_RUN", runs[1]), ("DIR", runs[2])):
        (folder / name).symlink_to(target)
    for name in ("configs", "open_llama"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("example", [*filter(runs_in_process, EXAMPLES)])
def test_an_example_runs(example, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("LOGDIR", str(workplace / "results"))
    module, *arguments = arguments_of(example)
    expanded = []
    for word in arguments:
        matches = sorted(map(str, Path().glob(word))) if "*" in word else []
        expanded += matches or [word]
    assert importlib.import_module(module).main(expanded) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("example", [*filter(runs_alone, EXAMPLES)])
def test_an_example_runs_as_a_program(example, workplace):
    done = subprocess.run(
        [sys.executable, "-m", *arguments_of(example)],
        cwd=workplace,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
