"""Test what a word that is not known was meant to be."""

import pytest

from common.benchmarks import config_keys, names
from common.engines import ENGINES
from common.suggestions import ENTRIES, nearest, unknown
from common.variables import TABLE
from launch import cli
from launch.profilers import TOOLS

pytestmark = pytest.mark.quick

KEYS = [key.rstrip("=") for key in config_keys("open_llama")]
COMMANDS = [*cli.COMMANDS]


@pytest.mark.parametrize(
    ("word", "known", "ours"),
    [
        ("lr", KEYS, "opt_base_learning_rate"),
        ("learning-rate", KEYS, "opt_base_learning_rate"),
        ("batch_size", KEYS, "global_batch_size"),
        ("per_device_train_batch_size", KEYS, "micro_batch_size"),
        ("seq_len", KEYS, "sequence_length"),
        ("mikro_batch_size", KEYS, "micro_batch_size"),
        ("Max-Samples", KEYS, "max_samples"),
        ("optimizer", KEYS, ""),
        ("target_modules", KEYS, ""),
        ("model", KEYS, "model"),
        ("train", COMMANDS, "run"),
        ("plna", COMMANDS, "plan"),
        ("gpu", ("cpu", "cuda"), "cuda"),
        ("MI355", ("MI350X", "MI355X"), "MI355X"),
        ("H201", ("H100", "H200"), "H200"),
    ],
)
def test_the_meaning_comes_before_the_spelling(word, known, ours):
    assert nearest(word, known).ours == ours


@pytest.mark.parametrize(
    ("word", "known"),
    [("A100", ("H100", "H200")), ("fast", KEYS), ("dance", COMMANDS), ("optimizer", COMMANDS)],
)
def test_nothing_is_suggested_for_another_word(word, known):
    assert nearest(word, known) is None


def test_a_number_of_another_unit_is_explained():
    assert "steps x global_batch_size" in unknown("", "max_steps", KEYS).do
    assert "epochs x" in unknown("", "num_train_epochs", KEYS).do


def test_of_equally_similar_names_the_first_is_suggested():
    assert nearest("MI325X_1x", ("MI325X_1x8", "MI325X_2x8")).ours == "MI325X_1x8"


def test_every_name_of_ours_exists():
    known = {*KEYS, *TABLE, *COMMANDS, *TOOLS, "cuda", "fetch", "--version", "--help"}
    known |= {engine.name for engines in ENGINES.values() for engine in engines}
    for benchmark in names():
        known |= {key.rstrip("=") for key in config_keys(benchmark)}
        known |= {*cli.parser_of("run", benchmark).options()}
    for command in ("preflight", "throughput"):
        known |= {*cli.parser_of(command, "").options()}
    missing = {ours for (ours, _), _ in ENTRIES if ours and ours.split()[0] not in known}
    assert missing == set()
