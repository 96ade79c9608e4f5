"""Test that 300 configs, 300 command lines and 60 damaged checkpoints work or fail cleanly."""

import contextlib
import io
import json
import os
import random
import shutil
from dataclasses import fields
from unittest import mock

import pytest
import torch
from synthetic_run import BENCHMARKS
from test_checkpoint import as_after, checkpoints_of

from common import benchmarks
from common.command_line import EVERYWHERE
from common.config import from_table, load
from common.errors import ConfigError, RunError, WeightsError
from common.training.continuation import FACTS, newest
from launch.cli import COMMANDS, has_command, parser_of, read

WORDS = [
    "",
    " ",
    "-1",
    "0",
    "1",
    "7",
    "1e9",
    "nan",
    "inf",
    "x" * 300,
    "../..",
    "\ud800",
    "\0",
    "a=b",
    "=",
    "fp8",
    "NaN",
    "[]",
    "\n",
    "--",
    "-",
]
VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    2**70,
    -0.0,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "fp8",
    "MI355X",
    "mxfp4+x",
    [],
    [1],
    {},
    {"A": 1},
]


def random_table(chance: random.Random, benchmark) -> dict:
    """A good table with up to five keys that are changed, gone or new."""
    sizes = {
        "nodes": 1,
        "gpus_per_node": 8,
        "micro_batch_size": 1,
        "eval_micro_batch_size": 1,
        "max_samples": 1_000_000,
    }
    table = {"gpu": "MI355X", **sizes, **benchmark.config}
    keys = [field.name for field in fields(benchmark.rules.Config)]
    for _ in range(chance.randint(0, 5)):
        key = chance.choice([*keys, "unknown", "fp8", "global_batchsize"])
        if chance.random() < 0.2:
            table.pop(key, None)
        else:
            table[key] = chance.choice(VALUES)
    return table


def test_random_configs_load_or_raise_a_config_error():
    chance = random.Random(1)
    taken = 0
    for _ in range(300):
        benchmark = chance.choice(BENCHMARKS)
        table = random_table(chance, benchmark)
        try:
            from_table(table, benchmark.rules.Config, "a test")
        except ConfigError as error:
            assert error.why and error.do, table
            continue
        taken += 1
    assert 20 < taken < 280, "some are good, some are not"


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"= 3", b"[" * 5000, b"a = " + b"[" * 100_000, b"a = 1e999999", b"\0"]
)
def test_files_that_are_not_toml_raise_a_config_error(tmp_path, content):
    path = tmp_path / "X_1x8.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load(path, BENCHMARKS[0].rules.Config)


@mock.patch.dict(os.environ)  # --quiet and --no-color are handed on as variables
def test_random_command_lines_parse_or_exit_with_code_2():
    chance = random.Random(2)
    names = benchmarks.names()
    options = {}
    for name in COMMANDS:
        owner = next(each for each in names if has_command(each, name))
        options[name] = [*parser_of(name, owner).options()]
    taken = 0
    for _ in range(300):
        subcommand = chance.choice(list(COMMANDS))
        line = chance.choice(
            (
                [subcommand],
                [chance.choice(names), subcommand],
                [chance.choice(names)],
                [chance.choice(WORDS)],
            )
        )
        known = [*options[subcommand], *EVERYWHERE]
        line = line + [
            chance.choice([*known, *WORDS, *names, *COMMANDS]) for _ in range(chance.randint(0, 4))
        ]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                read(line)
            taken += 1
        except SystemExit as end:
            assert end.code == 0, line  # --help
        except RunError as error:
            assert error.exit_code == 2, line
    assert taken, "not every command line is refused"


def damaged(chance: random.Random, folder) -> str:
    """Damage one file of the checkpoint; returns how."""
    path = chance.choice(sorted(folder.iterdir()))
    way = chance.choice(["flip", "cut", "grow", "empty", "gone", "noise"] + ["fact"] * 4)
    content = bytearray(path.read_bytes())
    if way == "fact":
        facts = json.loads((folder / FACTS).read_text())
        facts[chance.choice(sorted(facts))] = chance.choice(
            [value for value in VALUES if value == value]
        )
        (folder / FACTS).write_text(json.dumps(facts))
    elif way == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    elif way == "cut":
        path.write_bytes(content[: chance.randrange(len(content))])
    elif way == "grow":
        path.write_bytes(bytes(content) + bytes(7))
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "gone":
        path.unlink()
    else:
        path.write_bytes(chance.randbytes(len(content)))
    return f"{way} of {path.name}"


def test_damaged_checkpoints_are_refused_or_load_the_saved_values(processes, tmp_path):
    """A flip in the padding of a header may be harmless. Then the values are the saved ones."""
    chance = random.Random(3)
    saving = as_after(checkpoints_of(processes, tmp_path / "run"), 2)
    saving.offer(2, evaluated=True)
    saving.finish()
    expected = [part.live.clone() for part in saving.parts.values()]
    refused = 0
    for number in range(60):
        run = tmp_path / f"damaged_{number}"
        shutil.copytree(tmp_path / "run", run)
        how = damaged(chance, newest(run)[0])
        loading = checkpoints_of(processes, tmp_path / f"on_{number}", continues=run)
        try:
            assert loading.load() == 2, how
            assert all(
                torch.equal(*pair)
                for pair in zip(
                    (part.live for part in loading.parts.values()), expected, strict=True
                )
            ), how
        except (WeightsError, ConfigError):
            refused += 1
    assert refused >= 50
